"""What a call costs the host before and between its launches: a table of stages.

The launch itself is replaced by a function that does nothing, so no kernel runs and no GPU is
needed: on a CPU the triton backend serves CPU tensors as it does under TRITON_INTERPRET=1, and the
interpreter is never entered. What CPU tensors cannot show: the copy of a table to pinned memory and
the start of its upload, the question which stream is current, and that a CUDA tensor takes longer
to say where it lies. With `--device cuda` all of that is in, and real launches have a column.

Cases. unchanged: the same gradients as in the call before. recreated: new tensors at the same
addresses, as `zero_grad(set_to_none=True)` often gets from an allocator. moved: every gradient at
an address that it did not have in the last calls. first: new parameters in sizes never seen (but
everything imported). flat: FlatGradients, unchanged.

`total` is timed without looking inside. Stages come from other calls, in which the functions named
in STAGES are wrapped in clocks: each counts the time that no inner one counts, and `else` is what
is left. `floor` reads every `.grad` and address and compares them with the last, which no
implementation that walks the gradients can go below.

Run `python -m bench.host`.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tritonclip
from bench import rows
from bench.stages import LAUNCHES, STAGES, clocks, no_launches

SIZES = (10, 100, 148, 300, 1000, 2000, 10_000)
CASES = ("unchanged", "recreated", "moved", "first", "flat")
RULES: dict[str, tritonclip.rules.Rule] = {
    "norm": tritonclip.ClipByGlobalNorm(1.0),
    "value": tritonclip.ClipByValue(1.0),
    "gradient": tritonclip.ClipByNorm(1.0),
}
# Targets on a machine with 2 cores: microseconds a call, and a tensor.
CALL_US = 30.0
TENSOR_US = {"unchanged": 0.2, "recreated": 0.2, "moved": 0.4}
ELEMENTS = 16
# Sets of gradients kept alive, so that the next one gets other memory.
KEPT = 3


@dataclass(frozen=True)
class HostRow:
    """Microseconds of host time a call: medians, and quartiles of the total.

    Attributes:
        limit_us: the target, None where there is none.
        stages_us: by name of the stage; "else" is the rest of the call.
        launches_us: the real launches of a call, None without a GPU.
    """

    n_tensors: int
    case: str
    rule: str
    device: str
    repetitions: int
    total_us: float
    total_lo_us: float
    total_hi_us: float
    floor_us: float
    limit_us: float | None
    stages_us: dict[str, float]
    launches_us: float | None


class Setting:
    """Parameters whose gradients are as a case wants them before each call."""

    def __init__(self, n: int, case: str, device: str) -> None:
        self.case, self.device = case, device
        self._n = n
        self._first_size = ELEMENTS
        self._kept: list[list[torch.Tensor]] = []
        self._renew()
        self.argument: Any = self.parameters
        if case == "flat":
            self.argument = tritonclip.FlatGradients(self.parameters)

    def _renew(self) -> None:
        sizes = [self._first_size, *[ELEMENTS] * (self._n - 1)]
        self.parameters = [
            torch.zeros(size, device=self.device, requires_grad=True) for size in sizes
        ]
        self._move()

    def _move(self) -> None:
        grads = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
        self._kept = [*self._kept[1 - KEPT :], grads]
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad

    def before_call(self) -> None:
        """Does, outside the clock, what happens between two calls of the case."""
        if self.case == "moved":
            self._move()
        elif self.case == "first":
            self._first_size += 1
            self._renew()
            self.argument = self.parameters
        elif self.case == "recreated":
            for parameter in self.parameters:
                assert parameter.grad is not None
                parameter.grad = parameter.grad.detach()


def microseconds(setting: Setting, call: Callable[[], Any]) -> float:
    """One call, prepared outside the clock."""
    setting.before_call()
    start = perf_counter_ns()
    call()
    return (perf_counter_ns() - start) / 1e3


def floor_us(parameters: list[torch.Tensor], repetitions: int) -> float:
    """Reading and comparing gradients' addresses, median."""
    known: list[int] = []
    times = []
    for _ in range(repetitions):
        start = perf_counter_ns()
        addresses = [g.data_ptr() for p in parameters if (g := p.grad) is not None]
        if addresses != known:
            known = addresses
        times.append((perf_counter_ns() - start) / 1e3)
    return statistics.median(times)


