"""Clamping on a CPU: large gradients in one pass each, small ones together."""

import math
from collections.abc import Iterable, Set
from itertools import accumulate

import torch
from torch import Tensor

from tritonclip.backends.batching import pack_small
from tritonclip.backends.cpu_wide import write_widened_
from tritonclip.backends.torch_writes import ARITHMETIC, clamp_together_, in_forward_mode

# Elements from which a CPU tensor is clamped in one pass: of 1,024, 4,096, 8,192 and 131,072
# elements, two foreach passes take 1.2, 2.3, 7.5 and 78 us a tensor, one call of clamp_ 1.9, 2.2,
# 6.0 and 45. To compare first whether any element is outside costs as much as to clamp: 28 to 35 ms
# for 124M float32 elements, against 29. (torch 2.13, Xeon, 2 threads.)
ONE_PASS = 4096
# Tensors of a batch from which those with elements outside are searched: that takes 80 us a batch,
# and 0.8 us to clamp a tensor of up to 256 elements.
MANY = 256


class Clamping:
    """Which gradients of a list are clamped how.

    Args:
        tensors: gradients of one dtype on a CPU; at least one.
        sizes: theirs.
        widened: indices of those that are converted to be written.
        flat: each is contiguous.
    """

    __slots__ = ("_alone", "_lines", "_sizes", "_together", "_widened")

    def __init__(
        self, tensors: list[Tensor], sizes: list[int], widened: Set[int], *, flat: bool
    ) -> None:
        least = math.inf
        if tensors[0].dtype in ARITHMETIC:
            least = 0 if len(tensors) == 1 else ONE_PASS
        self._alone = [i for i, n in enumerate(sizes) if n >= least]
        self._widened = widened
        self._together = [i for i, n in enumerate(sizes) if n < least]
        # Contiguous and 1-d: packed without a view of each.
        self._lines = flat and all(tensor.dim() == 1 for tensor in tensors)
        self._sizes = sizes

    def clamp_(self, tensors: list[Tensor], low: float, high: float) -> None:
        """Clamps gradients of the list's form."""
        if self._together:
            small = [tensors[i] for i in self._together] if self._alone else tensors
            # First, because packing refuses dual numbers of forward AD.
            if len(small) >= MANY and self._lines:
                _clamp_many_(small, [self._sizes[i] for i in self._together], low, high)
            else:
                clamp_together_(small, low, high)
        alone: Iterable[int] = self._alone
        if self._widened and not in_forward_mode():
            write_widened_(tensors, self._widened, lambda piece, _: piece.clamp_(low, high))
            alone = [i for i in self._alone if i not in self._widened]
        for i in alone:
            tensors[i].clamp_(low, high)


def _clamp_many_(tensors: list[Tensor], sizes: list[int], low: float, high: float) -> None:
    """Clamps many small tensors, those within bounds not at all.

    Comparing many at once takes less than clamping them, unless most of them need it.
    """
    n_done = 0
    for start, stop, elements in pack_small(tensors, sizes):
        least, largest = torch.aminmax(elements)
        if not (low <= least and largest <= high):
            if stop - start < MANY:
                break
            ends = torch.tensor(list(accumulate(sizes[start:stop])), device="cpu")
            outside = ((elements < low) | (elements > high)).nonzero().flatten()
            places = torch.searchsorted(ends, outside, right=True).unique_consecutive().tolist()
            if 2 * len(places) > stop - start:
                break
            clamp_together_([tensors[start + place] for place in places], low, high)
        n_done = stop
    clamp_together_(tensors[n_done:], low, high)
