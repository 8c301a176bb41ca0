"""Scaling on a CPU: coefficients in Python's numbers, and no write where one is 1."""

import math
from collections.abc import Sequence
from ctypes import c_double, c_float
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tritonclip.backends.batch import PartialNorms
from tritonclip.backends.cpu_form import FEW, CpuForm
from tritonclip.backends.numbers import Numbers
from tritonclip.backends.torch_backend import TorchBatch, combine
from tritonclip.backends.torch_writes import in_one_call, multiply_, zero_
from tritonclip.rules import Rule

unscale_ = torch._amp_foreach_non_finite_check_and_unscale_


class CpuScaling:
    """The verbs that scale; see :class:`tritonclip.backends.batch.Batch`.

    Args:
        tensors: the gradients.
        layout: theirs.
    """

    def __init__(self, tensors: list[Tensor], layout: CpuForm) -> None:
        self.tensors, self.layout, self.dtype = tensors, layout, layout.dtype

    def _as_torch(self) -> TorchBatch:
        """The verbs that leave every decision to tensors."""
        return TorchBatch(self.tensors, self.dtype)

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
            unscale_(self.tensors, layout.found_nonfinite, numbers.first)
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
            as_tensor(norms), first, rule, max_norm, grad_scale
        )
        if erase is not None and bool(erase):
            zero_(self.tensors)
            return norm, 0.0
        changed = (factors[0] != 1).nonzero().flatten().tolist()
        if changed:
            self._multiply_by_(changed, factors)
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
        numbers.memory[:] = norms
        norm = numbers.together.clone()
        coefficients = _to_coefficients(numbers.memory, max_norm, rule.eps)
        least = 1.0
        if coefficients is not None:
            least = min(coefficients) if sum(coefficients) >= 0 else math.nan
        if erase is not None and bool(erase):
            zero_(self.tensors)
            least = 0.0
        elif scale != 1 or (dtype != layout.wide and coefficients is not None):
            self._multiply_unscaled_(coefficients or [1.0] * len(norms), scale)
        elif coefficients is not None:
            self._multiply_each_(coefficients, coefficients, numbers)
        layout.numbers[dtype].append(numbers)
        return norm, least

    def _multiply_unscaled_(self, coefficients: list[float], scale: float) -> None:
        """Multiplies each gradient by its coefficient, divided by the loss scale."""
        layout = self.layout
        rounded = c_double if self.dtype == torch.float64 else c_float
        divisor = rounded(scale).value
        multipliers = [rounded(coefficient / divisor).value for coefficient in coefficients]
        factors = layout.take_numbers(layout.wide)
        factors.memory[:] = multipliers
        self._multiply_each_(multipliers, coefficients, factors, scale)
        layout.numbers[layout.wide].append(factors)

    def _multiply_each_(
        self,
        multipliers: list[float],
        coefficients: list[float],
        factors: Numbers,
        scale: float = 1.0,
    ) -> None:
        """Multiplies each gradient, but not where its multiplier is 1.

        Args:
            multipliers: coefficients divided by the loss scale.
            coefficients: the same, where a multiplier would lose digits.
            factors: the multipliers, in the dtype that gradients are multiplied in.
            scale: the loss scale.
        """
        changed = None
        if 1.0 in multipliers:
            changed = [i for i, multiplier in enumerate(multipliers) if multiplier != 1]
            if not changed:
                return
        if self._loses_digits(multipliers, coefficients):
            exact = torch.tensor(coefficients, dtype=self.dtype, device="cpu")
            self._multiply_by_(changed, self._as_torch().factors_of(exact, scale))
        else:
            self._multiply_chosen_(changed, factors.each)

    def _loses_digits(self, multipliers: list[float], coefficients: list[float]) -> bool:
        """Whether a multiplier is too small for the dtype that it multiplies in."""
        least = self.layout.least
        if least <= min(multipliers) and sum(multipliers) >= 0:
            return False
        return any(m < least and c > 0 for m, c in zip(multipliers, coefficients, strict=True))

    def _multiply_by_(self, changed: list[int] | None, factors: list[Tensor]) -> None:
        """Multiplies some gradients, each by the factors of its index; None for all."""
        if len(factors) > 1 and bool((factors[1] != 1).any()):
            no = torch.zeros((), dtype=torch.bool, device="cpu")
            for i in range(len(self.tensors)) if changed is None else changed:
                multiply_([self.tensors[i]], [factor[i] for factor in factors], no)
        else:
            self._multiply_chosen_(changed, factors[0].to(self.layout.wide).unbind())

    def _multiply_chosen_(self, changed: list[int] | None, factors: Sequence[Tensor]) -> None:
        """Multiplies some gradients, each by the 0-d factor of its index; None for all."""
        tensors, layout = self.tensors, self.layout
        if changed is not None:
            tensors = [tensors[i] for i in changed]
            factors = [factors[i] for i in changed]
        if layout.unscales_each and forward_ad._current_level < 0:
            for tensor, factor in zip(tensors, factors, strict=True):
                unscale_([tensor], layout.found_nonfinite, factor)
            torch.autograd.graph.increment_version(tensors)
        elif not in_one_call(torch._foreach_mul_, tensors, factors):
            no = torch.zeros((), dtype=torch.bool, device="cpu")
            for tensor, factor in zip(tensors, factors, strict=True):
                multiply_([tensor], [factor], no)


def as_tensor(norms: PartialNorms) -> Tensor:
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
    return 1.0 if bound <= limit or not bound else rounded(limit / bound).value


def _to_coefficients(memory: Any, max_norm: float, eps: float) -> list[float] | None:
    """The coefficient of each norm, as `_coefficient`; None where each is 1.

    `memory` has the norms, and then the coefficients, where there are any but 1.
    """
    limit, added = memory._type_(max_norm).value, memory._type_(eps).value
    memory[:] = [norm + added for norm in memory[:]]
    bounds: list[float] = memory[:]
    # max may miss a NaN, a sum does not.
    if max(bounds) <= limit and sum(bounds) >= 0:
        return None
    memory[:] = [1.0 if bound <= limit or not bound else limit / bound for bound in bounds]
    coefficients: list[float] = memory[:]
    return coefficients
