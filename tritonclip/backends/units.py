"""Clipping by unit in PyTorch's operators, on any device; other backends do the same faster.

A unit is a slice along the first dimension of a parameter, a row, or all of one with fewer than two
dimensions. The partial norms of a group are a float64[2, n] (float32 where a device has no
float64): norms of each unit's gradient, gradient after gradient, and below them those of its
weights.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tritonclip.backends.interface import Clip
from tritonclip.backends.operators import (
    PIECE,
    as_scalar,
    coefficient_of,
    combine,
    factor_of,
    multiply_,
    norm_of,
    unscaled,
    wide_dtype,
)


def count_units(tensor: Tensor) -> int:
    """The units of a parameter; one of length 0 where it has no elements."""
    return max(1, tensor.shape[0]) if tensor.dim() > 1 else 1


class TorchUnitLayout:
    """The units of each gradient, and of its weights; holds neither.

    Gradients are of one device and dtype; `dtype` is that of results.
    """

    def __init__(self, grads: list[Tensor], dtype: torch.dtype, *, on_host: bool) -> None:
        self.dtype, self.on_host = dtype, on_host
        self.counts = list(map(count_units, grads))
        # The partial norms of each gradient.
        self.sizes = self.counts
        self.ends = list(accumulate(self.counts))
        self.n_units = self.ends[-1]
        self.whole = [grad.dim() < 2 for grad in grads]

    def bind(
        self, grads: list[Tensor], weights: list[Tensor], addresses: list[int]
    ) -> "TorchUnits":
        """The gradients of a call, as users see them, and their weights, of the same shapes.

        Addresses, a new list, are of gradients, then of weights.
        """
        return TorchUnits(grads, weights, self)


class TorchUnits:
    """The gradients of a group in one call, beside their weights, and the verbs on them.

    `total_each` and `scale_each_` are as those of :class:`tritonclip.backends.interface.Batch`, of
    norm type 2. On the host, a gradient whose coefficients are all 1 is not written.
    """

    def __init__(self, grads: list[Tensor], weights: list[Tensor], layout: TorchUnitLayout) -> None:
        self.grads, self.weights = grads, weights
        self.layout, self.dtype = layout, layout.dtype
        self._real_dtype = grads[0].dtype.to_real()

    def measure(self) -> Tensor:
        """Measures gradients and weights, by unit: partial norms."""
        return torch.cat(list(map(unit_norms, [*self.grads, *self.weights]))).view(2, -1)

    def lack_weights(self, norms: Tensor) -> Tensor:
        """Whether each gradient has a unit that is not 0 and whose weights are NaN; 1-d bool."""
        lacking = torch.where(norms[1].isnan() & (norms[0] != 0), math.nan, 0.0).to(norms.dtype)
        return self.norms_each(torch.stack([lacking, lacking])).isnan()

    def norms_of_units(self) -> Sequence[Tensor]:
        """Measures gradients alone: the norms of the units of each, 1-d, in the wide dtype."""
        return list(map(unit_norms, self.grads))

    def total_each(self, norms: Tensor, norm_type: float, grad_scale: float | Tensor) -> Tensor:
        return unscaled(self.norms_each(norms), grad_scale).to(self.dtype)

    def norms_each(self, norms: Tensor) -> Tensor:
        """The norm of each gradient, 1-d, as wide as partial norms and still loss-scaled.

        Or of its weights, from partial norms of which these come first.
        """
        layout, norms = self.layout, norms[0]
        if len(norms) == len(layout.counts):
            return norms
        if norms.dtype != torch.float64 or self._real_dtype == torch.float64:
            # Squares may leave the range.
            return torch.stack([combine(part, 2.0) for part in norms.split(layout.counts)])
        return torch.stack(torch._foreach_norm(norms.split(layout.counts)))

    def with_whole(self, norms: Tensor, gradients: Tensor, weights: Tensor) -> Tensor:
        """Partial norms in which gradients that are one unit, and their weights, have other norms.

        These are float64, one for each gradient of the group.
        """
        layout, parts = self.layout, []
        # By slices, not by an index tensor: that would be an upload.
        for row, given in zip(norms.unbind(), (gradients, weights), strict=True):
            old_and_new = zip(row.split(layout.sizes), given.split(1), layout.whole, strict=True)
            for old, new, whole in old_and_new:
                # The norm as the first partial one, and nothing in the others.
                parts += [new, torch.zeros_like(old[1:])] if whole else [old]
        return torch.cat(parts).view(2, -1)

    def scale_each_(self, norms: Tensor, clip: Clip) -> tuple[Tensor, float | Tensor]:
        norm = self.total_each(norms, 2.0, clip.grad_scale)
        erase = clip.erase if isinstance(clip.erase, Tensor) else None
        if self.layout.on_host and erase is not None and bool(erase):
            # Not by torch._foreach_zero_, which refuses conjugate views.
            for grad in self.grads:
                grad.zero_()
            return norm, 0.0
        coefficient = self._coefficients(norms, clip)
        factors = factor_of(coefficient, clip.grad_scale, self._real_dtype)
        if not self.layout.on_host:
            self._multiply_(range(len(self.grads)), factors, erase)
            return norm, coefficient if erase is None else torch.where(erase, 0.0, coefficient)
        changed = (factors != 1).nonzero().flatten()
        if changed.numel():
            ends = torch.tensor(self.layout.ends, device="cpu")
            indices = torch.searchsorted(ends, changed, right=True).unique_consecutive()
            self._multiply_(indices.tolist(), factors, None)
        return norm, float(coefficient.min())

    def _coefficients(self, norms: Tensor, clip: Clip) -> Tensor:
        """The coefficient of each unit, computed as wide as norms, then rounded once."""
        ratio = as_scalar(clip.limit, norms)
        if ratio.dim():
            own_ratios = zip(ratio.split(1), self.layout.counts, strict=True)
            ratio = torch.cat([ratio.expand(n) for ratio, n in own_ratios])
        grad_norms, weights = norms.unbind()
        floor = torch.where(weights < clip.eps, clip.eps, weights)
        unlimited = (weights == torch.inf) | (ratio == torch.inf)
        limit = torch.where(unlimited, torch.inf, ratio * floor)
        return coefficient_of(unscaled(grad_norms, clip.grad_scale), limit, 0.0).to(self.dtype)

    def _multiply_(self, chosen: Sequence[int], factors: Tensor, erase: Tensor | None) -> None:
        """Multiplies the units of some gradients by their factors, or writes zeros."""
        by_gradient = factors.split(self.layout.counts)
        for i in chosen:
            _multiply_units_(self.grads[i], by_gradient[i], erase)


def has_dense_units(tensor: Tensor) -> bool:
    """Whether the slices along the first dimension lie end to end, each dense in any order."""
    if tensor.is_contiguous():
        return True
    if tensor.dim() < 2:
        return False
    unit = tensor[0]
    order = sorted(range(unit.dim()), key=unit.stride, reverse=True)
    dense = unit.permute(order).is_contiguous()
    return dense and (len(tensor) == 1 or tensor.stride(0) == unit.numel())


def unit_norms(tensor: Tensor) -> Tensor:
    """The 2-norm of each unit, 1-d, in the widest dtype of the device; by modulus if complex.

    Large tensors are converted piece by piece.
    """
    wide = wide_dtype(tensor.device)
    rows = as_rows(as_real(tensor), whole=tensor.dim() < 2)
    n, length = len(rows), rows[0].numel()
    if not length:
        return torch.zeros(n, dtype=wide, device=tensor.device)
    if length > PIECE:
        return torch.stack([norm_of([row], 2.0, wide) for row in rows])
    pieces = rows.split(PIECE // length) if rows.numel() > PIECE else [rows]
    norms = [norms_of_rows(piece, wide) for piece in pieces]
    return norms[0] if len(norms) == 1 else torch.cat(norms)


def norms_of_rows(rows: Tensor, wide: torch.dtype) -> Tensor:
    """The 2-norm of each slice of a small tensor."""
    x = rows.to(wide).reshape(len(rows), -1)
    if wide == torch.float64 and rows.dtype != wide:
        # Squares of narrower numbers fit float64, whatever they are.
        norms: Tensor = torch.linalg.vector_norm(x, dim=1)
        return norms
    largest = x.abs().amax(1, keepdim=True)
    # Dividing by 1 instead of 0, inf and NaN gives just these.
    scale = torch.where((largest > 0) & (largest < torch.inf), largest, 1.0)
    rest: Tensor = torch.linalg.vector_norm(x / scale, dim=1)
    return scale[:, 0] * rest


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of reals; of a conjugated one those of the memory."""
    tensor = tensor.detach()
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)


def as_rows(real: Tensor, *, whole: bool) -> Tensor:
    """A tensor whose slices along the first dimension are the units."""
    return real.unsqueeze(0) if whole or not real.shape[0] else real


def _multiply_units_(grad: Tensor, factors: Tensor, erase: Tensor | None) -> None:
    """Multiplies the units of a gradient in place by 1-d factors, rounding once."""
    rows = as_rows(as_real(grad), whole=grad.dim() < 2)
    column = factors.view(-1, *(1,) * (rows.dim() - 1))
    if rows.dtype == factors.dtype:
        rows.mul_(column)
        if erase is not None:
            rows.masked_fill_(erase, 0.0)
        return
    length = max(1, rows[0].numel())
    if length > PIECE:
        for row, factor in zip(rows, factors.unbind(), strict=True):
            multiply_([row], factor, erase)
        return
    n = PIECE // length
    for piece, part in zip(rows.split(n), column.split(n), strict=True):
        values = piece.to(factors.dtype, copy=True).mul_(part)
        piece.copy_(values if erase is None else values.masked_fill_(erase, 0.0))
