"""The memory of gradients: whether there is any, whose it is, and whether elements share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from operator import add, gt
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.backends.native import loops

# A view into a freed buffer has its offset in place of an address. No buffer is as large as this,
# and most systems give no memory below it.
OFFSETS = 1 << 40


class OverlapError(ValueError):
    """Tensors overlap in memory, so that they cannot be written."""


def overlap_error(first: str, second: str) -> OverlapError:
    """The error for two gradients that overlap in memory."""
    return OverlapError(
        f"the gradients of {first} and {second} overlap in memory, so a part would be scaled "
        "twice; replace one of them by grad.clone()"
    )


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
        return self.start + _span(self.runs)


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
    """Whether no two tensors share a byte; those without bytes may lie anywhere.

    Args:
        addresses: of their first bytes.
        spans: bytes from the first to the last of each.
    """
    # So it is exactly where every end, in order, comes before the start that follows.
    ends = sorted(map(add, addresses, spans))
    return not any(map(gt, ends, sorted(addresses)[1:]))


# Calls whose gradients moved pass here.
are_apart: Callable[[list[int], list[int]], bool] = (
    apart_in_python if loops is None else loops.are_apart
)


def is_freed(tensor: Tensor, address: int) -> bool:
    """Whether a strided tensor has elements and no memory.

    Args:
        tensor: not read.
        address: its `data_ptr()`.
    """
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
    if _is_nested(runs):
        return False
    # Fewer bytes than the elements need.
    if _span(runs) < tensor.numel() * tensor.element_size():
        return True
    return _shares(Region(tensor.device, 0, runs))


def find_overlap(regions: Sequence[Region]) -> tuple[int, int] | None:
    """The indices of two regions that share a byte, if any do; exact.

    Args:
        regions: each without overlap in itself.
    """
    by_device: dict[torch.device, list[int]] = {}
    for index, region in enumerate(regions):
        by_device.setdefault(region.device, []).append(index)
    for indices in by_device.values():
        cluster: list[int] = []
        end = 0
        for index in sorted(indices, key=lambda i: regions[i].start):
            if regions[index].start >= end:
                if found := _pair(regions, cluster):
                    return found
                cluster = []
            cluster.append(index)
            end = max(end, regions[index].end)
        if found := _pair(regions, cluster):
            return found
    return None


def _pair(regions: Sequence[Region], cluster: Sequence[int]) -> tuple[int, int] | None:
    """Two regions of a cluster that overlap, or None."""
    if len(cluster) < 2 or not _shares(*(regions[i] for i in cluster)):
        return None
    for position, second in enumerate(cluster):
        for first in cluster[:position]:
            if _shares(regions[first], regions[second]):
                return min(first, second), max(first, second)
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


def _span(runs: Sequence[tuple[int, int]]) -> int:
    """Bytes from the first to the last."""
    return sum(stride * (size - 1) for stride, size in runs) + 1


def _is_nested(runs: Sequence[tuple[int, int]]) -> bool:
    """Whether every stride leaves smaller ones behind, so that no byte is met twice."""
    return all(stride >= _span(runs[:i]) for i, (stride, _) in enumerate(runs))


def _shares(*regions: Region) -> bool:
    """Whether a byte is met twice, counted in a map of the memory."""
    base = min(region.start for region in regions)
    starts = [region.start - base for region in regions]
    runs = [region.runs for region in regions]
    # Parts of the columns of one matrix are compared in its first row.
    while (
        all(len(r) > 1 and r[-1] == runs[0][-1] for r in runs)
        and max(start + _span(r[:-1]) for start, r in zip(starts, runs, strict=True))
        <= runs[0][-1][0]
    ):
        runs = [r[:-1] for r in runs]
    unit = gcd(*starts, *(r[0][1] for r in runs), *(s for r in runs for s, _ in r[1:]))
    end = max(start + _span(r) for start, r in zip(starts, runs, strict=True))
    met = torch.zeros(end // unit, dtype=torch.bool, device="cpu")
    n = 0
    for start, ((_, length), *outer) in zip(starts, runs, strict=True):
        if any(stride == 0 for stride, _ in outer):
            return True
        sizes = [length // unit, *(size for _, size in outer)]
        strides = [1, *(stride // unit for stride, _ in outer)]
        view = met.as_strided(sizes, strides, start // unit)
        n += view.numel()
        view.fill_(True)
    return int(met.sum()) < n
