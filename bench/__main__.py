"""The command line: `python -m bench speed|functional|accuracy|host|distributed|codegen|report`.

Each command but `report` measures, prints a table, and writes rows with their provenance to
bench/results/, or to `--out`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track

from bench import results
from bench.accuracy import DTYPES, RULES
from bench.results import Row
from bench.workloads import WORKLOADS

Options = Callable[[Callable[..., Any]], Any]
OUT: Options = click.option("--out", type=click.Path(path_type=Path), help="file of the rows")
THREADS: Options = click.option(
    "--threads", type=click.IntRange(1), default=2, show_default=True, help="threads of torch"
)
DEVICE: Options = click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="cuda if there"
)


def several(name: str, choices: Sequence[str], about: str) -> Options:
    """An option that may be given several times."""
    return click.option(name, multiple=True, type=click.Choice(choices), help=about)


def device_of(name: str) -> torch.device:
    """The device of a `--device`."""
    cuda = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")


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


def terminal() -> Console:
    """The terminal, or lines wide enough for every table."""
    return Console(width=None if sys.stdout.isatty() else 300)


@click.group(help="Benchmarks of tritonclip.")
def main() -> None:
    """Groups the commands."""


@main.command()
@click.option("--quick", is_flag=True, help="some cases, in under 90 seconds")
@click.option("--busy", type=click.IntRange(0), default=0, help="processes that spin meanwhile")
@several("--workload", list(WORKLOADS), "measure these by all rules, whatever the plan")
@several("--dtype", DTYPES, "only these; with --workload: in these")
@several("--rule", RULES, "only these")
@click.option("--provider", "providers", multiple=True, help="compare these with tritonclip")
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
    providers: Sequence[str],
    compiled: bool,
    samples: int | None,
    device: str,
    threads: int,
    out: Path | None,
) -> None:
    """Times every provider on every workload, after its results were checked."""
    from bench.speed import ALL, Effort, plan, providers_of, run

    names = [one.name for one in ALL]
    for name in providers:
        if name not in names:
            raise click.BadParameter(f"expected one of {', '.join(names)}; got {name}")
    torch.set_num_threads(threads)
    where = device_of(device)
    effort = Effort(samples or (5 if quick else 9), 0.2 if quick else 0.6, busy)
    tasks = plan(workload, dtype, rule, quick, busy)
    rows = run(
        tasks,
        where,
        effort,
        lambda task, by: providers_of(task, by, providers, compiled, quick),
        terminal(),
    )
    name = f"{where.type}{'-quick' * quick}{f'-busy{busy}' if busy else ''}"
    caption = "ratio: the best torch variant's time over this one's, median of paired samples"
    finish(rows, where, out, name, caption=caption, hidden=("bytes_moved", "batch", "repetitions"))


@main.command()
@several("--workload", list(WORKLOADS), "only these, in float32 by all rules")
@click.option("--samples", type=click.IntRange(2), default=9, show_default=True)
@DEVICE
@THREADS
@OUT
def functional(
    workload: Sequence[str], samples: int, device: str, threads: int, out: Path | None
) -> None:
    """Times clipping out of place, beside the idioms of PyTorch, TensorFlow and optax."""
    from bench.functional import CAPTION, PLAN, PROVIDERS
    from bench.speed import CLIPS, Effort, Task, run

    torch.set_num_threads(threads)
    where = device_of(device)
    tasks = [Task(name, "float32", CLIPS) for name in workload] or PLAN
    rows = run(tasks, where, Effort(samples), lambda task, rule: list(PROVIDERS), terminal())
    hidden = ("bytes_moved", "batch", "repetitions")
    finish(rows, where, out, f"functional-{where.type}", caption=CAPTION, hidden=hidden)


@main.command()
@click.option("--shrink", type=click.IntRange(1), default=1, help="divide long lists by this")
@DEVICE
@THREADS
@OUT
def accuracy(shrink: int, device: str, threads: int, out: Path | None) -> None:
    """Measures norms that are hard to get right against float64."""
    from bench.accuracy import hard_gradients, measure

    torch.set_num_threads(threads)
    where = device_of(device)
    lists = hard_gradients(where, shrink)
    rows = [row for one in track(lists, "norms", total=9, transient=True) for row in measure(*one)]
    finish(rows, where, out, f"accuracy-{where.type}", title="Norms")


@main.command()
@click.argument("parts", nargs=-1, type=click.Choice(["cpu", "triton", "launches"]))
@click.option("--repetitions", type=click.IntRange(2), default=100, show_default=True)
@click.option("--longest", type=click.IntRange(20), default=10_000, help="tensors in a list")
@click.option("--here", is_flag=True, hidden=True, help="in this process, one part")
@THREADS
@OUT
def host(
    parts: Sequence[str],
    repetitions: int,
    longest: int,
    here: bool,
    threads: int,
    out: Path | None,
) -> None:
    """Measures calls on the host: functions, modules and time, by path; no GPU is needed."""
    from bench.host import CAPTION, PARTS, measure, run

    torch.set_num_threads(threads)
    if here:
        rows = measure(parts[0], repetitions, longest)
    else:
        rows = run(parts or PARTS, repetitions, longest, threads)
    finish(rows, torch.device("cpu"), out, "host", caption=CAPTION)


@main.command()
@click.option("--samples", type=click.IntRange(2), default=15, show_default=True)
@OUT
def distributed(samples: int, out: Path | None) -> None:
    """Clips over four processes, and times DTensors on the host; no GPU is needed."""
    from bench.distributed import CAPTION, LAYOUTS, PROVIDERS, run

    torch.set_num_threads(1)
    rows = run(list(LAYOUTS), list(PROVIDERS), samples)
    finish(rows, torch.device("cpu"), out, "distributed", caption=CAPTION)


@main.command()
@click.option("--latency-ns", default=650.0, show_default=True, help="assumed latency of memory")
@OUT
def codegen(latency_ns: float, out: Path | None) -> None:
    """Computes from compiled kernels the bytes they keep in flight; no GPU is needed."""
    from bench.codegen import CAPTION, CHIPS, DTYPES, rows_of

    work = [(chip, dtype) for chip in CHIPS for dtype in DTYPES]
    rows = [
        row
        for chip, dtype in track(work, "compiling", transient=True)
        for row in rows_of(chip, dtype, latency_ns)
    ]
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
    stale = made.stale() if check else made.write()
    for path in stale:
        click.echo(f"{path} is not what the rows give: run python -m bench report", err=True)
    sys.exit(1 if stale else 0)


if __name__ == "__main__":
    main(prog_name="python -m bench")
