"""Virtual flattening: many gradients seen as one buffer, through tables on the device.

One table holds pointers, one chunks. The chunk table depends on sizes alone: it is built without a
loop over chunks, once. The pointers are compared on every call and uploaded only where one moved;
no table is ever changed after its upload, so kernels that still run keep reading their
own.
"""

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tritonclip.kernels.chunk_access import CHUNK, OCCUPANCY_2X128, OCCUPANCY_3X80, Occupancy
from tritonclip.kernels.launch import current_stream, wave

# Streams whose tables are kept: a table made on one stream is not yet there for another.
STREAMS = 8
# Most spare pinned blocks kept of a size, one for each eager upload.
SPARES = 16


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Gradients of one device and dtype, as kernels see them.

    Attributes:
        device: of gradients and tables.
        dtype: of the gradients.
        n_tensors: gradients, empty ones included.
        n_chunks: chunks; an empty gradient has one, of length 0.
        arguments: addresses, sizes and first chunks, each int64[n_tensors], and the tensor of each
            chunk, int32[n_chunks].
        programs: that walk the chunks, one wave at most, by occupancy.
    """

    device: torch.device
    dtype: torch.dtype
    n_tensors: int
    n_chunks: int
    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    programs: dict[Occupancy, int]


class ChunkTables:
    """The tables of gradients of one form: laid out once a stream, pointers as of the last call.

    Args:
        device: of the gradients.
        dtype: of the gradients.
        sizes: elements of each.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, sizes: Sequence[int]) -> None:
        self._device, self._dtype, self._sizes = device, dtype, sizes
        # By stream, the addresses of a call and its table, replaced together: threads may meet.
        self._known: dict[int, tuple[list[int], ChunkTable]] = {}

    def table(self, addresses: list[int]) -> ChunkTable:
        """The table for these addresses, on the current stream.

        Args:
            addresses: one a gradient; not changed later.

        Raises:
            RuntimeError: a CUDA graph is captured, and eager calls left no pinned memory.
        """
        stream, capturing = _current_stream(self._device)
        if pinned_memory.taken and not capturing:
            pinned_memory.refill()
        known = self._known.get(stream)
        if known is None:
            table = self._lay_out(addresses, capturing)
        elif known[0] is addresses or known[0] == addresses:
            table = known[1]
        else:
            pointers = upload(on_cpu(addresses), self._device, capturing)
            table = replace(known[1], arguments=(pointers, *known[1].arguments[1:]))
        if capturing:
            # A graph reads its tables at every replay, and those that it uploads hold nothing
            # before: no other call may find them. Nobody knows when the graph is dropped.
            pinned_memory.captured.append((known, table))
            return table
        if known is None or known[1] is not table:
            self._known[stream] = addresses, table
            while len(self._known) > STREAMS:
                self._known.pop(next(iter(self._known)), None)
        return table

    def _lay_out(self, addresses: list[int], capturing: bool) -> ChunkTable:
        return lay_out(self._device, self._dtype, self._sizes, addresses, capturing)


class PinnedMemory:
    """Blocks of pinned memory, which cannot be allocated while a CUDA graph is captured.

    Every eager upload leaves a spare block behind, and the next eager call makes up for those that
    a capture took. Each change is one operation on a list, so threads and signals may meet.
    """

    def __init__(self) -> None:
        self._spare: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        # Sizes of the blocks that captures took.
        self.taken: list[int] = []
        # Memory that graphs read, alive as long as the process.
        self.captured: list[object] = []

    def block(self, n_bytes: int, capturing: bool) -> torch.Tensor:
        """A block for one upload, uint8, at least as large."""
        room = max(64, 1 << (n_bytes - 1).bit_length())
        spare = self._spare[room]
        if not capturing:
            if len(spare) < SPARES:
                spare.append(_pinned(room))
            return _pinned(room)
        try:
            block = spare.pop()
        except IndexError:
            raise RuntimeError(
                "tritonclip cannot allocate pinned memory while a CUDA graph is captured: expected "
                "a call on these parameters before the capture; call the same clip function once, "
                "eagerly, before capturing"
            ) from None
        self.taken.append(room)
        self.captured.append(block)
        return block

    def refill(self) -> None:
        """Replaces the blocks that captures took."""
        while self.taken:
            room = self.taken.pop()
            self._spare[room].append(_pinned(room))


pinned_memory = PinnedMemory()


def lay_out(
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sequence[int],
    addresses: Sequence[int],
    capturing: bool = False,
) -> ChunkTable:
    """Makes all tables of a gradient list, in two uploads."""
    size = on_cpu(sizes)
    n_own = ((size + CHUNK - 1) // CHUNK).clamp_min(1)
    first = torch.cumsum(n_own, 0) - n_own
    tensors = torch.arange(len(sizes), dtype=torch.int32, device="cpu")
    tensor_of_chunk = torch.repeat_interleave(tensors, n_own)
    n, n_chunks = len(sizes), len(tensor_of_chunk)

    packed = torch.cat([on_cpu(addresses), size, first])
    tables = upload(packed, device, capturing)
    return ChunkTable(
        device=device,
        dtype=dtype,
        n_tensors=n,
        n_chunks=n_chunks,
        arguments=(
            tables[:n],
            tables[n : 2 * n],
            tables[2 * n :],
            upload(tensor_of_chunk, device, capturing),
        ),
        programs={
            occupancy: min(n_chunks, wave(device, occupancy))
            for occupancy in (OCCUPANCY_2X128, OCCUPANCY_3X80)
        },
    )


def upload(table: torch.Tensor, device: torch.device, capturing: bool) -> torch.Tensor:
    """The table on the device, by an asynchronous copy from pinned memory that nothing reuses."""
    if device.type == "cpu":
        return table
    n_bytes = table.numel() * table.element_size()
    staged = pinned_memory.block(n_bytes, capturing)[:n_bytes].view(table.dtype)
    staged.copy_(table)
    return staged.to(device, non_blocking=True)


def on_cpu(numbers: Sequence[int]) -> torch.Tensor:
    """The numbers as int64[n], whatever the default device is."""
    # Half the time of torch.tensor.
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)


def _pinned(n_bytes: int) -> torch.Tensor:
    # Never inference tensors, which a later capture could not write to.
    with torch.inference_mode(False):
        return torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _current_stream(device: torch.device) -> tuple[int, bool]:
    """The current stream, and whether a CUDA graph is captured on it."""
    if device.type != "cuda":
        return 0, False
    stream = current_stream(device)
    if device.index == torch.cuda.current_device():
        return stream, torch.cuda.is_current_stream_capturing()
    # Which asks only the current stream of the current device.
    with torch.cuda.device(device):
        return stream, torch.cuda.is_current_stream_capturing()
