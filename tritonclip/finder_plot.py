"""The figure of `find_max_norm`: the loss by limit, with quartiles over seeds.

Needs matplotlib: `pip install "tritonclip[monitor]"`.
"""

from __future__ import annotations

import math
import os

from matplotlib import style
from matplotlib.figure import Figure

from tritonclip.finder import Found
from tritonclip.monitor import plot

# Losses whose largest is so many times the smallest are drawn on a log axis.
_WIDE = 10.0


def save(path: str | os.PathLike[str], found: Found) -> None:
    """Draws an answer into a .png or .svg file.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: another ending.
    """
    plot.write(path, lambda: draw(found))


@style.context(plot.STYLE)
def draw(found: Found) -> Figure:
    """The figure of `save`."""
    figure = Figure(figsize=(8, 3.8))
    axes = figure.subplots()
    shown = found.candidates
    finite = [loss for one in shown for loss in one.losses if math.isfinite(loss)]
    for position, one in enumerate(shown):
        is_last = (one.seeds, one.steps) == (found.best.seeds, found.best.steps)
        low, middle, high = one.quartiles
        colour = "C1" if one.clip == found.clip else "C0" if is_last else "0.7"
        if math.isinf(middle):
            axes.annotate(
                "diverged", (position, 0.95), None, ("data", "axes fraction"), ha="center"
            )
            continue
        high = high if math.isfinite(high) else max(finite)
        errors = [[middle - low], [high - middle]]
        axes.errorbar(position, middle, errors, fmt="o", capsize=4, color=colour)
    axes.set_xticks(range(len(shown)), [one.name for one in shown])
    if len(shown) > 8 or any(len(one.name) > 10 for one in shown):
        axes.tick_params(axis="x", labelrotation=30)
    if finite and min(finite) > 0 and max(finite) > _WIDE * min(finite):
        axes.set_yscale("log")
    kind = "held-out loss" if found.is_held_out else "loss of the last quarter"
    axes.set(xlabel="limit", ylabel=f"{kind}: median and quartiles over seeds")
    for label, colour in (
        ("recommended", "C1"),
        (f"of the last round, {found.best.steps} steps", "C0"),
        ("of shorter trials", "0.7"),
    ):
        axes.plot([], [], "o", color=colour, label=label)
    figure.legend(loc="outside upper center", ncols=3)
    return figure
