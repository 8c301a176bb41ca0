"""The torch backend on a CPU: no sync is needed there, so the host decides.

A gradient within the limit is not written. Small gradient lists are packed into scratch by one
call, and measured by one more.
"""

import math
from collections import deque
from collections.abc import Sequence
from ctypes import c_double, c_float
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tritonclip.backends import cpu_norm
from tritonclip.backends.batch import PartialNorms
from tritonclip.backends.cpu_clamp import Clamping
from tritonclip.backends.numbers import Numbers
from tritonclip.backends.packed import VIEW_BYTES, Scratch, packs, scratch_bytes
from tritonclip.backends.torch_backend import (
    ARITHMETIC,
    TorchBatch,
    combine,
    in_one_call,
    multiply_,
    norm_of,
    unscale_and_clamp_,
    zero_,
)
from tritonclip.grad_mode import outside_inference
from tritonclip.rules import Rule

# Gradients whose coefficients are computed in Python's numbers, at most. For 32, 128 and 512 that
# takes 5, 10 and 29 us where nothing is clipped, tensor operators 33, 39 and 58; where all are
# clipped, 29, 94 and 361 against 65, 151 and 492. (torch 2.13, Xeon, 1 thread.)
FEW = 512
# Largest mean size of gradients that GradScaler's function multiplies faster than foreach does: 30
# float32 gradients of 64, 1,024, 4,096 and 16,384 elements take 8.2, 11.4, 20.8 and 67 us, foreach
# 13.1, 14.6, 20.7 and 56; of bfloat16 8.5, 14.8, 32 and 99 against 32, 37, 50 and 105; float16 is
# like bfloat16. (torch 2.13, Xeon, 2 threads.)
UNSCALED = {torch.float32: 2048, torch.float16: 16384, torch.bfloat16: 16384}


class CpuLayout:
    """Sizes, and scratch for a small list.

    Args:
        tensors: gradients of one dtype on a CPU; at least one.
        flat: each is contiguous.
    """

    @outside_inference
    def __init__(self, tensors: list[Tensor], *, flat: bool) -> None:
        self.dtype = torch.float32
        self.flat = flat
        self.sizes = list(map(Tensor.numel, tensors))
        dtype = tensors[0].dtype
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.least = torch.finfo(self.wide).tiny
        self.packs = dtype in ARITHMETIC and packs(dtype, self.sizes, flat=flat)
        self.clamping = Clamping(tensors, self.sizes, flat=flat)
        # Gradients whose mean size is small are scaled by GradScaler's function, which looks for
        # NaN and inf too; nothing reads what it finds.
        self.unscales = (
            dtype in UNSCALED
            and sum(self.sizes) <= UNSCALED[dtype] * len(tensors)
            and not any(map(Tensor.is_neg, tensors))
        )
        self.found_nonfinite = torch.zeros((), dtype=torch.float32, device="cpu")
        # Memory that no call uses: a call takes it and appends it again, each in one operation, so
        # that threads, and a signal handler within a call, never share any. One of each is kept.
        self.scratch: deque[Scratch] = deque(maxlen=1)
        self.numbers: dict[torch.dtype, deque[Numbers]] = {
            dtype: deque(maxlen=1) for dtype in (torch.float32, torch.float64)
        }
        # One a gradient where there are few; else one for all.
        self._n_numbers = len(tensors) if len(tensors) <= FEW else 1
        self.n_bytes = VIEW_BYTES * self._n_numbers
        if self.packs:
            self.n_bytes += scratch_bytes(dtype, self.sizes, flat=flat)

    def bind(self, tensors: list[Tensor], addresses: list[int] | None) -> "CpuBatch":
        """The gradients of a call."""
        return CpuBatch(tensors, self)

    def take_numbers(self, dtype: torch.dtype) -> Numbers:
        """Numbers of a dtype that tensors share."""
        try:
            return self.numbers[dtype].pop()
        except IndexError:
            return Numbers(self._n_numbers, dtype)


