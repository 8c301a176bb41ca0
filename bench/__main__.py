"""Benchmarks that pytest does not run, and the report; from the root of the repository.

`python -m bench accuracy|host|distributed|codegen|report`; `--help` names their options.
`accuracy` and `codegen` time nothing, `host` sets the environment of a process for each part, and
`distributed` starts four processes: no fixture of a test fits them. Each writes rows with their
provenance to bench/results/ or `--out` as they are measured, and prints a table. Ctrl-C ends it and
keeps the rows so far. OMP_NUM_THREADS says how many threads torch has. `report` makes tables and
figures of all rows.

Imports point up this list: workloads and results; accuracy, which also checks results; timing;
providers and frameworks, which are compared; codegen; speed, host and distributed; report;
conftest and test_benchmarks, which `pytest bench --benchmark-only` runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if missing := [name for name in ("click", "matplotlib", "rich", "torch") if not find_spec(name)]:
    sys.exit(
        f"python -m bench needs {', '.join(missing)}, not installed here: make install, or "
        "pip install -e '.[dev]'"
    )

import click
import torch
from rich.console import Console
from rich.progress import track

from bench import results
from bench.results import Row

CPU = torch.device("cpu")
FILE = click.Path(path_type=Path)
# Lines wide enough for every table where they go to a file.
TERMINAL = Console(width=None if sys.stdout.isatty() else 300)

Options = Callable[[Callable[..., Any]], Any]
OUT: Options = click.option("--out", type=FILE, help="file of the rows")
DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]


def need_triton() -> None:
    """Ends with a message where there are no kernels to measure."""
    if not find_spec("triton"):
        raise click.ClickException(
            "triton is not installed: pip install triton, where there is one"
        )


def count(name: str, default: int, about: str, least: int = 2) -> Options:
    """An option that is a number."""
    number = click.IntRange(least)
    return click.option(name, type=number, default=default, show_default=True, help=about)


def finish(
    measured: Iterable[Sequence[Row]],
    device: torch.device,
    out: Path | None,
    default: str,
    caption: str = "",
) -> None:
    """Writes rows as they are measured, and prints all; an interrupt ends the measurement.

    Ends with 1 where a result of tritonclip was wrong, with 130 where it was interrupted.
    """
    out = out or results.RESULTS / f"{default}.json"
    rows: list[Row] = []
    origin = results.provenance(device) | {"plan": "not finished"}
    with suppress(KeyboardInterrupt):
        for found in measured:
            rows += found
            results.write(out, origin, rows)
        del origin["plan"]
    if rows:
        results.write(out, origin, rows)
        TERMINAL.print(results.table(rows, caption=caption))
    written = f"{len(rows)} rows in {out}" if rows else f"no rows; {out} is as it was"
    click.echo(f"interrupted: {written}" if "plan" in origin else written)
    wrong = any(row.ours and row.correct is False for row in rows)
    sys.exit(130 if "plan" in origin else int(wrong))


@click.group()
def main() -> None:
    """Benchmarks of tritonclip that pytest does not run."""


@main.command()
@count("--shrink", 1, "divide long lists by this", least=1)
@click.option("--device", type=click.Choice(DEVICES), default=DEVICES[-1], show_default=True)
@OUT
def accuracy(shrink, device, out):
    """Measures norms that are hard to get right against float64."""
    from bench.accuracy import N_HARD, hard_gradients, measure

    device = torch.device(device)
    lists = track(hard_gradients(device, shrink), "norms", total=N_HARD, transient=True)
    measured = (list(measure(*one)) for one in lists)
    finish(measured, device, out, f"accuracy-{device.type}")


@main.command()
@click.argument("parts", nargs=-1, type=click.Choice(["cpu", "triton", "launches"]))
@count("--samples", 100, "timed calls")
@count("--longest", 10_000, "tensors in a list", least=20)
@OUT
def host(parts, samples, longest, out):
    """Measures calls on the host: functions, modules and time, by path; no GPU is needed."""
    from bench.host import CAPTION, PARTS, run

    need_triton()
    measured = (run([part], samples, longest) for part in parts or PARTS)
    finish(measured, CPU, out, "host", CAPTION)


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

    need_triton()
    work = track([(c, d) for c in CHIPS for d in DTYPES], "compiling", transient=True)
    finish((rows_of(*one) for one in work), CPU, out, "codegen", CAPTION)


@main.command()
@click.option("--check", is_flag=True, help="write nothing; fail where a file is stale")
@click.option("--show", type=click.Path(path_type=Path, exists=True), help="print rows of a file")
@click.option("--root", type=FILE, default=results.RESULTS.parents[1])
def report(check, show, root):
    """Writes the tables of README.md and docs/performance.md from committed rows."""
    from bench.report import Report

    if show is not None:
        TERMINAL.print(results.table(results.read(show)[1]))
        return
    made = Report(root)
    if not check:
        made.write()
    stale = made.stale()
    for path in stale:
        click.echo(f"{path} is not what the rows give: run python -m bench report", err=True)
    sys.exit(1 if stale else 0)


if __name__ == "__main__":
    main(prog_name="python -m bench")
