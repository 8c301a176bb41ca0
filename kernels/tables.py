"""Virtual flattening: many gradients seen as one buffer, through tables on the device.

One table holds pointers. Another holds chunks or, for clipping by unit, pieces: runs of whole rows,
or parts of a row that is longer than a chunk. Chunks and pieces depend on shapes alone, so they are
laid out once, without a loop over them. The pointers are compared on every call and uploaded only
if one moved. No table changes while a call or a graph holds it. Later it changes only by copies on
the stream whose kernels read it, so that kernels that still run read the old table.
"""

import weakref
from array import array
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from tritonclip.kernels import launch
from tritonclip.kernels.access import (
    CHUNK,
    MEDIUM,
    MEDIUM_ROWS,
    OCCUPANCY_2X128,
    OCCUPANCY_3X80,
    SHORT,
    Occupancy,
)
from tritonclip.kernels.launch import Launches, Start, wave

# The streams whose tables are kept. A table made on one stream is not yet there for another.
STREAMS = 8
# The tables kept on a stream. Gradients that each step makes anew take memory that the last ones
# left. In a simulation of PyTorch's allocator they are back at the same addresses after 1 to 7
# steps, in 15 of 16 loops: of four models, with loss and norm kept until the next step or not.
KEPT = 8
# The most spare pinned blocks of a size; each eager upload leaves one.
SPARES = 16

