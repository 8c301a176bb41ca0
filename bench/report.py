"""`python -m bench report`: from committed rows to tables and figures in README and docs.

Tables stand between `<!-- bench:NAME -->` and `<!-- /bench -->` in docs/performance/, from the rows
of bench/results/NAME.json (`<!-- bench:NAME providers -->`: the times of all providers), and
between `<!-- speed:NAME -->` and `<!-- /speed -->` in README.md. Figures lie beside the rows, as
NAME-RULE.svg. Rows that were not checked, or found wrong, are refused (`results.checked`).
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from rich import box

from bench import results
from bench.results import RefusedError, Row
from bench.workloads import BY, TWO, WORKLOADS, named

# The markers that pages have.
PAGES = {"docs/performance/*.md": "bench:NAME", "README.md": "speed:NAME"}
SECTION = re.compile(
    r"(<!-- (speed|bench):([\w-]+)( providers)? -->\n).*?(<!-- /\2 -->)", re.DOTALL
)
CASE = ("workload", "dtype", "rule", "step")
# Workloads of the README's table, from short to long.
SHOWN = (
    *("small_1", "small_10", "small_100", "lenet5", "resnet20", "resnet50"),
    *("gpt2_124m", "llama3_8b", "huge_and_small", "tiny_10000"),
)
# From the pages of docs/performance/.
TO_RESULTS = "../../bench/results"
# Provenance that a figure shows, and a page above the fold.
SHORT = ("cpu", "device", "threads", "torch", "commit", "date")
# Colours are those of the figure's style.
SLOWER = "C1"
COLOURS = {"float32": "C0", "bfloat16": "C4", "float16": "C5", "mixed": "C3", "float64": "C2"}
MARKERS = dict(zip(COLOURS, "os^Dv", strict=True))


def origin_line(origin: dict[str, Any]) -> str:
    """Provenance in one line; the command as code, whose dashes a page leaves as they are."""
    shown = origin | {"command": f"`{origin['command']}`"} if "command" in origin else origin
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def short_origin(origin: dict[str, Any]) -> str:
    """The provenance that readers look for."""
    return origin_line({key: origin[key] for key in SHORT if key in origin})


def unique(rows: Sequence[Row], part: str) -> list[str]:
    """A part of the cases, each value in the order in which it comes first."""
    return list(dict.fromkeys(row.case[part] for row in rows))


def ratio_rows(rows: Sequence[Row]) -> list[Row]:
    """Our rows that have a ratio to torch, from small workloads to large ones."""
    ours = [r for r in rows if r.benchmark == "speed" and r.get("provider") == "tritonclip"]
    order = {name: i for i, name in enumerate(WORKLOADS)}
    return sorted((r for r in ours if "ratio" in r.values), key=lambda r: order[r.case["workload"]])


def ratio_cell(row: Row, tie: str = "") -> str:
    """A ratio with quartiles, bold where it is a loss; `tie` instead where they include 1."""
    ratio, low, high = (row.get(f"ratio{end}") for end in ("", "_lo", "_hi"))
    if tie and low <= 1 <= high:
        return tie
    text = f"{ratio:.2f}x" + ("" if tie else f" ({low:.2f} to {high:.2f})")
    return f"**{text}**" if ratio < 1 else text


def time_cell(row: Row, beside: str = "ratio", form: str = "{:.2f}x") -> str:
    """The time of a call, and a figure beside it where it has one."""
    if "wall_us" not in row.values:
        return "wrong result"
    more = f", {form.format(row.get(beside))}" if beside in row.values else ""
    return f"{row.get('wall_us') / 1e3:.3g} ms{more}"


def pivot(rows: Sequence[Row], line: Sequence[str], column: str, cell: Callable[[Row], str]) -> str:
    """A table in Markdown: cases by parts in a line, and a column; a cell has its last row."""
    columns = list(dict.fromkeys(column.format_map(row.case) for row in rows))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        case = tuple(named(part, row.case[part]) for part in line)
        lines.setdefault(case, {})[column.format_map(row.case)] = cell(row)
    headings = [*(results.COLUMNS[part][0] for part in line), *columns]
    texts = [headings, ["---"] * len(headings)]
    texts += [[*own, *(cells.get(one, "") for one in columns)] for own, cells in lines.items()]
    return "\n".join(f"| {' | '.join(text)} |" for text in texts)


def summary(rows: Sequence[Row]) -> str:
    """The median, the worst, and the share of cases below 1.0x."""
    ours = sorted(ratio_rows(rows), key=lambda row: float(row.get("ratio")))
    if not ours:
        return "No ratio was measured."
    ratios = [float(row.get("ratio")) for row in ours]
    workload, dtype, rule, step = (named(part, ours[0].case[part]) for part in CASE)
    lost = sum(ratio < 1 for ratio in ratios) / len(ratios)
    share = f"{lost:.0%} are" if lost else "none is"
    return (
        f"Over all {len(ours)} cases the median is {statistics.median(ratios):.2f}x, the worst "
        f"{ratios[0]:.2f}x ({workload}, {dtype}, by {rule}, {step}); {share} below 1.0x."
    )


def share_table(rows: Sequence[Row]) -> str:
    """The README's table of shares of a training step."""
    share = "{step_share:.1%}".format_map
    table = pivot(rows, ["model"], "{provider}", lambda row: share(row.values))
    return f"Clipping's share of a whole training step, float32 on a CPU:\n\n{table}\n"