def measure(n: int, case: str, rule: str, device: str, repetitions: int) -> HostRow:
    """Times one case: the whole call, then its stages, then real launches where there is a GPU."""
    setting = Setting(n, case, device)

    def call() -> None:
        tritonclip.clip_(setting.argument, RULES[rule])

    stages: dict[str, list[float]] = {name: [] for name in (*STAGES, "else")}
    launches: list[float] = []
    with no_launches():
        # The first two fill caches.
        times = [microseconds(setting, call) for _ in range(repetitions + 2)][2:]
        for _ in range(repetitions):
            with clocks(STAGES) as clock:
                whole = microseconds(setting, call)
            for name in STAGES:
                stages[name].append(clock.spent_us.get(name, 0.0))
            stages["else"].append(whole - sum(clock.spent_us.values()))
    if device == "cuda":
        for _ in range(repetitions + 2):
            with clocks({"launches": LAUNCHES}) as clock:
                microseconds(setting, call)
            torch.cuda.synchronize()
            launches.append(clock.spent_us["launches"])
    low, middle, high = statistics.quantiles(times, n=4)
    return HostRow(
        n_tensors=n,
        case=case,
        rule=rule,
        device=device if device == "cpu" else torch.cuda.get_device_name(),
        repetitions=repetitions,
        total_us=middle,
        total_lo_us=low,
        total_hi_us=high,
        floor_us=floor_us(setting.parameters, repetitions),
        limit_us=CALL_US + TENSOR_US[case] * n if case in TENSOR_US else None,
        stages_us={name: statistics.median(spent) for name, spent in stages.items()},
        launches_us=statistics.median(launches[2:]) if launches else None,
    )


def table(measured: list[HostRow]) -> Table:
    """The rows for people."""
    result = Table(
        title="Host time of a call, microseconds (median)",
        caption="walk to else: from other calls, slowed down by clocks; limit: what we aim at, on "
        "a machine whose floor is 0.13 a tensor",
    )
    for name in ("tensors", "case", "rule", "total", "quartiles", "limit", "floor"):
        result.add_column(name, justify="right", no_wrap=True)
    for name in (*STAGES, "else", "launches"):
        result.add_column(name, justify="right", no_wrap=True)
    for row in measured:
        over = row.limit_us is not None and row.total_us > row.limit_us
        result.add_row(
            f"{row.n_tensors:,}",
            row.case,
            row.rule,
            f"{row.total_us:.1f}",
            f"{row.total_lo_us:.1f} to {row.total_hi_us:.1f}",
            "" if row.limit_us is None else f"{row.limit_us:.0f}{' over' if over else ''}",
            f"{row.floor_us:.1f}",
            *(f"{spent:.1f}" for spent in row.stages_us.values()),
            "" if row.launches_us is None else f"{row.launches_us:.1f}",
        )
    return result


def main(argv: list[str] | None = None) -> int:
    """Measures all cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="tensors in a list")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["norm"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (2)")
    parser.add_argument("--repetitions", type=int, default=100, help="calls a case (100)")
    parser.add_argument("--out", type=Path, help="also write rows and provenance to this file")
    options = parser.parse_args(argv)
    os.environ["TRITONCLIP_BACKEND"] = "triton"
    if options.device == "cpu":
        # Read by Triton when the kernels are imported, at the first call.
        os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(options.threads)
    console = Console(width=170)
    work = [
        (n, case, rule) for rule in options.rules for n in options.sizes for case in options.cases
    ]
    measured = [
        measure(*one, options.device, options.repetitions)
        for one in track(work, "measuring", console=console, transient=True)
    ]
    console.print(table(measured))
    if options.out:
        rows.write(options.out, rows.provenance(torch.device(options.device)), measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
