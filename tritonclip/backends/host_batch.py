"""Verbs on a CPU as far as the host decides: no sync is needed there.

A gradient within the limit is not written. Subclasses measure, multiply and clamp.
"""

import math
from ctypes import c_double, c_float

import torch
from torch import Tensor

from tritonclip.backends.cpu_scale import least_of, multiply_exactly_
from tritonclip.backends.host_form import FEW, HostForm
from tritonclip.backends.interface import PartialNorms
from tritonclip.backends.numbers import Numbers, as_tensor
from tritonclip.backends.operators import TorchBatch, combine, zero_
from tritonclip.rules import Rule


class HostBatch:
    """Decisions of the verbs on a CPU; see :class:`tritonclip.backends.interface.Batch`."""

    counts_versions = True
    on_host = True

    def __init__(self, tensors: list[Tensor], layout: HostForm) -> None:
        self.tensors, self.layout, self.dtype = tensors, layout, layout.dtype

    def _as_torch(self) -> TorchBatch:
        """The verbs that leave every decision to tensors."""
        return TorchBatch(self.tensors, self.dtype)

    def _for_operators(self) -> list[Tensor]:
        """The gradients as operators want them."""
        return self.tensors

    def _take_numbers(self, dtype: torch.dtype) -> Numbers:
        """Numbers of a dtype that no other call has."""
        try:
            return self.layout.numbers[dtype].pop()
        except IndexError:
            return self.layout.new_numbers(dtype)

    def count_norms(self, *, per_gradient: bool) -> int:
        """How many partial norms `norm` gives: one a gradient, or one."""
        return len(self.tensors) if per_gradient else 1

    def total(self, norms: PartialNorms, norm_type: float, grad_scale: float | Tensor) -> Tensor:
        """The norm from partial norms, 0-d."""
        if not isinstance(norms, Tensor) and not isinstance(grad_scale, Tensor):
            # Numbers, for which tensors take five operators or more.
            norm = combined(norms, norm_type)
            number = norm / grad_scale if norm_type else norm
            return torch.tensor(number, dtype=self.dtype, device="cpu")
        return self._as_torch().total(as_tensor(norms), norm_type, grad_scale)

    def total_each(
        self, norms: PartialNorms, first: int, norm_type: float, grad_scale: float | Tensor
    ) -> Tensor:
        """The norm of each gradient, 1-d."""
        if not isinstance(norms, Tensor) and not isinstance(grad_scale, Tensor):
            own = norms[first : first + len(self.tensors)]
            numbers = [norm / grad_scale for norm in own] if norm_type else own
            return torch.tensor(numbers, dtype=self.dtype, device="cpu")
        return self._as_torch().total_each(as_tensor(norms), first, norm_type, grad_scale)

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
        is_one = isinstance(norms, list) and len(norms) == 1
        total: float = norms[0] if is_one else combined(norms, rule.norm_type)
        layout, dtype, scale = self.layout, self.dtype, float(grad_scale)
        numbers = self._take_numbers(dtype)
        # A count of elements carries no loss scale.
        numbers.memory[0] = total / scale if rule.norm_type else total
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
            tensors = self._for_operators()
            multiply_exactly_(tensors, layout, torch.full_like(norm, coefficient), scale)
        elif multiplier != 1:
            self._multiply_(multiplier)
        return norm, coefficient

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
            norms = norms[first : first + n]
            norms = norms.tolist() if isinstance(norms, Tensor) else norms
            return self._scale_few_(norms, rule, max_norm, float(grad_scale), erase)
        norm, coefficient, factors = self._as_torch().terms_each(
            as_tensor(norms), first, rule, max_norm, grad_scale
        )
        if erase is not None and bool(erase):
            zero_(self.tensors)
            return norm, 0.0
        changed = (factors[0] != 1).nonzero().flatten().tolist()
        if changed:
            self._multiply_by_tensors_(changed, factors)
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
        numbers = self._take_numbers(dtype)
        numbers.memory[:] = norms
        norm = numbers.together.clone()
        coefficients, least = self._coefficients(norms, numbers, max_norm, rule.eps)
        if erase is not None and bool(erase):
            zero_(self.tensors)
            least = 0.0
        elif scale != 1 or (dtype != layout.wide and least != 1):
            self._unscale_each_(coefficients, scale)
        elif least != 1:
            self._multiply_each_(coefficients, coefficients, numbers, least)
        layout.numbers[dtype].append(numbers)
        return norm, least

    def _coefficients(
        self, norms: list[float], numbers: Numbers, max_norm: float, eps: float
    ) -> tuple[list[float], float]:
        """The coefficient of each norm, as `_coefficient`, and the least; NaN where one is.

        `numbers` has the norms, and then, for operators, the coefficients, where any is not 1.
        """
        memory = numbers.memory
        limit, added = memory._type_(max_norm).value, memory._type_(eps).value
        norms = memory[:]
        # max may miss a NaN, a sum does not. What is within the limit is so after rounding too.
        if max(norms) + added <= limit and sum(norms) >= 0:
            return [1.0] * len(norms), 1.0
        memory[:] = [norm + added for norm in norms]
        bounds: list[float] = memory[:]
        memory[:] = [1.0 if bound <= limit else limit / bound for bound in bounds]
        coefficients: list[float] = memory[:]
        return coefficients, least_of(coefficients)

    def _multiply_(self, multiplier: float) -> None:
        """Multiplies all gradients."""
        raise NotImplementedError

    def _unscale_each_(self, coefficients: list[float], scale: float) -> None:
        """Multiplies each gradient by its coefficient, divided by the loss scale."""
        layout = self.layout
        rounded = c_double if self.dtype == torch.float64 else c_float
        divisor = rounded(scale).value
        multipliers = [rounded(coefficient / divisor).value for coefficient in coefficients]
        factors = self._take_numbers(layout.wide)
        factors.memory[:] = multipliers
        self._multiply_each_(multipliers, coefficients, factors, least_of(multipliers), scale)
        layout.numbers[layout.wide].append(factors)

    def _multiply_each_(
        self,
        multipliers: list[float],
        coefficients: list[float],
        factors: Numbers,
        least: float,
        scale: float = 1.0,
    ) -> None:
        """Arguments as for :func:`tritonclip.backends.cpu_scale.multiply_each_`."""
        raise NotImplementedError

    def _multiply_by_tensors_(self, changed: list[int], factors: list[Tensor]) -> None:
        """Multiplies some gradients, each by the factors of its index."""
        raise NotImplementedError


