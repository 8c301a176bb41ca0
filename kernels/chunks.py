"""Virtual flattening: many gradients seen as one buffer, through tables on the device.

One table holds pointers, one chunks. The chunk table depends on sizes alone: it is built without a
loop over chunks, once. The pointers are compared on every call and uploaded only where one moved;
no table is ever changed after its upload, so kernels that still run keep reading what they were
given.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tritonclip.gradient_list import Group
from tritonclip.kernels.launch import wave
from tritonclip.kernels.walk import CHUNK, Occupancy

# Spare pinned blocks kept of a size: what one call may upload while a graph is captured.
SPARES = 16
# Gradient lists without a memo remembered, oldest dropped first. A training loop has one or two; a
# table costs 4 bytes per 16,384 elements.
CACHED_LISTS = 32


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Gradients of one device and dtype, as kernels see them.

    Attributes:
        device: of gradients and tables.
        dtype: of the gradients.
        n_tensors: gradients, empty ones included.
        n_chunks: chunks; an empty gradient has one, of length 0.
        arguments: addresses, sizes and first chunks, each int64[n_tensors], and owners
            int32[n_chunks].
    """

    device: torch.device
    dtype: torch.dtype
    n_tensors: int
    n_chunks: int
    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

    def programs(self, occupancy: Occupancy) -> int:
        """Programs that walk the chunks: one wave at most."""
        return min(self.n_chunks, wave(self.device, occupancy))


# Addresses, and the table that holds them.
_Known = tuple[list[int], ChunkTable]


class _Cache:
    """Tables of the last gradient lists and their addresses, by stream, device, dtype and sizes."""

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[object, ...], _Known] = OrderedDict()
        # What a CUDA graph reads at every replay lives as long as the process: nobody knows when
        # the graph is dropped.
        self._captured: list[object] = []
        # Pinned memory cannot be allocated during capture: every eager upload leaves a spare
        # behind, and the next eager call makes up for those that a capture took.
        self._spare: dict[int, list[torch.Tensor]] = {}
        self._taken: list[int] = []

    def table(
        self,
        tensors: Sequence[torch.Tensor],
        addresses: list[int] | None = None,
        memo: dict[Any, Any] | None = None,
    ) -> ChunkTable:
        device = tensors[0].device
        stream = _stream(device)
        capturing = _is_capturing(device)
        while self._taken and not capturing:
            taken = self._taken.pop()
            self._spare[taken].append(_pinned(taken))
        if addresses is None:
            addresses = list(map(torch.Tensor.data_ptr, tensors))
        tables: MutableMapping[Any, _Known] = self._tables if memo is None else memo
        # The memo is of one device, one dtype and these sizes.
        key = (stream,) if memo is not None else (stream, *_layout_of(tensors))
        known = tables.get(key)
        if known is None and memo is not None:
            # The first call with these gradients had no memo yet.
            known = self._tables.get((stream, *_layout_of(tensors)))
        if known is not None and (known[0] is addresses or known[0] == addresses):
            table = known[1]
        elif known is not None:
            pointers = self._upload(_on_cpu(addresses), device, capturing)
            table = replace(known[1], arguments=(pointers, *known[1].arguments[1:]))
        else:
            table = self._lay_out(*_layout_of(tensors), addresses, capturing)
        if capturing:
            # A graph reads its tables at every replay, and those that it uploads hold nothing
            # before: no eager call may find them.
            self._captured.append((known, table))
            return table
        tables[key] = (addresses, table)
        if memo is None:
            self._tables.move_to_end(key)
            while len(self._tables) > CACHED_LISTS:
                self._tables.popitem(last=False)
        return table

    def _lay_out(
        self,
        device: torch.device,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        addresses: list[int],
        capturing: bool,
    ) -> ChunkTable:
        """All tables of a new gradient list, in one upload."""
        size = _on_cpu(sizes)
        n_own = ((size + CHUNK - 1) // CHUNK).clamp_min(1)
        first = torch.cumsum(n_own, 0) - n_own
        places = torch.arange(len(sizes), dtype=torch.int32, device="cpu")
        owners = torch.repeat_interleave(places, n_own)
        n, n_chunks = len(sizes), len(owners)

        packed = torch.cat([_on_cpu(addresses), size, first])
        tables = self._upload(packed, device, capturing)
        return ChunkTable(
            device=device,
            dtype=dtype,
            n_tensors=n,
            n_chunks=n_chunks,
            arguments=(
                tables[:n],
                tables[n : 2 * n],
                tables[2 * n :],
                self._upload(owners, device, capturing),
            ),
        )

    def _upload(self, table: torch.Tensor, device: torch.device, capturing: bool) -> torch.Tensor:
        """The table on the device, by an asynchronous copy from pinned memory of its own."""
        if device.type == "cpu":
            return table
        n_bytes = table.numel() * table.element_size()
        room = _size_class(n_bytes)
        spare = self._spare.setdefault(room, [])
        if capturing:
            if not spare:
                raise RuntimeError(
                    "tritonclip cannot allocate pinned memory while a CUDA graph is captured: "
                    "expected a call on these parameters before the capture; call the same clip "
                    "function once, eagerly, before capturing"
                )
            pinned = spare.pop()
            self._taken.append(room)
            self._captured.append(pinned)
        else:
            pinned = _pinned(room)
            if len(spare) < SPARES:
                spare.append(_pinned(room))
        staged = pinned[:n_bytes].view(table.dtype)
        staged.copy_(table)
        return staged.to(device, non_blocking=True)


def _layout_of(
    tensors: Sequence[torch.Tensor],
) -> tuple[torch.device, torch.dtype, tuple[int, ...]]:
    """What a table depends on, apart from addresses."""
    return tensors[0].device, tensors[0].dtype, tuple(map(torch.Tensor.numel, tensors))


def _on_cpu(numbers: Sequence[int]) -> torch.Tensor:
    """The numbers as int64[n], whatever the default device is."""
    # Half the time of torch.tensor.
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)


def _pinned(n_bytes: int) -> torch.Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _size_class(n_bytes: int) -> int:
    """The power of two, 64 or more, that holds so many bytes."""
    return max(64, 1 << (n_bytes - 1).bit_length()) if n_bytes else 64


def _stream(device: torch.device) -> int:
    """The current stream: a table made on one stream is not yet there for another."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_cache = _Cache()
_lock = threading.Lock()


def prepare(group: Group) -> ChunkTable:
    """The table of a group of gradients, remembered between calls."""
    return chunk_table(group.tensors, group.addresses, group.memo)


def chunk_table(
    tensors: Sequence[torch.Tensor],
    addresses: list[int] | None = None,
    memo: dict[Any, Any] | None = None,
) -> ChunkTable:
    """The table of gradients that kernels walk, remembered between calls.

    Args:
        tensors: gradients of one device and one dtype, each a contiguous piece of memory; at least
            one.
        addresses: theirs, where they are known already.
        memo: where tables of such gradients are remembered, by stream, so that nothing but
            addresses has to be compared.
    """
    with _lock:
        return _cache.table(tensors, addresses, memo)
