"""The formulas of all functions in PyTorch operators, which are right for every magnitude.

They define the results, and they are evaluated where each operator must be seen: where autograd
records, and inside torch.func and torch.compile. Other calls compute the same results faster.

All formulas can be differentiated twice everywhere. At the limit of a coefficient and at a bound,
where no derivative exists, it is the mean of both sides. The derivative of a norm at 0 is 0.

Arithmetic is in the widest dtype that a device has (float64, except on MPS), so that neither values
nor derivatives of narrower tensors overflow on the way. A branch that a `where` does not take gets
harmless numbers, because a derivative of NaN or inf times 0 would be NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tritonclip.backends.operators import WIDE, wide_dtype
from tritonclip.engine.plan import result_dtype
from tritonclip.modes import is_traced


def clip(
    tensors: Sequence[Tensor],
    limit: float | Tensor,
    norm_type: float,
    *,
    each: bool,
    power: float,
    norm: float | Tensor | None,
) -> tuple[list[Tensor], Tensor]:
    """Returns what `evaluation.clip` returns, but the norm in the wide dtype."""
    dtype, device = result_dtype(tensors), tensors[0].device
    if norm is not None:
        measured = as_wide(norm, dtype, device)
    else:
        measured = norms_of(tensors, norm_type, each=each)
    if power:
        # At least 1, because inf * 0 would be NaN; tensors without elements have norm 0 anyway.
        counts = [max(1, x.numel()) ** power for x in tensors]
        limits = torch.stack([as_wide(limit, wide_dtype(device), device) * n for n in counts])
    coefficients = coefficient_of(measured, as_wide(limits if power else limit, dtype, device))
    each_of = coefficients.unbind() if each else [coefficients] * len(tensors)
    return [product_of(x, c) for x, c in zip(tensors, each_of, strict=True)], measured


def norms_of(tensors: Sequence[Tensor], norm_type: float, *, each: bool) -> Tensor:
    """The norm of all tensors, 0-d, or of each, 1-d; inf beyond the range of the result's dtype."""
    device = tensors[0].device
    if norm_type == 2 and all(map(_has_exact_squares, tensors)):
        # One root of all sums takes a third of the operators that a root for each tensor takes.
        squares = torch.stack([_wide_of(x).square().sum().to(device) for x in tensors])
        norms = _power(squares if each else squares.sum(), 0.5)
    else:
        norms = torch.stack([norm_of(x, norm_type).to(device) for x in tensors])
        norms = norms if each else norm_of(norms, norm_type)
    return within(norms, result_dtype(tensors))


def norm_of(x: Tensor, norm_type: float, dim: tuple[int, ...] | None = None) -> Tensor:
    """The p-norm of a tensor in the wide dtype: 0-d, or over `dim`, whose sizes become 1."""
    if dim is None:
        return norm_of(x.reshape(-1), norm_type, (0,)).reshape(())
    real, over = _wide_of(x), (*dim, x.dim()) if x.is_complex() else dim
    if not x.numel():
        norm = real.sum(over, keepdim=True)
    elif norm_type == 2 and _has_exact_squares(x):
        norm = _norm_of_real(real, norm_type, over, is_complex=x.is_complex())
    else:
        # The norm does not depend on the factor that is taken out, so the factor needs no
        # derivative. Batched gradients have no detach().
        with torch.no_grad():
            largest = real.abs().amax(over, keepdim=True)
            scale = torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
        norm = scale * _norm_of_real(real / scale, norm_type, over, is_complex=x.is_complex())
    return norm.squeeze(-1) if x.is_complex() else norm


def _norm_of_real(
    real: Tensor, norm_type: float, over: tuple[int, ...], *, is_complex: bool
) -> Tensor:
    """The p-norm of numbers whose powers fit their dtype; complex numbers are pairs."""
    if norm_type == 2:
        return _power(real.square().sum(over, keepdim=True), 0.5)
    magnitudes = real.abs()
    if is_complex:
        magnitudes = _power(real.square().sum(-1, keepdim=True), 0.5)
    if norm_type == math.inf:
        return magnitudes.amax(over, keepdim=True)
    return _power(_power(magnitudes, norm_type).sum(over, keepdim=True), 1 / norm_type)


def _power(x: Tensor, exponent: float) -> Tensor:
    """Raises numbers of 0 or more to a power; the derivative at 0 is 0."""
    if exponent == 1:
        return x
    is_zero = x == 0
    base = torch.where(is_zero, 1.0, x)
    return torch.where(is_zero, 0.0, base.sqrt() if exponent == 0.5 else base.pow(exponent))


def within(norm: Tensor, dtype: torch.dtype) -> Tensor:
    """A norm, or inf where it is beyond the range of a dtype."""
    return torch.where(norm > torch.finfo(dtype).max, math.inf, norm)


def coefficient_of(norm: Tensor, limit: Tensor) -> Tensor:
    """min(1, limit / norm), both in the wide dtype; 0/0 counts as 0, inf/inf as 1."""
    keeps = (norm < limit) | ((norm == math.inf) & (limit == math.inf))
    divisor = torch.where(keeps | (norm == 0), 1.0, norm)
    ratio = torch.where(keeps, 1.0, limit) / divisor
    is_at_limit = (norm == limit) & (limit > 0) & ~keeps
    return torch.where(is_at_limit, (1 + ratio) / 2, ratio)


def product_of(x: Tensor, coefficient: Tensor) -> Tensor:
    """A tensor times a coefficient, which is 0-d or has as many dimensions; rounded once."""
    if not x.numel():
        # torch cannot differentiate pairs without elements.
        return x.clone()
    real, factor = real_of(x), coefficient.to(x.device, wide_dtype(x.device))
    if x.is_complex() or not factor.dim():
        factor = factor.unsqueeze(-1)
    # A factor with a dimension makes the product wide, so that autograd keeps no wide copy of x.
    product = (real * factor).to(real.dtype).reshape(real.shape)
    return torch.view_as_complex(product) if x.is_complex() else product


def real_of(x: Tensor) -> Tensor:
    """Complex numbers as pairs; others as they are."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _wide_of(x: Tensor) -> Tensor:
    """A tensor in the wide dtype; complex numbers as pairs."""
    if x.is_complex() and not x.numel():
        # torch cannot differentiate pairs without elements.
        x = x.detach()
    return real_of(x).to(wide_dtype(x.device))


def _has_exact_squares(x: Tensor) -> bool:
    """Whether squares in the wide dtype neither overflow nor vanish."""
    return x.dtype not in WIDE and wide_dtype(x.device) == torch.float64


def as_wide(number: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number or a tensor, rounded to a dtype, in the wide dtype of a device."""
    wide = wide_dtype(device)
    if not isinstance(number, Tensor):
        number = filled(number, wide, device)
    return number.to(device, dtype).to(wide)


def filled(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a 0-d tensor; a number that changes becomes an input of a traced graph."""
    if is_traced():
        # torch.compile would make a graph for each value, unless the number multiplies a tensor.
        return torch.ones((), dtype=dtype, device=device) * number
    return torch.full((), number, dtype=dtype, device=device)
