"""The cost of a call on the host; needs no GPU.

docs/performance/details.md explains the paths and lists. On CPU tensors a call does not copy a
table to pinned memory, start its upload, or ask which stream is current.
"""

from __future__ import annotations

import atexit
import os
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import tritonclip
from bench.accuracy import Gradients
from bench.comparison import CPU, AllSamples, Comparison, Effort, beside_torch, hand_over
from bench.providers import NAMED, sgd_of
from bench.samples import Samples, Timed, interleaved
from bench.workloads import WORKLOADS, Workload
from helpers.absent_gpu import absent_gpu, kernel_module, launches, replaced_launch

NEEDS_TRITON = pytest.mark.skipif(
    not find_spec("triton"), reason="triton is not installed: pip install -e '.[triton]'"
)
# The environment of each path.
PATHS = {
    "cpu": {"TRITONCLIP_BACKEND": "native"},
    "triton": {"TRITONCLIP_BACKEND": "triton", "TRITON_INTERPRET": "1"},
    "launches": {},
}
BOTH = ["cpu", pytest.param("triton", marks=NEEDS_TRITON)]
SIZES = (10, 100, 1000, 10_000)
LISTS = ("unchanged", "recreated", "moved", "first", "flat")
# The goals: shares of the time of torch.nn.utils.clip_grad_norm_, for the host time between
# launches and for a whole CPU call; and 0.5 us a tensor, where reading its address takes 0.17.
SHARES = {"triton": 0.3, "cpu": 1.0}
GROWTH = 0.5 / 0.17
ELEMENTS = 16
# A perceptron so small that a step takes little longer than the host time.
MLP = Workload("mlp_9k", "MLP, 9 thousand", ((64, 64), (64,), (64, 64), (64,), (10, 64), (10,)))
NORM, VALUE = tritonclip.ClipByNorm(1.0), tritonclip.ClipByValue(0.5)
CALLS: dict[str, Callable[[list[Tensor]], Callable[[], Any]]] = {
    "clip_(list, 1.0)": lambda own: partial(tritonclip.clip_, own, 1.0),
    "clip_(list, ClipByNorm(1.0))": lambda own: partial(tritonclip.clip_, own, NORM),
    "clip_(list, ClipByValue(0.5))": lambda own: partial(tritonclip.clip_, own, VALUE),
    "clip_(flat, 1.0)": lambda own: partial(tritonclip.clip_, tritonclip.FlatGradients(own), 1.0),
    "ClippedOptimizer(SGD).step()": lambda own: tritonclip.ClippedOptimizer(sgd_of(own), 1.0).step,
}
FIXED, BY_TORCH = "a fixed limit", "torch: clip_grad_norm_, step"
LAUNCHED = [f"norm and scale: {by}" for by in ("JIT", "library", "compiled kernel")]
T = TypeVar("T")


@pytest.fixture(scope="module")
def process(path: str) -> Iterator[ProcessPoolExecutor]:
    """A process for a path, because Triton reads the environment when it is imported."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")} | PATHS[path]
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        with patch.dict(os.environ, kept, clear=True):
            # Starts the process now, so that this one can restore its environment at once.
            executor.submit(os.getpid).result()
        yield executor


def without_launches(path: str, measure: Callable[..., T], *given: Any) -> T:
    """Calls `measure` while launches of the Triton backend do nothing."""
    nothing: Any = replaced_launch(lambda *_, **__: None) if path == "triton" else nullcontext()
    with nothing:
        return measure(*given)


def call_samples(call: str, effort: Effort) -> AllSamples:
    """Samples of a call on 10 tensors that clips nothing, of torch's, and of the floor, in turn."""
    first, second = (Gradients(WORKLOADS["small_10"], "float32", CPU).parameters for _ in range(2))
    ours = CALLS[call](first)
    calls = {
        "tritonclip": Timed(ours),
        "torch": Timed(partial(torch.nn.utils.clip_grad_norm_, second, 1e9)),
        "floor": Timed(floor_of(second)),
    }
    return Comparison(calls, effort).take_turns()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("path", BOTH, scope="module")
