"""`python -m tritonclip suggest`: prints `suggest_max_norm` of a file of norms."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

# The number of lists that are shown.
_MOST_LISTS = 6

if TYPE_CHECKING:
    from tritonclip.advice.suggestion import Suggestion


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    command.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="written by tritonclip.record or by python -m tritonclip run --record; or another "
        "CSV file with a column grad_norm, as of W&B or TensorBoard, or a trainer_state.json",
    )
    command.add_argument(
        "--column",
        metavar="NAME",
        help="the column of norms in a file that another program wrote",
    )
    command.add_argument(
        "--warmup",
        type=_whole_number,
        metavar="STEPS",
        help="steps to leave out at the start; found by default",
    )
    command.add_argument(
        "--list",
        metavar="NUMBER",
        help="one list of parameters of the run, by its number or whole name",
    )


def _whole_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text}")
    return int(text)


def main(chosen: argparse.Namespace) -> int:
    """Prints the suggestion for each list of parameters that is clipped."""
    from tritonclip.advice.suggestion import one_of, only_logged, suggest_max_norm, to_judge
    from tritonclip.monitor.history import read

    history = read(chosen.file, chosen.column)
    wanted = chosen.list
    series = history.series() if wanted is None else dict([one_of(history, wanted)])
    if len(series) == 1:
        (only,) = series.values()
        _print(suggest_max_norm(only, warmup=chosen.warmup))
        return 0
    logged = only_logged(series)
    clipped = to_judge(series)
    single = sum(": 1 tensor, " in name for name in clipped)
    if single > 1:
        print(
            f"{single} of these lists are single tensors: the run clips each gradient by its own "
            "norm, as clip_(parameters, ClipByNorm(max_norm)) does in one call."
        )
    for name in clipped[:_MOST_LISTS]:
        print(f"\nList {name}, {len(series[name])} calls")
        try:
            _print(suggest_max_norm(series[name], warmup=chosen.warmup))
        except ValueError as error:
            # Other lists may have enough norms.
            print(f"No suggestion: {error}")
    if (more := len(series) - len(logged) - len(clipped[:_MOST_LISTS])) > 0:
        print(f"\nand {more} lists with fewer calls; --list NUMBER shows one")
    if logged:
        print()
    for name in [*logged][:_MOST_LISTS]:
        print(f"List {name}, {len(series[name])} calls: only logged, since {logged[name]}")
    if (more := len(logged) - _MOST_LISTS) > 0:
        print(f"and {more} lists that are only logged")
    return 0


def _print(suggestion: "Suggestion") -> None:
    judged = f"Judged by the norms of {suggestion.steps} steps"
    if suggestion.warmup:
        judged += f", without a warm-up of {suggestion.warmup} steps at the start"
    counts = ((suggestion.nonfinite, "NaN or inf"), (suggestion.zeros, "0"))
    left_out = ", ".join(f"{n} that are {value}" for n, value in counts if n)
    print(f"{judged}; {'left out: ' if left_out else 'no norm is NaN, inf or 0'}{left_out}.")
    if not math.isnan(suggestion.spike_score):
        print(f"SpikeScore: {suggestion.spike_score:.2%}")
    print(suggestion)
    limit = "none" if suggestion.max_norm is None else f"{suggestion.max_norm:g}"
    more = ""
    if suggestion.range is not None:
        low, high = suggestion.range
        more = f"; to try: {low:g} to {high:g}"
    elif suggestion.verdict == "drift":
        more = ", if the limit has to be fixed"
    print(f"max_norm: {limit}{more}")
