"""The command line: `python -m bench speed|functional|accuracy|host|distributed|codegen|report`.

Each command but `report` measures, prints a table, and writes rows with their provenance to
bench/results/, or to `--out`. OMP_NUM_THREADS says how many threads torch has.
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
from bench.results import RefusedError, Row
from bench.speed import IN_PLACE, OUT_OF_PLACE, Effort, compare, providers_of
from bench.workloads import DTYPES, RULES, WORKLOADS, tasks_of

CPU = torch.device("cpu")
RATIO = "ratio: the best {} time over this one's, median of paired samples"
# Not of interest in the terminal.
HIDDEN = ("bytes_moved", "batch", "repetitions")
FILE = click.Path(path_type=Path)

Options = Callable[[Callable[..., Any]], Any]
OUT: Options = click.option("--out", type=FILE, help="file of the rows")
DEVICE: Options = click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default=lambda: "cuda" if torch.cuda.is_available() else "cpu",
    show_default="cuda if there",
    callback=lambda context, option, name: torch.device(name),
)


def several(name: str, choices: Sequence[str], about: str) -> Options:
    """An option that may be given several times."""
    return click.option(name, multiple=True, type=click.Choice(choices), help=about)


def count(name: str, default: int | None, about: str, least: int = 2) -> Options:
    """An option that is a number."""
    number = click.IntRange(least)
    return click.option(name, type=number, default=default, show_default=True, help=about)


def terminal() -> Console:
    """The terminal, or lines wide enough for every table."""
    return Console(width=None if sys.stdout.isatty() else 300)


def finish(
    rows: Sequence[Row], device: torch.device, out: Path | None, default: str, caption: str = ""
) -> None:
    """Writes and prints rows; ends with 1 where a result of tritonclip was wrong."""
    out = out or results.RESULTS / f"{default}.json"
    results.write(out, results.provenance(device), rows)
    terminal().print(results.table(rows, caption=caption, hidden=HIDDEN))
    click.echo(f"{len(rows)} rows in {out}")
    sys.exit(1 if any(row.ours and row.correct is False for row in rows) else 0)


@click.group()
def main() -> None:
    """Benchmarks of tritonclip."""


@main.command()
@click.option("--quick", is_flag=True, help="some cases, in under 90 seconds")
@count("--busy", 0, "processes that spin meanwhile", least=0)
@several("--workload", list(WORKLOADS), "measure these by all rules, whatever the plan")
@several("--dtype", DTYPES, "only these; with --workload: in these")
@several("--rule", RULES, "only these")
@several("--provider", [one.name for one in IN_PLACE], "compare these with tritonclip")
@count("--samples", None, "fewest timed samples (9; quick: 5)")
@DEVICE
@OUT
def speed(quick, busy, workload, dtype, rule, provider, samples, device, out):
    """Times every provider on every workload, after its results were checked."""
    effort = Effort(samples or (5 if quick else 9), 0.2 if quick else 0.6, busy)
    tasks = tasks_of("busy" if busy else "quick" if quick else "speed", workload, dtype, rule)
    choose = partial(providers_of, provider, quick)
    rows = compare(tasks, device, effort, terminal(), choose)
    name = f"{device.type}{'-quick' * quick}{f'-busy{busy}' if busy else ''}"
    finish(rows, device, out, name, RATIO.format("torch variant's"))


@main.command()
@several("--workload", list(WORKLOADS), "only these, in float32 by all rules")
@count("--samples", 9, "fewest timed samples")
@DEVICE
@OUT
def functional(workload, samples, device, out):
    """Times clipping out of place, beside the idioms of PyTorch, TensorFlow and optax."""
    tasks = tasks_of("functional", workload)
    rows = compare(tasks, device, Effort(samples), terminal(), lambda task, rule: OUT_OF_PLACE)
    finish(rows, device, out, f"functional-{device.type}", RATIO.format("PyTorch idiom's"))


@main.command()
@count("--shrink", 1, "divide long lists by this", least=1)
@DEVICE
@OUT
def accuracy(shrink, device, out):
    """Measures norms that are hard to get right against float64."""
    from bench.accuracy import N_HARD, hard_gradients, measure

    lists = track(hard_gradients(device, shrink), "norms", total=N_HARD, transient=True)
    rows = [row for one in lists for row in measure(*one)]
    finish(rows, device, out, f"accuracy-{device.type}")


@main.command()
@click.argument("parts", nargs=-1, type=click.Choice(["cpu", "triton", "launches"]))
@count("--samples", 100, "timed calls")
@count("--longest", 10_000, "tensors in a list", least=20)
@OUT
def host(parts, samples, longest, out):
    """Measures calls on the host: functions, modules and time, by path; no GPU is needed."""
    from bench.host import CAPTION, PARTS, run

    rows = run(parts or PARTS, samples, longest)
    finish(rows, CPU, out, "host", CAPTION)


@main.command()
@count("--samples", 15, "timed samples")
@OUT
def distributed(samples, out):
    """Clips over four processes, and times DTensors on the host; no GPU is needed."""
    from bench.distributed import CAPTION, run

    torch.set_num_threads(1)
    finish(run(samples), CPU, out, "distributed", CAPTION)


@main.command()
@OUT
def codegen(out):
    """Computes from compiled kernels the bytes they keep in flight; no GPU is needed."""
    from bench.codegen import CAPTION, CHIPS, DTYPES, rows_of

    work = track([(c, d) for c in CHIPS for d in DTYPES], "compiling", transient=True)
    rows = [row for chip, dtype in work for row in rows_of(chip, dtype)]
    finish(rows, CPU, out, "codegen", CAPTION)


@main.command()
@click.option("--check", is_flag=True, help="write nothing; fail where a file is stale")
@click.option("--show", type=click.Path(path_type=Path, exists=True), help="print rows of a file")
@click.option("--root", type=FILE, default=results.RESULTS.parents[1])
def report(check, show, root):
    """Writes the tables of README.md and docs/performance.md from committed rows."""
    from bench.report import Report

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