def combined(norms: PartialNorms, p: float) -> float:
    """The norm whose parts have these norms."""
    if isinstance(norms, Tensor):
        return float(combine(norms, p))
    numbers: list[float] = norms
    total, largest = sum(numbers), max(numbers)
    # The sum tells of NaN, which max and hypot may miss.
    if p in (0, 1) or len(numbers) == 1 or math.isnan(total):
        return total
    # 0 for -0, too.
    if p == -math.inf:
        return min(numbers) + 0.0
    if p == math.inf or not 0 < largest < math.inf:
        return largest + 0.0
    if p == 2:
        return math.hypot(*numbers)
    try:
        unit: float = sum((number / largest) ** p for number in numbers) ** (1 / p)
    except OverflowError:
        return math.inf
    return largest * unit


def _coefficient(
    norm: float, max_norm: float, eps: float, rounded: type[c_float] | type[c_double]
) -> float:
    """Returns min(1, max_norm / (norm + eps)), every step rounded as a tensor would round it.

    1 for nothing to clip and for an infinite limit; NaN stays. A sum and a quotient of two float32
    computed in float64 and rounded to float32 are those that float32 gives.
    """
    limit = rounded(max_norm).value
    bound = rounded(norm + rounded(eps).value).value
    return 1.0 if bound <= limit or not bound else rounded(limit / bound).value
