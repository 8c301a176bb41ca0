"""Prints the CPU table of the README: tritonclip against torch.nn.utils, as a ratio of medians.

Both sides are interleaved in one process. Before a list is timed, our norm and gradients are
compared with a float64 reference: a wrong result is never timed. Clipped and unclipped steps stand
apart. Gradients are filled anew before every clipped repetition, outside the clock.
"""

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import tritonclip

# Interquartile range over median beyond which a row is marked as noisy.
NOISY = 0.15


@dataclass(frozen=True)
class Case:
    """One row: a list of gradients, and what is asked of both sides."""

    gradients: str
    dtype: str
    rule: str
    clipped: bool
    target: float | None


@dataclass(frozen=True)
class Row:
    """A measured case: milliseconds as median and quartiles, and the ratio of the medians."""

    case: Case
    ours_ms: tuple[float, float, float]
    torch_ms: tuple[float, float, float]
    ratio: float
    norm_error: float | None
    torch_norm_error: float | None


def gpt2_124m() -> list[tuple[int, ...]]:
    """Parameter shapes of GPT-2 124M with tied embeddings: 148 tensors, 124,439,808 elements."""
    block = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,)]
    block += [(768,), (768,), (768, 3072), (3072,), (3072, 768), (768,)]
    return [(50257, 768), (1024, 768), *(block * 12), (768,), (768,)]


def small_1000() -> list[tuple[int, ...]]:
    """1,000 vectors of 64 to 1,024 elements."""
    generator = torch.Generator().manual_seed(0)
    return [(n,) for n in torch.randint(64, 1025, (1000,), generator=generator).tolist()]


LISTS = {"GPT-2 124M": gpt2_124m, "1,000 of 64-1,024": small_1000}
# The ratios that the library set out to reach.
CASES = [
    Case("GPT-2 124M", "float32", "norm", False, 3.2),
    Case("GPT-2 124M", "float32", "norm", True, 1.45),
    Case("GPT-2 124M", "bfloat16", "norm", False, 4.0),
    Case("GPT-2 124M", "bfloat16", "norm", True, 1.4),
    Case("GPT-2 124M", "float16", "norm", False, 4.5),
    Case("GPT-2 124M", "float16", "norm", True, 2.2),
    Case("1,000 of 64-1,024", "float32", "norm", False, 2.5),
    Case("1,000 of 64-1,024", "float32", "norm", True, 1.8),
    Case("1,000 of 64-1,024", "bfloat16", "norm", False, None),
    Case("1,000 of 64-1,024", "bfloat16", "norm", True, None),
    Case("1,000 of 64-1,024", "float16", "norm", False, None),
    Case("1,000 of 64-1,024", "float16", "norm", True, None),
    Case("GPT-2 124M", "float32", "value", False, 2.2),
    Case("GPT-2 124M", "float32", "value", True, 1.5),
    Case("GPT-2 124M", "bfloat16", "value", False, 2.2),
    Case("GPT-2 124M", "bfloat16", "value", True, 1.5),
    Case("GPT-2 124M", "float16", "value", False, 2.2),
    Case("GPT-2 124M", "float16", "value", True, 1.5),
    Case("1,000 of 64-1,024", "float32", "value", False, None),
    Case("1,000 of 64-1,024", "float32", "value", True, None),
]


