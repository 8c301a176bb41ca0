"""Kernels are launched as Triton's JIT would launch them, with none of its work on a known call.

Ahead-of-time compilation spells out types and options by hand; this lets the JIT of the installed
Triton derive them from the verbs' real arguments, for an H100 that is not there.
"""

from typing import Any

import pytest
import torch

from helpers.absent_gpu import absent_gpu
from helpers.workers import run_in_threads

triton = pytest.importorskip("triton", reason="triton is not installed")

from tritonclip.backends.interface import Clip  # noqa: E402
from tritonclip.backends.triton import TritonBatch  # noqa: E402
from tritonclip.kernels import launch  # noqa: E402
from tritonclip.kernels.tables import lay_out  # noqa: E402

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter compiles nothing"),
]


@pytest.fixture
def driver(monkeypatch):
    """The driver of an H100 that is not there."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    with absent_gpu(90):
        yield


class Compiled:
    """Stands in for a compiled kernel that no driver can load: keeps what it is launched with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []
        # How many launches told the hooks.
        self.told = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.told += 1
        return lambda *arguments: self.calls.append((grid, arguments))

    def run(self, x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        assert stream == 0
        assert arguments[:5] == ("function", "metadata", None, None, None)
        self.calls.append(((x, y, z), arguments[5:]))


@pytest.fixture
def compiled(driver, monkeypatch):
    """The kernels that launches have compiled, in place of loading and launching them."""
    made: list[Compiled] = []

    def warmup(kernel, *arguments, grid, **keywords):
        result = real(kernel, *arguments, grid=grid, **keywords)
        made.append(Compiled(result.result() if hasattr(result, "result") else result))
        return made[-1]

    real = triton.runtime.jit.JITFunction.warmup
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "warmup", warmup)
    return made


def batch_of(dtype: torch.dtype, sizes=(20000, 3)) -> TritonBatch:
    """Gradients that nobody reads."""
    addresses = [16 * (i + 1) for i in range(len(sizes))]
    table = lay_out(torch.device("cpu"), dtype, sizes, addresses)
    return TritonBatch([], table, torch.promote_types(dtype, torch.float32))


EPS = 1e-6


def launch_all(dtype: torch.dtype, number: Any) -> None:
    """Every verb, with every kind of argument."""
    batch = batch_of(dtype)
    for erase in (False, True):
        clip = Clip(2.0, EPS, number, number, erase)
        norms = batch.norm(2.0, "all")
        for write in (True, False):
            batch._scale_(norms, clip, batch._dtype, write=write)
        clip = clip._replace(erase=torch.tensor(True) if erase else None, of="each")
        batch.scale_(batch.norm(2.0, "each"), clip)
    batch.clamp_(-1.0, 1.0, number)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("number", [1.0, torch.tensor(2.0)], ids=["number", "tensor"])
def test_launch_arguments_bind_through_the_jit(compiled, dtype, number):
    launch_all(dtype, number)
    # Two forms of each kernel but the last: norms by gradient or not, with or without zeros.
    assert len(compiled) == 7
    assert sum(len(one.calls) for one in compiled) == 11
    for one in compiled:
        assert one.kernel.metadata.num_warps == launch.OPTIONS["num_warps"]
        assert one.kernel.metadata.maxnreg in (80, 128)
        assert "st.global" in one.kernel.asm["ptx"]


def test_launches_of_a_known_form_compile_nothing(compiled):
    """Other numbers, sizes, alignments and grids: what the JIT specialises to by itself."""
    for sizes in ((3,), (3, 5), (16384 * 16,), (16,) * 16):
        batch = batch_of(torch.float32, sizes)
        batch.norm(2.0, "all")
        # At an odd number of elements after an aligned address.
        norms = torch.empty(len(sizes) * 17, dtype=torch.float64)[len(sizes) % 2 :]
        batch.scale_(norms, Clip(2.0, EPS, 0.5, 0.5))
        batch.scale_(norms, Clip(2.0, EPS, -0.0, -0.0, of="each"))
        batch.clamp_(-1.0, 2.0**60, 1.0)
    assert len(compiled) == 4
    assert [len(one.calls) for one in compiled] == [4] * 4


def test_a_call_in_a_thread_leaves_nothing_to_compile(compiled):
    """The first call of a process may be made while the model is built."""
    run_in_threads(lambda thread: batch_of(torch.float32, (1,)).clip_(2.0, EPS, 1.0, 1.0), 1)
    assert len(compiled) == 2
    batch_of(torch.float32).clip_(2.0, EPS, 0.5, 1.0)
    assert [len(one.calls) for one in compiled] == [2, 2]


def jit_arguments(kernel: Any, arguments: Any, keywords: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments that the JIT would launch with, and its specialisation of them."""
    binder = kernel.device_caches[90][-1]
    bound, specialization, _ = binder(*arguments, debug=False, **keywords)
    return tuple(bound.values()), specialization


def test_known_launches_pass_what_the_jit_would_pass(compiled, monkeypatch):
    """Arguments, their order, the grid, and a specialisation that depends on types alone."""
    seen = []
    real = launch.launch

    def record(kernel, device, programs, occupancy, arguments, **constants):
        seen.append((kernel, programs, occupancy, arguments, constants))
        real(kernel, device, programs, occupancy, arguments, **constants)

    monkeypatch.setattr(launch, "launch", record)
    for number in (1.0, torch.tensor(2.0)):
        for _ in range(2):
            launch_all(torch.float32, number)
    calls = {id(one): iter(one.calls) for one in compiled}
    by_kernel: dict[Any, Any] = {}
    assert len(seen) == 44
    for kernel, programs, occupancy, arguments, constants in seen:
        keywords = {**constants, **launch.options_of(occupancy)}
        expected, specialization = jit_arguments(kernel, arguments, keywords)
        types = [getattr(a, "dtype", None) for a in arguments]
        key = (kernel.fn, *types, *constants.values())
        if key not in by_kernel:
            by_kernel[key] = compiled[len(by_kernel)], specialization
        own, known = by_kernel[key]
        grid, passed = next(calls[id(own)])
        assert grid == (programs, 1, 1)
        assert len(passed) == len(expected)
        for ours, theirs in zip(passed, expected, strict=True):
            assert ours is theirs or ours == theirs
        assert specialization == known


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_told_of_known_launches(compiled, monkeypatch, name):
    """A profiler may come and go at any time."""
    batch = batch_of(torch.float32)
    batch.clamp_(-1.0, 1.0, 1.0)
    assert compiled[0].told == 0
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, name, lambda metadata: None)
        batch.clamp_(-1.0, 1.0, 1.0)
    assert compiled[0].told == 1
    batch.clamp_(-1.0, 1.0, 1.0)
    assert compiled[0].told == 1
    assert len(compiled[0].calls) == 3


def test_kernels_without_parts_that_are_known_are_launched_as_triton_does(compiled, monkeypatch):
    """Triton's launcher is no public part of it."""
    monkeypatch.delattr(Compiled, "packed_metadata")
    batch = batch_of(torch.float32)
    for _ in range(2):
        batch.clamp_(-1.0, 1.0, 1.0)
    assert compiled[0].told == len(compiled[0].calls) == 2


def test_without_reusable_kernels_launches_go_through_the_jit(driver, monkeypatch):
    """An installed Triton may have no way to launch what it has compiled."""
    runs = []

    def run(kernel, *arguments, grid, warmup, **keywords):
        runs.append(warmup)
        return object()

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)
    batch = batch_of(torch.float32)
    for _ in range(2):
        batch.clamp_(-1.0, 1.0, 1.0)
    assert runs == [True, False, False]
