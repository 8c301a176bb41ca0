"""Benchmarks that pytest does not run, and the report; from the root of the repository.

`python -m bench accuracy|host|distributed|features|training|codegen|gpu|report`; `--help` names
their options. `accuracy` and `codegen` time nothing, `host` sets the environment of a process for
each part, `distributed` starts four processes, `features` compares other calls with other loops,
`training` times two parts of one call, and `gpu` sweeps constants: no fixture of a test fits them.
Each writes rows with their provenance to bench/results/ or `--out` as they are measured, and prints
a table. Ctrl-C ends it and keeps the rows so far. OMP_NUM_THREADS says how many threads torch has.
`report` makes tables and figures of all rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

if missing := [name for name in ("click", "matplotlib", "rich", "torch") if not find_spec(name)]:
    sys.exit(
        f"python -m bench needs {', '.join(missing)}, not installed here: make install, or "
        "pip install -e '.[dev]'"
    )

import click
import torch
from rich.progress import track

from bench import results
from bench.results import Row

FILE = click.Path(path_type=Path)
DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]


@click.group()
def main() -> None:
    """Benchmarks of tritonclip that pytest does not run."""


def measuring(command: Callable[..., Iterable[Sequence[Row]]]) -> click.Command:
    """A command that writes rows as they come, and exits with 1 where one of ours is wrong."""

    @main.command()
    @click.option("--out", type=FILE, help="file of the rows")
    @wraps(command)
    def run(out: Path | None, **options: Any) -> None:
        device = torch.device(options.get("device", "cpu"))
        name = "-".join((command.__name__, *([device.type] if "device" in options else [])))
        out = out or results.RESULTS / f"{name}.json"
        rows: list[Row] = []
        origin = results.provenance(device) | {"plan": "not finished"}
        with suppress(KeyboardInterrupt):
            for found in track(command(**options), command.__name__, transient=True):
                rows += found
                results.write(out, origin, rows)
            del origin["plan"]
        if rows:
            results.write(out, origin, rows)
            click.echo(results.table(rows))
        written = f"{len(rows)} rows in {out}" if rows else f"no rows; {out} is as it was"
        click.echo(f"interrupted: {written}" if "plan" in origin else written)
        wrong = any(row.ours and row.correct is False for row in rows)
        sys.exit(130 if "plan" in origin else int(wrong))

    return run


def need_triton() -> None:
    """Ends with a message where there are no kernels to measure."""
    if not find_spec("triton"):
        raise click.ClickException(
            "triton, which compiles the kernels, is not installed: pip install -e '.[triton]'"
        )


@measuring
@click.option("--shrink", type=click.IntRange(1), default=1, help="divide long lists by this")
@click.option("--device", type=click.Choice(DEVICES), default=DEVICES[-1], show_default=True)
def accuracy(shrink, device):
    """Measures norms that are hard to get right against float64."""
    from bench.accuracy import hard_gradients, measure

    for one in hard_gradients(torch.device(device), shrink):
        yield list(measure(*one))


@measuring
@click.argument("parts", nargs=-1, type=click.Choice(["cpu", "triton", "launches"]))
@click.option("--longest", type=click.IntRange(20), default=10_000, help="tensors in a list")
def host(parts, longest):
    """Measures calls on the host: functions, modules and time, by path; no GPU is needed."""
    from bench.host import PARTS, run

    need_triton()
    for part in parts or PARTS:
        yield run(part, longest=longest)


@measuring
def distributed():
    """Clips over four processes, and times DTensors on the host; no GPU is needed."""
    from bench.distributed import run

    torch.set_num_threads(1)
    return run()


@measuring
@click.argument("names", nargs=-1)
def features(names):
    """Measures features beside what a user would write without them, on the CPU."""
    from bench.features import FEATURES, run

    if unknown := set(names) - FEATURES.keys():
        raise click.UsageError(f"expected some of {', '.join(FEATURES)}, got {', '.join(unknown)}")
    return run(names)


@measuring
def training():
    """Measures the share of clipping in whole training steps of six models, on the CPU."""
    from bench.training import MODELS, rows_of

    return map(rows_of, MODELS)


@measuring
def codegen():
    """Computes from compiled kernels the bytes they keep in flight; no GPU is needed."""
    from bench.codegen import CHIPS, DTYPES, rows_of

    need_triton()
    for chip, dtype in product(CHIPS, DTYPES):
        yield rows_of(chip, dtype)


@main.command()
@click.option("--out", type=FILE, default="gpu.json", show_default=True, help="file to send in")
def gpu(out):
    """Tests, measures and asks what only a GPU can show, in ten minutes at most."""
    if not torch.cuda.is_available():
        raise click.ClickException(
            "expected a GPU, and torch.cuda.is_available() is false; run this on a machine with "
            "one, and with a PyTorch built for it"
        )
    need_triton()
    from bench.gpu import run

    sys.exit(run(out, torch.device("cuda", torch.cuda.current_device())))


@main.command()
@click.option("--check", is_flag=True, help="write nothing; fail where a file is stale")
@click.option("--root", type=FILE, default=results.RESULTS.parents[1])
def report(check, root):
    """Writes the tables of README.md and docs/performance/ from committed rows."""
    from bench.report import write

    stale = write(root, check)
    for path in stale:
        click.echo(f"{path} is not what the rows give: run python -m bench report", err=True)
    sys.exit(1 if stale else 0)


if __name__ == "__main__":
    main(prog_name="python -m bench")
