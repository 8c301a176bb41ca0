"""The accuracy of norms, ours beside torch's: `python -m bench.accuracy`.

What single precision overflows or underflows on, what a half type cannot hold, what a long sum
loses, and whether twenty repetitions give the same bits. Truth is known or summed up in float64.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import tritonclip
from bench import rows

REPETITIONS = 20
# Elements of GPT-2 124M.
MANY = 124_439_808
PIECE = 2**20


@dataclass(frozen=True)
class Case:
    """Gradients whose norm is hard to get right.

    Attributes:
        name: what they are.
        make: the gradients, on a device.
        truth: their norm; None to sum it up in float64.
    """

    name: str
    make: Callable[[torch.device], list[Tensor]]
    truth: float | None = None


@dataclass(frozen=True)
class AccuracyRow:
    """Norms of one case. "inf" and "nan" stand as text, which JSON has no numbers for.

    Attributes:
        case: what was measured.
        device: "cpu" or the name of the GPU.
        truth: the norm.
        ours: what `tritonclip.get_total_norm` gives.
        torch: what `torch.nn.utils.get_total_norm` gives.
        ours_error: relative.
        torch_error: relative.
        repetitions: how often each was called.
        ours_results: different results, bit for bit, among them.
        torch_results: the same of torch.
    """

    case: str
    device: str
    truth: float
    ours: float | str
    torch: float | str
    ours_error: float | str
    torch_error: float | str
    repetitions: int
    ours_results: int
    torch_results: int


def _filled(value: float, count: int, dtype: torch.dtype) -> Case:
    """4 gradients of one value."""
    written = f"{value:.0e}".replace("+", "").replace("e0", "e")
    name = f"{4 * count:,} times {written}, {str(dtype).removeprefix('torch.')}"
    exact = float(torch.tensor(value, dtype=dtype).double()) * math.sqrt(4 * count)
    return Case(name, lambda d: [torch.full((count,), value, dtype=dtype, device=d)] * 4, exact)


def _normal(dtype: torch.dtype, count: int) -> Case:
    def make(device: torch.device) -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        values = torch.empty(count, device=device).normal_(generator=generator)
        return [values.to(dtype)]

    return Case(f"{count:,} normal, {str(dtype).removeprefix('torch.')}", make)


def cases(shrink: int = 1) -> list[Case]:
    """All cases; the long ones divided by `shrink`."""
    ones = 200_000_000 // shrink
    long = Case(f"{ones:,} ones, float32", lambda d: [torch.ones(ones, device=d)], math.sqrt(ones))
    return [
        _filled(1e20, 1000, torch.float32),
        _filled(1e20, 1000, torch.bfloat16),
        _filled(1e-25, 1000, torch.float32),
        _filled(1e-25, 1000, torch.bfloat16),
        _filled(6e4, 1000, torch.float16),
        long,
        _normal(torch.float32, MANY // shrink),
        _normal(torch.bfloat16, MANY // shrink),
        _normal(torch.float16, MANY // shrink),
    ]


def truth(gradients: Sequence[Tensor]) -> float:
    """The 2-norm in float64, piece by piece."""

    def squares() -> Iterator[float]:
        for gradient in gradients:
            for piece in gradient.split(PIECE):
                yield float(piece.double().square().sum())

    return math.sqrt(math.fsum(squares()))


def measure(case: Case, device: torch.device) -> AccuracyRow:
    """Both norms, their errors, and how many different results come of twenty calls."""
    gradients = case.make(device)
    exact = truth(gradients) if case.truth is None else case.truth
    # Not `[...] * 4` of one tensor: the same gradient twice counts once in tritonclip.
    gradients = [g if i == 0 else g.clone() for i, g in enumerate(gradients)]
    ours = [float(tritonclip.get_total_norm(gradients)) for _ in range(REPETITIONS)]
    theirs = [float(torch.nn.utils.get_total_norm(gradients)) for _ in range(REPETITIONS)]
    return AccuracyRow(
        case=case.name,
        device=rows.device_name(device),
        truth=exact,
        ours=_written(ours[0]),
        torch=_written(theirs[0]),
        ours_error=_written(abs(ours[0] / exact - 1)),
        torch_error=_written(abs(theirs[0] / exact - 1)),
        repetitions=REPETITIONS,
        ours_results=len({x.hex() for x in ours}),
        torch_results=len({x.hex() for x in theirs}),
    )


def _written(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def table(found: Sequence[AccuracyRow]) -> Table:
    """The rows for people."""
    result = Table(title=f"Norms; different results in {REPETITIONS} calls")
    result.add_column("gradients", no_wrap=True)
    headings = ("truth", "ours", "torch", "our error", "torch's error", "our results", "torch's")
    for heading in headings:
        result.add_column(heading, justify="right", no_wrap=True)
    for row in found:
        norms = [f"{float(x):.7g}" for x in (row.truth, row.ours, row.torch)]
        errors = [f"{float(x):.0e}" for x in (row.ours_error, row.torch_error)]
        result.add_row(row.case, *norms, *errors, str(row.ours_results), str(row.torch_results))
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Measures all cases, writes rows, prints the table; 1 where ours is off by more than 1e-6."""
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__)
    parser.add_argument("--device", default="auto", help="cpu or cuda (cuda where there is one)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (2)")
    parser.add_argument("--shrink", type=int, default=1, help="divide the long cases by this")
    parser.add_argument("--out", type=Path, help="bench/results/accuracy-DEVICE.json")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if cuda else "cpu")
    console = Console(width=None if sys.stdout.isatty() else 150)
    given = cases(options.shrink)
    found = [measure(case, device) for case in track(given, "norms", console=console)]
    out = options.out or rows.RESULTS / f"accuracy-{device.type}.json"
    rows.write(out, rows.provenance(device), found)
    console.print(table(found))
    console.print(f"{len(found)} rows in {out}")
    right = all(float(row.ours_error) <= 1e-6 and row.ours_results == 1 for row in found)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
