"""Clipping the gradient of each example of a batch, and their sum.

Gradients are read twice: once for the norms of all examples, once for one weighted sum over the
batch. No clipped gradient of an example is stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from tritonclip.backends import choose
from tritonclip.backends.interface import arithmetic_of
from tritonclip.backends.operators import wide_dtype
from tritonclip.engine.checks import Nonfinite, check_policy
from tritonclip.engine.plan import result_dtype
from tritonclip.functional import c_loops, formulas
from tritonclip.functional.evaluation import is_readable, is_recorded, norms_of_rows
from tritonclip.functional.formulas import filled
from tritonclip.functional.limits import as_limit_or_tensor, coefficient_over
from tritonclip.functional.trees import Tree
from tritonclip.messages import join_names

T = TypeVar("T")
Reduction = Literal["sum", "mean"]

# AUTO-S adds this to every norm.
_STABILITY = 0.01
# The least normal number of float32.
_LEAST = 2.0**-126
# The elements that are copied at a time, where no operator can sum them as they are. On a CPU, for
# 16 times 10^6 bfloat16, pieces of 2^17, 2^19 and 2^20 take 8.8, 2.8 and 2.6 ms (torch 2.13, EPYC,
# one thread). On other devices fewer launches matter more, which is not measured on a GPU.
_PIECE, _LARGE_PIECE = 2**20, 2**24


@overload
def clip_per_example(
    gradients: T,
    max_norm: float | Tensor,
    *,
    per_layer: Literal[False] = ...,
    normalize: bool = ...,
    reduce: Reduction = ...,
    nonfinite: Nonfinite = ...,
) -> tuple[T, Tensor]: ...
@overload
def clip_per_example(
    gradients: T,
    max_norm: float | Tensor,
    *,
    per_layer: Literal[True],
    normalize: bool = ...,
    reduce: Reduction = ...,
    nonfinite: Nonfinite = ...,
) -> tuple[T, T]: ...
@overload
def clip_per_example(
    gradients: T,
    max_norm: float | Tensor,
    *,
    per_layer: bool,
    normalize: bool = ...,
    reduce: Reduction = ...,
    nonfinite: Nonfinite = ...,
) -> tuple[T, Any]: ...
def clip_per_example(
    gradients: T,
    max_norm: float | Tensor,
    *,
    per_layer: bool = False,
    normalize: bool = False,
    reduce: Reduction = "sum",
    nonfinite: Nonfinite = "propagate",
) -> tuple[T, Any]:
    """Clips the gradient of each example by its norm, and adds up the clipped gradients.

    ``g[b]`` are the gradients of example b: all tensors together or, with `per_layer`, each::

        total = sum(g[b] * min(1, max_norm / norm(g[b])) for b in range(B))

    Example:
        >>> import torch
        >>> from tritonclip.functional import clip_per_example
        >>> from torch.func import grad, vmap
        >>> weight = torch.tensor([3.0, 4.0])
        >>> inputs = torch.tensor([[1.0, 0.0], [0.0, 0.1]])
        >>> loss = lambda weight, x: (weight * x).square().sum()
        >>> for step in range(2):
        ...     gradients = vmap(grad(loss), in_dims=(None, 0))(weight, inputs)
        ...     total, norms = clip_per_example(gradients, 1.0)
        ...     weight = weight - total
        >>> total
        tensor([1.0000, 0.0784])
        >>> norms
        tensor([4.0000, 0.0784])

    Args:
        gradients: the gradients of B examples: a tensor `[B, ...]`, or a nested structure of such
            tensors and None, as for :func:`clip_by_global_norm`, strided. torch.func's
            `vmap(grad(loss))` returns them, and Opacus leaves them in `grad_sample`.
        max_norm: the largest norm of an example or, with `per_layer`, of each tensor in it, 0 or
            more: a number or a one-element tensor. 0 gives sums of 0.
        per_layer: clips each tensor of an example by its own norm.
        normalize: scales by max_norm / (norm + 0.01), up and down, so that every example's norm
            comes near `max_norm`, which has to be finite.
        reduce: "sum", or "mean", which divides the sum by B.
        nonfinite: the policy for examples whose norm is NaN or inf.

            - "propagate": a NaN makes every element of the sum NaN. If the norm is infinite, finite
              elements of the example count as 0, and the others make the sum NaN there.
            - "error": raises a RuntimeError that names the examples. The host waits for the device.
            - "zero": such an example counts as 0, also in the mean, which still divides by B. With
              `per_layer`, only the tensors where its norm is not finite do so.

    Returns:
        The same structure of tensors `[...]`, in the dtypes of the gradients. And the norms before
        clipping, `[B]`: float64 if any tensor is float64, else float32, on the first tensor's
        device; with `per_layer`, the same structure of norms, each on its tensor's device.

    Raises:
        TypeError: a leaf that is no plain strided floating-point or complex tensor.
        ValueError: tensors without a common first dimension; a limit that is negative, NaN or, with
            `normalize`, infinite; the mean of no example; an unknown policy or reduction.
        RuntimeError: norms that are not finite, with nonfinite="error".

    Notes:
        The function adds no noise and counts no privacy budget. The sum changes by at most
        `max_norm`, up to rounding, when an example is added or removed; with `per_layer`, by
        `max_norm` times the root of the number of tensors.

        A call that raises has changed nothing. There is no eps: an example whose norm equals
        `max_norm` is not changed. Without examples the sum is 0. Autograd keeps copies as large as
        the gradients, so detach the parameters if you want no derivatives. Coefficients and sums
        are float32, or float64 for float64 gradients, and rounded once to the gradients' dtype.

    References:
        Abadi et al., `Deep Learning with Differential Privacy <https://arxiv.org/abs/1607.00133>`_,
        2016; McMahan et al., `Learning Differentially Private Recurrent Language Models
        <https://arxiv.org/abs/1710.06963>`_, 2017 (by layer); Bu et al., `Automatic Clipping:
        Differentially Private Deep Learning Made Easier and Stronger
        <https://arxiv.org/abs/2206.07136>`_, 2022 (`normalize`); optax,
        `per_example_global_norm_clip`; Opacus, `DPOptimizer`
    """
    tree = Tree(gradients, "gradients")
    tensors = tree.check()
    n = _count_examples(tree, tensors)
    limit = _limit_of(max_norm, normalize=normalize)
    _check_options(reduce, nonfinite, n)
    read = is_readable(tensors)
    fast = not is_recorded([*tensors, limit] if isinstance(limit, Tensor) else tensors)

    dtype = result_dtype(tensors)
    batches = [_Batch(x, n, fast=fast) for x in tensors]
    norms = limiting = _measure(batches, dtype, per_layer=per_layer)
    if nonfinite != "propagate":
        finite = [x.isfinite() for x in norms]
        if nonfinite == "error":
            _refuse_nonfinite(finite, tree, read)
        elif not (read and all(choose.host_decides(x.device) and bool(x.all()) for x in finite)):
            every = finite if per_layer else finite * len(batches)
            for batch, is_finite in zip(batches, every, strict=True):
                batch.leave_out(~is_finite.to(batch.device))
            # The derivatives of infinite norms would be NaN, so we measure again without them.
            limiting = norms if fast else _measure(batches, dtype, per_layer=per_layer)
    weights = [_weights_of(x, limit, dtype, normalize=normalize, fast=fast) for x in limiting]
    if normalize:
        # An infinite weight would make gradients of 0 NaN.
        largest = min(torch.finfo(batch.dtype).max for batch in batches)
        weights = [weight.clamp(max=largest) for weight in weights]
    if reduce == "mean":
        weights = [weight / n for weight in weights]
    every = weights if per_layer else weights * len(batches)
    sums = [batch.weighted_sum(weight) for batch, weight in zip(batches, every, strict=True)]
    measured = [x.to(dtype) for x in norms]
    norms_of_all = tree.rebuild(measured) if per_layer else measured[0]
    rounded = [y.to(x.dtype) for y, x in zip(sums, tensors, strict=True)]
    return tree.rebuild(rounded), norms_of_all


class _Batch:
    """One tensor of gradients for all examples, `[B, ...]`, in the order of its memory.

    `fast` means that memory may be read and nothing is recorded; arithmetic is in `dtype`. `pages`
    are reals `[B, length]`, or `[n_pages, B, length]` where examples do not lie one after the
    other: for an embedding, torch.func returns a page for each word.
    """

    def __init__(self, x: Tensor, n: int, *, fast: bool) -> None:
        self.fast, self.device, self._is_complex = fast, x.device, x.is_complex()
        real = formulas.real_of(x.contiguous()) if self._is_complex else x
        self.dtype = arithmetic_of(real.dtype)
        self._shape = real.shape[1:]
        self._order: list[int] | None = None
        self._left_out: Tensor | None = None
        if not fast or real.is_contiguous():
            self.pages = real.reshape(n, self._shape.numel())
        else:
            self.pages, self._order = _pages_of(real)

    def leave_out(self, left_out: Tensor) -> None:
        """Makes the examples that `left_out`, bool `[B]`, marks count as 0."""
        if self.fast:
            self._left_out = left_out
        else:
            self.pages = self.pages.masked_fill(left_out[:, None], 0.0)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The sum over examples times their weights `[B]`, in the dtype of arithmetic."""
        pages, order, weights = self.pages, self._order, weights.to(self.device, self.dtype)
        if not self.fast:
            total = (pages.to(self.dtype) * weights[:, None]).sum(0).view(self._shape)
        else:
            shape = self._shape if order is None else [self._shape[d] for d in order]
            total = torch.empty(shape, dtype=self.dtype, device=self.device)
            is_read_whole = pages.dtype == self.dtype or pages.numel() <= _PIECE
            if pages.dim() == 2 and self._left_out is None and is_read_whole:
                # Autocast does not change operators with `out`.
                torch.mv(pages.to(self.dtype).t(), weights, out=total.view(-1))
            else:
                pages = pages if pages.dim() == 3 else pages[None]
                _add_up_pieces(pages, weights, self._left_out, total.view(len(pages), -1))
        if order is not None:
            total = total.permute([order.index(d) for d in range(len(order))])
        return torch.view_as_complex(total) if self._is_complex else total


