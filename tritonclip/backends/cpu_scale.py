"""Multiplying gradients on a CPU: together, or each by its own number, but none by 1."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tritonclip.backends.cpu_form import CpuForm
from tritonclip.backends.host_form import HostForm
from tritonclip.backends.numbers import Numbers
from tritonclip.backends.operators import TorchBatch, in_forward_mode, in_one_call, multiply_


def multiply_together_(tensors: list[Tensor], form: CpuForm, factor: Tensor) -> None:
    """Multiplies all gradients by one 0-d factor."""
    if form.unscales and not in_forward_mode():
        # The operator by which a GradScaler unscales; it would leave the tangents of dual numbers.
        # Versions count first: an interrupt leaves no write that autograd does not see.
        torch.autograd.graph.increment_version(tensors)
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, form.found_nonfinite, factor)
    elif not in_one_call(torch._foreach_mul_, tensors, factor):
        multiply_(tensors, [factor], _no())


def multiply_exactly_(
    tensors: list[Tensor], form: HostForm, coefficient: Tensor, scale: float
) -> None:
    """Multiplies all gradients by a quotient that one number would hold with fewer digits."""
    multiply_(tensors, TorchBatch(tensors, form.dtype).factors_of(coefficient, scale), _no())


def multiply_each_(
    tensors: list[Tensor],
    form: CpuForm,
    multipliers: list[float],
    coefficients: list[float],
    factors: Numbers,
    least: float,
    scale: float = 1.0,
) -> None:
    """Multiplies each gradient, but not where its multiplier is 1.

    Args:
        tensors: the gradients.
        form: theirs.
        multipliers: coefficients divided by the loss scale.
        coefficients: the same, where a multiplier would lose digits.
        factors: the multipliers, in the dtype that gradients are multiplied in.
        least: of the multipliers; NaN where one is.
        scale: the loss scale.
    """
    changed = None
    if 1.0 in multipliers:
        changed = [i for i, multiplier in enumerate(multipliers) if multiplier != 1]
        if not changed:
            return
    if form.holds(multipliers, coefficients, least):
        _multiply_chosen_(tensors, form, changed, factors.each)
    else:
        multiply_each_exactly_(tensors, form, coefficients, scale, changed)


def multiply_each_exactly_(
    tensors: list[Tensor],
    form: HostForm,
    coefficients: list[float],
    scale: float,
    changed: list[int] | None = None,
) -> None:
    """Multiplies some gradients by quotients that one number each would hold with fewer digits."""
    exact = torch.tensor(coefficients, dtype=form.dtype, device="cpu")
    multiply_by_products_(
        tensors, TorchBatch(tensors, form.dtype).factors_of(exact, scale), changed
    )


def multiply_by_tensors_(
    tensors: list[Tensor], form: CpuForm, changed: list[int], factors: list[Tensor]
) -> None:
    """Multiplies some gradients, each by the factors of its index."""
    if are_products(factors):
        multiply_by_products_(tensors, factors, changed)
    else:
        _multiply_chosen_(tensors, form, changed, factors[0].to(form.wide).unbind())


def are_products(factors: list[Tensor]) -> bool:
    """Whether a gradient is multiplied by several factors in turn."""
    return len(factors) > 1 and bool((factors[1] != 1).any())


def multiply_by_products_(
    tensors: list[Tensor], factors: list[Tensor], changed: list[int] | None
) -> None:
    """Multiplies some gradients, each by all factors of its index; None for all gradients."""
    for i in range(len(tensors)) if changed is None else changed:
        multiply_([tensors[i]], [factor[i] for factor in factors], _no())


def _multiply_chosen_(
    tensors: list[Tensor], form: CpuForm, changed: list[int] | None, factors: Sequence[Tensor]
) -> None:
    """Multiplies some gradients, each by the 0-d factor of its index; None for all."""
    if changed is not None:
        tensors = [tensors[i] for i in changed]
        factors = [factors[i] for i in changed]
    if form.unscales_each and not in_forward_mode():
        torch.autograd.graph.increment_version(tensors)
        for tensor, factor in zip(tensors, factors, strict=True):
            torch._amp_foreach_non_finite_check_and_unscale_([tensor], form.found_nonfinite, factor)
    elif not in_one_call(torch._foreach_mul_, tensors, factors):
        for tensor, factor in zip(tensors, factors, strict=True):
            multiply_([tensor], [factor], _no())


def least_of(numbers: list[float]) -> float:
    """The least of numbers of which none is negative; NaN where one is."""
    # min may miss a NaN, a sum does not.
    return min(numbers) if sum(numbers) >= 0 else math.nan


def _no() -> Tensor:
    return torch.zeros((), dtype=torch.bool, device="cpu")
