"""Clipping each element to one or two bounds, which are numbers or tensors that broadcast."""

from __future__ import annotations

import math
from typing import TypeVar, overload

import torch
from torch import Tensor

from tritonclip.functional import c_loops
from tritonclip.functional.evaluation import is_recorded
from tritonclip.functional.formulas import filled
from tritonclip.functional.limits import broadcasts
from tritonclip.functional.trees import Tree
from tritonclip.rules.arguments import as_number

T = TypeVar("T")
Bound = float | Tensor | None


@overload
def clip_by_value(x: T, min: Bound, max: Bound) -> T: ...
@overload
def clip_by_value(x: T, *, min: Bound = ..., max: Bound = ...) -> T: ...
def clip_by_value(x: T, *bounds: Bound, min: Bound = None, max: Bound = None) -> T:
    """Clamps every element to `[min, max]`, in new memory; NaN stays NaN.

    Example:
        >>> import torch
        >>> from tritonclip.functional import clip_by_value
        >>> weight = torch.tensor([3.0, 0.1])
        >>> for step in range(2):
        ...     gradient = clip_by_value(2 * weight, -0.5, 0.5)
        ...     weight = weight - gradient
        >>> gradient
        tensor([ 0.5000, -0.2000])
        >>> clip_by_value(gradient, max=torch.tensor([0.1, 1.0]))
        tensor([ 0.1000, -0.2000])

    Args:
        x: a tensor, or a nested structure of tensors and None, as for :func:`clip_by_norm`.
            Floating-point or integer, strided; any dtypes and devices, but no float8.
        *bounds: both `min` and `max`: `clip_by_value(x, -0.5, 0.5)`. A single bound must be named,
            because :class:`~tritonclip.ClipByValue` takes a single number for both sides.
        min: the least value: a number, a tensor that broadcasts to each tensor of `x`, or None for
            no bound. -inf counts as no bound.
        max: the largest value, of the same kinds; inf counts as no bound.

    Returns:
        The same structure with new tensors of the same dtypes, which share no memory with `x`.

    Raises:
        TypeError: a leaf that is no plain real tensor; a bound that is no real number or tensor; a
            single bound without its name.
        ValueError: no bound; numbers with `min > max`, or NaN; a bound that does not broadcast; a
            fraction for integers.

    Notes:
        Bounds are first rounded to the dtype of `x`, where a finite number stays finite. Where
        bounds that are tensors cross, so that `min > max`, the result is `max`, as in
        `torch.clamp`. Derivatives of first and second order exist everywhere, also with respect to
        the bounds, see docs/recipes.md.

    References:
        TensorFlow, `tf.clip_by_value`; optax, `optax.clip`; Keras, `clipvalue`.
    """
    min, max = bounds if len(bounds) == 2 and min is max is None else _named(bounds, min, max)
    # For one small tensor, making a tree would take a fifth of the time.
    quick: T | None = c_loops.clamped(x, min, max)
    if quick is not None:
        return quick
    if min is None and max is None:
        raise ValueError("expected a bound, got None for both: pass min, max, or both")
    low, high = _bound("min", min, none=-math.inf), _bound("max", max, none=math.inf)
    tree = Tree(x, "x", ordered=True)
    leaves = c_loops.clamped(tree.leaves, min, max)
    result: T = tree.rebuild(_clamped_leaves(tree, low, high) if leaves is None else leaves)
    return result


def _clamped_leaves(
    tree: Tree, low: float | Tensor | None, high: float | Tensor | None
) -> list[Tensor]:
    """Clamps the tensors of a tree by PyTorch operators."""
    values = tree.check()
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return [clamped(value, low, high) for value in values]
    least, most = -math.inf if low is None else low, math.inf if high is None else high
    if least > most:
        raise ValueError(f"min must not exceed max, got min={least} and max={most}")
    if not is_recorded(values):
        bounds = {t: (_within(low, t), _within(high, t)) for t in {x.dtype for x in values}}
        return [_clamped_by_numbers(x, *bounds[x.dtype]) for x in values]
    return [clamped(value, low, high) for value in values]


