"""The formulas in PyTorch operators: right for every magnitude, differentiable twice everywhere.

They serve where no kernel does: for tensors inside torch.func and torch.compile, norms over some
dimensions, and derivatives of norms of other orders than 2. Where a derivative does not exist, at
the limit of a coefficient and at a bound, it is the mean of both sides. At 0, that of a norm is 0.

Arithmetic is in the widest dtype that a device has, float64 but on MPS, so that neither values nor
derivatives of narrower tensors overflow on the way. Each branch that a `where` leaves out gets
harmless numbers, because a derivative of NaN or inf times 0 would be NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tritonclip.backends.interface import arithmetic_of
from tritonclip.backends.operators import wide_dtype
from tritonclip.engine.plan import WIDE


def norm_of(x: Tensor, norm_type: float, dim: tuple[int, ...] | None = None) -> Tensor:
    """The p-norm of a tensor in the wide dtype: 0-d, or over `dim`, whose sizes become 1."""
    if dim is None:
        return norm_of(x.reshape(-1), norm_type, (0,)).reshape(())
    real, over = x, dim
    if x.is_complex():
        real, over = torch.view_as_real(x.resolve_conj()), (*dim, x.dim())
    real = real.to(wide_dtype(x.device))
    if x.numel() == 0:
        norm = real.sum(over, keepdim=True)
    elif norm_type == 2 and real.dtype == torch.float64 and x.dtype not in WIDE:
        # Squares of narrower dtypes neither overflow nor vanish in float64.
        norm = _norm_of_real(real, norm_type, over, is_complex=x.is_complex())
    else:
        # The norm does not depend on the factor that is taken out, which needs no derivative. For
        # batched gradients there is no detach().
        with torch.no_grad():
            largest = real.abs().amax(over, keepdim=True)
            scale = torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
        norm = scale * _norm_of_real(real / scale, norm_type, over, is_complex=x.is_complex())
    if not x.is_complex():
        return norm
    return norm.squeeze(-1)


def _norm_of_real(
    real: Tensor, norm_type: float, over: tuple[int, ...], *, is_complex: bool
) -> Tensor:
    """The norm of numbers whose powers fit their dtype; complex ones are pairs."""
    if norm_type == 2:
        return _power(real.square().sum(over, keepdim=True), 0.5)
    magnitudes = real.abs()
    if is_complex:
        magnitudes = _power(real.square().sum(-1, keepdim=True), 0.5)
    if norm_type == math.inf:
        return magnitudes.amax(over, keepdim=True)
    return _power(_power(magnitudes, norm_type).sum(over, keepdim=True), 1 / norm_type)


def _power(x: Tensor, exponent: float) -> Tensor:
    """A power of numbers that are not negative, with derivative 0 at 0."""
    if exponent == 1:
        return x
    is_zero = x == 0
    base = torch.where(is_zero, 1.0, x)
    return torch.where(is_zero, 0.0, base.sqrt() if exponent == 0.5 else base.pow(exponent))


def norm_of_all(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    """The norm over all tensors, 0-d in the wide dtype; inf beyond the range of the result's."""
    device = tensors[0].device
    norms = torch.stack([norm_of(x, norm_type).to(device) for x in tensors])
    return within(norm_of(norms, norm_type), dtype)


def within(norm: Tensor, dtype: torch.dtype) -> Tensor:
    """A norm, or inf where it is beyond the range of a dtype."""
    return torch.where(norm > torch.finfo(dtype).max, math.inf, norm)


def slope_of(x: Tensor, norm: Tensor, grad: Tensor) -> Tensor:
    """The derivative of a 2-norm, times `grad`: grad * x / norm, but 0 where the norm is 0."""
    norm, grad = norm.to(x.device), grad.to(x.device)
    wide = torch.complex128 if x.is_complex() else wide_dtype(x.device)
    is_zero = norm == 0
    unit = x.to(wide) / torch.where(is_zero, 1.0, norm)
    return (torch.where(is_zero, 0.0, grad) * unit).to(x.dtype)


def coefficient_of(norm: Tensor, limit: Tensor) -> Tensor:
    """min(1, limit / norm), both in the wide dtype; 0/0 counts as 0, inf/inf as 1."""
    keeps = (norm < limit) | ((norm == math.inf) & (limit == math.inf))
    divisor = torch.where(keeps | (norm == 0), 1.0, norm)
    ratio = torch.where(keeps, 1.0, limit) / divisor
    is_at_limit = (norm == limit) & (limit > 0) & ~keeps
    return torch.where(is_at_limit, (1 + ratio) / 2, ratio)


def slope_of_coefficient(norm: Tensor, limit: Tensor) -> Tensor:
    """The derivative of `coefficient_of` in the norm."""
    keeps = (norm < limit) | ((norm == math.inf) & (limit == math.inf)) | (norm == 0)
    divisor = torch.where(keeps, 1.0, norm)
    slope = torch.where(keeps, 0.0, -limit / divisor / divisor)
    return torch.where(norm == limit, slope / 2, slope)


def inner_product(x: Tensor, y: Tensor) -> Tensor:
    """The sum of products, of complex numbers as pairs, 0-d in the wide dtype."""
    wide = wide_dtype(x.device)
    return (real_of(x).to(wide) * real_of(y).to(wide)).sum()


def real_of(x: Tensor) -> Tensor:
    """Complex numbers as pairs; others as they are."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def product_of(x: Tensor, coefficient: Tensor) -> Tensor:
    """A tensor times a coefficient of its arithmetic, float32 or float64, rounded once."""
    if x.is_complex():
        return torch.view_as_complex(product_of(real_of(x), coefficient))
    narrow, wide = arithmetic_of(x.dtype), wide_dtype(x.device)
    exact = coefficient.to(x.device, wide)
    # Rounded without a cast, in which a derivative might overflow.
    rounded = exact + (exact.detach().to(narrow).to(wide) - exact.detach())
    # Of float32, a product in float64 is exact.
    return (x.to(wide) * rounded).to(narrow).to(x.dtype)