# The most rows in a piece; rows of a few elements are measured 64 at a time.
MOST_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTable(Launches):
    """Gradients of one device and dtype, as kernels see them.

    `arguments` are addresses, sizes and first chunks, each int64[n_tensors], and the tensor of each
    chunk, int32[n_chunks].

    Attributes:
        dtype: the dtype of the gradients.
        n_tensors: the number of gradients, including empty ones.
        n_chunks: the number of chunks; an empty gradient has one, of length 0.
        programs: the programs that walk the chunks, at most one wave, by occupancy.
        row: holds the memory of the addresses, if other tables may get it later.
    """

    dtype: torch.dtype
    n_tensors: int
    n_chunks: int
    programs: dict[Occupancy, int]
    row: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTable(Launches):
    """Gradients and weights of one device, as kernels see them, or gradients alone.

    `arguments` are addresses, int64[n_sides, n_tensors], of gradients, then of weights; forms,
    int64[n_tensors, 4]: rows, their length, and the places of the first partial norm and of the
    first unit; pieces, int64[n_pieces, 4]: tensor, first row, number of rows, and chunk within the
    row.

    Attributes:
        dtypes: the dtypes of the gradients and of the weights.
        n_tensors: the number of gradients.
        n_pieces: the number of pieces; a gradient without elements has one without elements.
        n_norms: the number of partial norms: one per row, or per chunk of a longer row.
        n_units: the number of rows.
        wave: the most programs that walk the pieces.
        row: as in `ChunkTable`.
    """

    dtypes: Sequence[torch.dtype]
    n_tensors: int
    n_pieces: int
    n_norms: int
    n_units: int
    wave: int
    row: Any = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradients."""
        return self.dtypes[0]


class _Row:
    """Holds memory of addresses as long as a table or a graph holds the row."""

    __slots__ = "__weakref__", "memory"
    memory: "_Memory"


class _Memory(weakref.ref[_Row]):
    """Memory of addresses, which is spare for the same stream again when its row is gone.

    It is not given back to PyTorch, unless its row dies in a reference cycle. Else a gradient could
    take it and move, others would move with it, and the next step would upload all addresses again.
    When a row goes, no Python code runs that a signal could interrupt.
    """

    __slots__ = ("tensor",)
    tensor: torch.Tensor


class _Uploaded(NamedTuple):
    """A table on a stream.

    Attributes:
        packed: the addresses of the gradients, 8 bytes each.
        table: the table of these addresses.
        upload: the event at the end of the upload; None once it was seen to be reached.
    """

    packed: bytes
    table: Any
    upload: Any


class _Stream(NamedTuple):
    """The tables of a stream.

    Attributes:
        addresses: the addresses of the last call.
        tables: the tables of the last calls, the latest first.
        spare: memory of addresses that no table holds any more.
    """

    addresses: list[int]
    tables: tuple[_Uploaded, ...]
    spare: list[_Memory]


_Table = TypeVar("_Table", bound=Any)


class Tables(Generic[_Table]):
    """The tables of gradients of one form, laid out once per stream, and their last addresses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # In the order of their last change. Values are replaced whole, because threads may meet.
        self._streams: dict[int, _Stream] = {}
        self._starts: dict[Hashable, Start] = {}

    def table(self, addresses: list[int]) -> _Table:
        """The table for these addresses, on the current stream.

        Args:
            addresses: the address of each gradient; the caller does not change the list later.

        Raises:
            RuntimeError: a CUDA graph is captured, and eager calls left no pinned memory.
        """
        stream, capturing = _current_stream(self._device)
        if pinned_memory.taken and not capturing:
            pinned_memory.refill()
        table: _Table
        found: _Uploaded | None
        known = self._streams.get(stream) or _Stream([], (), [])
        packed = b""
        if known.addresses is addresses or known.addresses == addresses:
            found = known.tables[0]
        else:
            packed = array("q", addresses).tobytes()
            found = _find(known.tables, packed)
        if found is not None:
            table = found.table
            # Some versions of ROCm may not query events while any thread captures a graph.
            may_query = not capturing and torch.version.hip is None
            has_landed = found.upload is not None and may_query and found.upload.query()
            if packed or has_landed:
                last = found._replace(upload=None) if has_landed else found
                others = tuple(one for one in known.tables if one is not found)
                self._keep(stream, known._replace(addresses=addresses, tables=(last, *others)))
        else:
            landed = self._landed(packed) if capturing else None
            table = landed or self._upload(addresses, known, capturing)
            if not capturing:
                last = _Uploaded(packed, table, _recorded(self._device))
                tables = (last, *known.tables[: KEPT - 1])
                self._keep(stream, _Stream(addresses, tables, known.spare))
        if capturing:
            # A graph reads its tables at every replay. Tables that it uploads hold nothing before
            # a replay, so no other call may find them. A graph's lifetime is unknown, so its
            # tables live as long as the process.
            pinned_memory.keep(table.arguments)
            if table.row is not None:
                pinned_memory.keep([table.row])
        return table

    def _keep(self, stream: int, known: _Stream) -> None:
        """Keeps the tables of a stream, which becomes the last one whose addresses changed."""
        self._streams.pop(stream, None)
        self._streams[stream] = known
        for oldest in list(self._streams)[:-STREAMS]:
            self._streams.pop(oldest, None)

    def _landed(self, packed: bytes) -> Any:
        """A table for these addresses that has landed, so every stream may read it; or None."""
        tables = [known for stream in list(self._streams.values()) for known in stream.tables]
        found = _find([known for known in tables if known.upload is None], packed)
        return found and found.table

    def _upload(self, addresses: list[int], known: _Stream, capturing: bool) -> Any:
        """Makes all tables, or only the pointers if other gradients of this form have tables."""
        if not known.tables:
            return replace(self._lay_out(addresses, capturing), starts=self._starts)
        laid_out = known.tables[0].table
        # A graph gets separate memory.
        row = None if capturing else self._row(known.spare, len(addresses))
        into = None if row is None else row.memory.tensor
        pointers = upload(on_cpu(addresses), self._device, capturing, into)
        return replace(
            laid_out,
            arguments=(pointers, *laid_out.arguments[1:]),
            addresses=(pointers.data_ptr(), *laid_out.addresses[1:]),
            row=row,
        )

    def _row(self, spare: list[_Memory], n: int) -> _Row:
        """Memory for n addresses; work queued on this stream may still read others in it."""
        try:
            tensor = spare.pop().tensor
        except IndexError:
            # A later call could not write to inference tensors.
            with torch.inference_mode(False):
                rows = torch.empty(KEPT + 1, n, dtype=torch.int64, device=self._device)
            tensor, *others = rows.unbind()
            for other in others:
                # Nobody holds the row, so the memory is spare at once.
                _held(other, spare)
        return _held(tensor, spare)

    def _lay_out(self, addresses: list[int], capturing: bool) -> _Table:
        """Makes all tables."""
        raise NotImplementedError


