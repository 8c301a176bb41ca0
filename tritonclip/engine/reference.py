"""The plain arithmetic that `verify()` compares with: float64, one tensor at a time.

No arithmetic is shared with the calls that it checks.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.distributed.shares import without_mesh
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.units import parameters_of, weights_of
from tritonclip.rules import Rule


def dense(grad: Tensor) -> Tensor:
    """A dense tensor, its own or the gradient's."""
    return grad.detach().to_dense() if grad.layout != torch.strided else grad.detach()


def widened(x: Tensor) -> Tensor:
    """A tensor in float64, or complex128."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def norm_of(x: Tensor, norm_type: float) -> float:
    """The norm of a tensor, from float64 copies of its elements."""
    magnitudes = widened(x).abs().flatten()
    return _norm_of_magnitudes(magnitudes, norm_type)


def total_of(norms: list[float], norm_type: float) -> float:
    """The norm of all elements, from the norms of tensors."""
    if norm_type == 0:
        return math.fsum(norms)
    return _norm_of_magnitudes(torch.tensor(norms, dtype=torch.float64, device="cpu"), norm_type)


def _norm_of_magnitudes(magnitudes: Tensor, norm_type: float) -> float:
    """The norm of float64 magnitudes, with the largest taken out."""
    if norm_type == 0:
        return float((magnitudes != 0).sum())
    if magnitudes.numel() == 0:
        return 0.0
    if norm_type == -math.inf:
        return float(magnitudes.min())
    largest = float(magnitudes.max())
    if norm_type == math.inf or not 0 < largest < math.inf:
        return largest
    total = float((magnitudes / largest).pow(norm_type).sum())
    try:
        root: float = total ** (1 / norm_type)
    except OverflowError:
        return math.inf
    return largest * root


def rounded(norm: float, dtype: torch.dtype) -> float:
    """The norm itself, or inf where it is beyond the range of a dtype."""
    stored = float(torch.tensor(norm, dtype=torch.float64, device="cpu").to(dtype))
    return stored if math.isinf(stored) else norm


def coefficient_of(norm: float, max_norm: float, eps: float) -> float:
    """The coefficient in Python's floats."""
    if math.isnan(norm) or math.isnan(max_norm):
        return math.nan
    if max_norm == math.inf or norm + eps == 0:
        return 1.0
    return min(1.0, max_norm / (norm + eps))


class ReferenceNorms(NamedTuple):
    """The norms of the reference, as a rule asks for them."""

    norms: Tensor
    n_elements: list[int]

    def norm(self) -> Tensor:
        """The norm of all gradients, or of each."""
        return self.norms

    def sizes(self) -> Tensor:
        """The number of elements of each gradient."""
        return torch.tensor(self.n_elements, dtype=torch.float64, device="cpu")

    def positions(self) -> tuple[Sequence[int] | None, int]:
        """Of all."""
        return None, len(self.n_elements)


class UnitReference:
    """Coefficients of units, from float64 copies of weights."""

    def __init__(self, gradients: Gradients, rule: Rule) -> None:
        self._parameters = parameters_of(gradients)
        self._exempt, self._eps = rule.exempt(self._parameters), rule.eps

    def coefficients(
        self, index: int, before: Tensor, norm: float, ratio: float, scale: float
    ) -> tuple[Tensor, bool]:
        """The coefficient of each element, and whether every unit is well within its limit."""
        parameter = self._parameters[index].detach()
        if self._exempt[index] or ratio == math.inf:
            own = torch.full((), norm, dtype=torch.float64, device=before.device)
            return torch.where(own.isnan(), math.nan, 1.0), not math.isnan(norm)
        if before.dim() < 2:
            # Of a DTensor, all of it.
            norms, weights = [norm], [norm_of(without_mesh(parameter), 2.0)]
        else:
            norms = [norm_of(row, 2.0) / scale for row in before]
            weights = [norm_of(row, 2.0) for row in weights_of([parameter])[0]]
        limits = [w if math.isnan(w) else ratio * max(w, self._eps) for w in weights]
        by = [coefficient_of(n, limit, 0.0) for n, limit in zip(norms, limits, strict=True)]
        within = all(n * (1 + 1e-5) < limit for n, limit in zip(norms, limits, strict=True))
        shape = (len(by), *(1,) * (before.dim() - 1)) if before.dim() > 1 else ()
        wide = torch.tensor(by, dtype=torch.float64, device=before.device)
        return wide.reshape(shape), within
