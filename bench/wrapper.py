"""What ClippedOptimizer costs beside a call of `clip_` before the same optimizer's step.

The wrapper also finds the rule of each parameter group, keeps norm and coefficient, and counts.
Both sides are interleaved in one process, on the same gradients, and their norms are compared: a
difference is an error, and nothing is timed.

Run `python -m bench.wrapper`.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tritonclip
from bench import rows
from bench.gradients import Gradients, WrongResultError
from bench.lists import LISTS

# Repetitions of lists of more elements are as many as asked for; short steps get ten times as many.
LARGE = 10_000_000


@dataclass(frozen=True)
class WrapperRow:
    """An SGD step with and without the wrapper: microseconds as medians and quartiles.

    Attributes:
        ratio: time of `clip_` and step over the wrapper's, median over paired repetitions, with
            its quartiles.
    """

    list: str
    n_tensors: int
    dtype: str
    clipped: bool
    device: str
    repetitions: int
    wrapper_us: float
    wrapper_lo_us: float
    wrapper_hi_us: float
    call_us: float
    call_lo_us: float
    call_hi_us: float
    ratio: float
    ratio_lo: float
    ratio_hi: float
    correct: bool


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    lower, middle, upper = statistics.quantiles(values, n=4)
    return middle, lower, upper


def microseconds(step: Callable[[], torch.Tensor], device: torch.device) -> tuple[float, float]:
    """Wall time of a step, and the norm that it found."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = perf_counter()
    norm = step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (perf_counter() - start) * 1e6, float(norm)


def measure(
    name: str, dtype: str, clipped: bool, device: torch.device, repetitions: int
) -> WrapperRow:
    """Times both sides on one list, in turn; the gradients are refilled before each step."""
    gradients = Gradients(LISTS[name](), dtype, device)
    if gradients.list.n_elements < LARGE:
        repetitions *= 10
    limit = gradients.limit("norm", clipped)
    bare = torch.optim.SGD(gradients.parameters, lr=1e-3, foreach=True)
    wrapper = tritonclip.ClippedOptimizer(
        torch.optim.SGD(gradients.parameters, lr=1e-3, foreach=True), limit
    )

    def with_call() -> torch.Tensor:
        norm = tritonclip.clip_(gradients.parameters, limit)
        assert norm is not None
        bare.step()
        return norm

    def with_wrapper() -> torch.Tensor:
        wrapper.step()
        return wrapper.stats.last_norm

    wrapped, called = [], []
    for _ in range(repetitions + 2):
        gradients.refill()
        wrapped_us, norm = microseconds(with_wrapper, device)
        gradients.refill()
        called_us, other = microseconds(with_call, device)
        if norm != other or gradients.norm_error("norm", [norm]) > 1e-6:
            raise WrongResultError(f"{name}: wrong norm, not timed: {norm} and {other}")
        wrapped.append(wrapped_us)
        called.append(called_us)
    if (int(wrapper.stats.clipped_steps) > 0) != clipped:
        raise WrongResultError(f"{name}: clipped steps were counted wrongly, not timed")
    # The first two fill caches.
    wrapped, called = wrapped[2:], called[2:]
    ratios = [c / w for c, w in zip(called, wrapped, strict=True)]
    return WrapperRow(
        name,
        len(gradients.parameters),
        dtype,
        clipped,
        rows.device_name(device),
        repetitions,
        *quartiles(wrapped),
        *quartiles(called),
        *quartiles(ratios),
        correct=True,
    )


def table(measured: list[WrapperRow]) -> Table:
    """The rows for people."""
    result = Table(title="SGD step: ClippedOptimizer against clip_ and step, microseconds")
    for heading in ("gradients", "dtype", "step"):
        result.add_column(heading, no_wrap=True)
    for heading in ("wrapper (quartiles)", "clip_ (quartiles)", "ratio (quartiles)"):
        result.add_column(heading, justify="right", no_wrap=True)
    for row in measured:
        result.add_row(
            LISTS[row.list]().title,
            row.dtype,
            "clipped" if row.clipped else "unclipped",
            f"{row.wrapper_us:,.0f} ({row.wrapper_lo_us:,.0f} to {row.wrapper_hi_us:,.0f})",
            f"{row.call_us:,.0f} ({row.call_lo_us:,.0f} to {row.call_hi_us:,.0f})",
            f"{row.ratio:.3f}x ({row.ratio_lo:.3f} to {row.ratio_hi:.3f})",
        )
    return result


def main(argv: list[str] | None = None) -> int:
    """Measures all lists, clipped and unclipped, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--lists", nargs="+", choices=LISTS, default=["gpt2_124m", "huge_and_small", "lora_r16"]
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "mixed"), default="float32")
    parser.add_argument("--repetitions", type=int, default=15, help="timed steps a side (15)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (2)")
    parser.add_argument("--out", type=Path, help="also write rows and provenance to this file")
    options = parser.parse_args(argv)
    if options.repetitions < 2:
        parser.error(f"--repetitions must be 2 or more, got {options.repetitions}")
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console(width=140)
    work = [(name, clipped) for name in options.lists for clipped in (False, True)]
    measured = [
        measure(name, options.dtype, clipped, device, options.repetitions)
        for name, clipped in track(work, "measuring", console=console, transient=True)
    ]
    console.print(table(measured))
    if options.out:
        rows.write(options.out, rows.provenance(device), measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
