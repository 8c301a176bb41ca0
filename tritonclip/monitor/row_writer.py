"""The way of a recorder's rows from their device into the file."""

import os

from tritonclip.monitor.history_file import HistoryFile
from tritonclip.monitor.row_buffer import Row, RowBuffer, Value
from tritonclip.monitor.rows import cells_of


class RowWriter:
    """The rows of a recorder, which outlive it until they are written.

    Attributes:
        file: that the rows go to.
        process: the one that writes; a fork of it does not.
    """

    def __init__(self, file: HistoryFile, every: int) -> None:
        self.file, self.process = file, os.getpid()
        self._buffer = RowBuffer(every)
        # Arrived on the host, and not written.
        self._arrived: list[Row] = []

    def add_(self, step: int, row: list[Value]) -> None:
        """Adds the row of a step, whose values stay on their device."""
        self._buffer.add_([step, *row])

    def flush(self, *, wait: bool = True) -> None:
        """Writes the rows that have arrived on the host, or with `wait` all; none in a fork."""
        if os.getpid() != self.process:
            return
        self._buffer.send_()
        self._arrived += self._buffer.take(wait=wait)
        if self._arrived:
            self.file.append(list(map(cells_of, self._arrived)))
            self._arrived = []