def _pages_of(x: Tensor) -> tuple[Tensor, list[int]]:
    """The `pages` of a `_Batch` as a view, and an example's dimensions in the order of memory."""
    n = len(x)
    order = sorted(range(1, x.dim()), key=x.stride, reverse=True)
    n_outer = sum(x.stride(d) > x.stride(0) for d in order) if n > 1 else 0
    sizes = [x.shape[d] for d in order]
    n_pages, length = math.prod(sizes[:n_outer]), math.prod(sizes[n_outer:])
    if n_pages == 1 or length == 1:
        # The examples lie one after the other, or element by element side by side.
        pages = x.permute(0, *order).reshape(n, n_pages * length)
    else:
        pages = x.permute(*order[:n_outer], 0, *order[n_outer:]).reshape(n_pages, n, length)
    return pages, [d - 1 for d in order]


def _add_up_pieces(pages: Tensor, weights: Tensor, left_out: Tensor | None, total: Tensor) -> None:
    """Writes the weighted sum to `total`, `[n_pages, length]`, and copies a piece at a time."""
    _, n, length = pages.shape
    if not (n and length):
        total.zero_()
        return
    size = _PIECE if choose.host_decides(pages.device) else _LARGE_PIECE
    n_pages, n_columns = max(1, size // (n * length)), max(1, size // n)
    if left_out is not None:
        # Their values become 0 as well, below, because 0 times inf is NaN.
        weights = weights.masked_fill(left_out, 0.0)
    for some, sums in zip(pages.split(n_pages), total.split(n_pages), strict=True):
        for piece, part in zip(some.split(n_columns, 2), sums.split(n_columns, 1), strict=True):
            values = piece.to(weights.dtype, copy=True)
            if left_out is not None:
                values.masked_fill_(left_out[:, None], 0.0)
            if len(values) == 1:
                torch.mv(values[0].t(), weights, out=part[0])
            else:
                torch.sum(values.mul_(weights[:, None]), 1, out=part)
            # This frees the piece before the next one is copied.
            del values


def _measure(batches: Sequence[_Batch], dtype: torch.dtype, *, per_layer: bool) -> list[Tensor]:
    """The norms of the examples, `[B]`, in `dtype`: one tensor, or one for each batch."""
    pages, device = [batch.pages for batch in batches], batches[0].device
    if not batches[0].fast:
        # The norms stay in the wide dtype, so that derivatives do not overflow on the way.
        norms = [formulas.norm_of(x, 2.0, (1,)).view(-1) for x in pages]
        if not per_layer:
            joined = torch.stack([x.to(device) for x in norms])
            norms = [formulas.norm_of(joined, 2.0, (0,)).view(-1)]
        return [formulas.within(x, dtype) for x in norms]
    parts = c_loops.norms_of_rows(pages)
    if parts is None:
        rows = norms_of_rows([x if x.dim() == 2 else x.flatten(0, 1) for x in pages])
        norms = [
            row_norms if x.dim() == 2 else _norm_over(row_norms.view(len(x), -1), dtype)
            for row_norms, x in zip(rows, pages, strict=True)
        ]
        if per_layer:
            return [x.to(dtype) for x in norms]
        parts = torch.stack([x.to(device) for x in norms])
    return list(parts.to(dtype)) if per_layer else [_norm_over(parts, dtype).to(dtype)]


def _norm_over(norms: Tensor, dtype: torch.dtype) -> Tensor:
    """The norm of each example from the norms of its parts, `[n_parts, B]`."""
    if dtype == torch.float32 and norms.dtype == torch.float64:
        # The squares of narrower tensors' norms fit float64.
        return torch.linalg.vector_norm(norms, dim=0)  # type: ignore[no-any-return]
    return formulas.norm_of(norms, 2.0, (0,)).view(-1)


def _weights_of(
    norms: Tensor, limit: float | Tensor, dtype: torch.dtype, *, normalize: bool, fast: bool
) -> Tensor:
    if normalize:
        return (limit.to(norms) if isinstance(limit, Tensor) else limit) / (norms + _STABILITY)
    if not fast or isinstance(limit, Tensor) or not _LEAST <= limit <= 1 / _LEAST:
        return coefficient_over(norms.to(wide_dtype(norms.device)), limit, dtype)
    # The same in fewer operators, where there are no derivatives, no 0/0 and no inf/inf.
    return (filled(limit, dtype, norms.device) / norms).clamp_(max=1.0)


def _count_examples(tree: Tree, tensors: Sequence[Tensor]) -> int:
    """Returns B; ValueError for tensors without a common first dimension."""
    if not tensors:
        raise ValueError(
            "gradients has no tensor; expected tensors of shape [B, ...], one for each parameter"
        )
    first = tensors[0]
    n = first.shape[0] if first.dim() else -1
    for i, x in enumerate(tensors):
        if x.dim() == 0 or x.shape[0] != n:
            where = tree.tensor_labels()
            seen = f"{where[i]} of shape {tuple(x.shape)}"
            if x.dim() and first.dim():
                seen = f"{where[0]} of shape {tuple(first.shape)} and {seen}"
            raise ValueError(
                f"gradients must have the examples as their first dimension, [B, ...], got {seen}; "
                "expected the same B: pass what vmap(grad(loss)) returns, or stack the gradients "
                "of single examples"
            )
    return n


def _check_options(reduce: object, nonfinite: object, n: int) -> None:
    check_policy(nonfinite)
    if reduce not in ("sum", "mean"):
        raise ValueError(f"reduce must be 'sum' or 'mean', got {reduce!r}")
    if reduce == "mean" and n == 0:
        raise ValueError(
            "reduce='mean' needs at least one example, got tensors of shape [0, ...]; expected "
            "reduce='sum', which is 0"
        )


def _limit_of(max_norm: float | Tensor, *, normalize: bool) -> float | Tensor:
    limit, is_known = as_limit_or_tensor("max_norm", max_norm), True
    if isinstance(limit, Tensor):
        is_known = is_readable([limit]) and choose.host_decides(limit.device)
    if normalize and is_known and limit == math.inf:
        raise ValueError("max_norm must be finite with normalize=True, got inf")
    return limit


def _refuse_nonfinite(finite: list[Tensor], tree: Tree, read: bool) -> None:
    """Raises RuntimeError if the norm of an example is not finite; waits for the device."""
    if not read:
        raise RuntimeError(
            "nonfinite='error' reads norms on the host, and here they are traced, or inside "
            "torch.func; expected 'propagate' or 'zero'"
        )
    device = finite[0].device
    if bool(torch.stack([x.all().to(device) for x in finite]).all()):
        return
    labels = tree.tensor_labels() if len(finite) > 1 else [""]
    names = []
    for label, is_finite in zip(labels, finite, strict=True):
        found = (~is_finite).nonzero().flatten().tolist()
        names += [f"{i} in {label}" if label else str(i) for i in found]
    raise RuntimeError(
        f"The norms of examples {join_names(names)} of {len(finite[0])} are not finite. Nothing "
        "was changed. To go on, pass nonfinite='zero' to leave these examples out, or 'propagate'"
    )
