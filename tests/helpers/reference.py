"""The truth that the tests compare with: float64, one gradient at a time, no cleverness.

Nothing here imports the library. Norms are computed on the CPU from values divided by the largest
one, so float64 values of 1e200 and 1e-200 come out right too. The scaling and the clamping are the
formulas of the documentation, written down once more in plain PyTorch, and compared bit for bit.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def _combined(sizes: Tensor, p: float) -> float:
    """The p-norm of float64 numbers that are not negative."""
    if sizes.numel() == 0:
        return 0.0
    if p == math.inf:
        return float(sizes.max())
    largest = float(sizes.max())
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * math.pow(float(((sizes / largest) ** p).sum()), 1 / p)


def norm(grad: Tensor, p: float = 2.0) -> float:
    """The p-norm of one gradient: by modulus where it is complex, dense where it is sparse."""
    values = grad.detach().to_dense() if grad.layout != torch.strided else grad.detach()
    wide = torch.complex128 if values.is_complex() else torch.float64
    return _combined(values.to("cpu", wide).abs().flatten(), p)


def norms(grads: Sequence[Tensor], p: float = 2.0) -> list[float]:
    """One norm a gradient, in order."""
    return [norm(grad, p) for grad in grads]


def total_norm(grads: Sequence[Tensor], p: float = 2.0) -> float:
    """The p-norm over all elements of all gradients; zero-size gradients count nothing."""
    parts = torch.tensor([norm(grad, p) for grad in grads if grad.numel()], dtype=torch.float64)
    return _combined(parts, p)


def coefficient(norm: Tensor, max_norm: float, eps: float = 1e-6) -> Tensor:
    """``min(1, max_norm / (norm + eps))``, in the dtype of the norm."""
    norm = norm.cpu()
    one = torch.ones_like(norm)
    if max_norm == math.inf and not norm.isnan():
        return one
    divisor = norm + torch.tensor(eps, dtype=norm.dtype)
    if divisor == 0:
        return one
    # A tensor over a tensor: torch turns a number over a tensor into a reciprocal and a product.
    quotient = torch.tensor(max_norm, dtype=norm.dtype) / divisor
    return quotient.clamp(max=1)


def scaled(grad: Tensor, multiplier: Tensor) -> Tensor:
    """The gradient times the multiplier, in float32 (float64 for float64), rounded once."""
    if grad.is_complex():
        return torch.view_as_complex(scaled(torch.view_as_real(grad.resolve_conj()), multiplier))
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return (grad.to("cpu", wide) * multiplier.to(wide)).to(grad.dtype)


def bound(limit: float, dtype: torch.dtype) -> Tensor:
    """A limit rounded to a dtype; a finite limit stays finite."""
    if math.isfinite(limit):
        largest = torch.finfo(dtype).max
        limit = min(max(limit, -largest), largest)
    return torch.tensor(limit, dtype=torch.float64).to(dtype)


def clamped(grad: Tensor, low: float, high: float, grad_scale: float | None = None) -> Tensor:
    """The gradient within its bounds, NaN where it was NaN, unscaled first if it was scaled."""
    values = grad.cpu()
    if grad_scale is not None:
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        values = values.to(wide) * (
            torch.ones((), dtype=wide) / torch.tensor(grad_scale, dtype=wide)
        )
    lowest = bound(low, grad.dtype).to(values.dtype)
    highest = bound(high, grad.dtype).to(values.dtype)
    values = torch.where(values < lowest, lowest, values)
    return torch.where(values > highest, highest, values).to(grad.dtype)


def clipped(
    grads: Sequence[Tensor], rule: Any, measured: Tensor | None, grad_scale: float | None = None
) -> list[Tensor]:
    """The gradients by the formula of a rule, from the norm or the norms that a call measured."""
    if measured is None:
        return [clamped(grad, rule.min, rule.max, grad_scale) for grad in grads]
    norms = [measured] * len(grads) if measured.dim() == 0 else list(measured.cpu())
    multipliers = [coefficient(norm, rule.max_norm, rule.eps) for norm in norms]
    if grad_scale is not None:
        multipliers = [by / torch.tensor(grad_scale, dtype=by.dtype) for by in multipliers]
    return [scaled(grad, by) for grad, by in zip(grads, multipliers, strict=True)]
