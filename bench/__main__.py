"""The command line: `python -m bench speed|functional|accuracy|host|distributed|codegen|report`.

Each command but `report` measures, prints a table, and writes rows with their provenance to
bench/results/, or to `--out`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track

from bench import results
from bench.results import Row
from bench.speed import IN_PLACE, OUT_OF_PLACE, Effort, compare, providers_of
from bench.workloads import DTYPES, RULES, WORKLOADS, tasks_of

Options = Callable[[Callable[..., Any]], Any]
OUT: Options = click.option("--out", type=click.Path(path_type=Path), help="file of the rows")
THREADS: Options = click.option(
    "--threads",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="threads of torch",
    expose_value=False,
    callback=lambda context, option, n: torch.set_num_threads(n),
)
DEVICE: Options = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    help="cuda if there",
    callback=lambda context, option, name: device_of(name),
)
# Not of interest in the terminal.
HIDDEN = ("bytes_moved", "batch", "repetitions")


def several(name: str, choices: Sequence[str], about: str) -> Options:
    """An option that may be given several times."""
    return click.option(name, multiple=True, type=click.Choice(choices), help=about)


def device_of(name: str) -> torch.device:
    """The device of a `--device`."""
    cuda = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")


def terminal() -> Console:
    """The terminal, or lines wide enough for every table."""
    return Console(width=None if sys.stdout.isatty() else 300)


def finish(
    rows: Sequence[Row], device: torch.device, out: Path | None, default: str, **texts: Any
) -> None:
    """Writes and prints rows; ends with 1 where a result of tritonclip was wrong."""
    out = out or results.RESULTS / f"{default}.json"
    results.write(out, results.provenance(device), rows)
    console = terminal()
    console.print(results.table(rows, **texts))
    console.print(f"{len(rows)} rows in {out}", highlight=False)
    ours = [row for row in rows if str(row.case.get("provider")).startswith("tritonclip")]
    sys.exit(1 if any(row.correct is False for row in ours) else 0)


@click.group(help="Benchmarks of tritonclip.")
def main() -> None:
    """Groups the commands."""


@main.command()
@click.option("--quick", is_flag=True, help="some cases, in under 90 seconds")
@click.option("--busy", type=click.IntRange(0), default=0, help="processes that spin meanwhile")
@several("--workload", list(WORKLOADS), "measure these by all rules, whatever the plan")
@several("--dtype", DTYPES, "only these; with --workload: in these")
@several("--rule", RULES, "only these")
@several("--provider", [one.name for one in IN_PLACE], "compare these with tritonclip")
@click.option("--compiled", is_flag=True, help="under torch.compile, too")
@click.option("--samples", type=click.IntRange(2), help="fewest timed samples (9; quick: 5)")
@DEVICE
@THREADS
@OUT
def speed(
    quick: bool,
    busy: int,
    workload: Sequence[str],
    dtype: Sequence[str],
    rule: Sequence[str],
    provider: Sequence[str],
    compiled: bool,
    samples: int | None,
    device: torch.device,
    out: Path | None,
) -> None:
    """Times every provider on every workload, after its results were checked."""
    effort = Effort(samples or (5 if quick else 9), 0.2 if quick else 0.6, busy)
    tasks = tasks_of("busy" if busy else "quick" if quick else "speed", workload, dtype, rule)
    rows = compare(
        tasks, device, effort, terminal(), partial(providers_of, provider, compiled, quick)
    )
    name = f"{device.type}{'-quick' * quick}{f'-busy{busy}' if busy else ''}"
    caption = "ratio: the best torch variant's time over this one's, median of paired samples"
    finish(rows, device, out, name, caption=caption, hidden=HIDDEN)


@main.command()
@several("--workload", list(WORKLOADS), "only these, in float32 by all rules")
@click.option("--samples", type=click.IntRange(2), default=9, show_default=True)
@DEVICE
@THREADS
@OUT
def functional(
    workload: Sequence[str], samples: int, device: torch.device, out: Path | None
) -> None:
    """Times clipping out of place, beside the idioms of PyTorch, TensorFlow and optax."""
    tasks = tasks_of("functional", workload)
    rows = compare(tasks, device, Effort(samples), terminal(), lambda task, rule: OUT_OF_PLACE)
    caption = "ratio: the best PyTorch idiom's time over this one's, median of paired samples"
    finish(rows, device, out, f"functional-{device.type}", caption=caption, hidden=HIDDEN)


@main.command()
@click.option("--shrink", type=click.IntRange(1), default=1, help="divide long lists by this")
@DEVICE
@THREADS
@OUT
def accuracy(shrink: int, device: torch.device, out: Path | None) -> None:
    """Measures norms that are hard to get right against float64."""
    from bench.accuracy import hard_gradients, measure

    lists = hard_gradients(device, shrink)
    rows = [row for one in track(lists, "norms", total=9, transient=True) for row in measure(*one)]
    finish(rows, device, out, f"accuracy-{device.type}", title="Norms")


@main.command()
@click.argument("parts", nargs=-1, type=click.Choice(["cpu", "triton", "launches"]))
@click.option("--repetitions", type=click.IntRange(2), default=100, show_default=True)
@click.option("--longest", type=click.IntRange(20), default=10_000, help="tensors in a list")
@THREADS
@OUT
def host(parts: Sequence[str], repetitions: int, longest: int, out: Path | None) -> None:
    """Measures calls on the host: functions, modules and time, by path; no GPU is needed."""
    from bench.host import CAPTION, PARTS, run

    rows = run(parts or PARTS, repetitions, longest, torch.get_num_threads())
    finish(rows, torch.device("cpu"), out, "host", caption=CAPTION)


@main.command()
@click.option("--samples", type=click.IntRange(2), default=15, show_default=True)
@OUT
def distributed(samples: int, out: Path | None) -> None:
    """Clips over four processes, and times DTensors on the host; no GPU is needed."""
    from bench.distributed import CAPTION, run

    torch.set_num_threads(1)
    finish(run(samples), torch.device("cpu"), out, "distributed", caption=CAPTION)


@main.command()
@click.option("--latency-ns", default=650.0, show_default=True, help="assumed latency of memory")
@OUT
def codegen(latency_ns: float, out: Path | None) -> None:
    """Computes from compiled kernels the bytes they keep in flight; no GPU is needed."""
    from bench.codegen import CAPTION, CHIPS, DTYPES, rows_of

    work = track([(c, d) for c in CHIPS for d in DTYPES], "compiling", transient=True)
    rows = [row for chip, dtype in work for row in rows_of(chip, dtype, latency_ns)]
    finish(rows, torch.device("cpu"), out, "codegen", caption=CAPTION.format(latency_ns))


@main.command()
@click.option("--check", is_flag=True, help="write nothing; fail where a file is stale")
@click.option("--show", type=click.Path(path_type=Path, exists=True), help="print rows of a file")
@click.option("--root", type=click.Path(path_type=Path), default=results.RESULTS.parents[1])
def report(check: bool, show: Path | None, root: Path) -> None:
    """Writes the tables of README.md and docs/performance.md from committed rows."""
    from bench.report import RefusedError, Report

    if show is not None:
        terminal().print(results.table(results.read(show)[1]))
        return
    try:
        made = Report(root)
    except RefusedError as error:
        raise click.ClickException(f"refused: {error}") from error
    if not check:
        made.write()
    stale = made.stale()
    for path in stale:
        click.echo(f"{path} is not what the rows give: run python -m bench report", err=True)
    sys.exit(1 if stale else 0)


if __name__ == "__main__":
    main(prog_name="python -m bench")
