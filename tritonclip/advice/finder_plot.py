"""The figure of `find_max_norm`: the loss by limit, with quartiles over seeds.

Needs matplotlib: `pip install "tritonclip[monitor]"`.
"""

from __future__ import annotations

import math
import os

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from tritonclip.advice import plot
from tritonclip.advice.finder import Found

# Losses whose largest is so many times the smallest are drawn on a log axis; below the second, with
# labels at 2 and 5 too.
_WIDE, _VERY_WIDE = 10.0, 300.0
# Kinds of candidates: colour, marker and name.
_RECOMMENDED = "C1", "D", "recommended"
_ALL = "C0", "o", "with all seeds"
_FEWER = "0.6", ".", "with fewer seeds"


def save(path: str | os.PathLike[str], found: Found) -> None:
    """Draws an answer into a .png or .svg file."""
    plot.write(path, lambda: draw(found))


@style.context(plot.STYLE)
def draw(found: Found) -> Figure:
    """The figure of `save`."""
    figure = Figure(figsize=(8, 3.8))
    axes = figure.subplots()
    shown, best = found.candidates, found.best
    finite = [loss for one in shown for loss in one.losses if math.isfinite(loss)]
    for position, one in enumerate(shown):
        low, middle, high = one.quartiles
        if math.isinf(middle):
            place = ("data", "axes fraction")
            axes.annotate("diverged", (position, 0.95), None, place, ha="center")
            continue
        kind = _ALL if one.seeds == best.seeds else _FEWER
        colour, marker, _ = _RECOMMENDED if one.clip == found.clip else kind
        errors = [[middle - low], [min(high, max(finite)) - middle]]
        axes.errorbar(position, middle, errors, fmt=marker, capsize=4, color=colour)
    axes.set_xticks(range(len(shown)), [one.name for one in shown])
    if len(shown) > 12 or any(len(one.name) > 10 for one in shown):
        axes.tick_params(axis="x", labelrotation=30)
    if finite and min(finite) > 0 and max(finite) > _WIDE * min(finite):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        is_very_wide = max(finite) > _VERY_WIDE * min(finite)
        axes.yaxis.set_minor_formatter("" if is_very_wide else "{x:g}")
    axes.set(xlabel="limit", ylabel="held-out loss" if found.is_held_out else "loss at the end")
    for colour, marker, label in (_RECOMMENDED, _ALL, _FEWER):
        axes.plot([], [], marker, color=colour, label=label)
    seeds = f"{len(best.seeds)} seed{'s' * (len(best.seeds) > 1)}"
    axes.set_title(f"median and quartiles over {seeds}, {best.steps} steps")
    figure.legend(loc="outside upper center", ncols=3)
    return figure
