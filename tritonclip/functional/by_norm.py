"""Clipping each tensor by its norm, by norms over dimensions, by average norm, or by RMS."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch import Tensor

from tritonclip.backends import choose
from tritonclip.backends.interface import arithmetic_of
from tritonclip.backends.operators import PIECE
from tritonclip.engine.plan import result_dtype
from tritonclip.functional import c_loops, evaluation, formulas
from tritonclip.functional.evaluation import is_recorded
from tritonclip.functional.limits import as_limit_or_tensor, coefficient_over
from tritonclip.functional.trees import Tree
from tritonclip.rules.arguments import as_norm_type

T = TypeVar("T")


def clip_by_norm(
    x: T, max_norm: float | Tensor, dim: int | Sequence[int] | None = None, norm_type: float = 2.0
) -> T:
    """Scales each tensor whose norm exceeds `max_norm` to that norm, in new memory.

    For each tensor x::

        y = x * min(1, max_norm / norm(x))

    Example:
        >>> import torch
        >>> from tritonclip.functional import clip_by_norm
        >>> weight = torch.tensor([3.0, 4.0])
        >>> for step in range(2):
        ...     gradient = clip_by_norm(2 * weight, 1.0)
        ...     weight = weight - gradient
        >>> gradient
        tensor([0.6000, 0.8000])
        >>> clip_by_norm(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0, dim=1)
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])

    Args:
        x: a tensor, or a nested structure of tensors and None: dicts, lists, tuples, and classes
            registered with `torch.utils._pytree`. Each tensor is clipped by its own norm. Real or
            complex, strided; any dtypes and devices, but no float8.
        max_norm: the largest norm, 0 or more: a number, or a floating-point tensor, which may have
            a derivative. It has one element or, with `dim`, broadcasts to the norms. A negative or
            NaN element raises on a CPU; elsewhere, where reading it would wait, the result is
            undefined.
        dim: the dimensions over which each norm is taken, like TensorFlow's `axes`: `dim=1` clips
            each row of a matrix, `dim=(1, 2, 3)` each example of a batch. By default one norm is
            taken over all dimensions.
        norm_type: the order of the norm: 2 is the Euclidean norm, inf the largest magnitude. Any
            number from 1 to inf.

    Returns:
        The same structure with new tensors of the same dtypes, which share no memory with `x`.

    Raises:
        TypeError: a leaf that is no plain floating-point or complex tensor.
        ValueError: a limit that is negative, NaN or does not broadcast; a `norm_type` that names no
            norm; dimensions that a tensor does not have.

    Notes:
        There is no eps: a norm equal to `max_norm` changes nothing. A NaN makes all elements under
        its norm NaN; an inf makes the finite ones 0. `max_norm=inf` changes nothing. Derivatives of
        first and second order exist everywhere, see docs/recipes.md.

    References:
        TensorFlow, `tf.clip_by_norm`; Keras, `clipnorm` and `MaxNorm`.
    """
    if dim is None:
        return _clip_each(x, max_norm, "max_norm", norm_type=norm_type)
    tree = Tree(x, "x")
    values, order = tree.check(), as_norm_type("norm_type", norm_type)
    limit = as_limit_or_tensor("max_norm", max_norm, may_broadcast=True)
    clipped = [_clip_slices(value, limit, order, _dims_of(value, dim)) for value in values]
    result: T = tree.rebuild(clipped)
    return result


def clip_by_average_norm(x: T, max_norm: float | Tensor) -> T:
    """Scales each tensor whose norm over its number of elements exceeds `max_norm`, in new memory.

    For each tensor x of n elements::

        y = x * min(1, max_norm / (norm(x) / n))

    TensorFlow's average norm is not the root mean square, which :func:`clip_by_rms` limits.

    Example:
        >>> import torch
        >>> from tritonclip.functional import clip_by_average_norm
        >>> weight = torch.tensor([3.0, 4.0])
        >>> for step in range(2):
        ...     gradient = clip_by_average_norm(2 * weight, 1.25)
        ...     weight = weight - gradient
        >>> gradient
        tensor([1.5000, 2.0000])

    Args:
        x: tensors as for :func:`clip_by_norm`.
        max_norm: the largest average norm, 0 or more: a number or a one-element tensor.

    Returns:
        The same structure with new tensors of the same dtypes. NaN, inf and derivatives behave as
        in :func:`clip_by_norm`.

    Raises:
        TypeError, ValueError: as :func:`clip_by_norm`.

    References:
        TensorFlow, `tf.compat.v1.clip_by_average_norm`.
    """
    return _clip_each(x, max_norm, "max_norm", power=1.0)


def clip_by_rms(x: T, max_rms: float | Tensor) -> T:
    """Scales each tensor whose root mean square exceeds `max_rms`, in new memory.

    For each tensor x::

        y = x * min(1, max_rms / sqrt(mean(x * x)))

    Example:
        >>> import torch
        >>> from tritonclip.functional import clip_by_rms
        >>> weight = torch.tensor([3.0, 4.0, 0.0, 0.0])
        >>> for step in range(2):
        ...     gradient = clip_by_rms(2 * weight, 1.0)
        ...     weight = weight - gradient
        >>> gradient
        tensor([1.2000, 1.6000, 0.0000, 0.0000])

    Args:
        x: tensors as for :func:`clip_by_norm`.
        max_rms: the largest root mean square, 0 or more: a number or a one-element tensor.

    Returns:
        The same structure with new tensors of the same dtypes. NaN, inf and derivatives behave as
        in :func:`clip_by_norm`.

    Raises:
        TypeError, ValueError: as :func:`clip_by_norm`.

    References:
        optax, `clip_by_block_rms`; Shazeer, Stern, `Adafactor: Adaptive Learning Rates with
        Sublinear Memory Cost <https://arxiv.org/abs/1804.04235>`_, 2018
    """
    return _clip_each(x, max_rms, "max_rms", power=0.5)


def _clip_each(
    x: T, max_norm: float | Tensor, name: str, *, norm_type: float = 2.0, power: float = 0.0
) -> T:
    """Clips each tensor by its norm, divided by its number of elements to a power."""
    tree = Tree(x, "x")
    made = c_loops.clipped_each(tree.leaves, max_norm, norm_type, power)
    if made is not None:
        return tree.rebuild(made[0])  # type: ignore[no-any-return]
    values = tree.check()
    order, limit = as_norm_type("norm_type", norm_type), as_limit_or_tensor(name, max_norm)
    clipped: list[Tensor] = []
    if values:
        clipped, _ = evaluation.clip(values, limit, order, each=True, power=power)
    result: T = tree.rebuild(clipped)
    return result


def _clip_slices(
    x: Tensor, limit: float | Tensor, norm_type: float, dims: tuple[int, ...]
) -> Tensor:
    """Clips a tensor by norms over `dims`, one for each index of the other dimensions."""
    dtype = result_dtype([x])
    recorded = is_recorded([x, limit] if isinstance(limit, Tensor) else [x])
    norms = (formulas.norm_of if recorded else _norms_over)(x, norm_type, dims)
    coefficient = coefficient_over(formulas.within(norms, dtype), limit, dtype)
    if recorded:
        return formulas.product_of(x, coefficient)
    real, factor = formulas.real_of(x), coefficient.to(arithmetic_of(x.dtype.to_real()))
    if x.is_complex():
        factor = factor.unsqueeze(-1)
    # With `out`, torch multiplies half types in float32 and rounds once.
    product = torch.mul(real, factor, out=torch.empty_like(real))
    return torch.view_as_complex(product) if x.is_complex() else product


def _norms_over(x: Tensor, norm_type: float, dims: tuple[int, ...]) -> Tensor:
    """Like `formulas.norm_of`, but on a CPU in pieces whose float64 temporaries stay in cache."""
    others = [d for d in range(x.dim()) if d not in dims]
    if not choose.host_decides(x.device) or x.numel() <= PIECE or not others:
        return formulas.norm_of(x, norm_type, dims)
    along = max(others, key=lambda d: x.shape[d])
    pieces = x.detach().split(max(1, PIECE * x.shape[along] // x.numel()), along)
    return torch.cat([formulas.norm_of(piece, norm_type, dims) for piece in pieces], along)


def _dims_of(x: Tensor, dim: int | Sequence[int]) -> tuple[int, ...]:
    """Checks `dim` and counts negative dimensions of `x` from the front."""
    several = isinstance(dim, Iterable) and not isinstance(dim, str | Tensor)
    given: tuple[Any, ...] = tuple(dim) if several else (dim,)  # type: ignore[arg-type]
    if not all(isinstance(d, Integral) and not isinstance(d, bool) for d in given):
        raise TypeError(
            "dim must be an integer, a sequence of integers or None for all dimensions, got "
            f"{dim!r:.80} of type {type(dim).__name__}"
        )
    dims = tuple(d + x.dim() if d < 0 else d for d in given)
    if not dims or len(set(dims)) < len(dims) or not all(0 <= d < x.dim() for d in dims):
        raise ValueError(
            f"dim must name dimensions of each tensor, each at most once; got {dim} for a tensor "
            f"of shape {tuple(x.shape)}"
        )
    return dims
