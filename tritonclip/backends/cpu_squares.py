"""Sums of squares by gradient on a CPU, from norms of rows, with little memory."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

# Rows of one gradient from which they are added up alone, and rows of several, at most, but for
# those of a slab, that are added up together, which takes up to 4 MiB.
LONE, TOGETHER = 2**13, 2**16


class Squares:
    """Adds squares of row norms to those of the gradients that the rows are of, many at a time.

    Args:
        result: float64[n], the sum of squares of each gradient.
    """

    def __init__(self, result: Tensor) -> None:
        self._result = result
        self._places: list[int] = []
        self._counts: list[int] = []
        self._norms: list[Tensor] = []
        self._n = 0

    def add(self, places: Sequence[int], counts: Sequence[int], norms: Tensor) -> None:
        """Takes norms of rows, of which so many are of each of some gradients; at most a slab."""
        if max(counts) >= LONE:
            if len(places) == 1:
                self._result[places[0]] += torch.linalg.vector_norm(norms, dtype=torch.float64) ** 2
                return
            own = norms.split_with_sizes(list(counts))
            for place, count, some in zip(places, counts, own, strict=True):
                self.add([place], [count], some)
            return
        if self._n + norms.numel() > TOGETHER:
            self.finish()
        self._places += places
        self._counts += counts
        self._norms.append(norms)
        self._n += norms.numel()

    def finish(self) -> None:
        """Adds those that were taken."""
        if self._norms:
            squares = torch.cat(self._norms).to(torch.float64, copy=True).square_()
            self._result.index_add_(0, _repeated(self._places, self._counts), squares)
            self._places, self._counts, self._norms, self._n = [], [], [], 0


def _repeated(numbers: list[int], counts: list[int]) -> Tensor:
    """Each number so many times, without the threads that `repeat_interleave` would start."""
    first = torch.tensor([*accumulate(counts[:-1])], dtype=torch.int64, device="cpu")
    marks = torch.zeros(sum(counts), dtype=torch.int64, device="cpu")
    marks[first] = 1
    return torch.tensor(numbers, device="cpu").index_select(0, marks.cumsum_(0))
