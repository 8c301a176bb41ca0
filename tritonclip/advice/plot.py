"""The figure of a history: norms over steps, and their histogram beside candidates for a limit.

Below stand losses and the largest norms by name, if the history has any. Needs matplotlib:
`pip install "tritonclip[monitor]"`. Fonts, axes and colours are those of figures.mplstyle; each
kind of mark has a shape as well.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from torch import Tensor

from tritonclip.advice.suggestion import Candidate, Suggestion, percent
from tritonclip.messages import join_names, printable
from tritonclip.monitor.history import History, NamedNorm

ENDINGS = (".png", ".svg")
NORM, MEDIAN = "#9ab4c8", "#1f3b57"
# Inches for losses.
_LOSS = 1.3
CLIPPED, SKIPPED, NONFINITE, SPIKE = "C4", "C0", "black", "C3"
# Points above which a line is drawn as pixels: a vector graphic would be slow.
_MANY = 5_000
# Sections of a run whose medians draw its trend.
_SECTIONS = 100
# Marks of a kind above which they are drawn small.
_CROWDED = 200
# The width of a run's name, as a fraction of the axis.
_NAME = 0.07
# Largest number of names, the height of each, and the length of its text.
_LARGEST, _INCHES, _LETTERS = 10, 0.22, 48
# Shared with the examples and the benchmarks.
STYLE = "tritonclip.advice.figures"


def save(
    path: str | os.PathLike[str], history: History, suggestion: Suggestion | None = None
) -> None:
    """Draws a history into a .png or .svg file.

    A line with its number marks where each of several runs begins. The histogram shows the run of
    the suggestion, and its candidates.
    """
    write(path, lambda: draw(history, suggestion))


def write(path: str | os.PathLike[str], drawn: Callable[[], Figure]) -> None:
    """Writes a figure, drawn if the path is good, into a file."""
    check_path(path)
    metadata = {"Date": None} if Path(path).suffix.lower() == ".svg" else None
    with style.context(STYLE):
        drawn().savefig(path, metadata=metadata)


def check_path(path: str | os.PathLike[str]) -> None:
    """Raises the errors of `save` for a path."""
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(
            f"{path}: expected a name that ends in .png or .svg, got {path.suffix or 'no ending'}; "
            f"write {path.with_suffix('.png')}"
        )
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(
            f"{path}: expected an existing folder, got {path.absolute().parent}; make it first"
        )


@style.context(STYLE)
def draw(history: History, suggestion: Suggestion | None = None) -> Figure:
    """The figure of `save`, which raises the same errors."""
    shown = history.is_positive
    if not shown.any():
        raise ValueError(
            f"expected a finite norm over 0 to draw, got none in {len(history)} steps; "
            "clip_(..., nonfinite='error') names the gradients that are NaN or inf"
        )
    numbered, history = history, _counted_on(history)
    named = history if suggestion is None else history.runs[suggestion.run - 1]
    largest = named.largest(_LARGEST)
    below = _INCHES * len(largest) + 0.8 if largest else 0.0
    above = 3.6 + (_LOSS if history.losses.isfinite().any() else 0.0)
    figure = Figure(figsize=(9, above + below))
    upper: Figure | SubFigure = figure
    if largest:
        parts: Any = figure.subfigures(2, 1, height_ratios=(above, below))
        upper, lower = parts
        draw_largest(lower.subplots(), named, largest)
    has_losses = above > 3.6
    grid = upper.add_gridspec(
        1 + has_losses, 2, width_ratios=(3.2, 1), height_ratios=(3.6, _LOSS)[: 1 + has_losses]
    )
    over_steps = upper.add_subplot(grid[0, 0])
    histogram = upper.add_subplot(grid[0, 1], sharey=over_steps)
    over_steps.set_yscale("log")
    _draw_norms(over_steps, history)
    _draw_marks(over_steps, history)
    if len(history.spans) > 1:
        _draw_begins(over_steps, history)
    after = shown.clone()
    if suggestion is not None:
        start, end = history.spans[suggestion.run - 1]
        warm = history.steps[start : min(start + suggestion.warmup, end)].tolist()
        if warm:
            over_steps.axvspan(warm[0], warm[-1], color="0.93", lw=0, label="warm-up")
        after[: start + len(warm)] = after[end:] = False
    candidates = () if suggestion is None else suggestion.candidates
    low, high = float(history.norms[shown].min()), float(history.norms[shown].max())
    # Limits far from every norm would leave little of the axis for these.
    candidates = tuple(c for c in candidates if low / 3 <= c.max_norm <= high * 3)
    near = (history.limits >= low / 3) & (history.limits <= high * 3)
    ends = [low, high, *(c.max_norm for c in candidates), *history.limits[near].tolist()]
    over_steps.set_ylim(min(ends) / 1.3, max(ends) * 1.6)
    draw_histogram(histogram, history.norms[after if after.any() else shown], candidates)
    if suggestion is not None and suggestion.max_norm is not None:
        over_steps.axhline(
            suggestion.max_norm, color=RECOMMENDED, lw=1, label="recommended limit", zorder=1.5
        )
    _label(over_steps, histogram)
    lowest = over_steps
    if has_losses:
        lowest = upper.add_subplot(grid[1, 0], sharex=over_steps)
        _draw_losses(lowest, history)
        over_steps.tick_params(labelbottom=False)
    lowest.set_xlabel("step" if numbered is history else "step, counted on from run to run")
    legend = upper.legend(loc="outside lower center", ncols=8)
    for sample in legend.get_lines():
        sample.set_markersize(5)
    return figure


def _counted_on(history: History) -> History:
    """The history with steps that rise throughout, also if runs have the same step numbers."""
    steps = history.steps.clone()
    for start, _ in history.spans[1:]:
        if steps[start] <= steps[start - 1]:
            steps[start:] += steps[start - 1] + 1 - steps[start]
    if steps.equal(history.steps):
        return history
    return replace(history, columns={**history.columns, "step": steps})


def _draw_norms(axes: Axes, history: History) -> None:
    """Norms, medians of sections of each run, and the limit."""
    many = len(history) > _MANY
    for number, run in enumerate(history.runs):
        steps, norms = run.steps[run.is_positive], run.norms[run.is_positive]
        # A label that begins with _ stays out of the legend.
        again = "_" if number else ""
        axes.plot(
            steps, norms, color=NORM, lw=0.6, label=f"{again}norm", rasterized=many, zorder=1.2
        )
        n_sections = min(_SECTIONS, len(steps) // 10)
        if n_sections > 1:
            centres = [float(section.double().mean()) for section in steps.tensor_split(n_sections)]
            medians = [float(section.quantile(0.5)) for section in norms.tensor_split(n_sections)]
            axes.plot(centres, medians, color=MEDIAN, lw=1.3, label=f"{again}median", zorder=3.5)
    limited = history.limits.isfinite() & (history.limits > 0)
    if limited.any():
        axes.plot(
            history.steps,
            torch.where(limited, history.limits, torch.nan),
            color="black",
            ls=(0, (5, 2)),
            lw=1.1,
            drawstyle="steps-mid",
            label="limit",
            zorder=2.2,
        )


def _draw_losses(axes: Axes, history: History) -> None:
    """Losses of the steps, with a gap where one is unknown or not finite, or a run begins."""
    for run in history.runs:
        losses = torch.where(run.losses.isfinite(), run.losses, torch.nan)
        many = len(history) > _MANY
        axes.plot(run.steps, losses, color=MEDIAN, lw=0.8, rasterized=many)
    axes.set_ylabel("loss")
    finite = history.losses[history.losses.isfinite()]
    # The losses of a run that diverged would leave nothing of the axis for the others.
    top = float(finite.quantile(0.98)) if len(finite) <= 2**24 else float(finite.max())
    low = float(finite.min())
    if top > low:
        axes.set_ylim(low - 0.05 * (top - low), top + 0.15 * (top - low))


def _draw_begins(axes: Axes, history: History) -> None:
    """A line at the begin of each run, with the run's name above the axis if there is room."""
    begins = [int(history.steps[start]) for start, _ in history.spans]
    width = (int(history.steps[-1]) - begins[0]) * _NAME
    # The end of the last name in each of three lines above the axis.
    ends = [-math.inf] * 3
    for number, step in enumerate(begins, 1):
        axes.axvline(step, color=GREY, lw=0.8, zorder=1.1)
        line = next((i for i, end in enumerate(ends) if step >= end), None)
        if line is None:
            continue
        ends[line] = step + width
        axes.annotate(
            f"run {number}",
            xy=(step, 1),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 3 + 10 * line),
            textcoords="offset points",
            fontsize=8,
            color=GREY,
            annotation_clip=False,
        )


