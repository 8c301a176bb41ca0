"""`python -m bench host [cpu] [triton] [launches]`: the cost of a call on the host; needs no GPU.

Each part runs in a process by itself. docs/performance/host.md says what the parts and lists are.
CPU tensors cannot show the copy of a table to pinned memory, the start of its upload, and the
question which stream is current.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
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
from bench.workloads import WORKLOADS, Workload
from tritonclip.samples import Timed, interleaved, paired, spread

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
# What a step may have beside a fixed limit: a rule, options of the wrapper (of the recorder whether
# it takes the norm of each parameter; whether a loss is set before each step), and the goal in
# microseconds over the step with a fixed limit.
FEATURES: dict[str, tuple[Any, dict[str, Any], float]] = {
    "ClipByQuantile": (tritonclip.ClipByQuantile(), {}, 15.0),
    "ClipByZScore": (tritonclip.ClipByZScore(), {}, 15.0),
    "ClipByOwnHistory": (tritonclip.ClipByOwnHistory(), {}, 15.0),
    "ClipByOwnQuantile": (tritonclip.ClipByOwnQuantile(), {}, 15.0),
    "skip_above=Outlier()": (1e9, {"skip_above": tritonclip.Outlier()}, 15.0),
    "skip_above=Outlier(), loss": (1e9, {"skip_above": tritonclip.Outlier(), "loss": True}, 25.0),
    "skip_above=1e9": (1e9, {"skip_above": 1e9}, 15.0),
    'nonfinite="skip"': (1e9, {"nonfinite": "skip"}, 10.0),
    'nonfinite="error"': (1e9, {"nonfinite": "error"}, 10.0),
    'nonfinite="async_error"': (1e9, {"nonfinite": "async_error"}, 10.0),
    "recorder": (1e9, {"recorder": False}, 10.0),
    "recorder, each=True": (1e9, {"recorder": True}, 15.0),
}
LOSS = torch.ones(())
# Spent on one list.
SECONDS = 1.0


def run(part: str, repetitions: int = 100, longest: int = SIZES[-1]) -> list[Row]:
    """Rows of a part, measured in a process by itself."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    with (
        patch.dict(os.environ, kept | PARTS[part], clear=True),
        ProcessPoolExecutor(1, get_context("spawn")) as process,
    ):
        return process.submit(measure, part, repetitions, longest).result()


def measure(part: str, repetitions: int, longest: int) -> list[Row]:
    """Rows of a part, measured in this process, whose environment is set for it."""
    if part == "launches":
        return list(launches(repetitions))
    if part == "cpu":
        return [*calls(part, repetitions), *steps(repetitions), *growth(part, repetitions, longest)]
    with codegen.replaced_launch(lambda *_, **__: None):
        return [*calls(part, repetitions), *growth(part, repetitions, longest)]


def walls_of(
    known: Mapping[str, Callable[[], Any]], n_samples: int, seconds: float = SECONDS
) -> dict[str, list[float]]:
    """Microseconds of calls that are taken in turn, by name."""
    found = interleaved([Timed(call) for call in known.values()], CPU, n_samples, seconds)
    return {name: samples.walls for name, samples in zip(known, found, strict=True)}


@contextmanager
def entered() -> Iterator[list[tuple[str, str]]]:
    """Records file and name of each function of the library that is entered."""
    import tritonclip.kernels

    folders = (*tritonclip.__path__, *tritonclip.kernels.__path__)
    # Part of the function around them, as in Python 3.12.
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
    by_torch = partial(torch.nn.utils.clip_grad_norm_, parameters, 1e9)
    ours, theirs = walls_of({"tritonclip": call, "torch": by_torch}, n_samples).values()
    share = statistics.median(paired(ours, theirs))
    return spread("total_us", ours) | {"torch_us": statistics.median(theirs), "share": share}


