"""Compiled graphs and CUDA graphs of calls, and the marks of tests that compile."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from helpers.cases import INTERPRETED

NEEDS_DYNAMO = pytest.mark.skipif(INTERPRETED, reason="dynamo cannot trace beside the interpreter")
# Of files whose tests all compile.
COMPILING = [
    pytest.mark.usefixtures("fresh_compiler"),
    # A replaced torch.empty would be traced in place of torch's.
    pytest.mark.plain_empty,
    # torch's own deprecations while it traces are not ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    NEEDS_DYNAMO,
]


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call in one graph."""
    return torch.compile(call, fullgraph=True, backend="aot_eager")


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of a call, warmed up on the stream of its capture, and its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        result = call()
    return graph, result


def captured_second_gpu(current, monkeypatch):
    """Two absent GPUs, the second captured; returns the current one and those entered."""
    entered = [current]

    @contextmanager
    def switched(device):
        entered.append(device.index)
        yield
        entered.pop()

    for name, fake in {
        "current_device": lambda: entered[-1],
        "is_current_stream_capturing": lambda: entered[-1] == 1,
        "device": switched,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return entered
