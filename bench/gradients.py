"""Gradients of a parameter list, how to get them back, and what clipping must make of them.

Truth is float64, computed piece by piece, so that a copy of the list in float64 is never held.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bench.lists import ParameterList

DTYPES = ("float32", "bfloat16", "float16", "mixed")
RULES = ("norm", "value", "gradient")
# Gradients are normal, with mean 0 and this standard deviation.
SIGMA = 1e-3
# Elements compared at once: 8 MiB of float64.
PIECE = 2**20
EPS = 1e-6


class WrongResultError(RuntimeError):
    """A result that differs from float64 by more than was promised: it is not timed."""


class Gradients:
    """Parameters of a list with gradients, all equal on every run.

    Args:
        parameter_list: the shapes.
        dtype: "float32", "bfloat16", "float16", or "mixed": bfloat16 for what has two dimensions
            or more, float32 for vectors.
        device: where parameters and gradients lie.
        like: gradients whose values to share, in memory of their own; the device is theirs.

    Attributes:
        parameters: uninitialised, each with a `.grad`.
        fresh: the values of the gradients, one tensor each; never written.
        norms: their 2-norms in float64.
        norm: the 2-norm of all of them in float64.
    """

    def __init__(
        self,
        parameter_list: ParameterList,
        dtype: str,
        device: torch.device,
        like: Gradients | None = None,
    ) -> None:
        self.list = parameter_list
        self.dtype = dtype
        self.device = device
        self.fresh: list[Tensor] = (
            _normal(parameter_list, dtype, device) if like is None else like.fresh
        )
        # Never read nor written, so that they take no memory on a CPU.
        self.parameters = [torch.empty_like(f, requires_grad=True) for f in self.fresh]
        for i, (parameter, fresh) in enumerate(zip(self.parameters, self.fresh, strict=True)):
            offset = 1 + i % 7 if parameter_list.misaligned else 0
            memory = fresh.new_empty(offset + fresh.numel())
            parameter.grad = memory[offset:].view(fresh.shape)
        self.refill()
        self.norms: list[float] = [_norm(f) for f in self.fresh] if like is None else like.norms
        self.norm = math.sqrt(math.fsum(n * n for n in self.norms))

    @property
    def grads(self) -> list[Tensor]:
        """The gradients that the parameters have now."""
        return [p.grad for p in self.parameters if p.grad is not None]

    @property
    def n_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(f.nbytes for f in self.fresh)

    def refill(self) -> None:
        """Gives every parameter its first gradient again, in the memory that it has."""
        with torch.no_grad():
            torch._foreach_copy_(self.grads, self.fresh)

    def limit(self, rule: str, clipped: bool) -> float:
        """What to clip to, so that the rule clips, or clips nothing.

        Args:
            rule: "norm": half the norm of all gradients, or ten times it. "gradient": half the
                median of their norms, or ten times the largest. "value": 3 standard deviations,
                beyond which one element in 370 lies, or 100.
            clipped: which of the two.
        """
        if rule == "norm":
            return self.norm * (0.5 if clipped else 10)
        if rule == "gradient":
            return statistics.median(self.norms) / 2 if clipped else max(self.norms) * 10
        return SIGMA * (3 if clipped else 100)

    def multipliers(self, rule: str, limit: float) -> list[float]:
        """What clipping by a norm multiplies each gradient by."""
        norms = self.norms if rule == "gradient" else [self.norm] * len(self.fresh)
        return [min(1.0, limit / (norm + EPS)) for norm in norms]

    def norm_error(self, rule: str, measured: Sequence[float]) -> float:
        """The largest relative error of measured norms, before clipping, against float64."""
        truth = self.norms if rule == "gradient" else [self.norm]
        return max(abs(m / t - 1) for m, t in zip(measured, truth, strict=True))

    def check(
        self, grads: Sequence[Tensor], rule: str, limit: float | None, tolerance: float
    ) -> None:
        """Compares clipped gradients with float64.

        Args:
            grads: one a parameter, on any device.
            rule: what they were clipped by.
            limit: what they were clipped to; None where they must be as they were.
            tolerance: largest error relative to the largest element of a gradient, on top of one
                unit in the last place of their dtype.

        Raises:
            WrongResultError: one differs.
        """
        keep = limit is None or rule == "value"
        multipliers = [1.0] * len(self.fresh) if keep else self.multipliers(rule, limit or 0.0)
        bound = limit if rule == "value" else None
        for i, (grad, fresh) in enumerate(zip(grads, self.fresh, strict=True)):
            if grad.shape != fresh.shape or grad.dtype != fresh.dtype:
                raise WrongResultError(f"gradient {i} became {grad.dtype} {tuple(grad.shape)}")
            worst, largest = _difference(grad.detach(), fresh, multipliers[i], bound)
            limits = torch.finfo(fresh.dtype)
            if not worst <= (tolerance + limits.eps) * largest + limits.smallest_normal * 2**-9:
                raise WrongResultError(f"gradient {i} is off by {worst:.3g}, of {largest:.3g}")


def dtype_of(dtype: str, n_dimensions: int) -> torch.dtype:
    """The dtype of a tensor in a list of this dtype."""
    if dtype == "mixed":
        return torch.bfloat16 if n_dimensions > 1 else torch.float32
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found


def _normal(parameter_list: ParameterList, dtype: str, device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    return [
        torch.empty(shape, device=device)
        .normal_(0, SIGMA, generator=generator)
        .to(dtype_of(dtype, len(shape)))
        for shape in parameter_list.shapes
    ]


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Views of at most PIECE elements."""
    return iter(tensor.reshape(-1).split(PIECE))


def _norm(tensor: Tensor) -> float:
    squares = [piece.double().square().sum() for piece in _pieces(tensor)]
    return float(torch.stack(squares).sum().sqrt())


def _difference(
    grad: Tensor, fresh: Tensor, multiplier: float, bound: float | None
) -> tuple[float, float]:
    """Largest error of a gradient, and the largest magnitude that was expected; NaN stays NaN."""
    worst, largest = [], []
    for piece, start in zip(_pieces(grad), _pieces(fresh), strict=True):
        expected = start.double().mul_(multiplier)
        if bound is not None:
            expected.clamp_(-bound, bound)
        largest.append(expected.abs().max())
        worst.append(expected.sub_(piece.to(expected)).abs_().max())
    return float(torch.stack(worst).max()), float(torch.stack(largest).max())
