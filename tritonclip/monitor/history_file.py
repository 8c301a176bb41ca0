"""The file of a history: its two formats, and the writer, which carries a recorder's rows to it.

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
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tritonclip.messages import join_names, printable

# A recorder writes these, in this order, and then one for each named norm.
COLUMNS = ("run", "step", "norm", "coefficient", "limit", "skipped", "loss")
# Begins the columns of named norms, so that no name collides with those above.
PREFIX = "norm/"
Cell = float | int | bool | str | None
# The number of a line, and its cells by column.
Line = tuple[int, dict[str, Cell]]


class Csv:
    """Comma-separated values under a line of column names."""

    # The begin of a recorder's file, with 1 for every number.
    start = ",".join(COLUMNS).encode()

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
            # A name may end in a space.
            columns = [
                name.strip() if name.strip() in COLUMNS else name.lstrip()
                for name in next(lines, [])
            ]
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

    start = b'{"run": 1, "step": 1, "norm": '

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
                # As in CSV, a number with too many digits is inf.
                row = json.loads(line, parse_int=float)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number}: expected a JSON object: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number}: expected a JSON object, got {line.strip()!r:.40}")
            yield number, row


Format = Csv | JsonLines
# By the ending of a file's name.
_FORMATS: dict[str, Format] = {".csv": Csv(), ".jsonl": JsonLines()}


def format_of(path: Path) -> Format:
    """The format of a file by the ending of its name; ValueError for another ending."""
    format = _FORMATS.get(path.suffix.lower())
    if format is None:
        raise ValueError(
            f"{path}: expected a name that ends in .csv or .jsonl, the two formats, got "
            f"{path.suffix or 'no ending'}; rename the file"
        )
    return format


def _json_cell(cell: Cell) -> Cell:
    if isinstance(cell, float) and not math.isfinite(cell):
        return "NaN" if math.isnan(cell) else "Infinity" if cell > 0 else "-Infinity"
    return cell


_ANOTHER = "pass another path to record(...), or move the file"


class HistoryFile:
    """The file of a recorder, made at the first row; rows are appended to an existing file.

    `last_step` is the number of the last step in the file, 0 for a new one; `run`, that of the run
    whose rows are appended, one more than those in the file.
    """

    def __init__(self, path: Path, *, find: bool = True) -> None:
        self.path = path
        self._format = format_of(path)
        self._columns: tuple[str, ...] | None = None
        self.last_step, self.run = 0, 1
        # The bytes of whole lines, and whether this object wrote the last one.
        self._size, self._began = 0, False
        if find and not path.parent.is_dir():
            raise FileNotFoundError(
                f"{path}: expected an existing folder, got {path.parent}; make it first"
            )
        if find and path.exists():
            try:
                self._find()
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(
                    f"{path} exists, and no row can be appended to it: {error}; {_ANOTHER}"
                ) from None

    def _find(self) -> None:
        """Reads the columns, the last step and the last run of an existing file."""
        first = last = line = b""
        # Of each line what is before the first comma: in both formats, the run.
        begins = set()
        with self.path.open("rb") as file:
            for line in file:
                # A crash may have cut the last line.
                if line.endswith(b"\n"):
                    self._size += len(line)
                    first, last = first or line, line if line.strip() else last
                    begins.add(line.partition(b",")[0])
        start = self._format.start
        if not first and start.startswith(re.sub(rb"\d+", b"1", line)[: len(start)]):
            return
        rows = [cells for _, cells in self._format.decode((first + last).decode())]
        if not rows:
            raise ValueError("expected rows, got none")
        columns = tuple(rows[-1])
        if columns[: len(COLUMNS)] != COLUMNS:
            absent = join_names([name for name in COLUMNS if name not in columns])
            raise ValueError(
                f"expected a recorder's columns, first {', '.join(COLUMNS)}; "
                + (f"there is no {absent}" if absent else f"got {join_names(columns)}")
            )
        # Else there is only the line of column names.
        if rows[-1]["step"] != "step":
            self.last_step = int(float(rows[-1]["step"]))  # type: ignore[arg-type]  # caught
            self.run = 1 + max(map(int, re.findall(rb"\d+", b" ".join(begins))))
        self._columns = columns

    def begin(self, names: Sequence[str]) -> None:
        """Fixes the columns, at the first row; ValueError if the file has others."""
        columns = (*COLUMNS, *(PREFIX + printable(name) for name in names))
        if self._columns is not None and columns != self._columns:
            had, got = (
                join_names(found[len(COLUMNS) :], 4) or "no norms by name"
                for found in (self._columns, columns)
            )
            raise ValueError(
                f"{self.path} has rows with {had}; expected the same, got {got}: record with the "
                f"each= and the norms= of the rows that are there, or {_ANOTHER}"
            )
        self._columns = columns

    def append(self, rows: Sequence[Sequence[Cell]]) -> None:
        """Writes rows; RuntimeError if another writer changed the file."""
        assert self._columns is not None
        text = "" if self._size else self._format.header(self._columns)
        data = (text + self._format.encode(self._columns, rows)).encode()
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
            rest = memoryview(data)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except BaseException:
                # No half row stays, so that the rows can be written later.
                file.truncate(size)
                raise
        self._size += len(data)
        self._began = True

    def _has_grown(self, size: int) -> bool:
        """Whether a file has new whole lines; if not, its end is a line that was cut."""
        with self.path.open("rb") as file:
            file.seek(self._size)
            return b"\n" in file.read(size - self._size)