def test_call(benchmark: Any, process: ProcessPoolExecutor, effort: Effort, path, call) -> None:
    """Time of a warm call on 10 tensors, beside torch's and the floor."""
    samples = process.submit(without_launches, path, call_samples, call, effort).result()
    goal = {"share_goal": SHARES[path]} if call == "clip_(list, 1.0)" else {}
    floor = statistics.median(samples["floor"].walls)
    benchmark.extra_info |= beside_torch("tritonclip", samples) | goal | {"floor_us": floor}
    hand_over(benchmark, samples["tritonclip"])


# The files of recorders are kept until the process ends.
FILES = ExitStack()
atexit.register(FILES.close)


def recorder(**options: bool) -> Any:
    folder = FILES.enter_context(TemporaryDirectory())
    return FILES.enter_context(tritonclip.record(Path(folder, "run.csv"), **options))


def step_of(parameters: list[Tensor], clip: Any = 1e9, **options: Any) -> Callable[[], Any]:
    """A wrapped step of SGD with options of the wrapper."""
    step: Callable[[], Any] = tritonclip.ClippedOptimizer(sgd_of(parameters), clip, **options).step
    return step


# The features of a step, with the microseconds over a step with a fixed limit that are the goal.
FEATURES: dict[str, tuple[Callable[[list[Tensor]], Callable[[], Any]], float]] = {
    FIXED: (step_of, 0.0),
    "skip_above=1e9": (partial(step_of, skip_above=1e9), 15.0),
    'nonfinite="skip"': (partial(step_of, nonfinite="skip"), 10.0),
    'nonfinite="error"': (partial(step_of, nonfinite="error"), 10.0),
    "recorder": (lambda own: step_of(own, recorder=recorder()), 10.0),
    "recorder, each=True": (lambda own: step_of(own, recorder=recorder(each=True)), 15.0),
}


@pytest.fixture(scope="module")
def steps(effort: Effort) -> Comparison:
    """Steps of a wrapped SGD with each feature, and torch's loop; none clips."""
    lists = {name: Gradients(MLP, "float32", CPU) for name in (*FEATURES, BY_TORCH)}
    made = {name: make(lists[name].parameters) for name, (make, _) in FEATURES.items()}
    made[BY_TORCH] = NAMED["torch"].make(lists[BY_TORCH], "step", 1e9).call
    for step in made.values():
        # More steps than any warm-up and half of any window have.
        for _ in range(150):
            step()
    return Comparison({name: Timed(step) for name, step in made.items()}, effort, over_fixed)


def over_fixed(name: str, samples: AllSamples) -> dict[str, float]:
    """Microseconds more than the step with a fixed limit takes, paired."""
    if name in (FIXED, BY_TORCH):
        return {}
    pairs = zip(samples[name].walls, samples[FIXED].walls, strict=True)
    over = statistics.median(one - fixed for one, fixed in pairs)
    return {"over_us": over, "over_us_goal": FEATURES[name][1]}


@pytest.mark.parametrize("feature", [*FEATURES, BY_TORCH])
@pytest.mark.parametrize("path", ["cpu"])
def test_step(benchmark: Any, steps: Comparison, feature: str, path: str) -> None:
    steps.hand_over(benchmark, feature)


def lists(n: int, kind: str) -> Iterator[list[Tensor]]:
    """The parameters for each call, with gradients that differ from the last ones by kind."""
    # Earlier gradients are kept alive, so that the next ones get other memory.
    kept: deque[list[Tensor]] = deque(maxlen=3)
    for first_size in count(ELEMENTS):
        if not kept or kind == "first":
            sizes = [first_size, *[ELEMENTS] * (n - 1)]
            parameters = [torch.zeros(size, requires_grad=True) for size in sizes]
        if not kept or kind in ("first", "moved"):
            # No zeros, because norms that may have underflowed are measured again.
            kept.append([torch.full_like(p, 1e-3, requires_grad=False) for p in parameters])
        if first_size == ELEMENTS or kind in ("first", "moved", "recreated"):
            for parameter, grad in zip(parameters, kept[-1], strict=True):
                parameter.grad = grad.detach()
        yield parameters