def ratio_table(rows: Sequence[Row]) -> str:
    """The README's table of ratios: float32; by value, the worse of both steps."""
    shown = []
    for row in ratio_rows(rows):
        workload, dtype, rule, _ = (row.case[part] for part in CASE)
        if workload in SHOWN and dtype == "float32" and rule in TWO:
            # Of two rows in one cell the last is shown.
            place = SHOWN.index(workload), rule, -row.get("ratio") if rule == "value" else 0
            step = {"step": "by value"} if rule == "value" else {}
            shown.append((place, replace(row, case=row.case | step)))
    ordered = [row for _, row in sorted(shown, key=itemgetter(0))]
    table = pivot(ordered, ["workload"], "{step}", partial(ratio_cell, tie="tie"))
    used = {"tie": "tie: no clear difference", "**": "bold: slower"}
    signs = "; ".join(text for sign, text in used.items() if sign in table)
    signs = f" ({signs})" if signs else ""
    return (
        f"Speed-up of one call over torch's fastest variant, float32 on a CPU{signs}:\n\n"
        f"{table}\n\n{summary(rows)}\n"
    )


def section(name: str, of_providers: bool, origin: dict[str, Any], rows: Sequence[Row]) -> str:
    """The text between a section's markers."""
    first = [
        f"<details>\n<summary>Measured on: {short_origin(origin)}</summary>",
        f"{origin_line(origin)}\n\n</details>",
    ]
    if busy := max(row.case.get("busy", 0) for row in rows):
        first.append(f"Meanwhile {busy} other processes kept cores busy.")
    if after := rows[0].case.get("after"):
        first.append(f"Before every call: a {after}.")
    if rows[0].benchmark != "speed":
        parts = [results.table(rows, border=box.MARKDOWN)]
    elif of_providers:
        parts = [summary(rows), pivot(rows, CASE, "{provider}", time_cell)]
    else:
        parts = list(_ratios(name, rows))
    return "\n\n".join([*first, *parts, f"Rows: [{name}.json]({TO_RESULTS}/{name}.json).\n"])


def _ratios(name: str, rows: Sequence[Row]) -> Iterator[str]:
    """A summary, the ratios to torch, figures, and the share of torch.sum."""
    lists = [WORKLOADS[one] for one in unique(rows, "workload")]
    yield summary(rows) + "".join(f" {one.title}: {one.note}." for one in lists if one.note)
    ours = ratio_rows(rows)
    yield pivot(ours, ["workload", "rule"], "{dtype} {step}", ratio_cell)
    for rule in unique(ours, "rule"):
        yield f"![Ratio to torch by {BY[rule]}]({TO_RESULTS}/{name}-{rule}.svg)"
    if on_gpu := [row for row in rows if "device_us" in row.values and row.get("launches")]:
        yield "Time on the GPU alone, of the host, and launches:"
        times = "{device_us:.1f} us, host {host_us:.0f} us, {launches}".format_map
        yield pivot(on_gpu, CASE, "{provider}", lambda row: times(row.values))
    if large := [row for row in ours if "sum_share" in row.values]:
        yield "Our time, and the share of it that torch.sum over as many bytes takes:"
        share = partial(time_cell, beside="sum_share", form="{:.0%}")
        yield pivot(large, CASE[:3], "{step}", share)


def digest(rows: Sequence[Row]) -> str:
    """The text in a figure that names the rows it shows, so that a stale one is found."""
    text = json.dumps([vars(row) for row in rows], sort_keys=True)
    return f"rows sha256 {hashlib.sha256(text.encode()).hexdigest()}"


