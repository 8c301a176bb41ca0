"""The torch backend on a CPU: no sync is needed there, so the host decides.

A gradient within the limit is not written. Small gradient lists are packed into scratch by one
call, and measured by one more.
"""

import math
from collections.abc import Sequence
from ctypes import c_double, c_float
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from tritonclip.backends import cpu_norm
from tritonclip.backends.batching import pack_small
from tritonclip.backends.torch_backend import (
    ARITHMETIC,
    TorchBatch,
    clamp_together_,
    combine,
    in_one_call,
    multiply_,
    norm_of,
    unscale_and_clamp_,
    zero_,
)
from tritonclip.rules import Rule

# Lists of up to so many elements and tensors are packed: their scratch takes up to 4 MiB a plan.
PACKED_ELEMENTS = 524288
PACKED_TENSORS = 512
# Elements of a packed float64 gradient whose squares are added up in turn: to 4096 * 2^-53 = 5e-13.
MOST_IN_TURN = 4096
# Mean size from which gradients are measured by a call each, rather than their squares added up by
# index: 10 tensors of 64, 256, 1,024 and 6,000 elements take 50, 60, 57 and 162 us so, and 39, 41,
# 91 and 979 by index; 100 tensors of 256 and 1,024 570 and 691, and 496 and 1,838.
COARSE = 512
# Sums of squares of float64 elements outside of this range may have lost some, or overflowed.
_SMALLEST, _LARGEST = 2.0**-450, 2.0**450
# Elements from which a CPU tensor is clamped in one pass: of 1,024, 4,096, 8,192 and 131,072
# elements, two foreach passes take 1.2, 2.3, 7.5 and 78 us a tensor, one call of clamp_ 1.9, 2.2,
# 6.0 and 45. To compare first whether any element is outside costs as much as to clamp: 28 to 35 ms
# for 124M float32 elements, against 29. (torch 2.13, Xeon, 2 threads.)
ONE_PASS = 4096
# Tensors of a batch from which those with elements outside are searched: that takes 80 us a batch,
# and 0.8 us to clamp a tensor of up to 256 elements.
MANY = 256


# Gradients whose coefficients are computed in numbers of Python: 2 us each; tensor operators take
# 80 us a call.
FEW = 32


class Scratch:
    """Memory in which a small gradient list is measured.

    Attributes:
        elements: float64[n], all gradients end to end: their squares neither overflow nor vanish,
            unless they are float64 themselves.
        slots: a view of it for each gradient, of its shape.
    """

    __slots__ = ("elements", "slots")

    def __init__(self, tensors: list[Tensor], sizes: list[int]) -> None:
        # Never inference tensors, which no later call could write to.
        with torch.inference_mode(False):
            self.elements = torch.zeros(sum(sizes), dtype=torch.float64, device="cpu")
            self.slots = [
                slot.view(tensor.shape)
                for slot, tensor in zip(self.elements.split(sizes), tensors, strict=True)
            ]


class CpuLayout:
    """Sizes, and scratch for a small list.

    Args:
        tensors: gradients of one dtype on a CPU; at least one.
        flat: each is contiguous.
    """

    def __init__(self, tensors: list[Tensor], *, flat: bool) -> None:
        self.dtype = torch.float32
        self.flat = flat
        self.sizes = list(map(Tensor.numel, tensors))
        self.wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        self.packs = (
            sum(self.sizes) <= PACKED_ELEMENTS
            and len(tensors) <= PACKED_TENSORS
            and tensors[0].dtype in ARITHMETIC
        )
        # Squares are added up one after the other, which costs long float64 gradients digits.
        self.packs_each = self.packs and (
            self.wide == torch.float32 or max(self.sizes) <= MOST_IN_TURN
        )
        self.is_coarse = sum(self.sizes) > COARSE * len(tensors)
        # Contiguous and 1-d: packed without a view of each.
        self.lines = flat and all(tensor.dim() == 1 for tensor in tensors)
        least = math.inf
        if tensors[0].dtype in ARITHMETIC:
            least = 0 if len(tensors) == 1 else ONE_PASS
        self.clamped_alone = [i for i, n in enumerate(self.sizes) if n >= least]
        self.clamped_together = [i for i, n in enumerate(self.sizes) if n < least]
        # Scratch that no call uses. A call takes one and puts it back, each in one operation on a
        # list: threads, and a signal handler within a call, so never share one.
        self.free: list[Scratch] = []

    def bind(self, tensors: list[Tensor], addresses: list[int] | None) -> "CpuBatch":
        """The gradients of a call."""
        return CpuBatch(tensors, self)

    @cached_property
    def tensor_of_element(self) -> Tensor:
        """The gradient that each element of the scratch belongs to, int64[n]."""
        with torch.inference_mode(False):
            counts = torch.tensor(self.sizes, device="cpu")
            return torch.repeat_interleave(counts)


