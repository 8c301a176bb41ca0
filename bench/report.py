"""Tables and figures in README and docs, from committed JSON of pytest-benchmark.

`python -m bench.report` writes them; `--check` writes nothing, and fails if one is stale. Tables
stand between `<!-- bench:NAME -->` and `<!-- /bench -->` in docs/, and have the rows of
bench/results/NAME.json (with `<!-- bench:NAME providers -->`, the times of all providers).
Headlines stand between `<!-- speed:NAME -->` and `<!-- /speed -->` in README.md and docs/index.md.
Figures lie beside the rows as NAME-RULE.svg, in the colours of the reader's scheme; if a page names
NAME-RULE-dark.svg, this one is always dark. Rows are written back without samples and, unless a
table shows them, without other providers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.workloads import BY, CLIPS, TWO, WORKLOADS, named

# The markers of each kind of page.
PAGES = {"docs/performance/*.md": "bench:NAME", "README.md": "speed:NAME"}
PAGES |= {"docs/index.md": "speed:NAME"}
SECTION = re.compile(
    r"(<!-- (speed|bench):([\w-]+)( providers)? -->\n).*?(<!-- /\2 -->)", re.DOTALL
)
CASE = ("workload", "dtype", "rule", "step")
# Tables with more rows are folded.
LONG = 10
# The path to the results from the pages of docs/performance/.
TO_RESULTS = "../../bench/results"
# Provenance that figures and folded summaries show; provenance that only the plugin's JSON keeps.
SHORT = ("cpu", "device", "threads", "torch", "commit", "date")
OF_PLUGIN = re.compile("node|processor|release|python_(build|compiler|impl.*)")
STATS = ("median", "q1", "q3", "rounds", "iterations")
# The parts of a case, then the figures, in the order of a table.
PARTS = (
    *("workload", "model", "dtype", "rule", "step", "layout", "provider", "path", "call"),
    *("feature", "list", "tensors"),
)
COLUMNS = (
    *PARTS,
    *("norm_error", "truth", "norm", "distinct", "collectives", "outcome", "us", "ratio"),
    *("baseline", "over_us", "torch_us", "share", "floor_us", "us_per_tensor", "clip_us"),
    *("step_share", "extra_mb"),
)
# The headings that differ from the names of the columns.
HEADINGS = {"workload": "gradients", "rule": "by", "feature": "a step with", "baseline": "over"}
HEADINGS |= {"share": "of torch", "step_share": "of the step", "extra_mb": "extra MB"}
HEADINGS |= {"us_per_tensor": "us a tensor"}
FORMATS = {"norm_error": ".0e", "truth": ".7g", "norm": ".7g", "step_share": ".2%"}
FORMATS |= dict.fromkeys(("ratio", "share", "us_per_tensor"), ".2f")
# The columns of a GPU's tables with our figure and torch's.
ON_GPU = (
    ("GPU us", "device_us", ",.1f"),
    ("host us", "host_us", ",.0f"),
    ("launches", "launches", ""),
)
# Advice is close to the best limit if it loses at most this share of what that limit gains. A loss
# is lower than another by more than so many standard errors, and than this share of the lower one.
CLOSE, ERRORS, CLEAR = 0.25, 2.0, 0.03
# Advice in the first table, of which the first is in every table; and advice whose limit is shown.
SHOWN = ("no clipping", "best of the grid", "1.0", "suggest", "find")
LIMITED = ("best of the grid", "suggest", "find")
# Colours are those of the figure's style, with one short name for its font.
STYLE = ("tritonclip.advice.figures", {"font.family": "DejaVu Sans"})
# Colours of text, lines and grid on a dark page.
DARK = (
    "text{fill:#e6e6e6} [style*='stroke: #000000']{stroke:#e6e6e6 !important}"
    " [style*='stroke: #e6e6e6']{stroke:#444444 !important}"
)
COLOURS = {"float32": "C0", "bfloat16": "C4", "float16": "C5", "mixed": "C3", "float64": "C2"}
MARKERS = dict(zip(COLOURS, "os^Dv", strict=True))
# A benchmark of the JSON, with parameters, extra information and microseconds by name.
Row = dict[str, Any]


def flat(benchmark: dict[str, Any]) -> Row:
    """The row of a benchmark; if it was timed, `us` is its median, and its quartiles are there."""
    stats = benchmark.get("stats", benchmark)
    found = {"test": benchmark["name"].partition("[")[0]}
    times = {"us": "median", "us_lo": "q1", "us_hi": "q3"}
    found |= {name: round(stats[of] * 1e6, 9) for name, of in times.items() if of in stats}
    return {**found, **benchmark["params"], **benchmark["extra_info"]}


def read(path: Path) -> dict[str, Any]:
    """Reads the JSON of a whole run without a failure, or exits; keeps only what tables need.

    Numbers are rounded to seven digits, as many as a float32 norm has and more than any clock.
    """
    if not path.exists():
        sys.exit(f"{path} does not exist: measure first, with --benchmark-json={path}")
    text, number = path.read_text(), lambda digits: float(f"{float(digits):.7g}")
    record: dict[str, Any] = json.loads(text, parse_float=number)
    names = [one["name"] for one in record.get("benchmarks", ())]
    status = record.get("exit_status")
    if status != 0 or not names or len(set(names)) < len(names):
        sys.exit(
            f"{path}: expected different rows of a run of these benchmarks that ended with status "
            f"0, got {len(names)} rows, {len(set(names))} of them different, and status {status}: "
            "measure again, to the end"
        )
    kept = {name: record[name] for name in ("command", "exit_status", "datetime")}
    machine, commit = record["machine_info"].items(), record["commit_info"].items()
    kept["machine_info"] = {k: v for k, v in machine if not OF_PLUGIN.fullmatch(k)}
    kept["commit_info"] = {k: v for k, v in commit if k in ("id", "dirty")}
    keys = ("name", "params", "extra_info")
    kept["benchmarks"] = [
        {key: one[key] for key in keys}
        | {"stats": {k: v for k, v in one["stats"].items() if k in STATS}}
        for one in record["benchmarks"]
    ]
    return kept


def origin(record: dict[str, Any]) -> dict[str, Any]:
    """Where rows were measured; the command is formatted as code, so that its dashes stay."""
    machine, commit = dict(record["machine_info"]), record["commit_info"]["id"]
    cpu, system, kind = (machine.pop(name) for name in ("cpu", "system", "machine"))
    found = {"command": f"`{record['command']}`", "date": record["datetime"].partition("T")[0]}
    short = commit[:7] if len(commit) == 40 else commit
    found["commit"] = f"{short}-dirty" if record["commit_info"].get("dirty") else short
    found["cpu"] = cpu["brand_raw"]
    return found | {"cores": cpu["count"], "platform": f"{system} {kind}"} | machine


def line(origin: dict[str, Any], names: Sequence[str] = ()) -> str:
    """The named entries of a provenance, or all of them, in one line."""
    return ", ".join(f"{name} {origin[name]}" for name in names or origin)


def dumped(record: dict[str, Any], whole: bool) -> str:
    """JSON with one row on each line; the rows of other providers only if `whole`."""
    rows = ",\n".join(
        json.dumps(one, allow_nan=False, separators=(",", ":"))
        for one in record["benchmarks"]
        if whole or one["params"]["provider"] == "tritonclip"
    )
    start = {name: value for name, value in record.items() if name != "benchmarks"}
    return f'{json.dumps(start, indent=1)[:-2]},\n "benchmarks": [\n{rows}\n]}}\n'


def unique(rows: Sequence[Row], part: str) -> list[str]:
    return list(dict.fromkeys(row[part] for row in rows))


def ratio_rows(rows: Sequence[Row]) -> list[Row]:
    """Our rows that have a ratio to torch, from small workloads to large ones."""
    ours = [r for r in rows if r.get("provider") == "tritonclip" and "rule" in r and "ratio" in r]
    order = {name: i for i, name in enumerate(WORKLOADS)}
    return sorted(ours, key=lambda row: order[row["workload"]])


def ratio_cell(row: Row) -> str:
    """A ratio with quartiles, marked if we are slower."""
    ratio, low, high = (row[f"ratio{end}"] for end in ("", "_lo", "_hi"))
    slower = " slower" if round(ratio, 2) < 1 else ""
    return f"{ratio:.2f}x{slower} ({low:.2f} to {high:.2f})"


def time_cell(row: Row) -> str:
    more = f", {row['ratio']:.2f}x" if "ratio" in row else ""
    return f"{row['us'] / 1e3:.3g} ms{more}"


def cell(row: Row, name: str) -> str:
    """A figure with its quartiles and goal; empty if nothing was measured."""
    value = row.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    form = FORMATS.get(name, ",d" if isinstance(value, int) else ",.1f")
    text = format(value, form)
    low, high, goal = (row.get(f"{name}_{end}") for end in ("lo", "hi", "goal"))
    if low is not None:
        text += f" ({low:{form}} to {high:{form}})"
    if goal is not None:
        text += f" / {goal:{form}}{' over' if value > goal else ''}"
    return text


def markdown(lines: Sequence[dict[str, str]]) -> str:
    """A table without empty columns; each line has its texts by heading."""
    columns = dict.fromkeys(name for one in lines for name in one)
    shown = [name for name in columns if any(one.get(name) for one in lines)]
    texts = [shown, ["---"] * len(shown), *([one.get(name, "") for name in shown] for one in lines)]
    return "\n".join(f"| {' | '.join(text)} |" for text in texts)


def folded(title: str, *parts: str) -> str:
    """Parts of a page that are folded until the reader opens them."""
    return "\n\n".join([f"<details>\n<summary>{title}</summary>", *parts, "</details>"])


def table(rows: Sequence[Row]) -> str:
    """A table for each kind of case, with a row for each case; folded if there are many rows."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        line = {HEADINGS.get(name, name.replace("_", " ")): cell(row, name) for name in COLUMNS}
        groups.setdefault(tuple(name for name in PARTS if name in row), []).append(line)
    texts = map(markdown, groups.values())
    return folded(f"All {len(rows)} cases", *texts) if len(rows) > LONG else "\n\n".join(texts)


