"""Rows of the suite as SVG: the ratio to torch by list and rule, wins and losses on one axis."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from bench.rows import Row
from bench.tables import BY, ratio_rows, step, title, unique

# Distinct for readers who do not tell red from green.
COLOURS = {"float32": "#0072b2", "bfloat16": "#e69f00", "float16": "#56b4e9", "mixed": "#cc79a7"}
MARKERS = {"float32": "o", "bfloat16": "s", "float16": "^", "mixed": "D"}
LOSS = "#d55e00"


def digest(rows: Sequence[Row]) -> str:
    """What a figure says it was drawn from, so that a stale one is found without drawing it."""
    text = json.dumps([asdict(row) for row in rows], sort_keys=True)
    return f"rows sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def figures(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each figure, by rule."""
    ours = ratio_rows(rows)
    return {rule: [r for r in ours if r.rule == rule] for rule in unique(r.rule for r in ours)}


def draw(rows: Sequence[Row], path: Path, origin: str) -> None:
    """Draws the ratios of one rule.

    Args:
        rows: ours, with a ratio, of one rule.
        path: the SVG file.
        origin: where the rows were measured, for the foot of the figure.
    """
    lists = unique(row.list for row in rows)
    steps = sorted({row.clipped for row in rows})
    settings: Any = {"svg.hashsalt": "tritonclip", "svg.fonttype": "none", "font.size": 9}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(9, 2 + 0.5 * len(lists)), layout="constrained")
        axes = figure.subplots(1, len(steps), sharex=True, sharey=True, squeeze=False)[0]
        for axis, clipped in zip(axes, steps, strict=True):
            _panel(axis, [row for row in rows if row.clipped == clipped], lists)
            axis.set_title(step(clipped))
        axes[0].set_xlim(*_limits(rows))
        by = BY[rows[0].rule]
        figure.suptitle(f"Clipping by {by}: time of the best torch variant / tritonclip's")
        figure.supxlabel(
            f"median and quartiles; right of 1x tritonclip is faster\n{origin}", fontsize=7
        )
        figure.legend(handles=_legend(rows), loc="outside right upper", frameon=False)
        figure.savefig(
            path, format="svg", metadata={"Date": None, "Description": digest(rows), "Title": by}
        )


def _panel(axis: Axes, rows: Sequence[Row], lists: Sequence[str]) -> None:
    """One point a row: a line a list, top down, and the dtypes side by side on it."""
    dtypes = unique(row.dtype for row in rows)
    axis.set_xscale("log")
    for row in rows:
        assert row.ratio is not None
        place = lists.index(row.list) + 0.18 * (dtypes.index(row.dtype) - (len(dtypes) - 1) / 2)
        low = row.ratio if row.ratio_lo is None else row.ratio_lo
        high = row.ratio if row.ratio_hi is None else row.ratio_hi
        axis.plot([low, high], [place, place], color=COLOURS[row.dtype], linewidth=1.2)
        axis.plot(
            row.ratio,
            place,
            MARKERS[row.dtype],
            markersize=6,
            markeredgewidth=1.2,
            markerfacecolor=LOSS if row.ratio < 1 else COLOURS[row.dtype],
            markeredgecolor=COLOURS[row.dtype],
        )
    axis.axvline(1.0, color="black", linewidth=1.0)
    axis.axvspan(1e-6, 1.0, color=LOSS, alpha=0.10, linewidth=0)
    axis.xaxis.set_major_locator(LogLocator(base=2))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axis.set_yticks(range(len(lists)), [title(name) for name in lists])
    axis.set_ylim(len(lists) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3)


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    """Ends of the axis: all whiskers, and a stretch on either side of 1."""
    ends = [end for r in rows for end in (r.ratio, r.ratio_lo, r.ratio_hi) if end is not None]
    return min(0.8, *ends) / 1.1, max(1.25, *ends) * 1.1


def _legend(rows: Sequence[Row]) -> list[Line2D]:
    """One entry a dtype, and one for losses."""
    entries = [
        Line2D([], [], color=COLOURS[dtype], marker=MARKERS[dtype], markersize=5, label=dtype)
        for dtype in unique(row.dtype for row in rows)
    ]
    return [*entries, Line2D([], [], color=LOSS, marker="o", linestyle="", label="slower")]
