"""Clipping by unit: the paper's formula in NumPy and float64, and parameters to try it on."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tritonclip
from helpers.cases import grad_of, normal
from tritonclip import ClipByUnitNorm

# One unit, one short row each, rows of every way of the kernels, and nothing at all.
SHAPES: list[tuple[int, ...]] = [
    *((), (1,), (7,), (5000,), (3, 4), (70, 9), (5, 1), (1, 300), (4, 1000), (17, 264), (9, 257)),
    *((17, 8192), (3, 8191), (3, 8196), (2, 17000), (6, 3, 3, 3), (2, 2, 2, 2, 2)),
    *((0,), (0, 3), (3, 0)),
]


def wide(tensor: Tensor) -> np.ndarray:
    values = tensor.detach().cpu()
    dtype = torch.complex128 if values.is_complex() else torch.float64
    return np.asarray(values.resolve_conj().resolve_neg().to(dtype).numpy())


def unit_norms(values: np.ndarray) -> np.ndarray:
    """The norm of each unit, of the shape that multiplies the units."""
    axes = tuple(range(1, values.ndim)) if values.ndim > 1 else None
    how: Any = {"axis": axes, "keepdims": values.ndim > 1}
    sizes = np.abs(values)
    largest = np.max(sizes, initial=0.0, **how)
    scale = np.where((largest > 0) & (largest < math.inf), largest, 1.0)
    with np.errstate(over="ignore"):
        return np.asarray(scale * np.sqrt(np.sum((sizes / scale) ** 2, **how)))


def coefficients(grad: Tensor, weight: Tensor, rule: ClipByUnitNorm, scale: float = 1.0):
    """min(1, ratio * max(|w_u|, eps) / |g_u|), 1 where the gradient is 0 or has no limit."""
    own, limit = (
        unit_norms(wide(grad)) / scale,
        rule.ratio * np.maximum(unit_norms(wide(weight)), rule.eps),
    )
    with np.errstate(all="ignore"):
        unlimited = (own == 0) | ((limit == np.inf) & ~np.isnan(own))
        return np.asarray(np.where(unlimited, 1.0, np.minimum(1.0, limit / own)))


def expected(grad: Tensor, weight: Tensor, rule: ClipByUnitNorm, scale: float = 1.0) -> np.ndarray:
    """The gradient after clipping."""
    with np.errstate(invalid="ignore"):
        return np.asarray(wide(grad) * coefficients(grad, weight, rule, scale) / scale)


def assert_clipped(grad: Tensor, truth: np.ndarray) -> None:
    """To 1e-6 for the norms and their quotient each, and half a unit in the last place."""
    info = torch.finfo(grad.dtype)
    double = grad.dtype in (torch.float64, torch.complex128)
    rtol = (4e-12 if double else 2e-6) + info.eps
    # Below the least normal number, to one unit in the last place.
    atol = info.smallest_normal * info.eps
    np.testing.assert_allclose(wide(grad), truth, rtol=rtol, atol=atol, equal_nan=True)


def make(
    shapes=SHAPES, dtype=torch.float32, device="cpu", weight_scale=1.0, grad_scale=1.0
) -> list[torch.nn.Parameter]:
    """Parameters of random weights with random gradients."""
    made = []
    for seed, shape in enumerate(shapes):
        weight = normal(shape, dtype, device, seed) * weight_scale
        one = torch.nn.Parameter(weight.to(dtype))
        one.grad = (normal(shape, dtype, device, seed + 100) * grad_scale).to(dtype)
        made.append(one)
    return made


def truths(parameters, rule, scale=1.0):
    return [expected(grad_of(p), p, rule, scale) for p in parameters]


def check_clip(parameters: list[torch.nn.Parameter], rule: ClipByUnitNorm, **options: Any) -> Any:
    """Clips, compares each gradient with the formula, and returns the norms."""
    expected_grads = truths(parameters, rule, float(options.get("grad_scale", 1.0)))
    norms = tritonclip.clip_(parameters, rule, **options)
    for parameter, truth in zip(parameters, expected_grads, strict=True):
        assert_clipped(grad_of(parameter), truth)
    return norms
