"""Checks of limits, which are numbers or tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonclip.engine.plan import FLOAT8
from tritonclip.functional.evaluation import is_readable
from tritonclip.functional.formulas import as_wide, coefficient_of
from tritonclip.rules.arguments import as_limit, local_number


def as_limit_or_tensor(
    name: str, value: object, *, may_be_nan: bool = False, may_broadcast: bool = False
) -> float | Tensor:
    """Returns a limit as a number or a floating-point tensor, whose values a CPU checks.

    The tensor is 0-d, or has any shape if it `may_broadcast`.
    """
    if not isinstance(value, Tensor):
        return as_limit(name, value)
    # The norm of DTensors, as `clip_grad_norm_` returns it, is a DTensor.
    value = local_number(name, value)
    if not value.is_floating_point() or value.dtype in FLOAT8:
        raise TypeError(
            f"{name} must be a number or a floating-point tensor, got {value.dtype}: convert it "
            "with float()"
        )
    is_read = value.device.type == "cpu" and is_readable([])
    if is_read and not bool(((value >= 0) | (value.isnan() & may_be_nan)).all()):
        raise ValueError(f"{name} must be 0 or more, got {value.detach()}")
    return value if may_broadcast else one_element(name, value)


def one_element(name: str, limit: Tensor, others: str = "") -> Tensor:
    """A limit as a 0-d tensor; the ValueError for other shapes says which `others` are allowed."""
    if limit.numel() != 1:
        raise ValueError(
            f"{name} must be a number or a one-element tensor{others}; got shape "
            f"{tuple(limit.shape)}"
        )
    return limit.reshape(())


def coefficient_over(norms: Tensor, limit: float | Tensor, dtype: torch.dtype) -> Tensor:
    """min(1, limit / norm) for norms in the wide dtype; the limit must broadcast to them."""
    bound = as_wide(limit, dtype, norms.device)
    if not broadcasts(bound.shape, norms.shape):
        bound = one_element("max_norm", bound, ", or one that broadcasts to the norms over dim")
    return coefficient_of(norms, bound)


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of one shape can be expanded to another."""
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, to_size) for size, to_size in pairs)
