"""The figure of a history: norms over steps, with the limit and candidates for a new one.

It needs matplotlib: `pip install "tritonclip[monitor]"`. figures.mplstyle sets fonts, axes and
colours; kinds of marks differ in shape as well as in colour.
"""

import os
from pathlib import Path
from typing import Any

import torch
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from tritonclip.advice.suggestion import Suggestion, percent
from tritonclip.monitor.history import History

NORM, MEDIAN, CANDIDATE, RECOMMENDED = "#9ab4c8", "#1f3b57", "0.45", "C1"
CLIPPED, SKIPPED, NONFINITE = "C4", "C0", "black"
# A line of more points is drawn as pixels, because a vector graphic would be slow.
_MANY = 5_000
# The number of sections whose medians draw the trend of a run.
_SECTIONS = 100
# More marks of a kind than this are drawn small.
_CROWDED = 200
# The examples and the benchmarks use this style as well.
STYLE = "tritonclip.advice.figures"


def save(
    path: str | os.PathLike[str], history: History, suggestion: Suggestion | None = None
) -> None:
    """Draws a history into a .png or .svg file."""
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(
            f"{path}: expected a name that ends in .png or .svg, got {path.suffix or 'no ending'}; "
            f"write {path.with_suffix('.png')}"
        )
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(
            f"{path}: expected an existing folder, got {path.absolute().parent}; make it first"
        )
    figure = draw(history, suggestion)
    with style.context(STYLE):
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


@style.context(STYLE)
def draw(history: History, suggestion: Suggestion | None = None) -> Figure:
    """Makes the figure that `save` writes; raises ValueError if there is no norm to draw."""
    norms = history.norms[history.is_positive]
    if not len(norms):
        raise ValueError(
            f"expected a finite norm over 0 to draw, got none in {len(history)} steps; "
            "clip_(..., nonfinite='error') names the gradients that are NaN or inf"
        )
    figure = Figure(figsize=(9, 3.8))
    axes = figure.subplots()
    axes.set_yscale("log")
    _draw_norms(axes, history)
    _draw_marks(axes, history)
    # Limits far from every norm would leave little of the axis for the norms.
    low, high = float(norms.min()), float(norms.max())
    drawn = history.limits[history.limits > 0].tolist()
    if suggestion is not None:
        _draw_suggestion(axes, history, suggestion)
        drawn += [candidate.max_norm for candidate in suggestion.candidates]
    near = [low, high, *(limit for limit in drawn if low / 3 <= limit <= high * 3)]
    axes.set_ylim(min(near) / 1.3, max(near) * 1.6)
    axes.margins(x=0.01)
    axes.set(xlabel="step", ylabel="gradient norm before clipping")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.9g}"))
    legend = figure.legend(loc="outside lower center", ncols=5)
    for sample in legend.get_lines():
        sample.set_markersize(5)
    return figure


def _draw_norms(axes: Axes, history: History) -> None:
    """Draws norms, medians of sections of the run, and the limit."""
    shown, many = history.is_positive, len(history) > _MANY
    steps, norms = history.steps[shown], history.norms[shown]
    axes.plot(steps, norms, color=NORM, lw=0.6, label="norm", rasterized=many, zorder=1.2)
    n_sections = min(_SECTIONS, len(steps) // 10)
    if n_sections > 1:
        centres = [float(section.double().mean()) for section in steps.tensor_split(n_sections)]
        medians = [float(section.quantile(0.5)) for section in norms.tensor_split(n_sections)]
        axes.plot(centres, medians, color=MEDIAN, lw=1.3, label="median", zorder=3.5)
    limited = history.limits.isfinite() & (history.limits > 0)
    if limited.any():
        limits = torch.where(limited, history.limits, torch.nan)
        look: dict[str, Any] = {"color": "black", "ls": (0, (5, 2)), "lw": 1.1, "zorder": 2.2}
        axes.plot(history.steps, limits, drawstyle="steps-mid", label="limit", **look)


def _draw_marks(axes: Axes, history: History) -> None:
    """Marks clipped and skipped steps at their norms, and NaN and inf at the upper edge."""
    positive = history.is_positive
    for chosen, label, color, marker, size in (
        (history.is_clipped & positive, "clipped", CLIPPED, "o", 3.2),
        (history.is_skipped & positive, "skipped", SKIPPED, "v", 5.0),
        (~history.norms.isfinite(), "NaN or inf", NONFINITE, "x", 5.0),
    ):
        n = int(chosen.sum())
        if not n:
            continue
        look: dict[str, Any] = {"ls": "", "marker": marker, "color": color, "label": label}
        look |= {"ms": size / 2 if n > _CROWDED else size, "rasterized": n > _MANY}
        heights: Any = history.norms[chosen]
        if color == NONFINITE:
            heights = [0.985] * n
            look |= {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(history.steps[chosen], heights, zorder=3, **look)


def _draw_suggestion(axes: Axes, history: History, suggestion: Suggestion) -> None:
    """Draws a line at each candidate for a limit, and the warm-up in grey."""
    for candidate in suggestion.candidates:
        look: dict[str, Any] = {"color": CANDIDATE, "lw": 0.6, "label": "other candidates"}
        if candidate.max_norm == suggestion.max_norm:
            clips = f"{candidate.max_norm:g}, recommended: clips {percent(candidate.share)}"
            look = {"color": RECOMMENDED, "lw": 1.2, "label": clips}
        elif any(line.get_label() == look["label"] for line in axes.lines):
            # A label that begins with _ stays out of the legend.
            look["label"] = "_"
        axes.axhline(candidate.max_norm, zorder=1.5, **look)
    warm = history.steps[: suggestion.warmup].tolist()
    if warm:
        axes.axvspan(warm[0], warm[-1], color="0.93", lw=0, label="warm-up")
