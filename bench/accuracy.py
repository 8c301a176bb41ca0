"""Gradients with norms known in float64, and the check of clipped gradients against them.

Everything is computed block by block, so that no float64 copy of a workload is ever held.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bench.workloads import Workload, dtype_of

# Gradients are normal, with mean 0 and this standard deviation.
SIGMA = 1e-3
# Elements that are converted to float64 at once. A check of 25M elements takes 0.20, 0.08, 0.09 and
# 0.14 s with blocks of 2^15, 2^16, 2^18 and 2^20.
BLOCK = 2**18
EPS = 1e-6
# By unit, weights are the first gradients times this power of two, which is exact in all dtypes.
WEIGHT = 1024.0
# Largest relative error of our norms.
OURS = 1e-6


class WrongResultError(RuntimeError):
    """A result that differs from float64 by more than was promised, so that it is not timed."""


class Gradients:
    """Parameters of a workload, whose gradients are equal on every run.

    `fresh` has the values of the gradients, and is never written; `norms` has the 2-norm of each
    in float64, and `norm` is the 2-norm over all of them.
    """

    def __init__(self, workload: Workload, dtype: str, device: torch.device) -> None:
        self.device = device
        self.fresh = list(normal(workload, dtype, device))
        self.norms = [norm([f]) for f in self.fresh]
        self.norm, self.n_bytes = math.hypot(*self.norms), workload.n_bytes(dtype)
        self._largest = max(float(f.abs().max()) for f in self.fresh)
        # Only "step" and "unit" read or write them; for other rules they take no memory on a CPU.
        self.parameters = [torch.empty_like(f, requires_grad=True) for f in self.fresh]
        for i, (parameter, fresh) in enumerate(zip(self.parameters, self.fresh, strict=True)):
            offset = 1 + i % 7 if workload.misaligned else 0
            memory = fresh.new_empty(offset + fresh.numel())
            parameter.grad = memory.as_strided(fresh.shape, fresh.stride(), offset)
        self.refill()

    @property
    def grads(self) -> list[Tensor]:
        """The gradients that the parameters have now."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def refill(self) -> None:
        """Copies the first values into every gradient, in the memory that it has."""
        with torch.no_grad():
            torch._foreach_copy_(self.grads, self.fresh)

    def weigh(self) -> None:
        """Writes the weights by which units are clipped."""
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.fresh)
            torch._foreach_mul_(self.parameters, WEIGHT)

    def backward(self) -> None:
        """Makes every first gradient again in new memory, by a backward pass."""
        for parameter in self.parameters:
            parameter.grad = None
        products = (p * f for p, f in zip(self.parameters, self.fresh, strict=True))
        # The gradient of a product is its other factor, whatever the parameters are.
        torch.autograd.backward([product.sum() for product in products])

    def limit(self, rule: str, clipped: bool) -> float:
        """Chooses a limit at which a rule clips (given first below), or clips nothing.

        By global norm, half the norm or ten times it; by each norm, half the median norm or ten
        times the largest; by unit, half the norm of each or ten times it; by value, 3 standard
        deviations, which one element in 370 exceeds (or half the largest magnitude, if that is
        less), or 100 standard deviations.
        """
        if rule == "unit":
            return (0.5 if clipped else 10) / WEIGHT
        if rule == "gradient":
            return statistics.median(self.norms) / 2 if clipped else max(self.norms) * 10
        if rule == "value":
            return min(SIGMA * 3, self._largest / 2) if clipped else SIGMA * 100
        return self._norms(rule)[0] * (0.5 if clipped else 10)

    def _norms(self, rule: str) -> list[float]:
        """The norm that a rule measures, or a norm for each gradient, in float64."""
        if rule in ("gradient", "unit"):
            return self.norms
        return [self._largest if rule == "largest" else self.norm]

    def norm_error(self, rule: str, measured: Sequence[float]) -> float:
        """The largest relative error of measured norms, before clipping, against float64."""
        return max(abs(m / t - 1) for m, t in zip(measured, self._norms(rule), strict=True))

    def check(
        self, grads: Sequence[Tensor], rule: str, limit: float, tolerance: float, eps: float = EPS
    ) -> None:
        """Raises WrongResultError if gradients differ from the fresh ones clipped in float64."""
        # One unit in the last place of the dtype is added to the tolerance; both are relative to
        # the largest element of a gradient.
        bound, most = (limit, math.inf) if rule == "value" else (math.inf, limit)
        norms = self._norms(rule) * (1 if rule == "gradient" else len(self.fresh))
        multipliers = [min(1.0, most / (norm + eps)) for norm in norms]
        if rule == "unit":
            multipliers = [min(1.0, limit * WEIGHT)] * len(self.fresh)
        for i, (grad, fresh) in enumerate(zip(grads, self.fresh, strict=True)):
            if grad.shape != fresh.shape or grad.dtype != fresh.dtype:
                raise WrongResultError(f"gradient {i} became {grad.dtype} {tuple(grad.shape)}")
            blocks = (tensor.detach().reshape(-1).split(BLOCK) for tensor in (grad, fresh))
            found = []
            for block, start in zip(*blocks, strict=True):
                expected = (start.double() * multipliers[i]).clamp_(-bound, bound)
                difference = expected - block.to(expected.device)
                found.append(torch.stack([difference.abs().max(), expected.abs().max()]))
            # `amax` keeps NaN.
            error, largest = torch.stack(found).amax(0).tolist()
            info = torch.finfo(fresh.dtype)
            if not error <= (tolerance + info.eps) * largest + info.smallest_normal * 2**-9:
                raise WrongResultError(f"gradient {i} is off by {error:.3g}, of {largest:.3g}")


def normal(workload: Workload, dtype: str, device: torch.device) -> Iterator[Tensor]:
    """Gradients of a workload, equal on every run."""
    generator = torch.Generator(device).manual_seed(1)
    for shape in workload.shapes:
        values = torch.empty(shape, device=device).normal_(0, SIGMA, generator=generator)
        values = values.to(dtype_of(dtype, len(shape)))
        is_last = workload.channels_last and len(shape) == 4
        yield values.to(memory_format=torch.channels_last) if is_last else values


def norm(tensors: Sequence[Tensor]) -> float:
    """The 2-norm in float64."""
    blocks = (block for tensor in tensors for block in tensor.reshape(-1).split(BLOCK))
    return math.sqrt(math.fsum(float(block.double().square().sum()) for block in blocks))