def _draw_marks(axes: Axes, history: History) -> None:
    """Clipped and skipped steps at their norms; NaN, inf and 0 at the edges."""
    positive = history.is_positive
    score = f"over 6 sigma, SpikeScore {percent(history.spike_score)}"
    for chosen, label, color, marker, size, edge in (
        (history.is_over_six_sigma, score, SPIKE, "D", 6.0, None),
        (history.is_clipped & positive, "clipped", CLIPPED, "o", 3.2, None),
        (history.is_skipped & positive, "skipped", SKIPPED, "v", 5.0, None),
        (~history.norms.isfinite(), "NaN or inf", NONFINITE, "x", 5.0, 0.985),
        (history.norms == 0, "zero", NONFINITE, "+", 5.0, 0.015),
    ):
        n = int(chosen.sum())
        if not n:
            continue
        look: dict[str, Any] = {"ls": "", "marker": marker, "ms": size, "color": color}
        if edge is not None:
            look |= {"mew": 1.2, "transform": axes.get_xaxis_transform(), "clip_on": False}
        elif n > _CROWDED:
            look |= {"ms": size / 2, "mew": 0.3, "mec": "none"}
        else:
            look |= {"mew": 0.3, "mec": "white"}
        heights = history.norms[chosen] if edge is None else [edge] * n
        zorder = 3 if edge is None else 4
        look |= {"label": label, "rasterized": n > _MANY, "zorder": zorder}
        axes.plot(history.steps[chosen], heights, **look)


