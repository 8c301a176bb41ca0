"""The behaviour that optax's tests of clipping show: a tree of two tensors, fifty limits."""

from __future__ import annotations

import math

import pytest
import torch

from tritonclip.functional import (
    clip_by_global_norm,
    clip_by_norm,
    clip_by_rms,
    clip_by_value,
    clip_per_example,
    global_norm,
)

UPDATES = (torch.tensor([500.0, 5.0]), torch.tensor([300.0, 3.0]))
STEPS = range(1, 51)


def assert_close(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-6, atol=0)


def rms(x):
    return float(x.square().mean().sqrt())


def test_clip_at_a_high_delta_changes_nothing():
    assert_close(clip_by_value(UPDATES, -1e6, 1e6), UPDATES)


def test_clip_at_one_makes_every_update_one():
    assert_close(clip_by_value(UPDATES, -1.0, 1.0), (torch.ones(2), torch.ones(2)))


def test_block_rms_is_at_most_the_threshold_and_stays_so_when_clipped_again():
    updates = UPDATES
    for i in STEPS:
        updates = clip_by_rms(updates, 1 / i)
        assert [rms(x) for x in updates] == pytest.approx([1 / i, 1 / i], rel=1e-6)
        assert_close(updates, clip_by_rms(UPDATES, 1 / i))


def test_global_norm_is_at_most_the_limit_and_stays_so_when_clipped_again():
    updates = UPDATES
    for i in STEPS:
        updates, _ = clip_by_global_norm(updates, 1 / i)
        assert float(global_norm(updates)) == pytest.approx(1 / i, rel=1e-6)
        assert_close(updates, clip_by_global_norm(UPDATES, 1 / i)[0])


def test_empty_trees_and_none_are_left():
    assert clip_by_global_norm({"a": None, "b": []}, 1.0)[0] == {"a": None, "b": []}


def test_zero_gradients_with_limit_zero_are_zero():
    """Here a difference: optax gives NaN, and NaN for the derivative of any limit."""
    x = torch.zeros(3, requires_grad=True)
    assert not clip_by_global_norm([x], 0.0)[0][0].any()
    assert not clip_by_rms(x, 0.0).any()
    (slope,) = torch.autograd.grad(clip_by_global_norm([x], 1.0)[0][0].sum(), x)
    assert slope.tolist() == [1.0, 1.0, 1.0]


def test_bfloat16_norm_has_the_digits_of_float32():
    """Here a difference: optax gives 31.625, the norm in bfloat16."""
    norm = global_norm(torch.ones(1000, dtype=torch.bfloat16))
    assert float(norm) == pytest.approx(math.sqrt(1000), rel=1e-6)


def test_global_norm_by_example_is_clipped():
    """Of four examples with two tensors: norms 0.5, sqrt(50), sqrt(70) and 0."""
    batch = [
        torch.tensor([[0.0, -0.5], [3.0, 4.0], [5.0, 6.0], [0.0, 0.0]]),
        torch.tensor([[0.0], [5.0], [-3.0], [0.0]]),
    ]
    sums, norms = clip_per_example(batch, 1.0)
    mapped, _ = torch.vmap(lambda tree: clip_by_global_norm(tree, 1.0))(batch)
    assert int((norms > 1.0).sum()) == 2
    torch.testing.assert_close(sums, [x.sum(0) for x in mapped])
    first = torch.tensor([3.0, 4.0]) / 50**0.5 + torch.tensor([5.0, 6.0]) / 70**0.5
    torch.testing.assert_close(sums[0], torch.tensor([0.0, -0.5]) + first)
    torch.testing.assert_close(sums[1], torch.tensor([5.0 / 50**0.5 - 3.0 / 70**0.5]))


def test_layers_by_example_are_clipped_by_dim():
    """Two layers, and a share of the limit for each: equal, or by its number of elements."""
    layers = [torch.tensor([[0.5], [1.5], [-2.0], [3.0]]), torch.ones(4, 3, 3, 2)]
    for limits, sums in (((1.0, 1.0), (1.5, 4 / 18**0.5)), ((1.0, 18**0.5), (1.5, 4.0))):
        for x, limit, expected in zip(layers, limits, sums, strict=True):
            clipped = clip_by_norm(x, limit, dim=tuple(range(1, x.dim())))
            torch.testing.assert_close(clipped.sum(0), torch.full(x.shape[1:], expected))
            torch.testing.assert_close(clip_per_example(x, limit)[0], clipped.sum(0))


def test_adaptive_limits_are_shares_of_the_norms_of_parameters():
    """adaptive_grad_clip: a limit for each unit, 0.5 of its weights' norm, at least 1e-3."""
    weight, gradient = torch.ones(5, 6), torch.full((5, 6), 2.0)
    gradient[0] = 0.1
    limits = 0.5 * torch.linalg.vector_norm(weight, dim=1, keepdim=True).clamp(min=1e-3)
    clipped = clip_by_norm(gradient, limits, dim=1)
    norms = torch.linalg.vector_norm(clipped, dim=1, keepdim=True)
    torch.testing.assert_close(norms[1:], limits[1:])
    assert torch.equal(clipped[0], gradient[0])
