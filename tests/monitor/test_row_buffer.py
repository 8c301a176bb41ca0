"""Rows reach the host without making the training loop wait."""

from typing import Any

import pytest
import torch

import tritonclip
from helpers.cases import NoHostRead, Operators, no_sync
from tritonclip.monitor import row_buffer
from tritonclip.monitor.history import read


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_add_reads_no_value(path, dtype):
    """The mode is entered around everything but the last flush: automatic flushes are inside."""
    weight = torch.nn.Parameter(torch.ones(5, dtype=dtype))
    recorder = tritonclip.record(path, every=4)
    with NoHostRead():
        for step in range(10):
            norm = torch.full((), float(step), dtype=dtype)
            parts = {"weight": weight.detach()[0]}
            coefficient = norm.clamp(max=1.0)
            recorder.add_(norm, coefficient=coefficient, limit=1.0, skipped=norm > 8, norms=parts)
    recorder.close()
    history = read(path)
    assert history.norms.tolist() == [float(step) for step in range(10)]
    assert history.is_skipped.tolist() == [False] * 9 + [True]


def test_add_between_flushes_only_fills_a_row(path):
    """One stack and one copy, beside views; nothing else reaches the device."""
    recorder = tritonclip.record(path)
    norm, coefficient = torch.tensor(2.0), torch.tensor(0.5)
    recorder.add_(norm, coefficient=coefficient)
    with Operators() as operators:
        recorder.add_(norm, coefficient=coefficient, limit=1.0)
    views = ("detach", "view", "_unsafe_view", "select", "slice", "unsqueeze", "alias")
    names = [operator._opname for operator, *_ in operators.calls]
    assert [name for name in names if name not in views] == ["cat", "copy_"]


def test_the_mode_of_these_tests_notices_a_sync():
    with NoHostRead(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        torch.tensor(1.0).item()


def test_add_keeps_the_value_of_the_step(path):
    """An optimizer writes its statistics in place."""
    norm = torch.tensor(1.0)
    with tritonclip.record(path) as recorder:
        recorder.add_(norm)
        norm.fill_(2.0)
        recorder.add_(norm)
    assert read(path).norms.tolist() == [1.0, 2.0]


def test_add_works_in_inference_mode_and_with_graphs(path):
    norm = torch.tensor(3.0, requires_grad=True) * 1.0
    with tritonclip.record(path) as recorder:
        with torch.inference_mode():
            recorder.add_(torch.tensor(1.0))
        recorder.add_(norm)
        recorder.add_(torch.nn.Parameter(torch.tensor([2.0])))
    assert read(path).norms.tolist() == [1.0, 3.0, 2.0]
    assert norm.grad_fn is not None


class Arrival:
    """An event that is over when the test says so."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = True


def test_rows_that_are_on_their_way_are_written_later_and_in_order(path, monkeypatch):
    """As on a GPU, whose copies to the host are not waited for."""
    arrivals: list[Arrival] = []

    def copy_slowly(block: torch.Tensor) -> tuple[torch.Tensor, Arrival]:
        arrivals.append(Arrival())
        return block.clone(), arrivals[-1]

    monkeypatch.setattr(row_buffer, "begin_copy", copy_slowly)
    recorder = tritonclip.record(path, every=2)
    for step in range(4):
        recorder.add_(torch.tensor(float(step)))
    assert not path.exists()
    arrivals[0].over = True
    recorder.add_(torch.tensor(4.0))
    recorder.add_(torch.tensor(5.0))
    assert read(path).norms.tolist() == [0.0, 1.0]
    recorder.close()
    assert read(path).norms.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(arrival.over for arrival in arrivals)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: is_available() is false")
def test_add_does_not_wait_for_the_gpu(path):
    recorder = tritonclip.record(path, every=4)
    with no_sync():
        for step in range(10):
            norm = torch.full((), float(step), device="cuda")
            recorder.add_(norm, limit=1.0, coefficient=torch.ones((), device="cuda"))
    recorder.close()
    assert read(path).norms.tolist() == [float(step) for step in range(10)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: is_available() is false")
def test_add_follows_streams_and_devices(path):
    recorder = tritonclip.record(path, every=100)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    for step in range(12):
        with torch.cuda.stream(streams[step % 3]):
            recorder.add_(torch.full((), float(step), device="cuda"))
        if step % 5 == 0:
            recorder.add_(torch.tensor(step + 0.5))
    recorder.close()
    expected = sorted([*map(float, range(12)), 0.5, 5.5, 10.5])
    assert read(path).norms.tolist() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: is_available() is false")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_add_refuses_to_become_a_part_of_a_graph(path):
    norm = torch.ones((), device="cuda")
    recorder = tritonclip.record(path)
    with (
        pytest.raises(RuntimeError, match=r"after graph\.replay"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        recorder.add_(norm)
    assert recorder.steps == 0


def test_blocks_are_bounded(path, monkeypatch):
    """A full block is sent before its rows are due, and is written with them."""
    monkeypatch.setattr(row_buffer, "_BLOCK", 10)
    sizes = []
    real = torch.empty

    def empty(shape: Any, **options: Any) -> torch.Tensor:
        sizes.append(tuple(shape))
        return real(shape, **options)

    monkeypatch.setattr(torch, "empty", empty)
    with tritonclip.record(path, every=10**9) as recorder:
        for step in range(20):
            norm = torch.tensor(float(step))
            recorder.add_(norm, limit=norm if step % 2 else 1.0)
            recorder.add_(step + 0.5)
        assert not path.exists()
    assert read(path).norms.tolist() == [step / 2 for step in range(40)]
    assert max(rows * columns for rows, columns in sizes) <= 10


def test_default_device_and_dtype_decide_nothing(path):
    recorder = tritonclip.record(path)
    norm = torch.tensor(0.1, dtype=torch.float64)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            recorder.add_(norm, limit=1.0)
            recorder.add_(0.1, limit=1.0)
            recorder.close()
            assert read(path).norms.tolist() == [0.1, 0.1]
    finally:
        torch.set_default_dtype(torch.float32)
