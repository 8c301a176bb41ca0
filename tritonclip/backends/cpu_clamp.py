"""Clamping on a CPU: large gradients in one pass each, small ones together."""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import accumulate
from operator import itemgetter

import torch
from torch import Tensor

from tritonclip.backends.batching import BATCH
from tritonclip.backends.cpu_wide import write_widened_
from tritonclip.backends.torch_writes import ARITHMETIC, clamp_together_, in_forward_mode

# Elements from which a CPU tensor is clamped in one pass: of 1,024, 4,096, 8,192 and 131,072
# elements, two foreach passes take 1.2, 2.3, 7.5 and 78 us a tensor, one call of clamp_ 1.9, 2.2,
# 6.0 and 45. To compare first whether any element is outside costs as much as to clamp: 28 to 35 ms
# for 124M float32 elements, against 29. (torch 2.13, Xeon, 2 threads.)
ONE_PASS = 4096
# Lists of so few gradients are clamped one by one: two of 4 and two of 4,095 elements take 2.9 and
# 3.4 us, in two foreach passes 3.3 and 4.0. (torch 2.13, AMD EPYC.)
CALLED = 2
# Small 1-d gradients from which a batch is compared with the bounds before it is clamped, and the
# few that have an element outside are searched. For 60 and 300 of 1 to 64 float32 elements,
# clamping takes 35 and 168 us, to see that none is outside 7.9 and 29, and to find and clamp one in
# twenty 21 and 59. (torch 2.13, Xeon, 1 thread.) After a backward pass this pays later: 100, 300
# and 10,000 of which none is outside take 1.6, 1.3 and 0.8 times as long as torch, clamped at once
# 1.4, 1.3 and 1.2. (AMD EPYC, 2 threads.)
SEARCHED = 256
# Calls that clamp without a look after one that was in vain.
PATIENCE = 31


class Clamping:
    """Which gradients of a list are clamped how.

    Args:
        tensors: gradients of one dtype on a CPU; at least one.
        sizes: theirs.
        widened: indices of those that may be converted to be written.
        flat: each is contiguous.
    """

    __slots__ = ("_alone", "_batches", "_foreach", "_small", "_together", "_widened")

    def __init__(
        self, tensors: list[Tensor], sizes: list[int], widened: Set[int], *, flat: bool
    ) -> None:
        least = math.inf
        if tensors[0].dtype in ARITHMETIC:
            least = 0 if len(tensors) <= CALLED else ONE_PASS
        self._alone = [i for i, n in enumerate(sizes) if n >= least]
        self._widened = widened
        small = [i for i, n in enumerate(sizes) if n < least]
        # None for all gradients.
        self._small = small if self._alone else None
        # Whether torch's foreach functions take them.
        self._foreach = least < math.inf and not any(map(Tensor.is_neg, tensors))
        lines = []
        if flat and least < math.inf:
            # Others would take a view each.
            lines = [i for i in small if tensors[i].dim() == 1 and sizes[i]]
        self._batches = [
            _Batch(indices, [sizes[i] for i in indices])
            for indices in _batches_of(lines, sizes)
            if len(indices) >= SEARCHED
        ]
        looked_at = {i for batch in self._batches for i in batch.indices}
        self._together = [i for i in small if i not in looked_at]

    def clamp_(self, tensors: list[Tensor], low: float, high: float) -> None:
        """Clamps gradients of the list's form."""
        if not self._batches or all(batch.waits > 0 for batch in self._batches):
            small = tensors if self._small is None else [tensors[i] for i in self._small]
            for batch in self._batches:
                # Another thread may have done it.
                batch.waits = max(0, batch.waits - 1)
        else:
            small = [tensors[i] for i in self._together]
            for batch in self._batches:
                small += batch.to_clamp(tensors, low, high)
        if not self._foreach:
            clamp_together_(small, low, high)
        elif small:
            torch._foreach_clamp_min_(small, low)
            torch._foreach_clamp_max_(small, high)
        alone: Iterable[int] = self._alone
        if self._widened and not in_forward_mode():
            write_widened_(tensors, self._widened, lambda piece, _: piece.clamp_(low, high))
            alone = [i for i in self._alone if i not in self._widened]
        for i in alone:
            tensors[i].clamp_(low, high)


class _Batch:
    """Small 1-d gradients that are looked at together.

    Args:
        indices: theirs in the list; at least two.
        sizes: theirs, BATCH elements at most in all.

    Attributes:
        indices: of the gradients.
        waits: how many calls more clamp all of them, whatever they hold.
    """

    __slots__ = ("_choose", "_ends", "indices", "waits")

    def __init__(self, indices: Sequence[int], sizes: Sequence[int]) -> None:
        self.indices = indices
        self._choose = itemgetter(*indices)
        self._ends = array("q", accumulate(sizes))
        self.waits = 0

    def to_clamp(self, tensors: list[Tensor], low: float, high: float) -> Sequence[Tensor]:
        """Gradients among which are all that have an element outside of bounds, or NaN."""
        chosen: tuple[Tensor, ...] = self._choose(tensors)
        if self.waits or in_forward_mode():
            self.waits = max(0, self.waits - 1)
            return chosen
        # Without memory to write to, autocast would refuse half types.
        room = torch.empty(self._ends[-1], dtype=chosen[0].dtype, device="cpu")
        elements = torch.cat(chosen, out=room)
        least, largest = torch.aminmax(elements)
        if low <= least.item() and largest.item() <= high:
            return ()
        outside = (elements.clamp(low, high) != elements).nonzero()
        if 2 * len(outside) <= len(chosen):
            places = {bisect_right(self._ends, place) for place in outside.flatten().tolist()}
            return [chosen[place] for place in sorted(places)]
        self.waits = PATIENCE
        return chosen


def _batches_of(indices: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """Indices in their order, of up to BATCH elements at a time."""
    batch: list[int] = []
    n = 0
    for i in indices:
        if n + sizes[i] > BATCH:
            yield batch
            batch, n = [], 0
        batch.append(i)
        n += sizes[i]
    yield batch
