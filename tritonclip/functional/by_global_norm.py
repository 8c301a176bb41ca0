"""Clipping by the global norm, and the global norm itself."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from tritonclip.engine.arguments import device_of
from tritonclip.engine.plan import result_dtype
from tritonclip.functional import c_loops, evaluation, formulas
from tritonclip.functional.limits import as_limit_or_tensor
from tritonclip.functional.trees import Tree

T = TypeVar("T")


def global_norm(tensors: Any) -> Tensor:
    """Measures the 2-norm of all elements of all tensors; differentiable.

    Complex elements count by their absolute values::

        norm = sqrt(sum((abs(x) ** 2).sum() for x in tensors))

    Example:
        >>> import torch
        >>> from tritonclip.functional import global_norm
        >>> weight = torch.tensor([3.0, 4.0])
        >>> for step in range(2):
        ...     gradients = {"weight": 2 * weight, "bias": None}
        ...     print(global_norm(gradients))
        ...     weight = weight - 0.25 * gradients["weight"]
        tensor(10.)
        tensor(5.)

    Args:
        tensors: as for :func:`clip_by_global_norm`.

    Returns:
        A 0-d tensor on the first tensor's device; float64 if any tensor is float64, else float32.
        It is 0 if there are no tensors. Differentiable; the derivative at 0 is 0.

    Raises:
        TypeError: a leaf that is no plain floating-point or complex tensor.

    References:
        TensorFlow, `tf.linalg.global_norm`; optax, `optax.global_norm`.
    """
    tree = Tree(tensors, "tensors")
    norm = c_loops.norm_of(tree.leaves)
    if norm is not None:
        return norm
    values = tree.check()
    norm = evaluation.norm_of_all(values) if values else torch.zeros(())
    return norm.to(result_dtype(values))


def clip_by_global_norm(
    tensors: T, max_norm: float | Tensor, use_norm: float | Tensor | None = None
) -> tuple[T, Tensor]:
    """Scales all tensors by one coefficient if their norm exceeds `max_norm`, in new memory.

    With the norm of all tensors together::

        clipped = [x * min(1, max_norm / norm) for x in tensors]

    Example:
        >>> import torch
        >>> from tritonclip.functional import clip_by_global_norm
        >>> from torch.func import grad
        >>> weights = {"weight": torch.tensor([3.0]), "bias": torch.tensor([4.0])}
        >>> loss = lambda weights: sum((w * w).sum() for w in weights.values())
        >>> for step in range(2):
        ...     clipped, norm = clip_by_global_norm(grad(loss)(weights), 1.0)
        ...     weights = {name: w - clipped[name] for name, w in weights.items()}
        >>> clipped
        {'weight': tensor([0.6000]), 'bias': tensor([0.8000])}
        >>> norm
        tensor(8.)

    Args:
        tensors: a tensor, or a nested structure of tensors and None: dicts, lists, tuples, and
            classes registered with `torch.utils._pytree`. Real or complex, strided; dtypes and
            devices may mix. A tensor that occurs several times counts each time.
        max_norm: the largest norm over all tensors, 0 or more: a number or a one-element tensor,
            which may have a derivative. A negative or NaN tensor raises on a CPU; elsewhere, where
            reading it would wait, the result is undefined.
        use_norm: a known norm, used instead of a computed one; a tensor may be NaN.

    Returns:
        The same structure with new tensors of the same dtypes, which share no memory with
        `tensors`; None stays None. And the norm before clipping, or `use_norm`: a 0-d tensor,
        float64 if any tensor is float64, else float32, on the first tensor's device.

    Raises:
        TypeError: a leaf that is no plain floating-point or complex tensor.
        ValueError: a limit or a known norm that is negative, NaN or has several elements.

    Notes:
        There is no eps: a norm equal to `max_norm` changes nothing. A NaN makes every tensor NaN;
        inf makes the finite elements 0. `max_norm=inf` changes nothing. Both results have
        derivatives of first and second order everywhere, see docs/recipes.md.

    References:
        TensorFlow, `tf.clip_by_global_norm`; optax, `clip_by_global_norm`; Pascanu, Mikolov,
        Bengio, `On the difficulty of training recurrent neural networks
        <https://arxiv.org/abs/1211.5063>`_, 2013
    """
    tree = Tree(tensors, "tensors")
    made = c_loops.clipped(tree.leaves, max_norm, use_norm)
    if made is not None:
        return tree.rebuild(made[0]), made[1]
    values, limit = tree.check(), as_limit_or_tensor("max_norm", max_norm)
    given = None
    if use_norm is not None:
        given = as_limit_or_tensor("use_norm", use_norm, may_be_nan=True)
    dtype = result_dtype(values)
    if not values:
        number = 0.0 if given is None else given
        return tree.rebuild([]), formulas.as_wide(number, dtype, device_of(values)).to(dtype)
    clipped, norm = evaluation.clip(values, limit, each=False, norm=given)
    result: T = tree.rebuild(clipped)
    return result, norm.to(dtype)
