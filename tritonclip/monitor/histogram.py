"""The histogram of a run's norms, and candidates for a limit with labels that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from torch import Tensor

from tritonclip.monitor.candidates import Candidate

BAR, GREY, RECOMMENDED = "#b9c9d6", "0.45", "#d55e00"
# Least distance of two labels, as a part of the axis' height.
GAP = 0.075
_BINS = 40


def draw_histogram(axes: Axes, norms: Tensor, candidates: Sequence[Candidate]) -> None:
    """Steps by norm, in bins of equal width on the log axis, and the candidates."""
    low, high = float(norms.min()), float(norms.max())
    width = math.log(high / low * 1.04) / _BINS
    bins = [low / 1.02 * math.exp(i * width) for i in range(_BINS + 1)]
    axes.hist(norms, bins=bins, orientation="horizontal", color=BAR)
    # Spikes are few among many steps.
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(0, None)
    heights = [
        float(axes.transLimits.transform((0, math.log10(c.max_norm)))[1]) for c in candidates
    ]
    for candidate, place in zip(candidates, spread(heights), strict=True):
        _draw_candidate(axes, candidate, place)


def _draw_candidate(axes: Axes, candidate: Candidate, place: float) -> None:
    """A line at the limit, and a label beside the axis."""
    chosen = candidate.origin == "recommended"
    color = RECOMMENDED if chosen else "black" if candidate.origin == "in use" else GREY
    axes.axhline(candidate.max_norm, color=color, lw=1.2 if chosen else 0.7, zorder=3)
    note = "" if candidate.origin.startswith("about") else f", {candidate.origin}"
    axes.annotate(
        f"{candidate.max_norm:g} clips {_percent(candidate.share)}{note}",
        xy=(1, candidate.max_norm),
        xycoords=axes.get_yaxis_transform(),
        xytext=(1.09, place),
        textcoords="axes fraction",
        va="center",
        fontsize=8,
        fontweight="bold" if chosen else "normal",
        color=color,
        annotation_clip=False,
        arrowprops={
            "arrowstyle": "-",
            "color": color,
            "lw": 0.6,
            "shrinkA": 1,
            "shrinkB": 0,
            "relpos": (0, 0.5),
        },
    )


def spread(heights: Sequence[float]) -> list[float]:
    """Places near ascending heights, in parts of the axis, where labels do not overlap."""
    # Labels that would overlap stand side by side around the mean of their heights.
    blocks: list[list[float]] = []
    for height in heights:
        blocks.append([height])
        while len(blocks) > 1 and _top(blocks[-2]) + GAP > _bottom(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return [_bottom(block) + i * GAP for block in blocks for i in range(len(block))]


def _bottom(block: Sequence[float]) -> float:
    """The lowest label of a block, which is as high as the axis allows."""
    extent = (len(block) - 1) * GAP
    return min(max(sum(block) / len(block) - extent / 2, 0.0), 1.0 - extent)


def _top(block: Sequence[float]) -> float:
    return _bottom(block) + (len(block) - 1) * GAP


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 0.995 else "100%"