def list_samples(n: int, kind: str, effort: Effort) -> tuple[Samples, float]:
    """Samples of calls by global norm on a list, and the microseconds to read its addresses."""
    known = lists(n, kind)
    parameters, rule = next(known), tritonclip.ClipByGlobalNorm(1.0)
    flat = tritonclip.FlatGradients(parameters) if kind == "flat" else None

    def prepare() -> None:
        nonlocal parameters
        parameters = next(known)

    timed = Timed(lambda: tritonclip.clip_(parameters if flat is None else flat, rule), prepare)
    (samples,) = interleaved([timed], CPU, *effort, most_samples=100, most_calls=1)
    (floor,) = interleaved([Timed(floor_of(parameters))], CPU, 20, 0.0)
    return samples, statistics.median(floor.walls)


@pytest.fixture(scope="module")
def shortest() -> dict[tuple[str, str], float]:
    """Microseconds of a call on the shortest list, by path and kind."""
    return {}


@pytest.mark.parametrize("tensors", SIZES)
@pytest.mark.parametrize("list", LISTS)
@pytest.mark.parametrize("path", BOTH, scope="module")
def test_list(benchmark: Any, process, shortest, effort: Effort, path, list, tensors) -> None:
    given = list_samples, tensors, list, effort
    samples, floor = process.submit(without_launches, path, *given).result()
    found, us = {"floor_us": floor}, statistics.median(samples.walls)
    start = shortest.setdefault((path, list), us)
    if tensors == SIZES[-1] and start < us and list != "first":
        found["us_per_tensor"] = (us - start) / (tensors - SIZES[0])
        if path == "triton" and list in ("unchanged", "recreated"):
            found["us_per_tensor_goal"] = GROWTH * floor / tensors
    benchmark.extra_info |= found
    hand_over(benchmark, samples)


def floor_of(parameters: Sequence[Tensor]) -> Callable[[], None]:
    """A function that reads and compares the addresses of gradients: the floor of any call."""
    known: list[int] = []

    def read() -> None:
        nonlocal known
        addresses = [g.data_ptr() for p in parameters if (g := p.grad) is not None]
        if addresses != known:
            known = addresses

    return read


def launch_samples(effort: Effort) -> AllSamples:
    """Samples of a norm and a scale launch, by the JIT, the library and the compiled kernels."""
    module = kernel_module("launch")
    with absent_gpu(90):
        both = launches()[:2]
        grids = [(one.programs, 1, 1) for one in both]
        compiled = [one.compiled() for one in both]
        options = [module.options_of(one.occupancy) for one in both]

        def by_jit() -> None:
            for one, grid, keywords in zip(both, grids, options, strict=True):
                one.kernel[grid](*one.arguments, **one.constants, **keywords)

        def by_library() -> None:
            for one in both:
                module.launch(*one[:5], **one.constants)

        def by_compiled() -> None:
            for one, grid, kernel in zip(both, grids, compiled, strict=True):
                kernel[grid](*one.arguments, *one.constants.values())

        calls = dict(zip(LAUNCHED, map(Timed, (by_jit, by_library, by_compiled)), strict=True))
        return Comparison(calls, effort).take_turns()


@pytest.fixture(scope="module")
def launched(process: ProcessPoolExecutor, effort: Effort) -> AllSamples:
    return process.submit(launch_samples, effort).result()


@NEEDS_TRITON
@pytest.mark.parametrize("call", LAUNCHED)
@pytest.mark.parametrize("path", ["launches"], scope="module")
def test_launch(benchmark: Any, launched: AllSamples, path: str, call: str) -> None:
    """Time of two launches with a driver that does nothing."""
    hand_over(benchmark, launched[call])
