"""The memory of gradients: whether it is there, and whether two gradients share it."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import add, gt
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.backends.native import loops

# In a freed storage, `data_ptr` is the offset of a view. No buffer is as large as this number, and
# most systems give no memory below it, so that it separates offsets from addresses.
OFFSETS = 1 << 40


class OverlapError(ValueError):
    """Tensors overlap in memory, so that they cannot be written in place."""


class Region(NamedTuple):
    """The bytes of a strided tensor.

    Attributes:
        device: the device of the tensor.
        start: the address of the first byte.
        runs: (stride, size) pairs with ascending strides. The first pair is a run of adjacent
            bytes; it is the only one if the tensor has no gaps. Pairs are merged where possible, so
            that tensors with the same bytes have the same runs.
    """

    device: torch.device
    start: int
    runs: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.start + sum(stride * (size - 1) for stride, size in self.runs) + 1


def memory_of(grad: Tensor) -> Region | None:
    """The bytes that clipping writes; None if the gradient has none, or none that are known."""
    if grad.layout == torch.sparse_coo:
        if not grad.is_coalesced():
            return None
        grad = grad._values()
    if grad.is_meta or not grad.numel():
        return None
    try:
        return Region(grad.device, grad.data_ptr(), _runs(grad))
    except RuntimeError:
        # A tensor without storage, as inside torch.func.
        return None


def is_dense(grad: Tensor) -> bool:
    """Whether a tensor has no gaps, in any order of its dimensions: channels_last is dense too."""
    if grad.is_contiguous():
        return True
    order = sorted(range(grad.dim()), key=grad.stride, reverse=True)
    return grad.permute(order).is_contiguous()


def apart_in_python(addresses: list[int], spans: list[int]) -> bool:
    """Whether no two tensors share a byte, given their addresses and the bytes that they span.

    Tensors without bytes may lie anywhere.
    """
    # No two overlap if and only if each end, in order, lies before the next start.
    ends = sorted(map(add, addresses, spans))
    return not any(map(gt, ends, sorted(addresses)[1:]))


# A call passes here whenever its gradients have moved.
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
        # PyTorch's zero tensors have a storage that cannot be read.
        return True


def find_overlap(regions: Sequence[Region | None]) -> tuple[int, int] | None:
    """The indices of two regions that are equal, or that overlap and have no gaps.

    Overlap with a region that has gaps is allowed: such gradients are clipped in a copy, so that no
    element is scaled twice.
    """
    seen: dict[Region, int] = {}
    for index, region in enumerate(regions):
        if region is not None and (first := seen.setdefault(region, index)) != index:
            return first, index
    dense = [region for region in seen if len(region.runs) == 1]
    dense.sort(key=lambda region: (str(region.device), region.start))
    for one, other in pairwise(dense):
        if one.device == other.device and other.start < one.end:
            first, second = sorted((seen[one], seen[other]))
            return first, second
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
