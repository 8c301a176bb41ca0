"""The commands of `python -m tritonclip`; they need the extra `monitor`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tritonclip.doctor import examine
from tritonclip.monitor import plot as figure
from tritonclip.monitor.history import History, read
from tritonclip.monitor.suggestion import Suggestion, suggest_max_norm

_FILE = click.argument("file", type=click.Path(path_type=Path))
_WARMUP = click.option(
    "--warmup",
    type=click.IntRange(0),
    help="Steps to leave out at the start of each run; found by default.",
)
_RUN = click.option(
    "--run",
    type=click.IntRange(1),
    help="Number of a run, where FILE has several; by default the last with enough steps.",
)


def run(arguments: Sequence[str]) -> int:
    """Runs a command; returns the exit status: 1 for bad input, 2 for bad usage."""
    try:
        status = _commands.main(list(arguments), "python -m tritonclip", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (OSError, ValueError) as error:
        click.echo(f"Error: {error}", err=True)
        return 1
    return status if isinstance(status, int) else 0


@click.group(help="Gradient clipping: checks of the installation, and help to choose max_norm.")
def _commands() -> None:
    """Groups the commands."""


@_commands.command()
def doctor() -> int:
    """Print versions, devices and backends, and run a short self-test."""
    return examine()


@_commands.command()
@_FILE
@_WARMUP
@_RUN
def suggest(file: Path, warmup: int | None, run: int | None) -> None:
    """Suggest max_norm from FILE, a recorder's .csv or .jsonl."""
    history = read(file)
    suggestion = suggest_max_norm(history, warmup=warmup, run=run)
    # Lines wide enough for the table, where they do not end up in a terminal.
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    if suggestion.candidates:
        console.print(_table(suggestion))
    of_run = f" of run {suggestion.run}" if history.joins else ""
    counted = f"{suggestion.steps} steps{of_run} after a warm-up of {suggestion.warmup}"
    console.print(f"{counted}; left out: {_left_out(suggestion)}.")
    console.print(suggestion.reason)
    limit = "none" if suggestion.max_norm is None else f"{suggestion.max_norm:g}"
    only = ", if the limit has to be fixed" if suggestion.verdict == "drift" else ""
    console.print(f"max_norm: {limit}{only}", style="bold")


@_commands.command()
@_FILE
@click.option(
    "--out", type=click.Path(path_type=Path), help="A .png or .svg file; by default FILE as .png."
)
@_WARMUP
@_RUN
def plot(file: Path, out: Path | None, warmup: int | None, run: int | None) -> None:
    """Draw the norms in FILE, with candidates for max_norm."""
    history = read(file)
    if run is not None:
        history = history.run(run)
    out = out or file.with_suffix(".png")
    figure.save(out, history, _suggestion(history, warmup))
    click.echo(str(out))


def _suggestion(history: History, warmup: int | None) -> Suggestion | None:
    """The suggestion for a run; None where it is too short for one."""
    try:
        return suggest_max_norm(history, warmup=warmup)
    except ValueError as error:
        click.echo(f"The figure has no candidates: {error}", err=True)
        return None


def _table(suggestion: Suggestion) -> Table:
    table = Table()
    for name in ("max_norm", "", "clips"):
        table.add_column(name, justify="left" if not name else "right")
    for spike in suggestion.spikes:
        table.add_column(f"step {spike.step}\nnorm {spike.norm:.4g}", justify="right")
    for candidate in suggestion.candidates:
        table.add_row(
            f"{candidate.max_norm:g}",
            candidate.origin,
            f"{candidate.share:.1%}",
            *(f"x {coefficient:.3g}" for coefficient in candidate.coefficients),
            style="bold" if candidate.origin == "recommended" else None,
        )
    return table


def _left_out(suggestion: Suggestion) -> str:
    counts = ((suggestion.nonfinite, "NaN or inf"), (suggestion.zeros, "0"))
    return ", ".join(f"{n} that are {what}" for n, what in counts if n) or "none"
