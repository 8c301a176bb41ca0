"""Limits that are numbers or tensors, and the coefficients that they give for norms."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_double, c_float

import torch
from torch import Tensor

from tritonclip.backends import choose
from tritonclip.engine.plan import FLOAT8
from tritonclip.functional.formulas import coefficient_of
from tritonclip.functional.norms import is_readable
from tritonclip.functional.products import Coefficient
from tritonclip.modes import is_traced
from tritonclip.rules.arguments import as_limit, local_number


def as_limit_or_tensor(name: str, value: object, *, may_be_nan: bool = False) -> float | Tensor:
    """A limit as a number, or a floating-point tensor, which is checked where it can be read."""
    if not isinstance(value, Tensor):
        return as_limit(name, value)
    # As `clip_grad_norm_` returns the norm of DTensors.
    value = local_number(name, value)
    if not value.is_floating_point() or value.dtype in FLOAT8:
        raise TypeError(
            f"{name} must be a number or a floating-point tensor, got {value.dtype}: convert it "
            "with float()"
        )
    if value.device.type != "cpu" or not is_readable([]):
        return value
    if not bool(((value >= 0) | (value.isnan() & may_be_nan)).all()):
        raise ValueError(f"{name} must be 0 or more, got {value.detach()}")
    return value


def coefficients_of(
    norms: Tensor, limits: Sequence[float | Tensor], dtype: torch.dtype, name: str
) -> list[Coefficient]:
    """min(1, limit / norm) for each norm in the wide dtype: numbers where the host knows all.

    There is one limit for all, or one for each, which is rounded to `dtype`.
    """
    numbers = [limit for limit in limits if not isinstance(limit, Tensor)]
    # Norms that the host reads at no cost, and that nothing differentiates.
    are_read = is_readable([norms]) and not norms.requires_grad
    if len(numbers) == len(limits) and are_read and choose.host_decides(norms.device):
        norm_numbers = norms.reshape(-1).tolist()
        each = numbers * (len(norm_numbers) if len(numbers) == 1 else 1)
        return [_number(*pair, dtype) for pair in zip(norm_numbers, each, strict=True)]
    bounds = [one_element(name, _as_tensor(limit, norms, dtype)) for limit in limits]
    limit = bounds[0] if len(bounds) == 1 else torch.stack(bounds)
    coefficients = coefficient_of(norms, limit)
    return list(coefficients.unbind() if norms.dim() else [coefficients])


def coefficient_over(norms: Tensor, limit: float | Tensor, dtype: torch.dtype) -> Tensor:
    """As `coefficients_of`, for norms of any shape, to which the limit has to broadcast."""
    bound = _as_tensor(limit, norms, dtype)
    if not broadcasts(bound.shape, norms.shape):
        bound = one_element("max_norm", bound, ", or one that broadcasts to the norms over dim")
    return coefficient_of(norms, bound)


def _number(norm: float, limit: float, dtype: torch.dtype) -> float:
    """The coefficient, rounded as a tensor would round it."""
    rounded = c_double if dtype == torch.float64 else c_float
    limit = rounded(limit).value
    if norm < limit or (norm == limit and limit > 0):
        return 1.0
    return rounded(limit / norm).value if norm else 0.0


def _as_tensor(limit: float | Tensor, norms: Tensor, dtype: torch.dtype) -> Tensor:
    """A limit in the dtype of the norms, rounded to another one."""
    if not isinstance(limit, Tensor):
        limit = filled(limit, norms.dtype, norms.device)
    return limit.to(norms.device, dtype).to(norms.dtype)


def filled(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a 0-d tensor; one that changes becomes an input of a traced graph."""
    if is_traced():
        # torch.compile makes a graph for each value, unless it is the factor of a tensor.
        return torch.ones((), dtype=dtype, device=device) * number
    return torch.full((), number, dtype=dtype, device=device)


def one_element(name: str, limit: Tensor, others: str = "") -> Tensor:
    """A limit as a 0-d tensor; ValueError where it has several elements, and is none of others."""
    if limit.numel() != 1:
        raise ValueError(
            f"{name} must be a number or a one-element tensor{others}; got shape "
            f"{tuple(limit.shape)}"
        )
    return limit.reshape(())


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of one shape can be expanded to another."""
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, to_size) for size, to_size in pairs)
