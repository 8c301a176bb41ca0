"""The behaviour that the tests of optax and timm show for adaptive clipping by unit, here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tritonclip
from helpers.cases import FLOATS, grad_of
from helpers.units import SHAPES, assert_clipped, make, unit_norms, wide
from tritonclip import ClipByUnitNorm


def test_optax_adaptive_grad_clip():
    """After each of 50 steps with a lower ratio every norm is within it; clipping again agrees."""
    weights = [torch.nn.Parameter(torch.tensor(w)) for w in ([1.0, 2.0], [3.0, 4.0])]
    first = [torch.tensor([500.0, 5.0]), torch.tensor([300.0, 3.0])]
    for weight, grad in zip(weights, first, strict=True):
        weight.grad = grad.clone()
    for i in range(1, 51):
        rule = ClipByUnitNorm(1 / i)
        tritonclip.clip_(weights, rule)
        again = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
        for weight, twin, grad in zip(weights, again, first, strict=True):
            assert grad_of(weight).norm() - weight.norm() / i < 1e-6
            twin.grad = grad.clone()
        tritonclip.clip_(again, rule)
        for weight, twin in zip(weights, again, strict=True):
            torch.testing.assert_close(grad_of(weight), grad_of(twin), rtol=1e-6, atol=1e-6)


def test_optax_adaptive_grad_clip_with_axis():
    """A 5-d kernel and a matrix: within the limit after clipping, unchanged where it was below."""
    for shape, value in (((4, 3, 2, 2, 2), 2.0), ((6, 5), 3.0)):
        weight = torch.nn.Parameter(torch.ones(shape))
        weight.grad = torch.full(shape, value)
        tritonclip.clip_([weight], ClipByUnitNorm(0.5))
        own, limit = (unit_norms(wide(x)) for x in (grad_of(weight), weight))
        assert (own <= 0.5 * limit + 1e-6).all()
    weight = torch.nn.Parameter(torch.ones(4, 3, 2, 2, 2))
    weight.grad = torch.full_like(weight, 0.1)
    tritonclip.clip_([weight], ClipByUnitNorm(2.0))
    assert (weight.grad == 0.1).all()


def test_optax_matrix_of_one_column_is_one_unit_there_and_rows_here():
    weight = torch.nn.Parameter(torch.ones(4, 1))
    weight.grad = torch.tensor([[4.0], [0.1], [0.1], [0.1]])
    tritonclip.clip_([weight], ClipByUnitNorm(0.5))
    torch.testing.assert_close(weight.grad, torch.tensor([[0.5], [0.1], [0.1], [0.1]]))


def _timm_adaptive_clip_grad(parameters, ratio: float, eps: float) -> list[np.ndarray]:
    """Its result in float64: kept where the norm is below the limit, else scaled; floor of 1e-6."""
    result = []
    for one in parameters:
        grad, limit = wide(grad_of(one)), ratio * np.maximum(unit_norms(wide(one)), eps)
        own = unit_norms(grad)
        result.append(np.where(own < limit, grad, grad * (limit / np.maximum(own, 1e-6))))
    return result


@pytest.mark.parametrize("dtype", FLOATS)
def test_timm_adaptive_clip_grad(device, dtype):
    """Its clip_factor and eps are our ratio and eps, its units ours."""
    shapes = [shape for shape in SHAPES if 0 not in shape]
    parameters = make(shapes, dtype, device)
    expected_grads = _timm_adaptive_clip_grad(parameters, 0.02, 1e-3)
    tritonclip.clip_(parameters, ClipByUnitNorm(0.02, eps=1e-3))
    for parameter, truth in zip(parameters, expected_grads, strict=True):
        assert_clipped(grad_of(parameter), truth)


def test_timm_floor_of_gradient_norms_is_not_ours():
    """It divides by 1e-6 at least, so that tiny gradients over their limit shrink too much."""
    weight = torch.nn.Parameter(torch.full((1, 4), 1e-7))
    weight.grad = torch.full((1, 4), 2e-7)
    assert unit_norms(_timm_adaptive_clip_grad([weight], 1.0, 1e-9)[0]).item() < 1e-7
    tritonclip.clip_([weight], ClipByUnitNorm(1.0, eps=1e-9))
    torch.testing.assert_close(weight.grad, torch.full((1, 4), 1e-7))
