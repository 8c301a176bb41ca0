"""The history of one run or several: its file, written and read, and its norms by step.

A history file is CSV or JSON Lines, one line a step. A cell is a number, a truth value, or None for
an unknown value: empty in CSV, null in JSON. JSON has no NaN and no inf: they are the texts "NaN",
"Infinity" and "-Infinity" there.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

Cell = float | int | bool | str | None
# The number of a line, and its cells by column.
Line = tuple[int, dict[str, Cell]]


class Csv:
    """Comma-separated values under a line of column names."""

    def header(self, columns: Sequence[str]) -> str:
        """The first line of a new file: the column names."""
        return self.encode(columns, [columns])

    def encode(self, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
        """Rows as lines: numbers in full precision, truth values as 1 and 0."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([int(c) if isinstance(c, bool) else c for c in row] for row in rows)
        return text.getvalue()

    def decode(self, text: str) -> Iterator[Line]:
        """The rows of a text; ValueError, with the number of the line, for any other text."""
        lines = csv.reader(io.StringIO(text))
        try:
            columns = [name.strip() for name in next(lines, [])]
            for cells in lines:
                if not cells:
                    continue
                if len(cells) != len(columns):
                    raise ValueError(
                        f"line {lines.line_num}: expected {len(columns)} cells, as the first line "
                        f"has, got {len(cells)}"
                    )
                yield lines.line_num, {n: c or None for n, c in zip(columns, cells, strict=True)}
        except csv.Error as error:
            expected = f"line {lines.line_num}: expected comma-separated values"
            raise ValueError(f"{expected}: {error}") from None


class JsonLines:
    """One JSON object a line."""

    def header(self, columns: Sequence[str]) -> str:
        """Empty: every line names its columns."""
        return ""

    def encode(self, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
        """Rows as lines: objects of numbers, truth values and null."""
        return "".join(
            json.dumps(dict(zip(columns, map(_json_cell, row), strict=True)), allow_nan=False)
            + "\n"
            for row in rows
        )

    def decode(self, text: str) -> Iterator[Line]:
        """The rows of a text; ValueError, with the number of the line, for any other text."""
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: expected a JSON object: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number}: expected a JSON object, got {line.strip():.40}")
            yield number, row


Format = Csv | JsonLines
# By the ending of a file's name.
_FORMATS: dict[str, Format] = {".csv": Csv(), ".jsonl": JsonLines()}


def format_of(path: Path) -> Format:
    """The format of a file by the ending of its name; ValueError for another ending."""
    form = _FORMATS.get(path.suffix.lower())
    if form is None:
        raise ValueError(
            f"{path}: expected a name that ends in .csv or .jsonl, the two formats, got "
            f"{path.suffix or 'no ending'}; rename the file"
        )
    return form


def _json_cell(cell: Cell) -> Cell:
    if isinstance(cell, float) and not math.isfinite(cell):
        return "NaN" if math.isnan(cell) else "Infinity" if cell > 0 else "-Infinity"
    return cell


# A recorder writes these, in this order, and then one for each named norm.
COLUMNS = ("step", "norm", "coefficient", "limit", "skipped")
# Begins the columns of named norms, so that no name collides with those above.
_PREFIX = "norm/"
# The same, and of their largest magnitudes and shares of zeros, where these are recorded.
_PREFIXES = (_PREFIX, "largest/", "zeros/")
# The numbers of a step, by column.
# A spike, as SpikeScore counts it: norms before it, and the distance from their mean in deviations.
_SPIKE_WINDOW, _SPIKE_SIGMAS = 128, 6.0
_Row = dict[str, float]
_WRITTEN_BY = "record(...) writes history files, and other files need a column 'norm'"


class NamedNorm(NamedTuple):
    """The norms of one name over the steps of a history, without those that are NaN or inf.

    Attributes:
        name: of the group or parameter.
        median: of the norms.
        largest: of the norms.
        step: of the largest.
        magnitude: the largest of an element in all steps; None where unknown, as is zeros.
        zeros: the median share of elements that are 0.
    """

    name: str
    median: float
    largest: float
    step: int
    magnitude: float | None = None
    zeros: float | None = None


