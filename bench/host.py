"""`python -m bench host [cpu] [triton] [launches]`: the cost of a call on the host; needs no GPU.

Each part runs in a process by itself.

cpu: the PyTorch backend. Torch's operators cannot be replaced, so times are those of whole calls,
beside whole calls of `torch.nn.utils.clip_grad_norm_` on the same tensors.

triton: the Triton backend on CPU tensors, as under TRITON_INTERPRET=1, with every launch replaced
by a function that does nothing: the host's time before and between launches. CPU tensors cannot
show the copy of a table to pinned memory, the start of its upload, and the question which stream is
current.

launches: the norm and the scale kernel launched with real arguments for an absent H100 whose driver
does nothing: through Triton's JIT, through the library's launch function, and through a compiled
kernel that is called again.

Both paths count the Python functions and modules of the library that a warm call enters, and time
lists of 10 to 10,000 tensors. unchanged: the same gradients as in the call before. recreated: new
tensors at the same addresses, as `zero_grad(set_to_none=True)` often gets from an allocator. moved:
every gradient at an address that it did not have in the last calls. first: new parameters in sizes
never seen, with everything imported. flat: FlatGradients, unchanged. The floor reads every `.grad`
and address and compares the addresses with the last; no call that walks the gradients is faster.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

import tritonclip
from bench import absent_gpu, results, timing
from bench.accuracy import Gradients
from bench.results import Row, spread
from bench.timing import Timed
from bench.workloads import small

CAPTION = "FIGURE / GOAL over: a goal that is missed"
PARTS = ("cpu", "triton", "launches")
ENVIRONMENT = {
    "cpu": {"TRITONCLIP_BACKEND": "torch"},
    "triton": {"TRITONCLIP_BACKEND": "triton", "TRITON_INTERPRET": "1"},
    "launches": {"TRITONCLIP_BACKEND": "auto"},
}
SIZES = (10, 100, 1000, 10_000)
LISTS = ("unchanged", "recreated", "moved", "first", "flat")
CPU = torch.device("cpu")
# Goals of a warm call on 10 tensors, and of a step of the wrapper.
FUNCTIONS, STEP_FUNCTIONS, MODULES = 20, 40, 7
# Of the time of torch.nn.utils.clip_grad_norm_: host time between launches, and a whole CPU call.
SHARES = {"triton": 0.3, "cpu": 1.0}
# Microseconds a tensor, where reading .grad and data_ptr takes 0.17.
GROWTH = 0.5 / 0.17
ELEMENTS = 16
# Sets of gradients kept alive, so that the next one gets other memory.
KEPT = 3
# Longest time spent on one list.
SECONDS = 1.0


def run(parts: Sequence[str], repetitions: int, longest: int, threads: int) -> list[Row]:
    """Rows of the parts, each measured in a process by itself."""
    rows = []
    for part in parts:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.json"
            command = [sys.executable, "-m", "bench", "host", "--here", part, "--out", str(out)]
            command += ["--repetitions", str(repetitions), "--longest", str(longest)]
            subprocess.run(
                [*command, "--threads", str(threads)],
                env=environment | ENVIRONMENT[part],
                cwd=Path(__file__).parents[1],
                stdout=subprocess.DEVNULL,
                check=True,
            )
            rows += results.read(out)[1]
    return rows


def measure(part: str, repetitions: int, longest: int) -> list[Row]:
    """Rows of one part, measured in this process, whose environment is set for it."""
    if part == "launches":
        return list(launches(repetitions))
    no_launch = absent_gpu.replaced_launch(lambda *_, **__: None)
    with no_launch if part == "triton" else nullcontext():
        return [*calls(part, repetitions), *growth(part, repetitions, longest)]


@contextmanager
def entered() -> Iterator[list[tuple[str, str]]]:
    """Records file and name of each function of the library that is entered.

    Comprehensions count as part of the function around them, as in Python 3.12.
    """
    import tritonclip.kernels

    folders = (*tritonclip.__path__, *tritonclip.kernels.__path__)
    found: list[tuple[str, str]] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        inlined = code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
        if event == "call" and not inlined and code.co_filename.startswith(folders):
            found.append((code.co_filename, code.co_name))

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


def calls(path: str, repetitions: int) -> Iterator[Row]:
    """Functions, modules and time of each kind of call on 10 tensors, nothing clipped."""
    gradients = Gradients(small(10), "float32", CPU)
    parameters = gradients.parameters
    with torch.no_grad():
        torch._foreach_zero_(parameters)
    flat_gradients = Gradients(small(10), "float32", CPU)
    flat = tritonclip.FlatGradients(flat_gradients.parameters)
    sgd = torch.optim.SGD(parameters, lr=1e-3, foreach=True)
    wrapper = tritonclip.ClippedOptimizer(sgd, 1.0)
    by_norm, by_value = tritonclip.ClipByNorm(1.0), tritonclip.ClipByValue(0.5)
    known: dict[str, Callable[[], Any]] = {
        "clip_(list, 1.0)": lambda: tritonclip.clip_(parameters, 1.0),
        "clip_(list, ClipByNorm(1.0))": lambda: tritonclip.clip_(parameters, by_norm),
        "clip_(list, ClipByValue(0.5))": lambda: tritonclip.clip_(parameters, by_value),
        "clip_(flat, 1.0)": lambda: tritonclip.clip_(flat, 1.0),
        "ClippedOptimizer(SGD).step()": wrapper.step,
    }
    torchs = Timed(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0), None)
    for name, call in known.items():
        for _ in range(3):
            call()
        with entered() as functions:
            call()
        pair, _ = timing.interleaved([Timed(call, None), torchs], CPU, repetitions, SECONDS)
        ours, theirs = (samples.walls for samples in pair)
        values = {
            "functions": len(functions),
            "functions_goal": STEP_FUNCTIONS if name.endswith("step()") else FUNCTIONS,
            "modules": len({file for file, _ in functions}),
            "modules_goal": MODULES,
            **spread("total_us", ours),
            "torch_us": statistics.median(theirs),
            "share": statistics.median([a / b for a, b in zip(ours, theirs, strict=True)]),
            "floor_us": floor_us(parameters, repetitions),
        }
        if name == "clip_(list, 1.0)":
            values["share_goal"] = SHARES[path]
        yield Row("host", {"path": path, "call": name}, values)


class Setting:
    """Parameters whose gradients are, before each call, as one of LISTS says."""

    def __init__(self, n: int, kind: str) -> None:
        self.kind = kind
        self._n = n
        self._first_size = ELEMENTS
        self._kept: list[list[Tensor]] = []
        self._renew()
        self.argument: Any = self.parameters
        if kind == "flat":
            self.argument = tritonclip.FlatGradients(self.parameters)

    def _renew(self) -> None:
        sizes = [self._first_size, *[ELEMENTS] * (self._n - 1)]
        self.parameters = [torch.zeros(size, requires_grad=True) for size in sizes]
        self._move()

    def _move(self) -> None:
        # Not zeros: norms that may have underflowed are measured again.
        grads = [torch.full_like(p, 1e-3, requires_grad=False) for p in self.parameters]
        self._kept = [*self._kept[1 - KEPT :], grads]
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad

    def prepare(self) -> None:
        """Does, outside the clock, the changes that come between two calls."""
        if self.kind == "moved":
            self._move()
        elif self.kind == "first":
            self._first_size += 1
            self._renew()
            self.argument = self.parameters
        elif self.kind == "recreated":
            for parameter in self.parameters:
                assert parameter.grad is not None
                parameter.grad = parameter.grad.detach()


def growth(path: str, repetitions: int, longest: int) -> Iterator[Row]:
    """Time of calls by global norm on lists of 10 tensors to `longest`."""
    rule = tritonclip.ClipByGlobalNorm(1.0)
    sizes = [*(size for size in SIZES if size < longest), longest]
    for kind in LISTS:
        shortest = 0.0
        for n in sizes:
            setting = Setting(n, kind)
            timed = Timed(lambda s=setting: tritonclip.clip_(s.argument, rule), setting.prepare)  # type: ignore[misc]
            for _ in range(2):
                timing.sample(timed, CPU)
            times: list[float] = []
            end = perf_counter_ns() + SECONDS * 1e9
            while len(times) < 3 or (len(times) < repetitions and perf_counter_ns() < end):
                times.append(timing.sample(timed, CPU)[1])
            floor = floor_us(setting.parameters, min(repetitions, 20))
            values = {**spread("total_us", times), "floor_us": floor}
            if n == sizes[0]:
                shortest = values["total_us"]
            if n == longest and kind != "first":
                values["us_per_tensor"] = (values["total_us"] - shortest) / (n - sizes[0])
                if path == "triton" and kind in ("unchanged", "recreated"):
                    values["us_per_tensor_goal"] = GROWTH * floor / n
            yield Row("host", {"path": path, "list": kind, "tensors": n}, values)


def floor_us(parameters: Sequence[Tensor], repetitions: int) -> float:
    """Reading and comparing gradients' addresses, median."""
    known: list[int] = []

    def read() -> None:
        nonlocal known
        addresses = [g.data_ptr() for p in parameters if (g := p.grad) is not None]
        if addresses != known:
            known = addresses

    timed = Timed(read, None)
    n_calls = max(1, 1000 // len(parameters))
    return statistics.median(timing.sample(timed, CPU, n_calls)[1] for _ in range(repetitions))


def launches(repetitions: int) -> Iterator[Row]:
    """Time of a norm and a scale launch: by the JIT, by the library, by the compiled kernels."""
    launch = absent_gpu.kernel_module("launch").launch
    with absent_gpu.absent_gpu(90):
        both = list(absent_gpu.launches_of(torch.float32).values())[:2]
        grids = [(one.programs, 1, 1) for one in both]
        compiled = [one.compiled() for one in both]
        options = [one.options() for one in both]

        def by_jit() -> None:
            for one, grid, keywords in zip(both, grids, options, strict=True):
                one.kernel[grid](*one.arguments, **one.constants, **keywords)

        def by_library() -> None:
            for one in both:
                launch(*one[:5], **one.constants)

        def by_compiled() -> None:
            for one, grid, kernel in zip(both, grids, compiled, strict=True):
                kernel[grid](*one.arguments, *one.constants.values())

        known = {"JIT": by_jit, "library": by_library, "compiled kernel": by_compiled}
        timed = [Timed(call, None) for call in known.values()]
        samples, _ = timing.interleaved(timed, CPU, repetitions, SECONDS)
    for name, one in zip(known, samples, strict=True):
        case = {"path": "launches", "call": f"norm and scale: {name}"}
        yield Row("host", case, spread("total_us", one.walls))