def calls(path: str, repetitions: int) -> Iterator[Row]:
    """Functions, modules and time of each kind of call on 10 tensors, nothing clipped."""
    parameters, others = (
        Gradients(WORKLOADS["small_10"], "float32", CPU).parameters for _ in range(2)
    )
    wrapper = tritonclip.ClippedOptimizer(sgd_of(parameters), 1.0)
    clip, flat = tritonclip.clip_, tritonclip.FlatGradients(others)
    known: dict[str, Callable[[], Any]] = {
        "clip_(list, 1.0)": partial(clip, parameters, 1.0),
        "clip_(list, ClipByNorm(1.0))": partial(clip, parameters, tritonclip.ClipByNorm(1.0)),
        "clip_(list, ClipByValue(0.5))": partial(clip, parameters, tritonclip.ClipByValue(0.5)),
        "clip_(flat, 1.0)": partial(clip, flat, 1.0),
        "ClippedOptimizer(SGD).step()": wrapper.step,
    }
    for name, call in known.items():
        for _ in range(3):
            call()
        with entered() as functions:
            call()
        goals = {"functions_goal": FUNCTIONS, "modules_goal": MODULES}
        values: dict[str, Any] = {
            "functions": len(functions),
            "modules": len({file for file, _ in functions}),
            **({"functions_goal": STEP_FUNCTIONS} if name.endswith("step()") else goals),
            **beside_torch(call, parameters, repetitions),
            "floor_us": floor_us(parameters, repetitions),
        }
        if name == "clip_(list, 1.0)":
            values["share_goal"] = SHARES[path]
        yield Row("host", {"path": path, "call": name}, values)


def step_with_loss(optimizer: tritonclip.ClippedOptimizer) -> None:
    """Takes a step whose loss is judged."""
    optimizer.loss = LOSS
    optimizer.step()


def steps(repetitions: int) -> Iterator[Row]:
    """Steps of a wrapped SGD, beside one whose limit is fixed, and torch's loop; none clips."""
    made: dict[str, Callable[[], Any]] = {}
    with TemporaryDirectory() as folder, ExitStack() as recorders:
        for name, (clip, options, _) in {"a fixed limit": (1e9, {}, 0.0), **FEATURES}.items():
            parameters = Gradients(MLP, "float32", CPU).parameters
            if "recorder" in options:
                record = tritonclip.record(Path(folder, f"{name}.csv"), each=options["recorder"])
                options = {"recorder": recorders.enter_context(record)}
            with_loss = options.get("loss", False)
            options = {key: value for key, value in options.items() if key != "loss"}
            optimizer = tritonclip.ClippedOptimizer(sgd_of(parameters), clip, **options)
            made[name] = partial(step_with_loss, optimizer) if with_loss else optimizer.step
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
        walls = walls_of(made, repetitions, 2 * SECONDS)
    for name, own in walls.items():
        values: dict[str, Any] = {"functions": counts[name], **spread("total_us", own)}
        if name in FEATURES:
            pairs = zip(own, walls["a fixed limit"], strict=True)
            values["over_us"] = statistics.median(one - fixed for one, fixed in pairs)
            values["over_us_goal"] = FEATURES[name][2]
        yield Row("host", {"path": "cpu", "feature": name}, values)


def lists(n: int, kind: str) -> Iterator[list[Tensor]]:
    """Parameters before each call, whose gradients differ from the call before as LISTS says."""
    # Sets of gradients that are kept alive, so that the next one gets other memory.
    kept: deque[list[Tensor]] = deque(maxlen=3)
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
    floor = floor_us(parameters, min(repetitions, 20))
    return spread("total_us", samples.walls) | {"floor_us": floor}


def floor_us(parameters: Sequence[Tensor], repetitions: int) -> float:
    """Reading and comparing gradients' addresses, median."""
    known: list[int] = []

    def read() -> None:
        nonlocal known
        addresses = [g.data_ptr() for p in parameters if (g := p.grad) is not None]
        if addresses != known:
            known = addresses

    return statistics.median(walls_of({"read": read}, repetitions, 0.0)["read"])


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
        walls = walls_of(known, repetitions)
    for name, own in walls.items():
        case = {"path": "launches", "call": f"norm and scale: {name}"}
        yield Row("host", case, spread("total_us", own))
