"""A graph may be captured on a GPU that is not the current one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.graphs import captured_second_gpu
from tritonclip.modes import is_captured
from tritonclip.monitor.row_buffer import RowBuffer
from tritonclip.optim.watches import SkipWatch


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("own", [0, 1])
def test_capture_is_asked_of_the_device_of_the_tensors(own, current, monkeypatch):
    entered = captured_second_gpu(current, monkeypatch)
    assert is_captured(torch.device("cuda", own)) == (own == 1)
    assert entered == [current]


def test_nothing_is_captured_on_a_cpu(monkeypatch):
    captured_second_gpu(1, monkeypatch)
    assert not is_captured(torch.device("cpu"))


def test_rows_of_a_captured_gpu_are_refused_whichever_is_current(monkeypatch):
    captured_second_gpu(0, monkeypatch)
    on_second: Any = SimpleNamespace(device=torch.device("cuda", 1), is_cuda=True)
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
        RowBuffer(1)._write_([on_second], 1)
    assert SkipWatch(3)._read(on_second) == 0
