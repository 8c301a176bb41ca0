"""Splits large tensors to bound temporaries, and packs small tensors to save calls."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

# Elements of a piece that is copied to float64: 1 MiB a temporary.
PIECE = 131072
# Elements of small tensors gathered at a time: up to 32,768 torch.cat copies in one go, 0.15 us a
# tensor, beyond it dispatches every tensor, 0.9 us.
BATCH = 32767


def split_flat(tensor: Tensor, size: int, *, writable: bool = False) -> Iterator[Tensor]:
    """Yields every element once, in pieces of at most `size` elements; none for an empty tensor.

    Pieces are 1-d: views where strides allow it, else copies. Writable pieces are always views, of
    any shape.
    """
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(size)
    elif tensor.numel() <= size:
        yield tensor if writable else tensor.reshape(-1)
    else:
        rows = max(1, size * tensor.shape[0] // tensor.numel())
        for part in tensor.split(rows) if tensor.shape[0] > 1 else tensor.unbind():
            yield from split_flat(part, size, writable=writable)


def as_contiguous(tensors: list[Tensor]) -> list[Tensor]:
    """Contiguous tensors as they are; views of all elements of others that are dense in memory."""
    return [t if t.is_contiguous() else t.as_strided((t.numel(),), (1,)) for t in tensors]


def pack_small(
    tensors: list[Tensor], sizes: Sequence[int], multiple: int = 1
) -> Iterator[tuple[int, int, Tensor]]:
    """Copies contiguous CPU tensors of one dtype end to end, in batches.

    Args:
        tensors: of BATCH - multiple elements or fewer.
        sizes: theirs.
        multiple: zeros fill up each batch to a multiple of so many elements.

    Yields:
        Indices of the batch's first tensor and of the one after its last, and their elements, 1-d,
        overwritten by the next batch.
    """
    if not tensors:
        return
    if set(map(Tensor.dim, tensors)) != {1}:
        tensors = [tensor.view(-1) for tensor in tensors]
    ends = [0, *accumulate(sizes)]
    room = torch.empty(min(BATCH, ends[-1] + multiple), dtype=tensors[0].dtype, device="cpu")
    start = 0
    while start < len(tensors):
        stop = bisect_right(ends, ends[start] + BATCH - multiple) - 1
        n = ends[stop] - ends[start]
        if n:
            padded = n + -n % multiple
            torch.cat(tensors[start:stop], out=room[:n])
            room[n:padded] = 0
            yield start, stop, room[:padded]
        start = stop
