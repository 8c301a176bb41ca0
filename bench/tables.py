"""Rows of the suite as Markdown: ratios for the README, and every column for those who doubt."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from bench.lists import LISTS
from bench.rows import Row

OURS = "tritonclip"
TORCH = "torch"
ERRORS = "norm off by: ours, torch"
BY = {"norm": "global norm", "value": "value", "gradient": "each norm"}


def title(name: str) -> str:
    """A parameter list for people; its name where this version has no such list."""
    return LISTS[name]().title if name in LISTS else name


def step(clipped: bool) -> str:
    """What a step did, in a word."""
    return "clipped" if clipped else "unclipped"


def unique(values: Iterable[Any]) -> list[Any]:
    """Values in the order in which they come first."""
    return list(dict.fromkeys(values))


def ratio_rows(rows: Sequence[Row]) -> list[Row]:
    """Our rows that have a ratio to torch."""
    return [row for row in rows if row.rival == OURS and row.ratio is not None]


def summary(rows: Sequence[Row]) -> str:
    """How many ratios are wins and losses, and the least and largest."""
    ours = ratio_rows(rows)
    if not ours:
        return "No ratio was measured."
    ratios = sorted(row.ratio for row in ours if row.ratio is not None)
    slower = sum(ratio < 1 for ratio in ratios)
    return (
        f"Of {len(ours)} cases {len(ours) - slower} are at least as fast as the best torch variant "
        f"and {slower} slower: {_times(ratios[0])} to {_times(ratios[-1])}, median "
        f"{_times(statistics.median(ratios))}."
    )


def notes(rows: Sequence[Row]) -> str:
    """What is special about lists and dtypes, in one line."""
    lists = [LISTS[name]() for name in unique(row.list for row in rows) if name in LISTS]
    found = [f"{one.title}: {one.note}" for one in lists if one.note]
    if any(row.dtype == "mixed" for row in rows):
        found.append("mixed: bfloat16 for matrices, float32 for vectors")
    return "; ".join(found) + "." if found else ""


def ratio_table(rows: Sequence[Row]) -> str:
    """One line a list and rule, one column a dtype and step: ratio to torch and its quartiles."""
    ours = ratio_rows(rows)
    columns = unique((row.dtype, row.clipped) for row in ours)
    columns.sort(key=lambda c: [unique(row.dtype for row in ours).index(c[0]), c[1]])
    lines = [
        _line(["gradients", "by", *(f"{d} {step(c)}" for d, c in columns), ERRORS]),
        "|---" * (len(columns) + 3) + "|",
    ]
    for name, rule in unique((row.list, row.rule) for row in ours):
        own = [row for row in ours if (row.list, row.rule) == (name, rule)]
        cells = {(row.dtype, row.clipped): ratio_cell(row) for row in own}
        theirs = [r for r in rows if (r.rival, r.list, r.rule) == (TORCH, name, rule)]
        errors = ", ".join(filter(None, (_worst_error(own), _worst_error(theirs))))
        ratios = [cells.get(column, "") for column in columns]
        lines.append(_line([title(name), BY[rule], *ratios, errors]))
    return "\n".join(lines)


def rival_table(rows: Sequence[Row]) -> str:
    """One line a list, dtype, rule and step, one column a rival: its time, and torch's over it."""
    rivals = unique(row.rival for row in rows)
    lines = [_line(["gradients", "dtype", "by", "step", *rivals]), "|---" * (len(rivals) + 4) + "|"]
    for case in unique((row.list, row.dtype, row.rule, row.clipped) for row in rows):
        own = [row for row in rows if (row.list, row.dtype, row.rule, row.clipped) == case]
        cells = {row.rival: _time_cell(row) for row in own}
        name, dtype, rule, clipped = case
        times = [cells.get(rival, "") for rival in rivals]
        lines.append(_line([title(name), dtype, BY[rule], step(clipped), *times]))
    return "\n".join(lines)


def _time_cell(row: Row) -> str:
    if row.wall_us is None:
        return "wrong result"
    ratio = "" if row.ratio is None else f", {_times(row.ratio)}"
    return f"{row.wall_us / 1e3:.1f} ms{ratio}"


def ratio_cell(row: Row) -> str:
    """A ratio and its quartiles; a loss says that it is one."""
    assert row.ratio is not None
    spread = ""
    if row.ratio_lo is not None and row.ratio_hi is not None:
        spread = f" ({row.ratio_lo:.2f} to {row.ratio_hi:.2f})"
    times = _times(row.ratio)
    return f"**{times} slower**{spread}" if row.ratio < 1 else f"{times}{spread}"


FULL = {
    "gradients": lambda r: title(r.list),
    "tensors": lambda r: f"{r.n_tensors:,}",
    "dtype": lambda r: r.dtype,
    "by": lambda r: BY[r.rule],
    "step": lambda r: step(r.clipped),
    "rival": lambda r: r.rival,
    "wall us": lambda r: _number(r.wall_us, ".1f") if r.correct else "wrong result, not timed",
    "quartiles": lambda r: (
        "" if r.wall_lo_us is None else f"{r.wall_lo_us:,.1f} to {r.wall_hi_us:,.1f}"
    ),
    "host us": lambda r: _number(r.host_us, ".1f"),
    "device us": lambda r: _number(r.device_us, ".1f"),
    "graph us": lambda r: _number(r.graph_us, ".1f"),
    "launches": lambda r: _number(r.launches, "d"),
    "bytes moved": lambda r: _number(r.bytes_moved, "d"),
    "GB/s": lambda r: _number(r.gb_per_s, ".1f"),
    "copy GB/s": lambda r: _number(r.copy_gb_per_s, ".1f"),
    "extra bytes": lambda r: _number(r.extra_bytes, "d"),
    "norm error": lambda r: "" if r.norm_error is None else f"{r.norm_error:.0e}",
    "ratio": lambda r: "" if r.ratio is None else ratio_cell(r),
}


def full_table(rows: Sequence[Row]) -> str:
    """Every row with every column; a cell is empty where nothing was measured."""
    lines = [_line(FULL), "|---" * len(FULL) + "|"]
    lines += [_line(cell(row) for cell in FULL.values()) for row in rows]
    return "\n".join(lines)


def _worst_error(rows: Sequence[Row]) -> str:
    errors = [row.norm_error for row in rows if row.norm_error is not None]
    return f"{max(errors):.0e}" if errors else ""


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, f",{form}")


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