@style.context("tritonclip.monitor.figures")
def draw(rows: Sequence[Row], path: Path, origin: str) -> None:
    """Draws our ratios by one rule as SVG: a line a workload, the dtypes side by side on it."""
    names, steps = (unique(rows, part) for part in ("workload", "step"))
    drawn = {(row.case["workload"], row.case["dtype"]) for row in rows}
    figure = Figure(figsize=(8, 1.8 + 0.4 * len(names)))
    panels = figure.subplots(1, len(steps), sharex=True, sharey=True, squeeze=False)[0]
    for axes, step in zip(panels, steps, strict=True):
        axes.set(title=step, xscale="log", ylim=(len(names) - 0.5, -0.5))
        axes.xaxis.set_major_locator(LogLocator(base=2))
        axes.xaxis.set_major_formatter("{x:g}x")
        axes.minorticks_off()
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x")
        axes.axvline(1.0, color="black", linewidth=1.0)
        slower = axes.axvspan(1e-6, 1.0, color=SLOWER, alpha=0.12, linewidth=0)
    panels[0].set_yticks(range(len(names)), [named("workload", name) for name in names])
    ends = [row.get(f"ratio{end}") for row in rows for end in ("_lo", "_hi")]
    panels[0].set_xlim(min(0.8, *ends) / 1.1, max(1.25, *ends) * 1.1)
    marks = {}
    for row in rows:
        workload, dtype, _, step = (row.case[part] for part in CASE)
        axes, colour = panels[steps.index(step)], COLOURS[dtype]
        beside = [one for one in COLOURS if (workload, one) in drawn]
        y = names.index(workload) + 0.16 * (beside.index(dtype) - (len(beside) - 1) / 2)
        axes.hlines(y, row.get("ratio_lo"), row.get("ratio_hi"), colour, linewidth=1.2)
        (marks[dtype],) = axes.plot(row.get("ratio"), y, MARKERS[dtype], color=colour, ms=5)
    by = BY[rows[0].case["rule"]]
    title = f"Clipping by {by}: time of the best torch variant / tritonclip's"
    figure.supxlabel(f"marks: medians; lines: quartiles\n{origin}", fontsize=7)
    handles = {one: marks[one] for one in COLOURS if one in marks} | {"slower than torch": slower}
    figure.legend(
        handles.values(),
        handles,
        title=title,
        title_fontsize=10,
        loc="outside upper center",
        ncols=6,
    )
    metadata = {"Date": None, "Description": digest(rows), "Title": by}
    figure.savefig(path, format="svg", metadata=metadata)


def write(root: Path, check: bool = False) -> list[Path]:
    """Writes pages and figures below the folder of README.md, or names those that are stale."""
    figures: dict[Path, tuple[list[Row], str]] = {}

    def filled(match: re.Match[str]) -> str:
        """A section with its markers; notes the figures that it shows."""
        start, kind, name, of_providers, end = match.groups()
        path = root / "bench" / "results" / f"{name}.json"
        origin, rows = results.checked(path)
        ours = [] if of_providers else ratio_rows(rows)
        for rule in unique(ours, "rule"):
            drawn = [row for row in ours if row.get("rule") == rule]
            figures[path.with_name(f"{path.stem}-{rule}.svg")] = drawn, short_origin(origin)
        if kind == "bench":
            text = section(name, bool(of_providers), origin, rows)
        else:
            text = share_table(rows) if rows[0].benchmark == "training" else ratio_table(rows)
        return f"{start}{text}{end}"

    texts: dict[Path, str] = {}
    for pattern, marker in PAGES.items():
        kind = marker.partition(":")[0]
        pages = {path: path.read_text() for path in sorted(root.glob(pattern))}
        cut = [
            path
            for path, text in pages.items()
            if len(SECTION.findall(text)) != text.count(f"<!-- {kind}")
        ]
        if cut or not any(map(SECTION.search, pages.values())):
            raise RefusedError(
                f"{', '.join(map(str, cut)) or root / pattern}: expected <!-- {marker} --> and its "
                f"end <!-- /{kind} --> around each table; write the markers where it belongs"
            )
        texts |= {path: SECTION.sub(filled, text) for path, text in pages.items()}
    if check:
        marks = {path: digest(rows) for path, (rows, _) in figures.items()}
        stale = [path for path, text in texts.items() if path.read_text() != text]
        return stale + [p for p in marks if not p.exists() or marks[p] not in p.read_text()]
    for path, text in texts.items():
        path.write_text(text)
    for path, (rows, shown) in figures.items():
        draw(rows, path, shown)
    return []