@dataclass(frozen=True)
class History:
    """The steps of one run in order, or of several runs, one after the other.

    Attributes:
        steps: numbers of the steps, which rise within a run; 1-d int64.
        norms: global norms *before* clipping; 1-d float64, as are the next three.
        coefficients: factors of the gradients; NaN where unknown.
        limits: limits of the norm; NaN where unknown.
        skipped: 1 for steps that were skipped; NaN where unknown.
        named_norms: norms of groups or parameters, by name.
        named_largest: their largest magnitudes, as far as they were recorded.
        named_zeros: their shares of zeros; likewise.
        joins: positions at which a run begins after another one: where a recorder appended to the
            file without a checkpoint, or where the step numbers start again.
        replaced: the number of rows left out because a run resumed from an earlier step.
    """

    steps: Tensor
    norms: Tensor
    coefficients: Tensor
    limits: Tensor
    skipped: Tensor
    named_norms: Mapping[str, Tensor] = field(default_factory=dict)
    joins: tuple[int, ...] = ()
    replaced: int = 0
    named_largest: Mapping[str, Tensor] = field(default_factory=dict)
    named_zeros: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def runs(self) -> tuple[History, ...]:
        """The runs, in order."""

        def cut(columns: Mapping[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
            return {name: values[start:end] for name, values in columns.items()}

        return tuple(
            History(
                self.steps[start:end],
                self.norms[start:end],
                self.coefficients[start:end],
                self.limits[start:end],
                self.skipped[start:end],
                cut(self.named_norms, start, end),
                replaced=self.replaced,
                named_largest=cut(self.named_largest, start, end),
                named_zeros=cut(self.named_zeros, start, end),
            )
            for start, end in pairwise((0, *self.joins, len(self)))
        )

    def run(self, number: int) -> History:
        """The run of this number, from 1 on; ValueError for any other."""
        runs = self.runs
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= len(runs):
            raise ValueError(
                f"run must be the number of a run, 1 to {len(runs)} in this history, got {number!r}"
            )
        return runs[number - 1]

    @property
    def is_clipped(self) -> Tensor:
        """Steps that were clipped; 1-d bool.

        The coefficient is below 1 or, if it is unknown, the norm is over the limit. Skipped steps,
        and norms that are NaN or inf, do not count.
        """
        by_limit = self.norms > self.limits
        clipped = torch.where(self.coefficients.isnan(), by_limit, self.coefficients < 1)
        return clipped & self.norms.isfinite() & ~self.is_skipped

    @property
    def is_skipped(self) -> Tensor:
        """Steps that were skipped; 1-d bool."""
        return self.skipped == 1

    @property
    def is_over_six_sigma(self) -> Tensor:
        """Steps that SpikeScore counts; 1-d bool.

        The norm is above the mean plus 6 standard deviations of the 128 norms before it in its run.
        Norms that are NaN, inf or 0 are left out.
        """
        counted = torch.zeros_like(self.norms, dtype=torch.bool)
        for start, end in pairwise((0, *self.joins, len(self))):
            (at,) = torch.where(self.norms[start:end].isfinite() & (self.norms[start:end] > 0))
            over = _over_six_sigma(self.norms[start:end][at])
            counted[start + at[_SPIKE_WINDOW:][over]] = True
        return counted

    @property
    def spike_score(self) -> float:
        """SpikeScore: the share of the steps with a norm above 6 standard deviations.

        Of all steps with a norm that is finite and not 0; NaN without a run of 129 such steps.

        References:
            OLMo-core, `StabilityMonitorCallback`, whose total also counts spikes of the loss.
        """
        usable = [int((run.norms.isfinite() & (run.norms > 0)).sum()) for run in self.runs]
        if max(usable) <= _SPIKE_WINDOW:
            return math.nan
        return int(self.is_over_six_sigma.sum()) / sum(usable)

    def largest(self, n: int = 10) -> list[NamedNorm]:
        """The names with the largest median norms, the largest first; none whose norms are all 0.

        Args:
            n: the largest number of names.
        """
        found = []
        for name, norms in self.named_norms.items():
            finite = norms.isfinite()
            if (norms[finite] > 0).any():
                at = int(norms.where(finite, -1.0).argmax())
                median, step = float(norms[finite].quantile(0.5)), int(self.steps[at])
                magnitude = _quantile_of(self.named_largest.get(name), 1.0)
                zeros = _quantile_of(self.named_zeros.get(name), 0.5)
                found.append(NamedNorm(name, median, float(norms[at]), step, magnitude, zeros))
        return sorted(found, key=lambda one: (-one.median, -one.largest))[:n]

    def most_zeros(self, n: int = 5) -> dict[str, float]:
        """The names with the largest median shares of zeros, as far as these were recorded.

        Without those that have no zeros, or nothing else.

        Args:
            n: the largest number of names.
        """
        medians = {name: _quantile_of(own, 0.5) for name, own in self.named_zeros.items()}
        some = {name: share for name, share in medians.items() if share and share < 1}
        return dict(sorted(some.items(), key=lambda one: -one[1])[:n])

    def dead(self) -> dict[str, int]:
        """The names whose norm is 0 at the last step, and for how many steps it has been.

        Such a gradient has only zeros, or there was none.
        """
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


def _quantile_of(values: Tensor | None, q: float) -> float | None:
    """A quantile of the numbers that are finite; None without any."""
    finite = None if values is None else values[values.isfinite()]
    return float(finite.quantile(q)) if finite is not None and len(finite) else None


def read(path: str | os.PathLike[str]) -> History:
    """Reads a history file, written by a :class:`Recorder` or another program.

    Args:
        path: a .csv or .jsonl file with a column `norm`. The columns `step`, `coefficient`, `limit`
            and `skipped` are optional, and so are named norms in columns `norm/<name>`, with
            `largest/<name>` and `zeros/<name>`. Other columns are not read. Rows without a norm are
            left out.

    Returns:
        The steps in order. If step numbers repeat because a run resumed from an earlier checkpoint,
        the later rows count. If they start again from the first, another run begins.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a history file.
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
        # A crash may have cut the last line.
        if last is None or f"line {last}:" not in str(error) or not runs[0]:
            raise ValueError(f"{path} is not a history file: {error}; {_WRITTEN_BY}") from None
    if not runs[0]:
        raise ValueError(
            f"{path} is not a history file: expected at least one row with a norm, got none; a "
            "recorder writes after every `every` steps, at flush() and at close()"
        )
    return _history(runs, replaced)


def _add(runs: list[list[_Row]], row: _Row, first: float, *, joined: bool) -> int:
    """Adds a row to the last run, or begins a new run; returns the number of rows it replaces."""
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
        # A run may resume from a checkpoint older than another run in its file.
        if not runs[-1] and step > first:
            runs.pop()
    runs[-1].append(row)
    return replaced


def join_after(step: int) -> tuple[Cell, ...]:
    """The row between the rows of two recorders: it has only the last step of the first."""
    return (step, *[None] * (len(COLUMNS) - 1))


def is_join(cells: Mapping[str, Cell]) -> bool:
    """Whether a row is made by `join_after`."""
    known = [name for name, cell in cells.items() if cell is not None]
    return known == ["step"] and tuple(cells)[: len(COLUMNS)] == COLUMNS


def read_text(path: Path) -> str:
    """The text of a history file."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: expected a history file, got none; a recorder writes it at its first "
            "flush, after `every` steps or at close()"
        )
    if not path.is_file():
        raise ValueError(f"{path}: expected a file, got a folder; pass the file in it")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(
            f"{path} is not a history file: expected text in UTF-8, got other bytes; {_WRITTEN_BY}"
        ) from None


def _numbers(number: int, cells: dict[str, Cell]) -> _Row | None:
    """The numbers of a row; None for one without a norm."""
    if "norm" not in cells:
        found = ", ".join(map(repr, list(cells)[:8])) or "none"
        raise ValueError(f"line {number}: expected a column 'norm', got columns {found}")
    if cells["norm"] is None:
        return None
    # Columns of other programs may begin alike: one with a norm beside it is ours.
    wanted = [
        name
        for name in cells
        if name in COLUMNS
        or (name.startswith(_PREFIXES) and _PREFIX + name.partition("/")[2] in cells)
    ]
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

    named = [
        {name.removeprefix(own): column(name) for name in names if name.startswith(own)}
        for own in _PREFIXES
    ]
    steps = column("step") if "step" in names else torch.arange(1, len(rows) + 1, device="cpu")
    return History(
        steps.long(),
        column("norm"),
        column("coefficient"),
        column("limit"),
        column("skipped"),
        named[0],
        tuple(accumulate(len(run) for run in runs[:-1])),
        replaced,
        *named[1:],
    )


_ANOTHER = "pass another path to record(...), or move the file"


class HistoryFile:
    """The file of a recorder, made at the first row; rows are appended to an existing file.

    Args:
        path: absolute; ends in .csv or .jsonl.
        find: whether to look for the folder and the file now.

    Attributes:
        path: of the file.
        last_step: the number of the last step in the file; 0 for a new one.
        resumes: whether the run in the file is known to continue, as after loading a checkpoint. If
            not, a row without a norm separates the rows in the file from those appended.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: another ending; a file that no recorder wrote.
    """

    def __init__(self, path: Path, *, find: bool = True) -> None:
        self.path = path
        self._format = format_of(path)
        self._columns: tuple[str, ...] | None = None
        self.last_step, self.resumes = 0, False
        # The bytes of whole lines, and whether this object wrote the last one.
        self._size, self._began = 0, False
        if find and not path.parent.is_dir():
            raise FileNotFoundError(
                f"{path}: expected an existing folder, got {path.parent}; make it first"
            )
        if find and path.exists():
            self._find()

    def _find(self) -> None:
        """Reads the columns and the last step of an existing file."""
        data = self.path.read_bytes() if self.path.is_file() else b"\n"
        # A line after the last line break was cut off by a crash.
        self._size = data.rfind(b"\n") + 1
        if not data:
            return
        first, _, rest = data[: self._size].partition(b"\n")
        last = rest.rstrip(b"\n").rpartition(b"\n")[2]
        try:
            rows = [cells for _, cells in self._format.decode(f"{first.decode()}\n{last.decode()}")]
            if not rows:
                raise ValueError("expected rows, got none")
            if tuple(rows[0])[: len(COLUMNS)] != COLUMNS:
                raise ValueError(f"expected columns {', '.join(COLUMNS)}, got {', '.join(rows[0])}")
            self.last_step = int(str(rows[-1]["step"]))
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{self.path} exists, and no recorder wrote it: {error}; {_ANOTHER}"
            ) from None
        self._columns = tuple(rows[0])

    def begin(self, names: Sequence[str], *, statistics: bool = False) -> None:
        """Fixes the columns, at the first row.

        Args:
            names: of the named norms.
            statistics: whether each name also has a largest magnitude and a share of zeros.

        Raises:
            ValueError: the file has other columns.
        """
        kinds = _PREFIXES if statistics else _PREFIXES[:1]
        columns = (*COLUMNS, *(kind + name for kind in kinds for name in names))
        if self._columns is not None and columns != self._columns:
            had = [c.removeprefix(_PREFIX) for c in self._columns if c.startswith(_PREFIX)]
            if had == [*names]:
                found = "no largest magnitudes and zeros" if statistics else "them as well"
                raise ValueError(
                    f"{self.path} has norms of {join_names(had)}, and {found}; expected the same "
                    f"columns: record(..., statistics={not statistics}), or {_ANOTHER}"
                )
            raise ValueError(
                f"{self.path} has norms of {join_names(had)}; expected the same names, got "
                f"{join_names(names)}: pass the same norms, or {_ANOTHER}"
            )
        self._columns = columns

    def append(self, rows: Sequence[Sequence[Cell]]) -> None:
        """Writes rows, in the order of the columns.

        Raises:
            OSError: the file cannot be written.
            RuntimeError: another writer changed the file.
        """
        assert self._columns is not None
        if self.last_step and not (self._began or self.resumes):
            join = join_after(self.last_step)
            rows = [(*join, *[None] * (len(self._columns) - len(join))), *rows]
        text = self._format.encode(self._columns, rows)
        if not self._size:
            text = self._format.header(self._columns) + text
        with self.path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if not self._began and size > self._size and not self._has_grown(size):
                file.truncate(self._size)
                size = self._size
            elif size != self._size:
                raise RuntimeError(
                    f"{self.path}: expected {self._size} bytes, as this recorder left it, got "
                    f"{size}; something else writes to it: use one file a recorder, and let one "
                    "process write: record(..., write=rank == 0)"
                )
            data = memoryview(text.encode())
            try:
                while data:
                    data = data[file.write(data) :]
            except BaseException:
                # No half row stays, so that the rows can be written later.
                file.truncate(size)
                raise
        self._size += len(text.encode())
        self._began = True

    def _has_grown(self, size: int) -> bool:
        """Whether a file has new whole lines; if not, its end is a line that was cut."""
        with self.path.open("rb") as file:
            file.seek(self._size)
            return b"\n" in file.read(size - self._size)


def join_names(names: Sequence[str]) -> str:
    """The first names, for a message or a figure."""
    shown = ", ".join(names[:4]) or "no names"
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
