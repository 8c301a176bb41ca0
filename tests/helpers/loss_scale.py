"""Steps under a loss scale, and the same steps without one, clipped by hand in float64."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from helpers import reference
from helpers.cases import copies, normal
from helpers.training import SHAPES
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClippedOptimizer

SCALE = 1024.0

UNSCALED_BEFORE = pytest.mark.parametrize("unscale", [False, True], ids=["direct", "unscale_"])


def grads_at(step: int) -> list[Tensor]:
    """The gradients of a step without a loss scale: norms from 0.5 to 10, so most are clipped."""
    size = (0.1, 1.0, 2.0)[step % 3]
    return [size * normal(shape, seed=10 * step + at) for at, shape in enumerate(SHAPES)]


def spoiled(grads: list[Tensor], value: float = torch.inf) -> list[Tensor]:
    """The gradients with one element that is not finite."""
    grads = copies(grads)
    grads[1].view(-1)[2] = value
    return grads


def backward(scaler: torch.amp.GradScaler, params: Sequence[Tensor], grads: list[Tensor]) -> None:
    """Leaves the gradients, times the loss scale, at the parameters."""
    for param in params:
        param.grad = None
    loss = sum((p * g.to(p.device)).sum() for p, g in zip(params, grads, strict=True))
    assert isinstance(loss, Tensor)
    scaler.scale(loss).backward()


def scaled_step(
    scaler: torch.amp.GradScaler,
    optimizer: Optimizer,
    params: Sequence[Tensor],
    grads: Any,
    *,
    unscale: bool = False,
) -> None:
    backward(scaler, params, grads)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def hand_clip(rule: Any, grads: list[Tensor]) -> list[Tensor]:
    """What a rule makes of gradients, in float64 and rounded once."""
    wide = [g.double() for g in grads]
    norms = reference.norms(wide) if isinstance(rule, ClipByNorm) else reference.total_norm(wide)
    measured = None if rule.clamps else torch.tensor(norms, dtype=torch.float64)
    return [g.float() for g in reference.clipped(wide, rule, measured)]


def hand_step(
    optimizer: Optimizer, params: Sequence[Tensor], grads: list[Tensor], rule: Any
) -> None:
    """One step of a bare optimizer on gradients that were clipped by hand."""
    for param, grad in zip(params, hand_clip(rule, grads), strict=True):
        param.grad = grad
    optimizer.step()


def assert_same_run(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Coefficients of both sides differ by the few ulp of a float32 norm and quotient, and every
    element of an update by as much: 12 updates of 0.1 are right to 12 * 0.1 * 4 * 2**-23 = 6e-7.
    """
    for ours, truth in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-6, atol=1e-6)


def weight_under(scaler_type, **options):
    """A weight with gradient [3, 4] under a scale of 1,024, its wrapper and the scaler."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = ClippedOptimizer(SGD([weight], lr=1.0, **options), ClipByGlobalNorm(1.0, eps=0.0))
    scaler = scaler_type("cpu", init_scale=1024.0)
    scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
    return weight, optimizer, scaler
