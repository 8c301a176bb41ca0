"""`python -m bench report`: from committed rows to tables and figures in README and docs.

In docs/performance.md, between `<!-- bench:NAME -->` and `<!-- /bench -->`, stand the tables that
the rows of bench/results/NAME.json give, and nothing else; `<!-- bench:NAME providers -->` asks for
the times of all providers. In README.md, a small table of bench/results/cpu.json stands between
`<!-- speed -->` and `<!-- /speed -->`. Figures lie beside the rows, as NAME-RULE.svg. Rows whose
results were not checked, or found wrong, are refused. Only a row of another library without any
figure may say that its result was wrong.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from bench import results
from bench.results import Row
from bench.workloads import WORKLOADS

# The markers that each page has.
PAGES = {"docs/performance.md": "bench:NAME", "README.md": "speed"}
SECTION = re.compile(
    r"(?P<start><!-- (?P<kind>speed|bench(?=:))(:(?P<name>[\w-]+)(?P<providers> providers)?)?"
    r" -->\n).*?(?P<end><!-- /(?P=kind) -->)",
    re.DOTALL,
)
OURS = "tritonclip"
BY = {"norm": "global norm", "value": "value", "gradient": "each norm", "step": "norm, SGD step"}
STEPS = ("unclipped", "clipped")
# Workloads of the README's table, from short to long.
SHOWN = (
    *("small_1", "small_10", "small_100", "lenet5", "resnet20", "resnet50"),
    *("gpt2_124m", "llama3_8b", "huge_and_small", "tiny_10000"),
)
# Provenance that a figure shows; the page shows all.
IN_FIGURES = ("cpu", "device", "threads", "torch", "commit", "date")
# Distinct for readers who do not tell red from green.
COLOURS = {"float32": "#0072b2", "bfloat16": "#e69f00", "float16": "#56b4e9", "mixed": "#cc79a7"}
MARKERS = {"float32": "o", "bfloat16": "s", "float16": "^", "mixed": "D"}
LOSS = "#d55e00"


class RefusedError(ValueError):
    """Rows or a page that nothing may be made from."""


def load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Provenance and rows of a file.

    Raises:
        RefusedError: there is no such file, it has no rows, a row's check failed or was not made,
            or two rows are of one case.
    """
    if not path.exists():
        raise RefusedError(f"{path} does not exist: measure first, with --out {path}")
    try:
        origin, rows = results.read(path)
    except (KeyError, TypeError) as error:
        raise RefusedError(f"{path} holds no rows of these benchmarks: {error}") from error
    if not rows or not origin:
        raise RefusedError(f"{path} has no rows, or no provenance")
    wrong = [_describe(row) for row in rows if not _is_checked(row)]
    if wrong:
        raise RefusedError(f"{path}: results wrong or not checked: {'; '.join(wrong)}")
    seen = [_describe(row) for row in rows]
    twice = sorted({one for one in seen if seen.count(one) > 1})
    if twice:
        raise RefusedError(f"{path}: measured twice: {'; '.join(twice)}")
    return origin, rows


def _is_checked(row: Row) -> bool:
    """Whether a row is right, cannot be wrong, or says that another library's result was wrong."""
    if row.correct is True or row.benchmark not in ("speed", "accuracy"):
        return True
    ours = str(row.get("provider")).startswith(OURS)
    return not ours and (not row.values if row.benchmark == "speed" else row.correct is None)


def _describe(row: Row) -> str:
    return " ".join(map(str, row.case.values()))


def origin_line(origin: dict[str, Any], names: Sequence[str] = ()) -> str:
    """Provenance in one line; of some names only, if any are given."""
    chosen = {name: value for name, value in origin.items() if not names or name in names}
    return ", ".join(f"{name} {value}" for name, value in chosen.items())


def title(name: str) -> str:
    """A workload's title; its name where this version has no such workload."""
    return WORKLOADS[name].title if name in WORKLOADS else name


def unique(values: Iterable[Any]) -> list[Any]:
    """Values in the order in which they come first."""
    return list(dict.fromkeys(values))


def ratio_rows(rows: Sequence[Row]) -> list[Row]:
    """Our rows that have a ratio to torch."""
    return [row for row in rows if row.get("provider") == OURS and row.get("ratio") is not None]


def ratio_cell(row: Row, tie: str = "") -> str:
    """A ratio with quartiles, bold where it is a loss; `tie` instead where they include 1."""
    ratio, low, high = (row.get(f"ratio{end}") for end in ("", "_lo", "_hi"))
    if tie and low <= 1 <= high:
        return tie
    text = f"{ratio:.2f}x"
    if not tie:
        text += f" ({low:.2f} to {high:.2f})"
    return f"**{text}**" if ratio < 1 else text