def _named(bounds: tuple[Bound, ...], min: Bound, max: Bound) -> tuple[Bound, Bound]:
    """Returns `min` and `max` where they were not both passed by position."""
    if not bounds:
        return min, max
    if len(bounds) == 1 and min is None and max is not None:
        return bounds[0], max
    got = f"{len(bounds)} by position" + ("" if min is None and max is None else " and others")
    if len(bounds) == 1 and min is None:
        got = f"one without a name, {bounds[0]!r:.40}"
    raise TypeError(
        f"expected both bounds, or one by its name, got {got}; write clip_by_value(x, -0.5, 0.5) "
        "for both sides, clip_by_value(x, min=0.5) for a lower bound alone, or "
        "clip_by_value(x, max=0.5) for an upper one"
    )


def _clamped_by_numbers(x: Tensor, least: float | None, most: float | None) -> Tensor:
    """Clamps in one pass; torch's derivatives, 1 on a bound and 0 at NaN, are not ours."""
    if least is None and most is None:
        return x.clone()
    return torch.clamp(x, least, most)


def _bound(name: str, bound: object, none: float) -> float | Tensor | None:
    """Checks the user's bound; None also for `none`, the infinity that bounds nothing."""
    if bound is None:
        return None
    if isinstance(bound, Tensor):
        if bound.is_complex() or bound.dtype == torch.bool:
            raise TypeError(f"{name} must be a real tensor or a number, got {bound.dtype}")
        return bound
    if type(bound) is int:
        # A float might not represent it exactly.
        return bound
    number = as_number(name, bound)
    if number != number:
        raise ValueError(f"{name} must be a number or None for no bound, got NaN")
    return None if number == none else number


def clamped(x: Tensor, low: float | Tensor | None, high: float | Tensor | None) -> Tensor:
    """Like `torch.clamp`, but the derivative on a bound is the mean of both sides."""
    least, most = _as_tensor("min", low, x), _as_tensor("max", high, x)
    if least is None:
        return x.clone() if most is None else torch.minimum(x, most)
    y = torch.maximum(x, least)
    if most is None:
        return y
    y = torch.minimum(y, most)
    if not isinstance(low, Tensor) and not isinstance(high, Tensor) and low != high:
        return y
    # Between equal bounds the result does not depend on x, unless x is NaN, which stays.
    return torch.where((least == most) & (x == x), most, y)


def _as_tensor(name: str, bound: float | Tensor | None, x: Tensor) -> Tensor | None:
    """A bound as a tensor of `x`'s dtype and device, 0-d for a number; None for no bound."""
    if not isinstance(bound, Tensor):
        number = _within(bound, x.dtype)
        return None if number is None else filled(number, x.dtype, x.device)
    if not broadcasts(bound.shape, x.shape):
        raise ValueError(
            f"{name} of shape {tuple(bound.shape)} does not broadcast to x of shape "
            f"{tuple(x.shape)}"
        )
    if x.dtype.is_floating_point:
        return bound.to(x.device, x.dtype)
    if bound.is_floating_point():
        raise ValueError(
            f"{name} must be of integers for {x.dtype}, got {bound.dtype}; convert x with float()"
        )
    whole = torch.iinfo(x.dtype)
    return bound.to(x.device, torch.int64).clamp(whole.min, whole.max).to(x.dtype)


def _within(bound: float | None, dtype: torch.dtype) -> float | None:
    """A bound in the range of a dtype, an int for integers; None for no bound."""
    if bound is None:
        return None
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        return bound if abs(bound) == math.inf else min(max(bound, info.min), info.max)
    if math.isfinite(bound) and bound != int(bound):
        raise ValueError(f"bounds must be whole for {dtype}, got {bound}; convert x with float()")
    whole = torch.iinfo(dtype)
    return int(sorted((whole.min, bound, whole.max))[1])