def _label(over_steps: Axes, histogram: Axes) -> None:
    over_steps.set_ylabel("gradient norm before clipping")
    over_steps.margins(x=0.01)
    over_steps.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    over_steps.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    over_steps.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.9g}"))
    over_steps.yaxis.set_minor_formatter(NullFormatter())
    histogram.grid(visible=False)
    histogram.tick_params(labelleft=False)
    # Else a few steps may have marks at halves.
    histogram.xaxis.set_major_locator(MaxNLocator("auto", steps=(1, 2, 5, 10), integer=True))
    histogram.xaxis.set_major_formatter(EngFormatter(sep=""))
    histogram.set_xlabel("number of steps")


BAR, GREY, RECOMMENDED = "#b9c9d6", "0.45", "C1"
# Least distance of two labels, as a fraction of the axis' height.
GAP = 0.075
_BINS = 40


def draw_histogram(axes: Axes, norms: Tensor, candidates: Sequence[Candidate]) -> None:
    """The histogram of norms, in bins of equal width on the log axis, and the candidates."""
    low, high = float(norms.min()), float(norms.max())
    width = math.log(high / low * 1.04) / _BINS
    bins = [low / 1.02 * math.exp(i * width) for i in range(_BINS + 1)]
    axes.hist(norms, bins=bins, orientation="horizontal", color=BAR)
    # Shows the few spikes beside many steps.
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(0, None)
    heights = [
        float(axes.transLimits.transform((0, math.log10(c.max_norm)))[1]) for c in candidates
    ]
    for candidate, height in zip(candidates, label_heights(heights), strict=True):
        _draw_candidate(axes, candidate, height)


def _draw_candidate(axes: Axes, candidate: Candidate, height: float) -> None:
    """A line at the limit, and a label beside the axis."""
    chosen = candidate.origin == "recommended"
    color = RECOMMENDED if chosen else "black" if candidate.origin == "in use" else GREY
    axes.axhline(candidate.max_norm, color=color, lw=1.2 if chosen else 0.7, zorder=3)
    note = "" if candidate.origin.startswith("about") else f", {candidate.origin}"
    axes.annotate(
        f"{candidate.max_norm:g} clips {percent(candidate.share)}{note}",
        xy=(1, candidate.max_norm),
        xycoords=axes.get_yaxis_transform(),
        xytext=(1.09, height),
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


def label_heights(heights: Sequence[float]) -> list[float]:
    """Label heights near ascending heights, in fractions of the axis, that do not overlap."""
    labels: list[float] = []
    for height in heights:
        labels.append(max(height, labels[-1] + GAP if labels else 0.0))
    top = 1.0
    for i in reversed(range(len(labels))):
        labels[i] = min(labels[i], top)
        top = labels[i] - GAP
    return labels


def draw_largest(axes: Axes, history: History, largest: Sequence[NamedNorm]) -> None:
    """Norms by name, a line each: most steps, median, and the largest of all steps."""
    ends = []
    for named in largest:
        norms = history.named_norms[named.name]
        norms = norms[norms.isfinite() & (norms > 0)]
        ends.append(norms.quantile(torch.tensor([0.05, 0.95], dtype=norms.dtype)).tolist())
    rows = range(len(largest))
    lows, highs = zip(*ends, strict=True)
    axes.hlines(rows, lows, highs, color=BAR, lw=5, label="5% to 95% of the steps")
    medians, spikes = [named.median for named in largest], [named.largest for named in largest]
    axes.plot(medians, rows, ls="", marker="|", ms=9, mew=1.6, color=MEDIAN, label="median")
    axes.plot(spikes, rows, ls="", marker="x", ms=4, color=CLIPPED, label="largest")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_xscale("log")
    names = [_shortened(named.name) for named in largest]
    # A dollar sign begins no formula.
    axes.set_yticks(rows, names, parse_math=False)
    axes.set_ylim(len(largest) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x")
    axes.set_xlabel("norms of the largest gradients")
    if dead := history.dead():
        title = f"0 in the last step: {join_names([*map(_shortened, dead)], 4)}"
        axes.set_title(title, fontsize=8, color=GREY, loc="left", parse_math=False)


def _shortened(name: str) -> str:
    """A name to be shown, without its beginning if it is long."""
    name = printable(name)
    return name if len(name) <= _LETTERS else f"...{name[3 - _LETTERS :]}"
