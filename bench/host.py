"""`python -m bench host [cpu] [triton] [launches]`: the cost of a call on the host; needs no GPU.

Each part runs in a process by itself. docs/performance.md says what the parts and lists are. CPU
tensors cannot show the copy of a table to pinned memory, the start of its upload, and the question
which stream is current.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import tritonclip
from bench import codegen
from bench.accuracy import Gradients
from bench.providers import sgd_of
from bench.results import Row
from bench.timing import Timed, interleaved, paired, spread
from bench.workloads import WORKLOADS, Workload

CAPTION = "FIGURE / GOAL over: a goal that is missed"
# The environment of each part.
PARTS = {
    "cpu": {"TRITONCLIP_BACKEND": "native"},
    "triton": {"TRITONCLIP_BACKEND": "triton", "TRITON_INTERPRET": "1"},
    "launches": {"TRITONCLIP_BACKEND": "auto"},
}
SIZES = (10, 100, 1000, 10_000)
LISTS = ("unchanged", "recreated", "moved", "first", "flat")
CPU = torch.device("cpu")
# Goals of a warm call on 10 tensors, and of a step of the wrapper.
FUNCTIONS, STEP_FUNCTIONS, MODULES = 15, 40, 7
# Of the time of torch.nn.utils.clip_grad_norm_: host time between launches, and a whole CPU call.
SHARES = {"triton": 0.3, "cpu": 1.0}
# Microseconds a tensor, where reading .grad and data_ptr takes 0.17.
GROWTH = 0.5 / 0.17
ELEMENTS = 16
# A multilayer perceptron, whose steps take little longer than the host needs for them.
MLP = Workload("mlp_9k", "MLP, 9 thousand", ((64, 64), (64,), (64, 64), (64,), (10, 64), (10,)))
# What a step may have beside a fixed limit: a rule, and options of the wrapper. Of the recorder,
# whether it takes the norm of each parameter.
FEATURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ClipByQuantile": (tritonclip.ClipByQuantile(), {}),
    "ClipByZScore": (tritonclip.ClipByZScore(), {}),
    "ClipByOwnHistory": (tritonclip.ClipByOwnHistory(), {}),
    "skip_above=Outlier()": (1e9, {"skip_above": tritonclip.Outlier()}),
    "skip_above=1e9": (1e9, {"skip_above": 1e9}),
    'nonfinite="skip"': (1e9, {"nonfinite": "skip"}),
    "recorder": (1e9, {"recorder": False}),
    "recorder, each=True": (1e9, {"recorder": True}),
}
# Goals, in microseconds over the step with a fixed limit; none where gradients are read once more.
OVER = {name: 15.0 for name in FEATURES if name != "recorder, each=True"}
OVER |= {'nonfinite="skip"': 10.0, "recorder": 10.0}
# Sets of gradients that are kept alive, so that the next one gets other memory.
KEPT = 3
# Spent on one list.
SECONDS = 1.0


def run(parts: Iterable[str], repetitions: int, longest: int) -> list[Row]:
    """Rows of the parts, each measured in a process by itself."""
    rows = []
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    for part in parts:
        with (
            patch.dict(os.environ, kept | PARTS[part], clear=True),
            ProcessPoolExecutor(1, get_context("spawn")) as process,
        ):
            rows += process.submit(measure, part, repetitions, longest).result()
    return rows


def measure(part: str, repetitions: int, longest: int) -> list[Row]:
    """Rows of one part, measured in this process, whose environment is set for it."""
    if part == "launches":
        return list(launches(repetitions))
    no_launch = codegen.replaced_launch(lambda *_, **__: None)
    with no_launch if part == "triton" else nullcontext():
        known = [] if part == "triton" else steps(repetitions)
        return [*calls(part, repetitions), *known, *growth(part, repetitions, longest)]


@contextmanager
def entered() -> Iterator[list[tuple[str, str]]]:
    """Records file and name of each function of the library that is entered.

    Comprehensions count as part of the function around them, as in Python 3.12.
    """
    import tritonclip.kernels

    folders = (*tritonclip.__path__, *tritonclip.kernels.__path__)
    inlined = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
    found: list[tuple[str, str]] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and name not in inlined and file.startswith(folders):
            found.append((file, name))

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


def beside_torch(
    call: Callable[[], Any], parameters: Sequence[Tensor], n_samples: int
) -> dict[str, float]:
    """Time of a call, and of torch's on the same parameters in turn; nothing is clipped."""
    torchs = Timed(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e9))
    both = interleaved([Timed(call), torchs], CPU, n_samples, SECONDS)
    ours, theirs = (samples.walls for samples in both)
    share = statistics.median(paired(ours, theirs))
    return spread("total_us", ours) | {"torch_us": statistics.median(theirs), "share": share}