def pivot(
    rows: Sequence[Row], parts: Sequence[str], column: str, cell: Callable[[Row], str]
) -> str:
    """A table with a row for each combination of parts, and a column for each value of `column`."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        own = {HEADINGS.get(part, part): named(part, row[part]) for part in parts}
        lines.setdefault(tuple(own.values()), own)[row[column]] = cell(row)
    return markdown(list(lines.values()))


def summary(rows: Sequence[Row]) -> str:
    """The median, the worst, and the share of cases below 1.0x."""
    ours = sorted(ratio_rows(rows), key=lambda row: float(row["ratio"]))
    if not ours:
        return "No ratio was measured."
    ratios = [row["ratio"] for row in ours]
    workload, dtype, rule, step = (named(part, ours[0][part]) for part in CASE)
    lost = sum(ratio < 1 for ratio in ratios) / len(ratios)
    return (
        f"Over all {len(ours)} cases the median is {statistics.median(ratios):.2f}x, the worst "
        f"{ratios[0]:.2f}x ({workload}, {dtype}, by {rule}, {step}); "
        f"{f'{lost:.0%} are' if lost else 'none is'} below 1.0x."
    )


def spread(rows: Sequence[Row], rule: str) -> str:
    """The median and the range of the ratios by one rule, in words."""
    ratios = sorted(row["ratio"] for row in ratio_rows(rows) if row["rule"] == rule)
    middle, low, high = (
        f"{ratio:.{1 if ratio >= 1 else 2}f}"
        for ratio in (statistics.median(ratios), ratios[0], ratios[-1])
    )
    lost = sum(ratio < 1 for ratio in ratios)
    cases = f"{len(ratios)} cases{f', {lost} of them slower than torch' if lost else ''}"
    return f"By {BY[rule]} **{middle}x** ({low}x to {high}x over {cases})"


def headline(origin: dict[str, Any], rows: Sequence[Row]) -> str:
    """A summary: shares of a training step, ratios over processes, or ratios by norm and value."""
    if "model" in rows[0]:
        table = pivot(rows, ["model"], "provider", lambda row: f"{row['step_share']:.1%}")
        return f"Clipping's share of a whole training step, float32 on a CPU:\n\n{table}\n"
    if "layout" in rows[0]:
        timed = [row for row in rows if row["test"] == "test_two_processes"]
        found = [f"**{1 / row['share']:.1f}x** on {row['tensors']:,} shards" for row in timed]
        return f"**FSDP2, two processes on that CPU.** By global norm {', '.join(found)}.\n"
    on_cpu = origin["device"] == "cpu"
    device = f"{origin['cpu']}, {origin['threads']} threads" if on_cpu else origin["device"]
    return f"**{device}.** {' '.join(f'{spread(rows, rule)}.' for rule in TWO)}\n"


def section(name: str, of_providers: bool, origin: dict[str, Any], rows: Sequence[Row]) -> str:
    """The text between the markers of a page."""
    notes: list[str] = []
    if busy := rows[0].get("busy"):
        notes = [f"Meanwhile {busy} other processes kept cores busy."]
    if after := rows[0].get("after"):
        notes = [f"Before every call: a {after}."]
    if "advice" in rows[0]:
        others = [row for row in rows if row["advice"] not in SHOWN[1:]]
        shown = [row for row in rows if row["advice"] in SHOWN]
        parts = [folded("Losses, and limits in brackets", in_losses(shown))]
        parts.append(folded("Other advice, and rules", in_losses(others)))
        for view, is_new in (("in view", False), ("not in view", True)):
            if chosen := [row for row in rows if row.get("is_new", False) == is_new]:
                n = len(unique(chosen, "task"))
                parts.append(f"The {n} that were {view} while the search was changed:")
                parts.append(in_counts(chosen))
    elif "rule" not in rows[0]:
        parts = [table(rows)]
        if "model" in rows[0]:
            parts.insert(0, headline(origin, rows))
    elif of_providers:
        times = pivot(rows, CASE, "provider", time_cell)
        parts = [summary(rows), folded("The times of all", times)]
    else:
        parts = list(ratios(name, rows))
    measured = folded(f"Measured on: {line(origin, SHORT)}", line(origin))
    rows_at = f"Rows: [{name}.json]({TO_RESULTS}/{name}.json).\n"
    return "\n\n".join([*notes, *parts, measured, rows_at])


def in_losses(rows: Sequence[Row]) -> str:
    """Medians over seeds of the losses of each task, untrained, and with each kind of advice."""

    def losses(row: Row) -> str:
        limit = statistics.median(math.inf if one is None else one for one in row["limits"])
        text = "none" if math.isinf(limit) else f"{limit:.2g}"
        return middle(row["losses"]) + (f" ({text})" if row["advice"] in LIMITED else "")

    medians = [{**row, "untrained": middle(row["untrained"])} for row in rows]
    return pivot(medians, ("task", "untrained"), "advice", losses)


def middle(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g}"


def in_counts(rows: Sequence[Row]) -> str:
    """Counts the tasks in which advice is close to the best limit, or worse than none."""
    own = {(row["task"], row["advice"]): row["losses"] for row in rows}
    tasks = unique(rows, "task")
    best, none = ({t: own[t, one] for t in tasks} for one in ("best of the grid", "no clipping"))
    gains = {t: statistics.fmean(none[t]) - statistics.fmean(best[t]) for t in tasks}
    gained = [t for t in tasks if is_lower(best[t], none[t])]
    lines = []
    for advice in unique(rows, "advice"):
        mean = {t: statistics.fmean(own[t, advice]) for t in tasks}
        regrets = {t: (mean[t] - statistics.fmean(best[t])) / gains[t] for t in gained}
        missed = {t: regret for t, regret in regrets.items() if regret > CLOSE}
        worse = [t for t in tasks if is_lower(none[t], own[t, advice])]
        line = {"advice": advice}
        line["within a quarter"] = f"{len(gained) - len(missed)} of {len(gained)}"
        line["worse than none"] = f"{len(worse)} of {len(tasks)}"
        if advice in LIMITED:
            limits = {row["task"]: row["limits"] for row in rows if row["advice"] == advice}
            free = [t for t in tasks if t not in gained and not any(limits[t])]
            line["no limit where none clearly helps"] = f"{len(free)} of {len(tasks) - len(gained)}"
            texts = [f"{t} ({regret:.2f})" for t, regret in missed.items()]
            line["misses (regret)"] = ", ".join(texts + [f"{t} (worse)" for t in worse])
        lines.append(line)
    return markdown(lines)


def is_lower(losses: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the mean loss is lower than another one of the same seeds, by more than noise."""
    differences = [b - a for a, b in zip(losses, others, strict=True)]
    n, gain = len(differences), statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(n) if n > 1 else 0.0
    low = min(statistics.fmean(losses), statistics.fmean(others))
    return gain > ERRORS * error and gain > CLEAR * abs(low)


