"""Launches that are noted, and a number of multiprocessors, which a CPU does not have."""

from typing import Any, NamedTuple

import pytest

from helpers.absent_gpu import kernel_module, replaced_launch


class Noted(NamedTuple):
    """One launch: the kernel's name, its grid and its arguments."""

    kernel: str
    programs: int
    arguments: tuple[Any, ...]


@pytest.fixture
def launches(backend):
    """Every launch of the test, in order; the kernels run as usual."""
    if backend.name != "triton":
        pytest.skip("the torch backend launches no kernels of ours")
    real, seen = kernel_module("launch").launch, []

    def launch(kernel, device, programs, occupancy, arguments, **constants):
        seen.append(Noted(kernel.fn.__name__, programs, tuple(arguments)))
        real(kernel, device, programs, occupancy, arguments, **constants)

    with replaced_launch(launch):
        yield seen


@pytest.fixture
def one_multiprocessor(monkeypatch):
    monkeypatch.setattr(kernel_module("launch"), "multiprocessors", lambda device: 1)