def calls(path: str, repetitions: int) -> Iterator[Row]:
    """Functions, modules and time of each kind of call on 10 tensors, nothing clipped."""
    parameters, others = (
        Gradients(WORKLOADS["small_10"], "float32", CPU).parameters for _ in range(2)
    )
    wrapper = tritonclip.ClippedOptimizer(sgd_of(parameters), 1.0)
    flat = tritonclip.FlatGradients(others)
    by_norm, by_value = tritonclip.ClipByNorm(1.0), tritonclip.ClipByValue(0.5)
    known: dict[str, Callable[[], Any]] = {
        "clip_(list, 1.0)": lambda: tritonclip.clip_(parameters, 1.0),
        "clip_(list, ClipByNorm(1.0))": lambda: tritonclip.clip_(parameters, by_norm),
        "clip_(list, ClipByValue(0.5))": lambda: tritonclip.clip_(parameters, by_value),
        "clip_(flat, 1.0)": lambda: tritonclip.clip_(flat, 1.0),
        "ClippedOptimizer(SGD).step()": wrapper.step,
    }
    for name, call in known.items():
        for _ in range(3):
            call()
        with entered() as functions:
            call()
        is_step = name.endswith("step()")
        values: dict[str, Any] = {
            "functions": len(functions),
            "functions_goal": STEP_FUNCTIONS if is_step else FUNCTIONS,
            "modules": len({file for file, _ in functions}),
            **({} if is_step else {"modules_goal": MODULES}),
            **beside_torch(call, parameters, repetitions),
            "floor_us": floor_us(parameters, repetitions),
        }
        if name == "clip_(list, 1.0)":
            values["share_goal"] = SHARES[path]
        yield Row("host", {"path": path, "call": name}, values)


def steps(repetitions: int) -> Iterator[Row]:
    """Steps of a wrapped SGD, beside one whose limit is fixed, and torch's loop; none clips."""
    made: dict[str, Callable[[], Any]] = {}
    with TemporaryDirectory() as folder, ExitStack() as recorders:
        for name, (clip, options) in {"a fixed limit": (1e9, {}), **FEATURES}.items():
            parameters = Gradients(MLP, "float32", CPU).parameters
            if "recorder" in options:
                path, each = Path(folder, f"{name}.csv"), options["recorder"]
                recorder = recorders.enter_context(tritonclip.record(path, each=each))
                options = {"recorder": recorder}
            made[name] = tritonclip.ClippedOptimizer(sgd_of(parameters), clip, **options).step
        parameters = Gradients(MLP, "float32", CPU).parameters
        sgd = sgd_of(parameters)

        def by_torch() -> None:
            torch.nn.utils.clip_grad_norm_(parameters, 1e9)
            sgd.step()

        made["torch: clip_grad_norm_, step"] = by_torch
        counts = {}
        for name, step in made.items():
            # Beyond every warm-up and half of every window.
            for _ in range(150):
                step()
            with entered() as functions:
                step()
            counts[name] = len(functions)
        found = interleaved(list(map(Timed, made.values())), CPU, repetitions, 2 * SECONDS)
    fixed = found[0].walls
    for name, samples in zip(made, found, strict=True):
        values: dict[str, Any] = {"functions": counts[name], **spread("total_us", samples.walls)}
        if name in FEATURES:
            pairs = zip(samples.walls, fixed, strict=True)
            values["over_us"] = statistics.median(own - other for own, other in pairs)
            if name in OVER:
                values["over_us_goal"] = OVER[name]
        yield Row("host", {"path": "cpu", "feature": name}, values)


