"""Clamping on a CPU: large gradients in one pass each, small ones together."""

import math

import torch
from torch import Tensor

from tritonclip.backends.operators import ARITHMETIC, clamp_together_

# Elements from which a CPU tensor is clamped in one pass: of 1,024, 4,096, 8,192 and 131,072
# elements, two foreach passes take 1.2, 2.3, 7.5 and 78 us a tensor, one call of clamp_ 1.9, 2.2,
# 6.0 and 45. To compare first whether any element is outside costs as much as to clamp: 28 to 35 ms
# for 124M float32 elements, against 29. (torch 2.13, Xeon, 2 threads.)
ONE_PASS = 4096
# Lists of so few gradients are clamped one by one: two of 4 and two of 4,095 elements take 2.9 and
# 3.4 us, in two foreach passes 3.3 and 4.0. (torch 2.13, AMD EPYC.)
CALLED = 2


class Clamping:
    """Which gradients of a list are clamped how.

    Args:
        tensors: gradients of one dtype on a CPU; at least one.
        sizes: theirs.
    """

    __slots__ = ("_alone", "_foreach", "_together")

    def __init__(self, tensors: list[Tensor], sizes: list[int]) -> None:
        least = math.inf
        if tensors[0].dtype in ARITHMETIC:
            least = 0 if len(tensors) <= CALLED else ONE_PASS
        self._alone = [i for i, n in enumerate(sizes) if n >= least]
        together = [i for i, n in enumerate(sizes) if n < least]
        # None for all gradients.
        self._together = together if self._alone else None
        # Whether torch's foreach functions take them.
        self._foreach = least < math.inf and not any(map(Tensor.is_neg, tensors))

    def clamp_(self, tensors: list[Tensor], low: float, high: float) -> None:
        """Clamps gradients of the list's form."""
        together = tensors if self._together is None else [tensors[i] for i in self._together]
        if not self._foreach:
            clamp_together_(together, low, high)
        elif together:
            torch._foreach_clamp_min_(together, low)
            torch._foreach_clamp_max_(together, high)
        for i in self._alone:
            tensors[i].clamp_(low, high)