class ChunkTables(Tables[ChunkTable]):
    """The chunk tables of gradients of one form.

    Args:
        device: the device of the gradients.
        dtype: the dtype of the gradients.
        sizes: the number of elements of each gradient.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, sizes: Sequence[int]) -> None:
        super().__init__(device)
        self._dtype, self._sizes = dtype, sizes

    def _lay_out(self, addresses: list[int], capturing: bool) -> ChunkTable:
        return lay_out(self._device, self._dtype, self._sizes, addresses, capturing)


class UnitTables(Tables[UnitTable]):
    """The tables of units of gradients of one form.

    Args:
        device: the device of the gradients.
        dtypes: the dtypes of the gradients and, if there are any, of the weights.
        counts: the number of rows of each gradient, at least one.
        lengths: the number of elements in each of its rows.
    """

    def __init__(
        self,
        device: torch.device,
        dtypes: Sequence[torch.dtype],
        counts: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        super().__init__(device)
        self._dtypes, self._counts, self._lengths = dtypes, counts, lengths

    def _lay_out(self, addresses: list[int], capturing: bool) -> UnitTable:
        """Makes all tables, in one upload."""
        n = len(self._counts)
        counts, lengths = on_cpu(self._counts), on_cpu(self._lengths)
        chunks = ((lengths + CHUNK - 1) // CHUNK).clamp_min(1)
        most = (CHUNK // lengths.clamp_min(1)).clamp(1, MOST_ROWS)
        # Rows that are read in tiles get pieces of whole tiles.
        tiled = (lengths > SHORT) & (lengths <= MEDIUM)
        tiles = (most // MEDIUM_ROWS).clamp_min(1)
        most = torch.where(tiled, tiles * MEDIUM_ROWS, most)
        runs = (counts + most - 1) // most
        n_own, n_norms = runs * chunks, counts * chunks
        forms = torch.stack([counts, lengths, _starts(n_norms), _starts(counts)], 1)
        tensor = torch.repeat_interleave(torch.arange(n, device="cpu"), n_own)
        at = torch.arange(len(tensor), device="cpu") - _starts(n_own)[tensor]
        row = at // chunks[tensor] * most[tensor]
        n_rows = torch.minimum(counts[tensor] - row, most[tensor])
        pieces = torch.stack([tensor, row, n_rows, at % chunks[tensor]], 1)
        packed = torch.cat([on_cpu(addresses), forms.flatten(), pieces.flatten()])
        tables = upload(packed, self._device, capturing)
        n_pieces, ends = len(tensor), (m := len(addresses), m + 4 * n)
        parts = tables[: ends[0]], tables[ends[0] : ends[1]], tables[ends[1] :]
        return UnitTable(
            device=self._device,
            dtypes=self._dtypes,
            n_tensors=n,
            n_pieces=n_pieces,
            n_norms=sum(map(_count_norms, self._counts, self._lengths)),
            n_units=sum(self._counts),
            arguments=parts,
            addresses=tuple(map(torch.Tensor.data_ptr, parts)),
            wave=wave(self._device, OCCUPANCY_2X128),
        )


def _find(tables: Sequence[_Uploaded], packed: bytes) -> _Uploaded | None:
    """The table of these addresses, if there is one."""
    return next((known for known in tables if known.packed == packed), None)


def _held(tensor: torch.Tensor, spare: list[_Memory]) -> _Row:
    """Holds memory by a new row; when nobody holds the row any more, the memory is spare."""
    row = _Row()
    row.memory = _Memory(row, spare.append)
    row.memory.tensor = tensor
    return row


class PinnedMemory:
    """Blocks of pinned memory, which cannot be allocated while a CUDA graph is captured.

    Every eager upload leaves a spare block behind, and the next eager call replaces the blocks that
    a capture took. Each change is one operation on a list, so threads and signals may meet.
    """

    def __init__(self) -> None:
        self._spare: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        # The sizes of the blocks that captures took.
        self.taken: list[int] = []
        # Memory that graphs read, by identity; it lives as long as the process.
        self.captured: dict[int, Any] = {}

    def block(self, n_bytes: int, capturing: bool) -> torch.Tensor:
        """A uint8 block for one upload, of n_bytes or more."""
        room = max(64, 1 << (n_bytes - 1).bit_length())
        spare = self._spare[room]
        if not capturing:
            if len(spare) < SPARES:
                spare.append(_pinned(room))
            return _pinned(room)
        try:
            block = spare.pop()
        except IndexError:
            # Nothing was written yet, so under a patch torch's function serves the call.
            raise NotImplementedError(
                "tritonclip cannot allocate pinned memory while a CUDA graph is captured: expected "
                "a call on these parameters before the capture; call the same clip function once, "
                "eagerly, before capturing"
            ) from None
        self.taken.append(room)
        self.keep([block])
        return block

    def keep(self, memory: Iterable[Any]) -> None:
        """Keeps memory that a graph reads; a table that several graphs read is kept once."""
        self.captured.update((id(one), one) for one in memory)

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
    """Makes all tables of a gradient list, in one upload."""
    size = on_cpu(sizes)
    n_own = ((size + CHUNK - 1) // CHUNK).clamp_min(1)
    first = torch.cumsum(n_own, 0) - n_own
    tensors = torch.arange(len(sizes), dtype=torch.int32, device="cpu")
    tensor_of_chunk = torch.repeat_interleave(tensors, n_own)
    n, n_chunks = len(sizes), len(tensor_of_chunk)

    numbers = torch.cat([on_cpu(addresses), size, first])
    packed = torch.cat([numbers.view(torch.uint8), tensor_of_chunk.view(torch.uint8)])
    tables = upload(packed, device, capturing)
    numbers, owners = tables[: 24 * n].view(torch.int64), tables[24 * n :].view(torch.int32)
    arguments = numbers[:n], numbers[n : 2 * n], numbers[2 * n :], owners
    return ChunkTable(
        device=device,
        dtype=dtype,
        n_tensors=n,
        n_chunks=n_chunks,
        arguments=arguments,
        addresses=tuple(map(torch.Tensor.data_ptr, arguments)),
        programs={
            occupancy: min(n_chunks, wave(device, occupancy))
            for occupancy in (OCCUPANCY_2X128, OCCUPANCY_3X80)
        },
    )


def upload(
    table: torch.Tensor, device: torch.device, capturing: bool, into: torch.Tensor | None = None
) -> torch.Tensor:
    """Copies a table to the device, asynchronously from pinned memory that nothing reuses."""
    if device.type == "cpu":
        return table if into is None else into.copy_(table)
    n_bytes = table.numel() * table.element_size()
    staged = pinned_memory.block(n_bytes, capturing)[:n_bytes].view(table.dtype)
    staged.copy_(table)
    if into is not None:
        return into.copy_(staged, non_blocking=True)
    return staged.to(device, non_blocking=True)


def on_cpu(numbers: Sequence[int]) -> torch.Tensor:
    """The numbers as int64[n], whatever the default device is."""
    # This takes half the time of torch.tensor.
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)


def _pinned(n_bytes: int) -> torch.Tensor:
    # A later capture could not write to inference tensors.
    with torch.inference_mode(False):
        return torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _current_stream(device: torch.device) -> tuple[int, bool]:
    """The current stream, and whether a CUDA graph is captured on it."""
    if device.index is None:
        return 0, False
    stream = launch.current_stream(device)
    if device.index == torch.cuda.current_device():
        return stream, torch.cuda.is_current_stream_capturing()
    # PyTorch asks only the current stream of the current device.
    with torch.cuda.device(device):
        return stream, torch.cuda.is_current_stream_capturing()


def _recorded(device: torch.device) -> torch.cuda.Event | None:
    """An event after the work that is queued on the current stream; None for a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _count_norms(count: int, length: int) -> int:
    return count * count_chunks(length)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    """The sum of the counts before each count."""
    return counts.cumsum(0) - counts


def count_chunks(length: int) -> int:
    """The number of chunks, and so of partial norms, of a row."""
    return max(1, -(-length // CHUNK))
