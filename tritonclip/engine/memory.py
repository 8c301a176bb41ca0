"""The memory of gradients: whether there is any, whose it is, and whether elements share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import gcd
from operator import add, gt
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.backends.native import loops

# Steps along a dimension: its stride, the fewest and the most.
_Steps = tuple[int, int, int]
# A view into a freed buffer has its offset in place of an address. No buffer is as large as this,
# and most systems give no memory below it.
OFFSETS = 1 << 40


class OverlapError(ValueError):
    """Tensors overlap in memory, so that they cannot be written."""


class Region(NamedTuple):
    """The bytes of a strided tensor.

    Attributes:
        device: that the address belongs to.
        start: address of the first byte.
        runs: (stride, size) pairs, strides ascending, of which the first is a run of adjacent
            bytes. As few as possible, so that tensors with the same bytes have the same runs.
    """

    device: torch.device
    start: int
    runs: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.start + sum(stride * (size - 1) for stride, size in self.runs) + 1


def region_of(tensor: Tensor) -> Region:
    """The bytes of a strided tensor that has elements."""
    return Region(tensor.device, tensor.data_ptr(), _runs(tensor))


def memory_of(grad: Tensor) -> Region | None:
    """The bytes that a gradient is clipped in; None where it has none, or none that are known."""
    if grad.layout == torch.sparse_coo:
        if not grad.is_coalesced():
            return None
        grad = grad._values()
    if grad.is_meta or not grad.numel():
        return None
    try:
        return region_of(grad)
    except RuntimeError:
        # A tensor without storage, as inside torch.func.
        return None


def flat_size(grad: Tensor) -> int | None:
    """Elements of a gradient dense in any order of its dimensions, as channels_last is; or None."""
    order = sorted(range(grad.dim()), key=grad.stride, reverse=True)
    return grad.numel() if grad.permute(order).is_contiguous() else None


def apart_in_python(addresses: list[int], spans: list[int]) -> bool:
    """Whether no two tensors share a byte, given their addresses and the bytes that they span.

    Those without bytes may lie anywhere.
    """
    # So it is exactly where every end, in order, comes before the start that follows.
    ends = sorted(map(add, addresses, spans))
    return not any(map(gt, ends, sorted(addresses)[1:]))


# Calls whose gradients moved pass here.
are_apart: Callable[[list[int], list[int]], bool] = (
    apart_in_python if loops is None else loops.are_apart
)


def is_freed(tensor: Tensor, address: int) -> bool:
    """Whether a strided tensor, whose `data_ptr()` is given, has elements and no memory."""
    if address >= OFFSETS or not tensor.numel() or tensor.is_meta:
        return False
    try:
        return tensor.untyped_storage().data_ptr() == 0
    except RuntimeError:
        # The storage of PyTorch's zero tensors.
        return True


def has_overlap(tensor: Tensor) -> bool:
    """Whether elements of a strided tensor share memory; exact."""
    if not tensor.numel():
        return False
    runs = _runs(tensor)
    # Two elements share a byte where steps along some dimensions, of which the one of the largest
    # stride is forward, lead back to it.
    return any(
        stride == 0 or _is_sum(0, [(stride, 1, size - 1), *_steps(runs[:i], runs[:i])])
        for i, (stride, size) in enumerate(runs[1:], 1)
    )


def find_overlap(regions: Sequence[Region | None]) -> tuple[int, int] | None:
    """The indices of two regions that share a byte, if any do; exact. No region overlaps itself."""
    # With their indices and ends, those that reach the next one.
    reaching: list[tuple[int, Region, int]] = []
    there = [(i, region) for i, region in enumerate(regions) if region is not None]
    for index, second in sorted(there, key=lambda pair: (str(pair[1].device), pair[1].start)):
        if reaching and reaching[0][1].device != second.device:
            reaching = []
        reaching = [item for item in reaching if item[2] > second.start]
        for other, first, _ in reaching:
            if _is_sum(second.start - first.start, _steps(first.runs, second.runs)):
                return min(index, other), max(index, other)
        reaching.append((index, second, second.end))
    return None


def _runs(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    item = tensor.element_size()
    if tensor.is_contiguous():
        return ((1, item * tensor.numel()),)
    runs = [(1, item)]
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride * item, size) for stride, size in dimensions if size > 1):
        inner_stride, inner_size = runs[-1]
        if stride == inner_stride * inner_size:
            runs[-1] = inner_stride, inner_size * size
        else:
            runs.append((stride, size))
    return tuple(runs)


# Slices of one matrix, of which each is compared with all others, have the same runs.
@lru_cache(maxsize=64)
def _steps(
    first: tuple[tuple[int, int], ...], second: tuple[tuple[int, int], ...]
) -> tuple[_Steps, ...]:
    """The steps from the start of one region to a byte of it, and from a byte of another back."""
    strides = sorted({stride for stride, _ in (*first, *second)}, reverse=True)
    return tuple(
        (
            stride,
            sum(1 - n for s, n in second if s == stride),
            sum(n - 1 for s, n in first if s == stride),
        )
        for stride in strides
    )


def _is_sum(distance: int, steps: Sequence[_Steps]) -> bool:
    """Whether steps add up to a distance; those of adjacent bytes are last."""
    (stride, least, most), *inner = steps
    if not inner:
        return least <= distance <= most
    # What the steps of smaller strides can add, and what only adjacent bytes can.
    low, high = sum(s * n for s, n, _ in inner), sum(s * n for s, _, n in inner)
    *larger, (_, start, end) = steps
    if (distance - start) % gcd(*(s for s, _, _ in larger)) > end - start:
        return False
    first, last = max(least, -((high - distance) // stride)), min(most, (distance - low) // stride)
    return any(_is_sum(distance - n * stride, inner) for n in range(first, last + 1))
