"""`python -m tritonclip plot`: draws a file of norms; it needs the extra `monitor`."""

import argparse
import sys
from pathlib import Path

from tritonclip.commands import suggest


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `suggest`, and the path of the figure."""
    suggest.add_arguments(command)
    command.add_argument(
        "--out",
        type=Path,
        metavar="FIGURE",
        help="a .png or .svg file; by default FILE as .png, if there is none",
    )


def main(chosen: argparse.Namespace) -> int:
    """Draws the norms, with candidates for max_norm, and prints the path of the figure."""
    from tritonclip.advice import plot as figure
    from tritonclip.advice.suggestion import one_of, suggest_max_norm, to_judge
    from tritonclip.monitor.history import read

    history = read(chosen.file, chosen.column)
    series = history.series()
    if chosen.list is not None:
        _, history = one_of(history, chosen.list)
    elif len(series) > 1:
        name = to_judge(series)[0]
        history = series[name]
        print(
            f"The figure is of the list {name}, one of {len(series)}; --list NUMBER draws another",
            file=sys.stderr,
        )
    target = chosen.out or chosen.file.with_suffix(".png")
    if chosen.out is None and target.exists():
        raise FileExistsError(f"{target} exists; to replace it, write --out {target}")
    suggestion = None
    try:
        suggestion = suggest_max_norm(history, warmup=chosen.warmup)
    except ValueError as error:
        # The run is too short for a suggestion.
        print(f"The figure has no candidates: {error}", file=sys.stderr)
    figure.save(target, history, suggestion)
    print(target)
    return 0
