"""The history of a run or of several: norms, coefficients and limits by step, read from a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from tritonclip.monitor.formats import Cell, format_of

# A recorder writes these, in this order, and then one for each norm of a part.
COLUMNS = ("step", "norm", "coefficient", "limit", "skipped")
# Begins the columns of groups and parameters, so that no name collides with those above.
PART = "norm/"
# The numbers of a step, by column.
_Row = dict[str, float]
_WRITTEN_BY = "record(...) writes such files, and a file from elsewhere needs a column 'norm'"


@dataclass(frozen=True)
class History:
    """Steps of a run in order, or of several runs that one file has one after the other.

    Attributes:
        steps: their numbers, which rise within a run; 1-d int64.
        norms: global norms *before* clipping; 1-d float64, as are the next three.
        coefficients: factors of the gradients; NaN where unknown.
        limits: of the norm; NaN where unknown.
        skipped: 1 for steps that were left out; NaN where unknown.
        parts: norms of groups or parameters, by name.
        joins: positions of the rows with which a run begins after another: a recorder went on in
            the file, not from a checkpoint, or the numbers of steps start again.
        replaced: rows that are not here, because a run went on from an earlier step.
    """

    steps: Tensor
    norms: Tensor
    coefficients: Tensor
    limits: Tensor
    skipped: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    joins: tuple[int, ...] = ()
    replaced: int = 0

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def runs(self) -> tuple[History, ...]:
        """The runs, in order."""
        return tuple(
            History(
                self.steps[start:end],
                self.norms[start:end],
                self.coefficients[start:end],
                self.limits[start:end],
                self.skipped[start:end],
                {name: norms[start:end] for name, norms in self.parts.items()},
                replaced=self.replaced,
            )
            for start, end in pairwise((0, *self.joins, len(self)))
        )

    def run(self, number: int) -> History:
        """One of the runs, by its number from 1 on; ValueError where there is none."""
        runs = self.runs
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= len(runs):
            raise ValueError(
                f"run must be the number of a run, 1 to {len(runs)} in this history, got {number!r}"
            )
        return runs[number - 1]

    @property
    def is_clipped(self) -> Tensor:
        """Steps whose coefficient is below 1 or, where it is unknown, whose norm is over the limit.

        A step that is not finite is not clipped, nor is one that was skipped; 1-d bool.
        """
        by_limit = self.norms > self.limits
        clipped = torch.where(self.coefficients.isnan(), by_limit, self.coefficients < 1)
        return clipped & self.norms.isfinite() & ~self.is_skipped

    @property
    def is_skipped(self) -> Tensor:
        """Steps that were left out; 1-d bool."""
        return self.skipped == 1


def read(path: str | os.PathLike[str]) -> History:
    """Reads a history file, which a :class:`Recorder` or another program wrote.

    Args:
        path: of a .csv or .jsonl file with a column `norm`. Columns `step`, `coefficient`, `limit`
            and `skipped` are optional, as are norms of parts under names that begin with `norm/`;
            others are not read. Rows without a norm are left out.

    Returns:
        The steps in order. Where a run went on from an earlier checkpoint, so that some numbers of
        steps come again, the later rows count; where all do, from the first, another run begins.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that is no history.
    """
    path = Path(path)
    form = format_of(path)
    text = read_text(path)
    runs: list[list[_Row]] = [[]]
    # The least step so far.
    first = torch.inf
    replaced, joined = 0, False
    last = text.count("\n") + 1 if not text.endswith("\n") else None
    try:
        for number, cells in form.decode(text):
            row = _numbers(number, cells)
            if row is None:
                joined = joined or is_join(cells)
                continue
            if runs[0] and ("step" in row) != ("step" in runs[0][0]):
                raise ValueError(f"line {number}: expected 'step' in every row or in none")
            replaced += _add(runs, row, first, joined=joined)
            first, joined = min(first, row.get("step", torch.inf)), False
    except ValueError as error:
        # A crash may have cut the last line off.
        if last is None or f"line {last}:" not in str(error) or not runs[0]:
            raise ValueError(f"{path} is no history: {error}; {_WRITTEN_BY}") from None
    if not runs[0]:
        raise ValueError(
            f"{path} is no history: expected at least one row with a norm, got none; a recorder "
            "writes after every `every` steps, and at flush() and close()"
        )
    return _history(runs, replaced)


def _add(runs: list[list[_Row]], row: _Row, first: float, *, joined: bool) -> int:
    """Adds a row to the last of the runs, or to a new one; returns how many rows it replaces."""
    if not runs[0] or "step" not in row:
        runs[-1].append(row)
        return 0
    step, last = row["step"], runs[-1][-1]["step"]
    replaced = 0
    if (joined and step > last) or step <= first < last:
        runs.append([])
    while runs[-1] and step <= runs[-1][-1]["step"]:
        runs[-1].pop()
        replaced += 1
        # A run may go on from a checkpoint that is older than another run in its file.
        if not runs[-1] and step > first:
            runs.pop()
    runs[-1].append(row)
    return replaced


def join_after(step: int) -> tuple[Cell, ...]:
    """The row between those of two recorders: the last step of the first, and nothing else."""
    return (step, *[None] * (len(COLUMNS) - 1))


def is_join(cells: Mapping[str, Cell]) -> bool:
    """Whether a row is one of `join_after`."""
    known = [name for name, cell in cells.items() if cell is not None]
    return known == ["step"] and tuple(cells)[: len(COLUMNS)] == COLUMNS


def read_text(path: Path) -> str:
    """The text of a file; where there is none, an error with the remedy."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: expected a history file, got none; a recorder writes it at its first flush, "
            "after `every` steps or at close()"
        )
    if not path.is_file():
        raise ValueError(f"{path}: expected a file, got a folder; name the file in it")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(
            f"{path} is no history: expected text in UTF-8, got other bytes; {_WRITTEN_BY}"
        ) from None


