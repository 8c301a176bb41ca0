"""The history of one run or several: a table of norms by step, its readers and its figures."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise, repeat
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.messages import printable
from tritonclip.monitor.history_file import COLUMNS, PREFIX, Cell, Line, format_of

# A spike, as SpikeScore counts it: norms before it, and the distance from their mean in deviations.
_SPIKE_WINDOW, _SPIKE_SIGMAS = 128, 6.0
_WRITTEN_BY = "record(...) writes history files, and other files need a column 'norm'"


class NamedNorm(NamedTuple):
    """The norms of one name over the steps of a history, without those that are NaN or inf.

    Attributes:
        name: of the group or parameter.
        median: of the norms.
        largest: of the norms.
        step: of the largest.
    """

    name: str
    median: float
    largest: float
    step: int


@dataclass
class History:
    """The steps of one run in order, or of several runs, one after the other.

    Attributes:
        columns: by their names in a file, each a 1-d tensor. Only `norm` has to be given.
        replaced: the number of rows left out because a later one of their run has the same step.
        steps: numbers of the steps, which rise within a run; 1-d int64.
        norms: global norms *before* clipping; 1-d float64, as are the next four.
        coefficients: factors of the gradients; NaN where unknown.
        limits: limits of the norm; NaN where unknown.
        skipped: 1 for steps that were skipped; NaN where unknown.
        losses: of the steps' batches; NaN where unknown.
        named_norms: norms of groups or parameters, by name.
    """

    columns: Mapping[str, Tensor]
    replaced: int = 0

    def __post_init__(self) -> None:
        numbers = torch.arange(1, len(self.columns["norm"]) + 1, device="cpu")
        columns = dict.fromkeys(COLUMNS, torch.full_like(self.columns["norm"], torch.nan))
        columns |= {"run": torch.ones_like(numbers), "step": numbers, **self.columns}
        self.columns = columns
        self.steps: Tensor = columns["step"].long()
        self.norms, self.coefficients, self.limits, self.skipped, self.losses = [
            columns[name] for name in COLUMNS[2:]
        ]
        self.named_norms = {
            name.removeprefix(PREFIX): column
            for name, column in columns.items()
            if name.startswith(PREFIX)
        }

    def __len__(self) -> int:
        return len(self.norms)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The position of the first step of each run, and of that after its last."""
        _, sizes = self.columns["run"].unique_consecutive(return_counts=True)
        return [*pairwise([0, *(sizes.cumsum(0).tolist() or [0])])]

    @property
    def runs(self) -> tuple[History, ...]:
        """The runs, in order."""
        return tuple(self.part(start, end) for start, end in self.spans)

    def run(self, number: int) -> History:
        """The run of this number, from 1 on; ValueError for any other."""
        runs = self.runs
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= len(runs):
            raise ValueError(
                f"run must be the number of a run, 1 to {len(runs)} in this history, got {number!r}"
            )
        return runs[number - 1]

    def part(self, start: int, end: int) -> History:
        """The steps from one position on, before another one."""
        columns = {name: column[start:end] for name, column in self.columns.items()}
        return History(columns, self.replaced)

    @property
    def is_limited(self) -> bool:
        """Whether a limit is known to have been in use."""
        return bool(self.limits.isfinite().any() or (self.coefficients < 1).any())

    @property
    def has_losses(self) -> bool:
        """Whether a loss is known."""
        return bool(self.losses.isfinite().any())

    @property
    def is_clipped(self) -> Tensor:
        """Steps with a coefficient below 1 or, where unknown, a norm over the limit; 1-d bool."""
        by_limit = self.norms > self.limits
        clipped = torch.where(self.coefficients.isnan(), by_limit, self.coefficients < 1)
        return clipped & self.norms.isfinite() & ~self.is_skipped

    @property
    def is_positive(self) -> Tensor:
        """Steps whose norm is finite and over 0; 1-d bool."""
        return self.norms.isfinite() & (self.norms > 0)

    @property
    def is_skipped(self) -> Tensor:
        """Steps that were skipped; 1-d bool."""
        return self.skipped == 1

    @property
    def is_over_six_sigma(self) -> Tensor:
        """Steps with a finite norm over 0 that SpikeScore counts; 1-d bool."""
        positive, counted = self.is_positive, torch.zeros_like(self.norms, dtype=torch.bool)
        for start, end in self.spans:
            (at,) = torch.where(positive[start:end])
            over = _over_six_sigma(self.norms[start:end][at])
            counted[start + at[_SPIKE_WINDOW:][over]] = True
        return counted

    @property
    def spike_score(self) -> float:
        """The share of spikes among the steps with a finite norm over 0; NaN for short runs.

        OLMo-core, `StabilityMonitorCallback`, whose total also counts spikes of the loss.
        """
        usable = [int(run.is_positive.sum()) for run in self.runs]
        if max(usable) <= _SPIKE_WINDOW:
            return math.nan
        return int(self.is_over_six_sigma.sum()) / sum(usable)

    def largest(self, n: int = 10) -> list[NamedNorm]:
        """The n names with the largest median norms; none whose norms are all 0."""
        found = []
        for name, norms in self.named_norms.items():
            finite = norms.isfinite()
            if (norms[finite] > 0).any():
                at = int(norms.where(finite, -1.0).argmax())
                median, step = float(norms[finite].quantile(0.5)), int(self.steps[at])
                found.append(NamedNorm(name, median, float(norms[at]), step))
        return sorted(found, key=lambda named: (-named.median, -named.largest))[:n]

    def dead(self) -> dict[str, int]:
        """The names whose norm is 0 at the last step, and for how many steps it has been."""
        counts = {}
        for name, norms in self.named_norms.items():
            others = (norms != 0).nonzero()
            count = len(norms) - (int(others[-1]) + 1 if len(others) else 0)
            if count:
                counts[name] = count
        return counts