class Gradients:
    """Parameters of a list, and the gradients that they get back before a clipped repetition."""

    def __init__(self, case: Case) -> None:
        dtype = getattr(torch, case.dtype)
        generator = torch.Generator().manual_seed(1)
        self.parameters: list[torch.Tensor] = []
        self._grads: list[torch.Tensor] = []
        self._fresh: list[torch.Tensor] = []
        for shape in LISTS[case.gradients]():
            parameter = torch.zeros(shape, dtype=dtype, requires_grad=True)
            fresh = torch.empty(shape).normal_(0, 1e-3, generator=generator).to(dtype)
            parameter.grad = fresh.clone()
            self.parameters.append(parameter)
            self._grads.append(parameter.grad)
            self._fresh.append(fresh)

    def refill(self) -> None:
        """Gives every parameter its first gradient again, in the same memory."""
        for grad, fresh in zip(self._grads, self._fresh, strict=True):
            grad.copy_(fresh)

    def reference_norm(self) -> float:
        """The 2-norm in float64, gradient by gradient."""
        squares = [float(g.double().square().sum()) for g in self._fresh]
        return math.sqrt(sum(squares))

    def check(self, clip: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Compares gradients with what a clip makes of float64; raises where they differ."""
        for grad, fresh in zip(self._grads, self._fresh, strict=True):
            expected = clip(fresh.double())
            tolerance = 2e-6 + torch.finfo(fresh.dtype).eps
            worst = (grad.double() - expected).abs().max()
            if not worst <= tolerance * expected.abs().max():
                raise RuntimeError(f"wrong result, not timed: off by {float(worst):.3g}")


def calls(case: Case) -> tuple[Callable[[Gradients], Any], Callable[[Gradients], Any], float]:
    """Our call, torch's, and the limit that both get."""
    if case.rule == "value":
        # 3 standard deviations: one element in 370 is outside. 0.1: none is.
        limit = 3e-3 if case.clipped else 0.1
        return (
            lambda g: tritonclip.clip_grad_value_(g.parameters, limit),
            lambda g: clip_grad_value_(g.parameters, limit),
            limit,
        )
    limit = 0.5 if case.clipped else 1e4
    return (
        lambda g: tritonclip.clip_grad_norm_(g.parameters, limit),
        lambda g: clip_grad_norm_(g.parameters, limit),
        limit,
    )


def measure(case: Case, repetitions: int) -> Row:
    """Checks a case, then times both sides in turn."""
    gradients = Gradients(case)
    ours, theirs, limit = calls(case)
    norm_error: float | None = None
    torch_norm_error: float | None = None
    if case.rule == "norm":
        true_norm = gradients.reference_norm()
        multiplier = min(1.0, limit / (true_norm + 1e-6))
        norm_error = abs(float(ours(gradients)) / true_norm - 1)
        gradients.check(lambda wide: wide * multiplier)
        gradients.refill()
        torch_norm_error = abs(float(theirs(gradients)) / true_norm - 1)
        if norm_error > 1e-6:
            raise RuntimeError(f"wrong norm, not timed: off by {norm_error:.2g}")
    else:
        ours(gradients)
        gradients.check(lambda wide: wide.clamp(-limit, limit))
    gradients.refill()

    times: tuple[list[float], list[float]] = ([], [])
    for repetition in range(repetitions + 1):
        for call, spent in zip((ours, theirs), times, strict=True):
            if case.clipped:
                gradients.refill()
            start = perf_counter()
            call(gradients)
            elapsed = perf_counter() - start
            if repetition > 0:
                spent.append(elapsed * 1e3)
    ours_ms, torch_ms = quartiles(times[0]), quartiles(times[1])
    ratio = torch_ms[0] / ours_ms[0]
    return Row(case, ours_ms, torch_ms, ratio, norm_error, torch_norm_error)


def quartiles(times: list[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    lower, middle, upper = statistics.quantiles(times, n=4)
    return middle, lower, upper


def is_noisy(row: Row) -> bool:
    """Whether either side's quartiles lie far apart."""
    return any((hi - lo) / mid > NOISY for mid, lo, hi in (row.ours_ms, row.torch_ms))


def table(rows: list[Row]) -> Table:
    """The rows for people."""
    result = Table(title="tritonclip against torch.nn.utils on the CPU", caption=provenance_line())
    for name in ("gradients", "dtype", "by", "step"):
        result.add_column(name, no_wrap=True)
    for name in ("ours ms", "torch ms", "ratio", "target", "norm error", "torch's"):
        result.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        case = row.case
        result.add_row(
            case.gradients,
            case.dtype,
            case.rule,
            "clipped" if case.clipped else "unclipped",
            f"{row.ours_ms[0]:.2f}",
            f"{row.torch_ms[0]:.2f}",
            f"{row.ratio:.2f}x{' ~' if is_noisy(row) else ''}",
            "" if case.target is None else f"{case.target}x",
            "" if row.norm_error is None else f"{row.norm_error:.0e}",
            "" if row.torch_norm_error is None else f"{row.torch_norm_error:.0e}",
        )
    return result


def provenance() -> dict[str, str | int]:
    """Where and with what the rows were measured."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().split("\n\n")[0].splitlines()
        parts = [line.partition(":") for line in lines]
        fields = {name.strip(): value.strip() for name, _, value in parts}
        cpu = f"{fields.get('model name', cpu)} model {fields.get('model', '?')}"
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    ).stdout.strip()
    return {
        "cpu": cpu,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "tritonclip": tritonclip.__version__,
        "commit": commit or "unknown",
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def provenance_line() -> str:
    """Provenance in one line."""
    return ", ".join(f"{name} {value}" for name, value in provenance().items())


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (2)")
    parser.add_argument("--repetitions", type=int, default=15, help="timed calls a side (15)")
    parser.add_argument("--only", default="", help="only rows whose description holds this text")
    parser.add_argument("--json", type=Path, help="also write rows and provenance to this file")
    options = parser.parse_args(argv)
    if options.threads < 1:
        parser.error(f"--threads must be 1 or more, got {options.threads}")
    if options.repetitions < 2:
        parser.error(f"--repetitions must be 2 or more, got {options.repetitions}")
    return options


def describe(case: Case) -> str:
    """A case in words."""
    step = "clipped" if case.clipped else "unclipped"
    return f"{case.gradients} {case.dtype} {case.rule} {step}"


def main(argv: list[str] | None = None) -> int:
    """Measures all cases and prints the table."""
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    cases = [case for case in CASES if options.only in describe(case)]
    console = Console(width=140)
    rows = []
    for case in track(cases, description="measuring", console=console, transient=True):
        repetitions = options.repetitions * (10 if case.gradients != "GPT-2 124M" else 1)
        rows.append(measure(case, repetitions))
    console.print(table(rows))
    console.print("ratio: torch's median over ours, interleaved; ~ quartiles more than 15% apart")
    if options.json:
        record = {"provenance": provenance(), "rows": [asdict(row) for row in rows]}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
