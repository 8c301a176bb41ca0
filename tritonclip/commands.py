"""`python -m tritonclip suggest` and `plot`; they need the extra `monitor`."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tritonclip.monitor import plot as figure
from tritonclip.monitor.history import History, read
from tritonclip.monitor.suggestion import Suggestion, suggest_max_norm


def suggest(file: Path, warmup: int | None, run: int | None) -> None:
    """Prints candidates for max_norm, the suggestion and its reason."""
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


def plot(file: Path, out: Path | None, warmup: int | None, run: int | None) -> None:
    """Draws the norms, with candidates for max_norm, and prints the path of the figure."""
    history = read(file)
    if run is not None:
        history = history.run(run)
    out = out or file.with_suffix(".png")
    figure.save(out, history, _suggestion(history, warmup))
    print(out)


def _suggestion(history: History, warmup: int | None) -> Suggestion | None:
    """The suggestion for a run; None where it is too short for one."""
    try:
        return suggest_max_norm(history, warmup=warmup)
    except ValueError as error:
        print(f"The figure has no candidates: {error}", file=sys.stderr)
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
