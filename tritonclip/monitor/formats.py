"""The two forms of a history file: CSV and JSON Lines, one line a step.

A cell is a number, a truth value, or None for a value that is not known: empty in CSV, null in
JSON. JSON has no NaN and no inf: they are the texts "NaN", "Infinity" and "-Infinity" there.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

Cell = float | int | bool | str | None
# The number of a line, and its cells by column.
Line = tuple[int, dict[str, Cell]]


class Format(Protocol):
    """Turns rows into text and back."""

    def header(self, columns: Sequence[str]) -> str:
        """The first line of a new file; "" in a format that has none."""

    def encode(self, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
        """Rows as whole lines."""

    def decode(self, text: str) -> Iterator[Line]:
        """The rows of a text; ValueError, with the number of the line, for any other text."""


class Csv:
    """Comma-separated values under a line with the names of the columns."""

    def header(self, columns: Sequence[str]) -> str:
        """The line with the names."""
        return self.encode(columns, [columns])

    def encode(self, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
        """Numbers in the fewest digits that give them back, truth values as 1 and 0."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([int(c) if isinstance(c, bool) else c for c in row] for row in rows)
        return text.getvalue()

    def decode(self, text: str) -> Iterator[Line]:
        """The rows under the first line, which names the columns."""
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
        """Nothing: every line names its columns."""
        return ""

    def encode(self, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
        """Objects of numbers, truth values and null."""
        return "".join(
            json.dumps(dict(zip(columns, map(_json_cell, row), strict=True)), allow_nan=False)
            + "\n"
            for row in rows
        )

    def decode(self, text: str) -> Iterator[Line]:
        """One row for each line that is not blank."""
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


FORMATS: dict[str, Format] = {".csv": Csv(), ".jsonl": JsonLines()}


def format_of(path: Path) -> Format:
    """The format that a file's name asks for; ValueError for other names."""
    form = FORMATS.get(path.suffix.lower())
    if form is None:
        raise ValueError(
            f"{path}: expected a name that ends in .csv or .jsonl, which decides the format, got "
            f"{path.suffix or 'no ending'}; rename the file"
        )
    return form


def _json_cell(cell: Cell) -> Cell:
    if isinstance(cell, float) and not math.isfinite(cell):
        return "NaN" if math.isnan(cell) else "Infinity" if cell > 0 else "-Infinity"
    return cell