def ratios(name: str, rows: Sequence[Row]) -> Iterator[str]:
    """A summary and the first figure; then, folded, other figures and a table of all cases."""
    ours = ratio_rows(rows)
    yield "\n".join([summary(rows), *(f"- {spread(rows, rule)}." for rule in drawn(ours))])
    first, *others = [
        f"![Ratio to torch by {BY[rule]}]({TO_RESULTS}/{name}-{rule}.svg)" for rule in drawn(ours)
    ] or [""]
    if first:
        yield first
    lists = [WORKLOADS[one] for one in unique(rows, "workload")]
    notes = " ".join(f"{one.title}: {one.note}." for one in lists if one.note)
    of_torch = {case_of(row): row for row in rows if row["provider"] == "torch"}
    lines = []
    for row in ours:
        gradients, dtype, rule, step = case_of(row)
        line = {"gradients": gradients, "dtype": dtype, "by": f"{rule}, {step}"}
        line["ratio to torch (quartiles)"] = ratio_cell(row)
        line["us; torch's"] = f"{row['us']:,.1f}; {row['baseline_us']:,.1f}"
        line["rate of torch.sum"] = f"{row['sum_share']:.0%}" if "sum_share" in row else ""
        if "device_us" in row:
            pair = row, of_torch[case_of(row)]
            for name, figure, form in ON_GPU:
                line[f"{name}; torch's"] = "; ".join(f"{one[figure]:{form}}" for one in pair)
        lines.append(line)
    yield folded(f"All {len(ours)} cases", *others, *[notes] * bool(notes), markdown(lines))