class CpuBatch:
    """Verbs on a CPU; see :class:`tritonclip.backends.batch.Batch`."""

    counts_versions = True

    def __init__(self, tensors: list[Tensor], layout: CpuLayout) -> None:
        self.tensors, self.layout, self.dtype = tensors, layout, layout.dtype

    def _as_torch(self) -> TorchBatch:
        """The verbs that leave every decision to tensors."""
        return TorchBatch(self.tensors, self.dtype)

    def count_norms(self, *, per_gradient: bool) -> int:
        """How many partial norms `norm` gives: one a gradient, or one."""
        return len(self.tensors) if per_gradient else 1

    def norm(self, norm_type: float, out: Tensor | None, *, per_gradient: bool) -> PartialNorms:
        """Measures the gradients."""
        measured: PartialNorms | None = None
        layout = self.layout
        if norm_type != 2.0:
            measured = self._as_torch().norm(norm_type, None, per_gradient=per_gradient)
        elif layout.packs:
            try:
                scratch = layout.scratch.pop()
            except IndexError:
                scratch = Scratch(self.tensors, layout.sizes, flat=layout.flat)
            if scratch.is_dotted and not per_gradient:
                torch._foreach_copy_(scratch.slots, self.tensors)
                elements = scratch.elements
                measured = [math.sqrt(torch.dot(elements, elements).item())]
            elif per_gradient:
                measured = scratch.norms(self.tensors)
            elif (norm := scratch.norm(self.tensors)) is not None:
                measured = [norm]
            layout.scratch.append(scratch)
        if measured is None:
            measured = self._two_norm(per_gradient)
        return measured if out is None else out.copy_(_as_tensor(measured))

    def _two_norm(self, per_gradient: bool) -> Tensor:
        tensors, layout = self.tensors, self.layout
        if not per_gradient:
            return cpu_norm.two_norm(tensors, layout.sizes, flat=layout.flat)
        if cpu_norm.measures(tensors[0]):
            return cpu_norm.two_norms_of_each(tensors, layout.sizes, flat=layout.flat)
        return torch.stack([norm_of([tensor], 2.0, torch.float64) for tensor in tensors])

    def total(self, norms: PartialNorms, norm_type: float, grad_scale: float | Tensor) -> Tensor:
        """The norm from partial norms, 0-d."""
        if not isinstance(norms, Tensor) and not isinstance(grad_scale, Tensor):
            # One number, for which tensors take five operators.
            (norm,) = norms
            number = norm / grad_scale if norm_type else norm
            return torch.tensor(number, dtype=self.dtype, device="cpu")
        return self._as_torch().total(_as_tensor(norms), norm_type, grad_scale)

    def total_each(
        self, norms: PartialNorms, first: int, norm_type: float, grad_scale: float | Tensor
    ) -> Tensor:
        """The norm of each gradient, 1-d."""
        return self._as_torch().total_each(_as_tensor(norms), first, norm_type, grad_scale)

    def norms_each(self, norms: Tensor, norm_type: float) -> Tensor:
        """The norm of each gradient: there is one partial norm for each."""
        return norms

    def partials_each(self, norms: Tensor, norm_type: float) -> Tensor:
        """The same norms."""
        return norms

    def scale_(
        self,
        norms: PartialNorms,
        rule: Rule,
        max_norm: float | Tensor,
        grad_scale: float | Tensor,
        *,
        erase_nonfinite: bool,
    ) -> tuple[Tensor, float]:
        """Multiplies all gradients by one coefficient, but not where it is 1."""
        if isinstance(norms, Tensor):
            norms = [float(norms if norms.numel() == 1 else combine(norms, rule.norm_type))]
        layout, dtype, scale = self.layout, self.dtype, float(grad_scale)
        numbers = layout.take_numbers(dtype)
        # A count of elements carries no loss scale.
        numbers.memory[0] = norms[0] / scale if rule.norm_type else norms[0]
        measured: float = numbers.memory[0]
        norm = numbers.first.clone()
        layout.numbers[dtype].append(numbers)
        if erase_nonfinite and not math.isfinite(measured):
            zero_(self.tensors)
            return norm, 0.0
        rounded = c_double if dtype == torch.float64 else c_float
        coefficient = _coefficient(measured, float(max_norm), rule.eps, rounded)
        multiplier = coefficient
        if scale != 1:
            multiplier = rounded(coefficient / rounded(scale).value).value
        if multiplier < layout.least and coefficient > 0:
            # It would lose digits.
            factors = self._as_torch().factors_of(torch.full_like(norm, coefficient), scale)
            multiply_(self.tensors, factors, torch.zeros((), dtype=torch.bool, device="cpu"))
        elif multiplier != 1:
            self._multiply_(multiplier)
        return norm, coefficient

    def _multiply_(self, multiplier: float) -> None:
        layout = self.layout
        # In a 0-d tensor: a number would be rounded to a half type first.
        numbers = layout.take_numbers(layout.wide)
        numbers.memory[0] = multiplier
        if layout.unscales and forward_ad._current_level < 0:
            # Not for dual numbers, whose tangents it leaves. What GradScaler unscales with.
            torch._amp_foreach_non_finite_check_and_unscale_(
                self.tensors, layout.found_nonfinite, numbers.first
            )
            torch.autograd.graph.increment_version(self.tensors)
        elif not in_one_call(torch._foreach_mul_, self.tensors, numbers.first):
            no = torch.zeros((), dtype=torch.bool, device="cpu")
            multiply_(self.tensors, [numbers.first], no)
        layout.numbers[layout.wide].append(numbers)

    def scale_each_(
        self,
        norms: PartialNorms,
        first: int,
        rule: Rule,
        max_norm: float | Tensor,
        grad_scale: float | Tensor,
        *,
        erase: Tensor | None,
    ) -> tuple[Tensor, float | Tensor]:
        """Multiplies each gradient by the coefficient of its norm, but not where it is 1."""
        n = len(self.tensors)
        if n <= FEW and not isinstance(max_norm, Tensor):
            if isinstance(norms, Tensor):
                norms = norms[first : first + n].tolist()
            return self._scale_few_(norms, rule, max_norm, float(grad_scale), erase)
        norm, coefficient, factors = self._as_torch().terms_each(
            _as_tensor(norms), first, rule, max_norm, grad_scale
        )
        if erase is not None and bool(erase):
            zero_(self.tensors)
            return norm, 0.0
        changed = (factors[0] != 1).nonzero().flatten().tolist()
        self._multiply_each_(changed, factors)
        return norm, coefficient

    def _scale_few_(
        self,
        norms: list[float],
        rule: Rule,
        max_norm: float,
        scale: float,
        erase: Tensor | None,
    ) -> tuple[Tensor, float]:
        """As `scale_each_`, with every coefficient in Python's numbers; returns the least."""
        layout, dtype = self.layout, self.dtype
        if scale != 1 and rule.norm_type:
            norms = [norm / scale for norm in norms]
        numbers = layout.take_numbers(dtype)
        memory = numbers.memory
        memory[:] = norms
        norm = numbers.together.clone()
        coefficients = _coefficients(memory[:], max_norm, rule.eps, memory)
        layout.numbers[dtype].append(numbers)
        if erase is not None and bool(erase):
            zero_(self.tensors)
            return norm, 0.0
        # min may miss a NaN, a sum does not.
        least = min(coefficients) if sum(coefficients) >= 0 else math.nan
        if least == 1 == scale:
            return norm, 1.0
        multipliers = coefficients
        if scale != 1:
            rounded = memory._type_
            divisor = rounded(scale).value
            multipliers = [rounded(coefficient / divisor).value for coefficient in coefficients]
        changed = [i for i, multiplier in enumerate(multipliers) if multiplier != 1]
        if self._loses_digits(multipliers, coefficients):
            exact = torch.tensor(coefficients, dtype=dtype, device="cpu")
            self._multiply_each_(changed, self._as_torch().factors_of(exact, scale))
        elif changed:
            factors = layout.take_numbers(layout.wide)
            factors.memory[:] = multipliers
            self._multiply_chosen_(changed, factors.each)
            layout.numbers[layout.wide].append(factors)
        return norm, least

    def _loses_digits(self, multipliers: list[float], coefficients: list[float]) -> bool:
        """Whether a multiplier is too small for the dtype that it multiplies in."""
        least = self.layout.least
        if least <= min(multipliers) and sum(multipliers) >= 0:
            return False
        return any(m < least and c > 0 for m, c in zip(multipliers, coefficients, strict=True))

    def _multiply_each_(self, changed: list[int], factors: list[Tensor]) -> None:
        """Multiplies some gradients, each by the factors of its index."""
        if len(factors) > 1 and bool((factors[1] != 1).any()):
            no = torch.zeros((), dtype=torch.bool, device="cpu")
            for i in changed:
                multiply_([self.tensors[i]], [factor[i] for factor in factors], no)
        elif changed:
            self._multiply_chosen_(changed, factors[0].to(self.layout.wide).unbind())

    def _multiply_chosen_(self, changed: list[int], factors: Sequence[Tensor]) -> None:
        """Multiplies some gradients, each by the 0-d factor of its index."""
        tensors = self.tensors
        if len(changed) < len(tensors):
            tensors = [tensors[i] for i in changed]
            factors = [factors[i] for i in changed]
        if not in_one_call(torch._foreach_mul_, tensors, factors):
            no = torch.zeros((), dtype=torch.bool, device="cpu")
            for tensor, factor in zip(tensors, factors, strict=True):
                multiply_([tensor], [factor], no)

    def clamp_(self, low: float, high: float, grad_scale: float | Tensor) -> None:
        """Clamps the gradients, in one pass where they are large."""
        if isinstance(grad_scale, Tensor) or grad_scale != 1:
            unscale_and_clamp_(self.tensors, low, high, grad_scale)
        else:
            self.layout.clamping.clamp_(self.tensors, low, high)


def _as_tensor(norms: PartialNorms) -> Tensor:
    """Partial norms as float64[n]."""
    if isinstance(norms, Tensor):
        return norms
    return torch.tensor(norms, dtype=torch.float64, device="cpu")


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


def _coefficients(norms: list[float], max_norm: float, eps: float, memory: Any) -> list[float]:
    """The coefficient of each norm, as `_coefficient`; `memory`, of so many numbers, rounds."""
    limit, added = memory._type_(max_norm).value, memory._type_(eps).value
    memory[:] = [norm + added for norm in norms]
    bounds: list[float] = memory[:]
    # max may miss a NaN, a sum does not.
    if max(bounds) <= limit and sum(bounds) >= 0:
        return [1.0] * len(norms)
    if limit == math.inf or 0 in bounds:
        return [_coefficient(norm, max_norm, eps, memory._type_) for norm in norms]
    memory[:] = [limit / bound for bound in bounds]
    return [1.0 if ratio > 1 else ratio for ratio in memory]