def lists(n: int, kind: str) -> Iterator[list[Tensor]]:
    """Parameters before each call, whose gradients differ from the call before as LISTS says."""
    kept: deque[list[Tensor]] = deque(maxlen=KEPT)
    for first_size in count(ELEMENTS):
        if not kept or kind == "first":
            sizes = [first_size, *[ELEMENTS] * (n - 1)]
            parameters = [torch.zeros(size, requires_grad=True) for size in sizes]
        if not kept or kind in ("first", "moved"):
            # Not zeros: norms that may have underflowed are measured again.
            kept.append([torch.full_like(p, 1e-3, requires_grad=False) for p in parameters])
        if first_size == ELEMENTS or kind in ("first", "moved", "recreated"):
            for parameter, grad in zip(parameters, kept[-1], strict=True):
                parameter.grad = grad.detach()
        yield parameters


def growth(path: str, repetitions: int, longest: int) -> Iterator[Row]:
    """Time of calls by global norm on lists of 10 tensors to `longest`."""
    sizes = [*(size for size in SIZES if size < longest), longest]
    for kind in LISTS:
        shortest = 0.0
        for n in sizes:
            values = times_of(n, kind, repetitions)
            shortest = shortest or values["total_us"]
            if n == longest and kind != "first":
                values["us_per_tensor"] = (values["total_us"] - shortest) / (n - sizes[0])
                if path == "triton" and kind in ("unchanged", "recreated"):
                    values["us_per_tensor_goal"] = GROWTH * values["floor_us"] / n
            yield Row("host", {"path": path, "list": kind, "tensors": n}, values)


def times_of(n: int, kind: str, repetitions: int) -> dict[str, float]:
    """Time of calls on one list, each sampled by itself, and of reading its addresses."""
    known = lists(n, kind)
    parameters, rule = next(known), tritonclip.ClipByGlobalNorm(1.0)
    flat = tritonclip.FlatGradients(parameters) if kind == "flat" else None

    def prepare() -> None:
        nonlocal parameters
        parameters = next(known)

    timed = Timed(lambda: tritonclip.clip_(parameters if flat is None else flat, rule), prepare)
    (samples,) = interleaved(
        [timed], CPU, min(3, repetitions), SECONDS, most_samples=repetitions, most_calls=1
    )
    return spread("total_us", samples.walls) | {
        "floor_us": floor_us(parameters, min(repetitions, 20))
    }


def floor_us(parameters: Sequence[Tensor], repetitions: int) -> float:
    """Reading and comparing gradients' addresses, median."""
    known: list[int] = []

    def read() -> None:
        nonlocal known
        addresses = [g.data_ptr() for p in parameters if (g := p.grad) is not None]
        if addresses != known:
            known = addresses

    (samples,) = interleaved([Timed(read)], CPU, repetitions, 0.0)
    return statistics.median(samples.walls)


def launches(repetitions: int) -> Iterator[Row]:
    """Time of a norm and a scale launch: by the JIT, by the library, by the compiled kernels."""
    module = codegen.kernel_module("launch")
    with codegen.absent_gpu(90):
        both = list(codegen.launches_of(torch.float32).values())[:2]
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

        known = {"JIT": by_jit, "library": by_library, "compiled kernel": by_compiled}
        found = interleaved(list(map(Timed, known.values())), CPU, repetitions, SECONDS)
    for name, samples in zip(known, found, strict=True):
        case = {"path": "launches", "call": f"norm and scale: {name}"}
        yield Row("host", case, spread("total_us", samples.walls))