def _over_six_sigma(norms: Tensor) -> Tensor:
    """Which of the norms after the first 128 are spikes; of finite norms over 0, in order."""
    if len(norms) <= _SPIKE_WINDOW:
        return torch.zeros(0, dtype=torch.bool, device="cpu")
    before = norms.unfold(0, _SPIKE_WINDOW, 1)[:-1]
    mean = before.mean(1)
    # Norms are right to 1e-6.
    deviation = torch.maximum(before.std(1, correction=0), 1e-6 * mean)
    return norms[_SPIKE_WINDOW:] > mean + _SPIKE_SIGMAS * deviation


class SpikeCounter:
    """Counts spikes as `History.spike_score` does, in the norms of one run as they come."""

    def __init__(self) -> None:
        # Norms at the end, which the next ones are compared with.
        self._last: list[float] = []
        self._n_spikes, self._n_norms = 0, 0

    def add_(self, norms: Iterable[float | None]) -> None:
        """Counts the next norms; those that are unknown, NaN, inf or 0 are left out."""
        usable = [norm for norm in norms if norm is not None and 0 < norm < math.inf]
        joined = [*self._last, *usable]
        over = _over_six_sigma(torch.tensor(joined, dtype=torch.float64, device="cpu"))
        self._n_spikes += sum(over.tolist())
        self._n_norms += len(usable)
        self._last = joined[-_SPIKE_WINDOW:]

    @property
    def score(self) -> float:
        """The share of spikes; NaN before 129 norms."""
        return self._n_spikes / self._n_norms if self._n_norms > _SPIKE_WINDOW else math.nan


def read(path: str | os.PathLike[str]) -> History:
    """Reads a history file, written by a :class:`Recorder` or another program.

    Args:
        path: a .csv or .jsonl file with a column `norm`. The columns `run`, `step`, `coefficient`,
            `limit`, `skipped` and `loss` are optional, and so are named norms in columns
            `norm/<name>`. Other columns are not read.
            A loss that is no number is unknown. Rows without a norm are left out, and so is a last
            line without a line break, which a crash may have cut.

    Returns:
        The steps in order. If step numbers of a run repeat because it resumed from a checkpoint,
        the later rows count. Without a column `run`, a step number that falls begins another run.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a history file.
    """
    path = Path(path)
    format = format_of(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: expected a history file, got none; a recorder writes it at its first "
            "flush, after `every` steps or at close()"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
        return _table(format.decode(text[: text.rfind("\n") + 1]))
    except UnicodeDecodeError:
        error = "expected text in UTF-8, got other bytes"
    except ValueError as found:
        error = str(found)
    raise ValueError(f"{path} is not a history file: {error}; {_WRITTEN_BY}") from None


def _table(lines: Iterable[Line]) -> History:
    """The rows of a file by run, without those that later ones replace."""
    columns: dict[str, array[float]] = {}
    # Positions of the rows of each run.
    runs: dict[str | int, list[int]] = {}
    n, n_falls, last = 0, 0, -torch.inf
    has_steps = False
    for number, cells in lines:
        row = _numbers(number, cells)
        if row is None:
            continue
        if n and ("step" in row) != has_steps:
            raise ValueError(f"line {number}: expected 'step' in every row or in none")
        has_steps = "step" in row
        step = row.setdefault("step", n + 1.0)
        for name, value in row.items():
            column = columns.setdefault(name, array("d"))
            column.extend(repeat(torch.nan, n - len(column)))
            column.append(value)
        n_falls, last = n_falls + (step < last), step
        run: str | int = n_falls
        if "run" in cells:
            if isinstance(cells["run"], list | dict):
                got = type(cells["run"]).__name__
                raise ValueError(f"line {number}: expected run to be a number, got {got}")
            run = str(cells["run"])
        rows = runs.setdefault(run, [])
        while rows and step <= columns["step"][rows[-1]]:
            rows.pop()
        rows.append(n)
        n += 1
    if not n:
        raise ValueError(
            "expected at least one row with a norm, got none; a recorder writes after every "
            "`every` steps, at flush() and at close()"
        )
    kept = torch.tensor([i for rows in runs.values() for i in rows], device="cpu")
    table: dict[str, Tensor] = {}
    for name, column in columns.items():
        column.extend(repeat(torch.nan, n - len(column)))
        table[name] = torch.tensor(column, dtype=torch.float64, device="cpu")[kept]
    sizes = torch.tensor([len(rows) for rows in runs.values()], device="cpu")
    table["run"] = torch.arange(1, len(runs) + 1, device="cpu").repeat_interleave(sizes)
    return History(table, n - len(kept))


def _numbers(number: int, cells: dict[str, Cell]) -> dict[str, float] | None:
    """The numbers of a row, without its run; None for one without a norm."""
    if "norm" not in cells:
        found = ", ".join(f"{name!r:.40}" for name in list(cells)[:8]) or "none"
        raise ValueError(f"line {number}: expected a column 'norm', got columns {found}")
    if cells["norm"] is None:
        return None
    wanted = [name for name in cells if name in COLUMNS[1:] or name.startswith(PREFIX)]
    row = {name: _number(number, name, cells[name]) for name in wanted}
    if row["norm"] < 0:
        raise ValueError(f"line {number}: expected norm 0 or more, got {row['norm']}")
    step = row.get("step", 0.0)
    if not step.is_integer() or abs(step) > 2**53:
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
        if name == "loss":
            # A usual name, by which another program may mean something else.
            return torch.nan
        got = f"{cell!r:.40}" if isinstance(cell, str) else type(cell).__name__
        raise ValueError(
            f"line {number}: expected {printable(name):.40} to be a number, got {got}"
        ) from None
