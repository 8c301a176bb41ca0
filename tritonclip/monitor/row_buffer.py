"""A buffer that keeps rows on their device, and copies them to the host without waiting."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonclip.modes import follow_stream, is_captured, outside_inference, without_grad

Value = float | Tensor | None
Row = list[Any]

# The number of values of a block, 1 MiB in float64. A full block is sent before a flush is due.
_BLOCK = 2**17


# Stands in a row for a number that is still on its device.
_ON_DEVICE: Any = object()


class RowBuffer:
    """Keeps rows; tensors stay in a block on their device until `send_`, or until it is full."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rows: list[Row] = []
        self._block: Tensor | None = None
        # The last CUDA stream that wrote to the block.
        self._stream: Any = None
        # Rows on their way to the host, their numbers, and the event of the arrival.
        self._copies: deque[tuple[list[Row], Tensor | None, Any]] = deque()

    def add_(self, row: Sequence[Value | str]) -> None:
        """Adds a row: numbers, text, None, and tensors of one element."""
        cells: Row = []
        tensors = []
        for value in row:
            if isinstance(value, Tensor):
                tensors.append(value)
                cells.append(_ON_DEVICE)
            else:
                cells.append(value)
        if tensors:
            self._write_(tensors, len(tensors))
        # Done last, because a signal handler may flush between any two lines.
        self._rows.append(cells)

    @without_grad
    def _write_(self, values: list[Tensor], n: int) -> None:
        """Writes values, n in all, into the block on its device."""
        # An accelerator if there is one, because uploads do not wait.
        device = next((v.device for v in values if v.device.type != "cpu"), torch.device("cpu"))
        _refuse_capture(device)
        if self._block is not None and len(self._rows) >= len(self._block):
            self.send_()
        block = self._block
        if block is None or block.device != device or block.shape[1] < n:
            self.send_()
            n_rows = max(1, min(self._capacity, _BLOCK // n))
            # MPS has no float64.
            shape, dtype = (n_rows, n), torch.float32 if device.type == "mps" else torch.float64
            # Later steps could not write to an inference tensor.
            block = outside_inference(torch.empty)(shape, dtype=dtype, device=device)
            self._block, self._stream = block, None
        if device.type == "cuda":
            self._stream = follow_stream(self._stream, [block], device)
        flat = [value.detach().to(device, non_blocking=True).reshape(-1) for value in values]
        row = block[len(self._rows), :n]
        row.copy_(flat[0] if len(flat) == 1 else torch.cat(flat))

    def send_(self) -> None:
        """Starts to copy the rows to the host; waits only for devices other than CPU and CUDA."""
        if not self._rows:
            return
        values, arrival = None, None
        if self._block is not None and any(_ON_DEVICE in row for row in self._rows):
            _refuse_capture(self._block.device)
            if self._block.device.type == "cuda":
                self._stream = follow_stream(self._stream, [self._block], self._block.device)
            values, arrival = begin_copy(self._block[: len(self._rows)])
            if values.device == self._block.device:
                # The values are the block itself, which no later step may write to.
                self._block = None
        self._copies.append((self._rows, values, arrival))
        self._rows = []

    def take(self, *, wait: bool) -> list[Row]:
        """Returns in order the rows that arrived since the last call or, with `wait`, all sent."""
        taken: list[Row] = []
        while self._copies:
            rows, values, arrival = self._copies[0]
            if arrival is not None:
                if wait:
                    arrival.synchronize()
                elif not arrival.query():
                    break
            self._copies.popleft()
            of_rows: list[list[float]] = [] if values is None else values.tolist()
            for row, of_row in zip(rows, of_rows, strict=False):
                numbers = iter(of_row)
                row[:] = [next(numbers) if cell is _ON_DEVICE else cell for cell in row]
            taken += rows
        return taken


def begin_copy(values: Tensor) -> tuple[Tensor, Any]:
    """Begins to copy values to the host; returns them and the event of arrival, None if arrived."""
    if values.device.type == "cuda":
        host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(values.device))
        return host, event
    return values.cpu(), None


def _refuse_capture(device: torch.device) -> None:
    if is_captured(device):
        raise RuntimeError(
            "a CUDA graph is being captured, and all its replays would write to one row; expected "
            "a call outside of the capture: add the norm after graph.replay()"
        )