def pivot(rows: Sequence[Row], line: Sequence[str], column: str, cell: Callable[[Row], str]) -> str:
    """A table in Markdown: a line for the parts of a case in `line`, a cell for each row.

    `column` is the heading of a row's cell, with names of parts of a case in braces.
    """
    columns = unique(column.format(**row.case) for row in rows)
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        cells = lines.setdefault(tuple(_named(name, row.case[name]) for name in line), {})
        cells[column.format(**row.case)] = cell(row)
    headings = [*(results.COLUMNS[name].heading for name in line), *columns]
    texts = [headings, ["---"] * len(headings)]
    texts += [[*named, *(cells.get(one, "") for one in columns)] for named, cells in lines.items()]
    return "\n".join(f"| {' | '.join(text)} |" for text in texts)


def _named(name: str, part: str) -> str:
    return title(part) if name == "workload" else BY[part] if name == "rule" else part


def summary(rows: Sequence[Row]) -> str:
    """The median, the worst, and the share of cases below 1.0x."""
    ours = sorted(ratio_rows(rows), key=lambda row: float(row.get("ratio")))
    if not ours:
        return "No ratio was measured."
    ratios = [float(row.get("ratio")) for row in ours]
    worst = ours[0].case
    by = f"{title(worst['workload'])}, {worst['dtype']}, by {BY[worst['rule']]}, {worst['step']}"
    share = sum(ratio < 1 for ratio in ratios) / len(ratios)
    return (
        f"Over all {len(ours)} cases the median is {statistics.median(ratios):.2f}x, the worst "
        f"{ratios[0]:.2f}x ({by}), and {share:.0%} are below 1.0x."
    )


def readme_table(rows: Sequence[Row]) -> str:
    """The README's table and sentence: float32; by value, the worse of both steps."""
    known: dict[tuple[int, int], Row] = {}
    columns = (*STEPS, "by value")
    for row in ratio_rows(rows):
        case, rule = row.case, row.get("rule")
        if case["dtype"] == "float32" and case["workload"] in SHOWN and rule in ("norm", "value"):
            column = case["step"] if rule == "norm" else "by value"
            place = SHOWN.index(case["workload"]), columns.index(column)
            if place not in known or row.get("ratio") < known[place].get("ratio"):
                known[place] = replace(row, case={**case, "column": column})
    shown = [known[place] for place in sorted(known)]
    table = pivot(shown, ["workload"], "{column}", lambda row: ratio_cell(row, tie="tie"))
    return (
        f"{table}\n\nfloat32 on a CPU: time of torch's best variant over tritonclip's; tie: the "
        f"quartiles of the ratio include 1; bold: slower. {summary(rows)}\n"
    )


def section(name: str, of_providers: bool, origin: dict[str, Any], rows: Sequence[Row]) -> str:
    """The text between a section's markers."""
    parts = [f"Measured on: {origin_line(origin)}."]
    busy = max(row.case.get("busy", 0) for row in rows)
    if busy:
        parts[0] += f" Meanwhile {busy} other processes kept cores busy."
    if rows[0].benchmark != "speed":
        parts.append(results.markdown(results.table(rows)))
    elif of_providers:
        parts.append(pivot(rows, ["workload", "dtype", "rule", "step"], "{provider}", _time))
    else:
        parts += _ratios(name, rows)
    parts.append(f"Rows: [{name}.json](../bench/results/{name}.json).\n")
    return "\n\n".join(parts)


def _ratios(name: str, rows: Sequence[Row]) -> Iterator[str]:
    """A summary, the ratios to torch, figures, and the share of torch.sum."""
    lists = [WORKLOADS[one] for one in unique(row.get("workload") for row in rows)]
    notes = "".join(f" {one.title}: {one.note}." for one in lists if one.note)
    ours = ratio_rows(rows)
    yield f"{summary(rows)}{notes}"
    yield pivot(ours, ["workload", "rule"], "{dtype} {step}", ratio_cell)
    yield "\n".join(
        f"![Ratio to torch by {BY[rule]}](../bench/results/{name}-{rule}.svg)"
        for rule in figures(rows)
    )
    large = [row for row in ours if row.get("sum_share") is not None]
    if large:
        yield "Our time, and the share of it that torch.sum over as many bytes takes:"
        yield pivot(large, ["workload", "dtype", "rule"], "{step}", _sum_time)


def _time(row: Row) -> str:
    if row.get("wall_us") is None:
        return "wrong result"
    ratio = "" if row.get("ratio") is None else f", {row.get('ratio'):.2f}x"
    return f"{row.get('wall_us') / 1e3:.3g} ms{ratio}"


def _sum_time(row: Row) -> str:
    return f"{row.get('wall_us') / 1e3:.3g} ms, {row.get('sum_share'):.0%}"


