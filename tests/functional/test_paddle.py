"""The behaviour of Paddle's three clip classes, and of ErrorClipByValue."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.cases import grad_of
from tritonclip.functional import clip_by_global_norm, clip_by_norm, clip_by_value


def test_by_value_with_one_bound_for_both_sides():
    assert clip_by_value(torch.tensor([-3.0, 0.5, 3.0]), -1.0, 1.0).tolist() == [-1.0, 0.5, 1.0]


def test_by_value_with_bounds_that_differ():
    assert clip_by_value(torch.tensor([-3.0, 0.5, 3.0]), -0.5, 2.0).tolist() == [-0.5, 0.5, 2.0]


def test_by_value_keeps_nan():
    assert clip_by_value(torch.tensor([math.nan]), -1.0, 1.0).isnan().all()


def test_by_value_refuses_bounds_that_cross():
    with pytest.raises(ValueError, match="min must not exceed max"):
        clip_by_value(torch.ones(3), 1.0, -1.0)


def test_by_norm_scales_to_the_limit_or_keeps():
    clipped, kept = clip_by_norm([torch.tensor([6.0, 8.0]), torch.tensor([0.6, 0.8])], 5.0)
    torch.testing.assert_close(clipped, torch.tensor([3.0, 4.0]))
    assert kept.tolist() == torch.tensor([0.6, 0.8]).tolist()


def test_by_global_norm_keeps_gradients_at_the_limit():
    """scale = clip_norm / max(norm, clip_norm), with no eps."""
    (x,), norm = clip_by_global_norm([torch.tensor([3.0, 4.0])], 5.0)
    assert float(norm) == 5.0
    assert x.tolist() == [3.0, 4.0]


def test_by_global_norm_takes_half_types_beside_float32():
    gradients = [torch.tensor([3.0]).half(), torch.tensor([4.0]), torch.tensor([12.0]).bfloat16()]
    clipped, norm = clip_by_global_norm(gradients, 6.5)
    assert float(norm) == 13.0
    assert [float(x) for x in clipped] == [1.5, 2.0, 6.0]
    assert [x.dtype for x in clipped] == [x.dtype for x in gradients]


def test_by_global_norm_leaves_gradients_as_they_were():
    """Here a difference: Paddle scales dense ones in place."""
    x = torch.tensor([3.0, 4.0])
    clip_by_global_norm([x], 1.0)
    assert x.tolist() == [3.0, 4.0]


def test_by_global_norm_with_limit_zero_and_zero_gradients_is_zero():
    """Here a difference: Paddle gives NaN."""
    assert clip_by_global_norm([torch.zeros(2)], 0.0)[0][0].tolist() == [0.0, 0.0]


def test_by_global_norm_adds_selected_rows_up():
    rows = torch.sparse_coo_tensor(
        torch.tensor([[2, 2]]), torch.tensor([[1.0], [2.0]]), (4, 1), check_invariants=False
    )
    (x, _), norm = clip_by_global_norm([rows, torch.tensor([4.0])], 2.5)
    assert float(norm) == 5.0
    assert x.values().tolist() == [[1.5]]


def test_error_clip_by_value_bounds_the_gradient_of_an_activation():
    """A hook clips what flows on into the layers below."""
    x = torch.tensor([1.0, -2.0, 0.1], requires_grad=True)
    hidden = x * 2
    hidden.register_hook(lambda gradient: clip_by_value(gradient, -0.5, 0.5))
    (hidden * torch.tensor([3.0, -3.0, 0.25])).sum().backward()
    assert grad_of(x).tolist() == [1.0, -1.0, 0.5]
