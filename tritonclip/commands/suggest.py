"""`python -m tritonclip suggest`: `suggest_max_norm` of a file of norms."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from tritonclip.commands.find import at_least

if TYPE_CHECKING:
    from tritonclip.advice.suggestion import Suggestion


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    command.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="written by tritonclip.record or by python -m tritonclip run --record",
    )
    command.add_argument(
        "--warmup",
        type=at_least(0),
        metavar="STEPS",
        help="steps to leave out at the start; found by default",
    )


def main(chosen: argparse.Namespace) -> int:
    """Prints the suggestion."""
    from tritonclip.advice.suggestion import suggest_max_norm

    suggestion = suggest_max_norm(chosen.file, warmup=chosen.warmup)
    judged = f"Judged by the norms of {suggestion.steps} steps"
    if suggestion.warmup:
        judged += f", without a warm-up of {suggestion.warmup} steps at the start"
    print(f"{judged}; {_left_out(suggestion)}.")
    if not math.isnan(suggestion.spike_score):
        print(f"SpikeScore: {suggestion.spike_score:.2%}")
    print(suggestion)
    limit = "none" if suggestion.max_norm is None else f"{suggestion.max_norm:g}"
    only = ", if the limit has to be fixed" if suggestion.verdict == "drift" else ""
    print(f"max_norm: {limit}{only}")
    return 0


def _left_out(suggestion: Suggestion) -> str:
    counts = ((suggestion.nonfinite, "NaN or inf"), (suggestion.zeros, "0"))
    found = ", ".join(f"{n} that are {value}" for n, value in counts if n)
    return f"left out: {found}" if found else "no norm is NaN, inf or 0"