def case_of(row: Row) -> tuple[str, ...]:
    return tuple(named(part, row[part]) for part in CASE)


def drawn(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each figure, by rule; further rules are measured on too few lists."""
    by_rule = {rule: [row for row in rows if row["rule"] == rule] for rule in CLIPS}
    return {rule: own for rule, own in by_rule.items() if own}


def digest(rows: Sequence[Row]) -> str:
    """The text in a figure that identifies its rows, so that a stale figure is found."""
    text = json.dumps(rows, sort_keys=True)
    return f"rows sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def draw(rows: Sequence[Row], path: Path, origin: str) -> None:
    """Draws our ratios by one rule as SVG, with a line for each workload and marks for dtypes."""
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    names, steps = (unique(rows, part) for part in ("workload", "step"))
    dtypes = {name: [r["dtype"] for r in rows if r["workload"] == name] for name in names}
    beside = {name: [one for one in COLOURS if one in dtypes[name]] for name in names}
    ends = [row[f"ratio{end}"] for row in rows for end in ("_lo", "_hi")]
    with style.context(STYLE):
        figure, marks = Figure(figsize=(6, 2 + 0.36 * len(names))), dict[str, Any]()
        panels = figure.subplots(1, len(steps), sharex=True, sharey=True, squeeze=False)[0]
        for axes, step in zip(panels, steps, strict=True):
            axes.set(title=step, xscale="log", ylim=(len(names) - 0.5, -0.5))
            axes.set_xlim(min(0.8, *ends) / 1.1, max(1.25, *ends) * 1.1)
            axes.xaxis.set_major_locator(LogLocator(base=2))
            axes.xaxis.set_major_formatter("{x:g}x")
            axes.minorticks_off()
            axes.grid(visible=False, axis="y")
            axes.grid(axis="x")
            axes.axvline(1.0, color="black", linewidth=1.0)
            slower = axes.axvspan(1e-6, 1.0, color="C1", alpha=0.12, linewidth=0)
            for dtype, colour in COLOURS.items():
                own = [row for row in rows if (row["dtype"], row["step"]) == (dtype, step)]
                ys = []
                for name in (row["workload"] for row in own):
                    offset = beside[name].index(dtype) - (len(beside[name]) - 1) / 2
                    ys.append(names.index(name) + 0.16 * offset)
                if own:
                    # One line with gaps shows all quartiles.
                    xs = [x for r in own for x in (r["ratio_lo"], r["ratio_hi"], math.nan)]
                    axes.plot(xs, [y for y in ys for _ in range(3)], color=colour, linewidth=1.2)
                    form = {"color": colour, "marker": MARKERS[dtype], "linestyle": ""}
                    medians = [row["ratio"] for row in own]
                    (marks[dtype],) = axes.plot(medians, ys, markersize=5, **form)
        panels[0].set_yticks(range(len(names)), [named("workload", name) for name in names])
        by = BY[rows[0]["rule"]]
        title = f"Clipping by {by}: speedup over the best torch variant"
        below = textwrap.fill(origin, 80)
        figure.supxlabel(f"marks: medians; lines: quartiles\n{below}", fontsize=8)
        handles = {one: marks[one] for one in COLOURS if one in marks} | {
            "slower than torch": slower
        }
        place: Any = {"loc": "outside upper center", "title": title, "title_fontsize": 10}
        figure.legend(handles.values(), handles, ncols=3, **place)
        metadata = {"Date": None, "Description": digest(rows), "Title": by}
        figure.savefig(path, format="svg", metadata=metadata, transparent=True)
    scheme = "all" if path.stem.endswith("-dark") else "(prefers-color-scheme: dark)"
    text = path.read_text().replace("</style>", f"\n@media {scheme}{{{DARK}}}</style>", 1)
    path.write_text(text)


def write(root: Path, check: bool = False) -> list[Path]:
    """Writes pages, figures and rows of a folder; with `check`, returns those that are stale."""
    texts, figures = dict[Path, str](), dict[Path, tuple[list[Row], str]]()

    def filled(match: re.Match[str]) -> str:
        """Returns a section with its markers, and notes the rows and figures that it shows."""
        start, kind, name, of_providers, end = match.groups()
        path = root / "bench" / "results" / f"{name}.json"
        record = read(path)
        source, rows = origin(record), list(map(flat, record["benchmarks"]))
        is_whole = of_providers or any("device_us" in r or "rule" not in r for r in rows)
        texts[path] = dumped(record, bool(is_whole))
        for rule, own in ({} if of_providers else drawn(ratio_rows(rows))).items():
            for figure in (f"{name}-{rule}.svg", f"{name}-{rule}-dark.svg"):
                if figure in match.string or (kind == "bench" and "dark" not in figure):
                    figures[path.with_name(figure)] = own, line(source, SHORT)
        shown = (
            headline(source, rows)
            if kind == "speed"
            else section(name, bool(of_providers), source, rows)
        )
        return f"{start}{shown}{end}"

    for pattern, marker in PAGES.items():
        kind = marker.partition(":")[0]
        pages = {path: path.read_text() for path in sorted(root.glob(pattern))}
        counts = {p: (len(SECTION.findall(t)), t.count(f"<!-- {kind}")) for p, t in pages.items()}
        cut = [str(path) for path, (whole, begun) in counts.items() if whole != begun]
        if cut or not any(whole for whole, _ in counts.values()):
            sys.exit(
                f"{', '.join(cut) or root / pattern}: expected <!-- {marker} --> and its end "
                f"<!-- /{kind} --> around each table; write the markers where it belongs"
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


def main() -> None:
    """Exits with status 1 if something is stale, or if nothing can be written."""
    parser = argparse.ArgumentParser("python -m bench.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where stale")
    if stale := write(Path(__file__).parents[1], parser.parse_args().check):
        names = ", ".join(map(str, stale))
        sys.exit(f"{names}: not what the rows give: run python -m bench.report")


if __name__ == "__main__":
    main()