def figures(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each figure, by rule."""
    ours = ratio_rows(rows)
    rules = unique(row.get("rule") for row in ours)
    return {rule: [row for row in ours if row.get("rule") == rule] for rule in rules}


def digest(rows: Sequence[Row]) -> str:
    """The text in a figure that tells which rows it shows, so that a stale one is found."""
    text = json.dumps([asdict(row) for row in rows], sort_keys=True)
    return f"rows sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def draw(rows: Sequence[Row], path: Path, origin: str) -> None:
    """Draws our ratios by one rule as SVG, wins and losses on one axis."""
    names = unique(row.get("workload") for row in rows)
    steps = [step for step in STEPS if any(row.get("step") == step for row in rows)]
    dtypes = unique(row.get("dtype") for row in rows)
    settings: Any = {"svg.hashsalt": "tritonclip", "svg.fonttype": "none", "font.size": 9}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(9, 2 + 0.4 * len(names)), layout="constrained")
        panels = figure.subplots(1, len(steps), sharex=True, sharey=True, squeeze=False)[0]
        for axes, step in zip(panels, steps, strict=True):
            _panel(axes, [row for row in rows if row.get("step") == step], names, dtypes)
            axes.set_title(step)
        ends = [row.get(f"ratio{end}") for row in rows for end in ("_lo", "_hi")]
        panels[0].set_xlim(min(0.8, *ends) / 1.1, max(1.25, *ends) * 1.1)
        by = BY[rows[0].get("rule")]
        figure.suptitle(f"Clipping by {by}: time of the best torch variant / tritonclip's")
        note = "median and quartiles; right of 1x tritonclip is faster"
        figure.supxlabel(f"{note}\n{origin}", fontsize=7)
        entries = [(dtype, COLOURS[dtype], MARKERS[dtype]) for dtype in dtypes]
        handles = [
            Line2D([], [], color=colour, marker=marker, linestyle="", label=label)
            for label, colour, marker in [*entries, ("slower", LOSS, "o")]
        ]
        figure.legend(handles=handles, loc="outside right upper", frameon=False)
        metadata = {"Date": None, "Description": digest(rows), "Title": by}
        figure.savefig(path, format="svg", metadata=metadata)


def _panel(axes: Axes, rows: Sequence[Row], names: Sequence[str], dtypes: Sequence[str]) -> None:
    """One point a row: a line a workload, top down, and the dtypes side by side on it."""
    axes.set_xscale("log")
    for row in rows:
        dtype, ratio = row.get("dtype"), row.get("ratio")
        offset = dtypes.index(dtype) - (len(dtypes) - 1) / 2
        y = names.index(row.get("workload")) + 0.18 * offset
        spread = [row.get("ratio_lo"), row.get("ratio_hi")]
        axes.plot(spread, [y, y], color=COLOURS[dtype], linewidth=1.2)
        style: Any = {"markeredgecolor": COLOURS[dtype], "markersize": 5}
        style["markerfacecolor"] = LOSS if ratio < 1 else COLOURS[dtype]
        axes.plot(ratio, y, MARKERS[dtype], **style)
    axes.axvline(1.0, color="black", linewidth=1.0)
    axes.axvspan(1e-6, 1.0, color=LOSS, alpha=0.10, linewidth=0)
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axes.set_yticks(range(len(names)), [title(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)


class Report:
    """All files that follow from committed rows.

    Args:
        root: the folder of README.md, docs/ and bench/results/.

    Attributes:
        texts: the text of each page, as it should be.
        drawings: the rows of each figure, and where they were measured.
    """

    def __init__(self, root: Path) -> None:
        self.texts: dict[Path, str] = {}
        self.drawings: dict[Path, tuple[list[Row], str]] = {}
        self._results = root / "bench" / "results"
        for page, marker in PAGES.items():
            text = _page(root / page, marker)
            self.texts[root / page] = SECTION.sub(self._filled, text)

    def _filled(self, match: re.Match[str]) -> str:
        """A section with its markers; notes the figures that it shows."""
        name, of_providers = match["name"] or "cpu", bool(match["providers"])
        origin, rows = load(self._results / f"{name}.json")
        text = section(name, of_providers, origin, rows) if match["name"] else readme_table(rows)
        for rule, drawn in figures([] if of_providers else rows).items():
            path = self._results / f"{name}-{rule}.svg"
            self.drawings[path] = drawn, origin_line(origin, IN_FIGURES)
        return f"{match['start']}{text}{match['end']}"

    def write(self) -> None:
        """Writes every file."""
        for path, text in self.texts.items():
            path.write_text(text)
        for path, (rows, origin) in self.drawings.items():
            draw(rows, path, origin)

    def stale(self) -> list[Path]:
        """Files that are missing, or differ from those that the rows give."""
        texts = [path for path, text in self.texts.items() if path.read_text() != text]
        return texts + [
            path
            for path, (rows, _) in self.drawings.items()
            if not path.exists() or digest(rows) not in path.read_text()
        ]


def _page(path: Path, marker: str) -> str:
    """The text of a page that has whole markers.

    Raises:
        RefusedError: it lacks them, or there is no such page.
    """
    text, kind = path.read_text() if path.exists() else "", marker.partition(":")[0]
    whole, started = len(SECTION.findall(text)), text.count(f"<!-- {kind}")
    if whole == 0 or whole != started:
        raise RefusedError(
            f"{path}: expected <!-- {marker} --> and its end <!-- /{kind} --> around each table, "
            f"found {whole} whole ones of {started}; write the markers where it belongs"
        )
    return text
