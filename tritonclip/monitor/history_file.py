"""The file that a recorder writes: created once, and appended to, also by a resumed run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tritonclip.monitor.formats import Cell, format_of
from tritonclip.monitor.history import COLUMNS, PART, join_after

_ANOTHER = "give record(...) another path, or move the file away"


class HistoryFile:
    """Appends rows to a history file; nothing is written before the first row.

    Args:
        path: absolute; ends in .csv or .jsonl. A file that is there goes on.
        find: look for folder and file now.

    Attributes:
        path: of the file.
        last_step: the number of the last step in the file; 0 for a new one.
        resumes: the run of the file is known to go on, as where it loaded a checkpoint; else a row
            without a norm tells the rows of the file from those that are appended.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: another ending; a file that no recorder wrote.
    """

    def __init__(self, path: Path, *, find: bool = True) -> None:
        self.path = path
        self._format = format_of(path)
        self._columns: tuple[str, ...] | None = None
        self.last_step, self.resumes = 0, False
        # Bytes of whole lines, and whether this object wrote the last of them.
        self._size, self._began = 0, False
        if find and not path.parent.is_dir():
            raise FileNotFoundError(
                f"{path}: expected the folder of a history file, got {path.parent}, which is not "
                "there; make it first"
            )
        if find and path.exists():
            self._find()

    def _find(self) -> None:
        """Reads columns and the number of the last step from a file that is there."""
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
                f"{self.path} is there and no recorder's file: {error}; {_ANOTHER}"
            ) from None
        self._columns = tuple(rows[0])

    def begin(self, parts: Sequence[str]) -> None:
        """Fixes the columns, at the first row.

        Args:
            parts: names of further norms.

        Raises:
            ValueError: a file that is there has others.
        """
        columns = (*COLUMNS, *(PART + name for name in parts))
        if self._columns is not None and columns != self._columns:
            had = [name.removeprefix(PART) for name in self._columns[len(COLUMNS) :]]
            raise ValueError(
                f"{self.path} is there with norms of {_some(had)}; expected the same, to append to "
                f"it, got {_some(parts)}: pass the same norms, or {_ANOTHER}"
            )
        self._columns = columns

    def append(self, rows: Sequence[Sequence[Cell]]) -> None:
        """Writes rows, in the order of the columns.

        Raises:
            OSError: the file cannot be written.
            RuntimeError: something else wrote to the file.
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
                    f"{size}; something else writes to it: give each recorder a file, and of "
                    "several processes let one write, by record(..., write=rank == 0)"
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
        """Whether a file has more lines than it had; else its end is a line that was cut off."""
        with self.path.open("rb") as file:
            file.seek(self._size)
            return b"\n" in file.read(size - self._size)


def _some(names: Sequence[str]) -> str:
    """Some names for a message."""
    shown = ", ".join(names[:4]) or "no parts"
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