class CpuBatch(TorchBatch):
    """Verbs on a CPU; see :class:`tritonclip.backends.batch.Batch`."""

    def __init__(self, tensors: list[Tensor], layout: CpuLayout) -> None:
        self.tensors, self.layout, self.dtype = tensors, layout, layout.dtype

    def norm(self, norm_type: float, out: Tensor | None, *, per_gradient: bool) -> Tensor:
        """Measures the gradients."""
        if norm_type != 2.0:
            return super().norm(norm_type, out, per_gradient=per_gradient)
        layout, measured = self.layout, None
        if layout.packs_each if per_gradient else layout.packs:
            try:
                scratch = layout.free.pop()
            except IndexError:
                scratch = Scratch(self.tensors, layout.sizes)
            elements = scratch.elements
            torch._foreach_copy_(scratch.slots, self.tensors)
            if per_gradient and layout.is_coarse:
                measured = torch.stack(torch._foreach_norm(scratch.slots))
            elif per_gradient:
                measured = torch.zeros(len(self.tensors), dtype=torch.float64, device="cpu")
                measured.index_add_(0, layout.tensor_of_element, elements * elements).sqrt_()
            else:
                measured = torch.dot(elements, elements).sqrt_()
            layout.free.append(scratch)
            if layout.wide == torch.float64:
                fits = (measured >= _SMALLEST) & (measured < _LARGEST)
                measured = measured if bool(fits.all()) else None
        if measured is None:
            measured = self._two_norm(per_gradient)
        return measured if out is None else out.copy_(measured)

    def _two_norm(self, per_gradient: bool) -> Tensor:
        tensors, layout = self.tensors, self.layout
        if not per_gradient:
            return cpu_norm.two_norm(tensors, layout.sizes, flat=layout.flat)
        if cpu_norm.measures(tensors[0]):
            return cpu_norm.two_norms_of_each(tensors, layout.sizes, flat=layout.flat)
        return torch.stack([norm_of([tensor], 2.0, torch.float64) for tensor in tensors])

    def scale_(
        self,
        norms: Tensor,
        rule: Rule,
        max_norm: float | Tensor,
        grad_scale: float | Tensor,
        *,
        erase_nonfinite: bool,
    ) -> tuple[Tensor, float | Tensor]:
        """Multiplies all gradients by one coefficient, but not where it is 1."""
        total = float(norms if norms.numel() == 1 else combine(norms, rule.norm_type))
        scale = float(grad_scale)
        rounded = c_double if self.dtype == torch.float64 else c_float
        measured = rounded(total / (scale if rule.norm_type else 1.0)).value
        norm = torch.full((), measured, dtype=self.dtype, device="cpu")
        if erase_nonfinite and not math.isfinite(measured):
            zero_(self.tensors)
            return norm, 0.0
        coefficient = _coefficient(measured, float(max_norm), rule.eps, rounded)
        multiplier = rounded(coefficient / rounded(scale).value).value
        if multiplier != 1:
            self._multiply_(multiplier)
        return norm, coefficient

    def _multiply_(self, multiplier: float) -> None:
        # In a 0-d tensor: a number would be rounded to a half type first.
        factor = torch.full((), multiplier, dtype=self.layout.wide, device="cpu")
        if not in_one_call(torch._foreach_mul_, self.tensors, factor):
            multiply_(self.tensors, factor, torch.zeros((), dtype=torch.bool, device="cpu"))

    def scale_each_(
        self,
        norms: Tensor,
        first: int,
        rule: Rule,
        max_norm: float | Tensor,
        grad_scale: float | Tensor,
        *,
        erase: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Multiplies each gradient by the coefficient of its norm, but not where it is 1."""
        n = len(self.tensors)
        if n <= FEW and not isinstance(max_norm, Tensor):
            norm, coefficient, multipliers = self._few_terms(
                norms[first : first + n].tolist(), rule, max_norm, float(grad_scale)
            )
            changed = [i for i, multiplier in enumerate(multipliers) if multiplier != 1]
            factors = (
                torch.tensor(multipliers, dtype=self.layout.wide, device="cpu") if changed else norm
            )
        else:
            norm, coefficient, factors = self.terms_each(norms, first, rule, max_norm, grad_scale)
            factors = factors.to(self.layout.wide)
            changed = (factors != 1).nonzero().flatten().tolist()
        if erase is not None and bool(erase):
            zero_(self.tensors)
            return norm, torch.zeros_like(coefficient)
        if changed:
            self._multiply_each_(changed, factors.unbind())
        return norm, coefficient

    def _few_terms(
        self, norms: list[float], rule: Rule, max_norm: float, scale: float
    ) -> tuple[Tensor, Tensor, list[float]]:
        """Norms, coefficients and multipliers of a few gradients, in numbers of Python."""
        rounded = c_double if self.dtype == torch.float64 else c_float
        divisor = rounded(scale).value
        # A count of elements carries no loss scale.
        shared = scale if rule.norm_type else 1.0
        measured = [rounded(norm / shared).value for norm in norms]
        coefficients = [_coefficient(norm, max_norm, rule.eps, rounded) for norm in measured]
        multipliers = [rounded(coefficient / divisor).value for coefficient in coefficients]
        results = torch.tensor([measured, coefficients], dtype=self.dtype, device="cpu")
        return results[0], results[1], multipliers

    def _multiply_each_(self, changed: list[int], factors: Sequence[Tensor]) -> None:
        """Multiplies some gradients, each by the 0-d factor of its index."""
        tensors = [self.tensors[i] for i in changed]
        chosen = [factors[i] for i in changed]
        if not in_one_call(torch._foreach_mul_, tensors, chosen):
            no = torch.zeros((), dtype=torch.bool, device="cpu")
            for tensor, factor in zip(tensors, chosen, strict=True):
                multiply_([tensor], factor, no)

    def clamp_(self, low: float, high: float, grad_scale: float | Tensor) -> None:
        """Clamps the gradients, in one pass where they are large."""
        tensors, layout = self.tensors, self.layout
        if isinstance(grad_scale, Tensor) or grad_scale != 1:
            unscale_and_clamp_(tensors, low, high, grad_scale)
            return
        small, large = layout.clamped_together, layout.clamped_alone
        together = [tensors[i] for i in small] if large else tensors
        # First, because packing refuses dual numbers of forward AD.
        if len(small) >= MANY and layout.lines:
            _clamp_many_(together, [layout.sizes[i] for i in small], low, high)
        else:
            clamp_together_(together, low, high)
        for i in large:
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


def _coefficient(
    norm: float, max_norm: float, eps: float, rounded: type[c_float] | type[c_double]
) -> float:
    """Returns min(1, max_norm / (norm + eps)), every step rounded as a tensor would round it.

    1 for nothing to clip and for an infinite limit; NaN stays. A sum and a quotient of two float32
    computed in float64 and rounded to float32 are those that float32 gives.
    """
    limit = rounded(max_norm).value
    bound = rounded(norm + rounded(eps).value).value
    if bound == 0 or (limit == math.inf and norm == norm):
        return 1.0
    ratio = rounded(limit / bound).value
    return 1.0 if ratio > 1 else ratio