def _numbers(number: int, cells: dict[str, Cell]) -> _Row | None:
    """The numbers of a row; None for one without a norm."""
    if "norm" not in cells:
        found = ", ".join(map(repr, list(cells)[:8])) or "none"
        raise ValueError(f"line {number}: expected a column 'norm', got columns {found}")
    if cells["norm"] is None:
        return None
    wanted = [name for name in cells if name in COLUMNS or name.startswith(PART)]
    row = {name: _number(number, name, cells[name]) for name in wanted}
    if row["norm"] < 0:
        raise ValueError(f"line {number}: expected norm 0 or more, got {row['norm']}")
    step = row.get("step", 0.0)
    if not step.is_integer():
        raise ValueError(f"line {number}: expected step to be a whole number, got {step}")
    return row


def _number(number: int, name: str, cell: Cell) -> float:
    if cell is None:
        return torch.nan
    if isinstance(cell, str) and cell.strip().lower() in ("true", "false"):
        return float(cell.strip().lower() == "true")
    try:
        return float(cell)
    except (TypeError, ValueError):
        expected = f"line {number}: expected {name} to be a number"
        raise ValueError(f"{expected}, got {cell!r:.40}") from None


def _history(runs: list[list[_Row]], replaced: int) -> History:
    rows = [row for run in runs for row in run]
    names = list(dict.fromkeys(name for row in rows for name in row))

    def column(name: str) -> Tensor:
        values = [row.get(name, torch.nan) for row in rows]
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    steps = column("step") if "step" in names else torch.arange(1, len(rows) + 1, device="cpu")
    return History(
        steps.long(),
        column("norm"),
        column("coefficient"),
        column("limit"),
        column("skipped"),
        {name.removeprefix(PART): column(name) for name in names if name.startswith(PART)},
        tuple(accumulate(len(run) for run in runs[:-1])),
        replaced,
    )
