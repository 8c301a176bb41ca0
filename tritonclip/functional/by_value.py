"""Clipping each element to bounds: numbers, tensors that broadcast, or one bound."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from tritonclip.functional.limits import broadcasts
from tritonclip.functional.norms import is_readable, needs_grad
from tritonclip.functional.trees import Tree
from tritonclip.rules.arguments import as_number

T = TypeVar("T")


def clip_by_value(x: T, min: float | Tensor | None = None, max: float | Tensor | None = None) -> T:
    r"""Clamps every element to `[min, max]`, in new memory; NaN stays NaN.

    .. math:: y = \min(\max(x, \text{min}), \text{max})

    Args:
        x: a tensor, or a nested structure of tensors and None: dicts, lists, tuples, dataclasses,
            and classes registered with `torch.utils._pytree`. Floating-point or integer, strided or
            sparse COO; any dtypes and devices.
        min: least value: a number, a tensor that broadcasts to each tensor of `x`, or None for no
            bound. -inf counts as none.
        max: largest value, alike.

    Bounds are rounded to the dtype of `x` first; a finite number stays finite there. Where tensors
    cross, so that `min > max`, the result is `max`, as of `torch.clamp`.

    Returns:
        The same structure with new tensors, which share no memory with `x`, in its dtypes.

    Raises:
        TypeError: a leaf that is no plain real tensor, a bound that is no real number or tensor.
        ValueError: no bound; numbers with `min > max`; NaN; a bound that does not broadcast; bounds
            of sparse tensors that exclude 0 or are tensors; a fraction for integers.

    Differentiable twice, in the bounds too: on a bound the derivative is the mean of both sides,
    one half, as of `torch.minimum`. On GPUs as on CPUs this is one operator of PyTorch, which reads
    and writes once.

    Example:
        >>> clip_by_value(torch.tensor([-2.0, 0.5, 2.0]), -1.0, 1.0)
        tensor([-1.0000, 0.5000, 1.0000])
        >>> clip_by_value(torch.tensor([-2.0, 0.5, 2.0]), max=torch.tensor([0.0, 1.0, 1.0]))
        tensor([-2.0000, 0.5000, 1.0000])

    References:
        TensorFlow, `tf.clip_by_value`; optax, `optax.clip`; Keras, `clipvalue`.
    """
    low, high = _bound("min", min), _bound("max", max)
    if low is None and high is None:
        raise ValueError("expected a bound, got None for both: pass min, max, or both")
    if isinstance(low, float) and isinstance(high, float) and low > high:
        raise ValueError(f"min must not exceed max, got min={low} and max={high}")
    tree = Tree(x, "x", ordered=True)
    for name, bound, sign in (("min", low, 1), ("max", high, -1)):
        if isinstance(bound, Tensor) or (bound is not None and bound * sign > 0):
            tree.refuse_sparse(name, "would change implicit zeros, or may,")
    if isinstance(low, Tensor) or isinstance(high, Tensor) or not _is_plain(tree.values):
        clamped = [_clamped(value, low, high) for value in tree.values]
    else:
        clamped = _clamped_by_numbers(tree.values, low, high)
    result: T = tree.rebuild(clamped)
    return result


def _is_plain(values: list[Tensor]) -> bool:
    """Whether nothing differentiates values or traces them."""
    return is_readable(values) and not needs_grad(values)


def _clamped_by_numbers(
    values: list[Tensor], low: float | None, high: float | None
) -> list[Tensor]:
    """As `_clamped`, in one pass without derivatives."""
    bounds = {}
    for dtype in {x.dtype for x in values}:
        bounds[dtype] = _within(low, dtype), _within(high, dtype)
    none = (None, None)
    return [
        x.clone() if bounds[x.dtype] == none else torch.clamp(x, *bounds[x.dtype]) for x in values
    ]


def _bound(name: str, bound: object) -> float | Tensor | None:
    if bound is None:
        return None
    if isinstance(bound, Tensor):
        if bound.is_complex() or bound.dtype == torch.bool:
            raise TypeError(f"{name} must be a real tensor or a number, got {bound.dtype}")
        return bound
    number = as_number(name, bound)
    if math.isnan(number):
        raise ValueError(f"{name} must be a number or None for no bound, got NaN")
    return number


def _clamped(x: Tensor, low: float | Tensor | None, high: float | Tensor | None) -> Tensor:
    """As `torch.clamp`, but on a bound with the mean of the derivatives of both sides."""
    least, most = _as_tensor("min", low, x), _as_tensor("max", high, x)
    y = x if least is None else torch.maximum(x, least)
    y = y.clone() if most is None else torch.minimum(y, most)
    if least is None or most is None:
        return y
    # Between equal bounds nothing moves; NaN stays.
    return torch.where((least == most) & (x == x), most, y)


def _as_tensor(name: str, bound: float | Tensor | None, x: Tensor) -> Tensor | None:
    """A bound as a tensor of the dtype and device of `x`, 0-d for a number; None for none."""
    if not isinstance(bound, Tensor):
        number = _within(bound, x.dtype)
        return None if number is None else torch.full((), number, dtype=x.dtype, device=x.device)
    if not broadcasts(bound.shape, x.shape):
        raise ValueError(
            f"{name} of shape {tuple(bound.shape)} does not broadcast to x of shape "
            f"{tuple(x.shape)}"
        )
    return bound.to(x.device, x.dtype)


def _within(bound: float | None, dtype: torch.dtype) -> float | None:
    """A bound in the range of a dtype, an int for integers; None for no bound."""
    if bound is None or math.isinf(bound):
        return None
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        return sorted((info.min, bound, info.max))[1]
    if not bound.is_integer():
        raise ValueError(f"bounds must be whole for {dtype}, got {bound}; convert x with float()")
    whole = torch.iinfo(dtype)
    return sorted((whole.min, int(bound), whole.max))[1]
