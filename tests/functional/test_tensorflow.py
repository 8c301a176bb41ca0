"""The behaviour that TensorFlow's tests of clip_ops show, and Keras's options and MaxNorm.

Each test says in its name what the one of TensorFlow shows. Numbers are computed anew.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck

from helpers.cases import grad_of
from tritonclip.functional import (
    clip_by_average_norm,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    global_norm,
)

DTYPES = [
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
]
# Its norm is 13, that of its columns 5, 0 and 12.
X = torch.tensor([[-3.0, 0.0, 0.0], [4.0, 0.0, 12.0]])


def close(ours, expected):
    torch.testing.assert_close(ours, torch.tensor(expected))


def rows(values, indices, size):
    """IndexedSlices: rows of values at indices of the first dimension."""
    return torch.sparse_coo_tensor(
        torch.tensor([indices]),
        torch.tensor(values),
        (size, *torch.tensor(values).shape[1:]),
        check_invariants=False,
    )


def test_value_gradient_is_right_for_numbers_and_tensors():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64, requires_grad=True)
    low, high = torch.full((4,), 1.5, dtype=torch.float64), torch.full((4,), 3.5).double()
    gradcheck(lambda x: clip_by_value(x, 1.5, 3.5), x)
    gradcheck(lambda x: clip_by_value(x, low, high), x)


def test_value_clamps_both_sides():
    close(clip_by_value(X, -2.5, 2.5), [[-2.5, 0.0, 0.0], [2.5, 0.0, 2.5]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tensors", ["neither", "min", "max", "both"])
def test_value_takes_numbers_and_tensors_in_every_dtype(dtype, tensors):
    x = torch.arange(1, 7, dtype=dtype).reshape(2, 3)
    low = torch.tensor([[2, 2, 2], [3, 3, 3]], dtype=dtype)
    high = torch.full((2, 3), 5, dtype=dtype)
    bounds: Any = {
        "neither": (2, 5),
        "min": (low, 5),
        "max": (2, high),
        "both": (low, high),
    }[tensors]
    y = clip_by_value(x, *bounds)
    assert y.dtype == dtype
    assert y.tolist() == [[2, 2, 3], [4, 5, 5]]


def test_value_refuses_bounds_of_another_shape():
    x, bound = torch.zeros(2, 3, 1), torch.tensor([1.0, 2.0])
    with pytest.raises(ValueError, match="does not broadcast"):
        clip_by_value(x, -bound, bound)
    with pytest.raises(ValueError, match="does not broadcast"):
        clip_by_value(x, 1.0, bound)


def test_value_keeps_nan_and_brings_inf_to_its_bound():
    y = clip_by_value(torch.tensor([math.nan, math.inf, -math.inf]), -4.0, 4.0)
    torch.testing.assert_close(y, torch.tensor([math.nan, 4.0, -4.0]), equal_nan=True)


def test_value_of_an_empty_tensor_is_empty():
    empty, least = torch.zeros(7, 0), torch.tensor(1.0)
    for low, high in ((empty, empty), (1.0, 1.0), (empty, least), (least, empty)):
        assert clip_by_value(empty, low, high).shape == (7, 0)


def test_value_of_rows_is_sparse_and_clamps_stored_values():
    x = rows([[[-3.0, 0.0], [4.0, 0.0]], [[0.0, 2.0], [0.0, -1.0]]], [2, 6], 10)
    y = clip_by_value(x, -2.0, 2.0)
    assert y.layout == torch.sparse_coo
    close(y.values(), [[[-2.0, 0.0], [2.0, 0.0]], [[0.0, 2.0], [0.0, -1.0]]])


def test_value_of_rows_refuses_bounds_that_would_change_the_other_rows():
    """Here a difference: TensorFlow clamps stored rows only, which no dense tensor equals."""
    x = rows([[-3.0], [4.0]], [2, 6], 10)
    for bounds in ((1.0, 2.0), (-2.0, -1.0)):
        with pytest.raises(ValueError, match="implicit zeros"):
            clip_by_value(x, *bounds)


@pytest.mark.parametrize("limit", [6.5, torch.tensor(6.5)], ids=["number", "tensor"])
def test_norm_over_the_limit_is_clipped(limit):
    close(clip_by_norm(X, limit), [[-1.5, 0.0, 0.0], [2.0, 0.0, 6.0]])


def test_norm_gradient_at_zeros_is_one():
    x = torch.zeros(3, requires_grad=True)
    clip_by_norm(x, 1.0).sum().backward()
    assert grad_of(x).tolist() == [1.0, 1.0, 1.0]


def test_norm_refuses_limits_of_another_shape():
    with pytest.raises(ValueError, match="one-element tensor"):
        clip_by_norm(X[..., None], torch.tensor([1.0, 2.0]))


def test_norm_within_the_limit_changes_nothing():
    assert torch.equal(clip_by_norm(X, 14.0), X)


def test_norm_of_zeros_changes_nothing():
    assert torch.equal(clip_by_norm(torch.zeros(2, 3), 6.0), torch.zeros(2, 3))


def test_norm_over_axis_0_clips_columns():
    close(clip_by_norm(X, 6.0, [0]), [[-3.0, 0.0, 0.0], [4.0, 0.0, 6.0]])


def test_norm_over_axis_1_clips_rows():
    x = torch.tensor([[-3.0, 0.0, 0.0], [4.0, 0.0, 3.0]])
    close(clip_by_norm(x, 4.0, [1]), [[-3.0, 0.0, 0.0], [3.2, 0.0, 2.4]])


def test_norm_over_axes_within_the_limit_changes_nothing():
    assert torch.equal(clip_by_norm(X, 13.0, [1]), X)


def test_norm_with_limit_zero_and_infinite_is_no_nan():
    """Here a difference: TensorFlow gives NaN for 0/0 and, up to 2.21, for an infinite limit."""
    assert torch.equal(clip_by_norm(torch.zeros(3), 0.0), torch.zeros(3))
    assert torch.equal(clip_by_norm(X, math.inf), X)


def test_norm_of_large_values_and_limits_is_no_nan():
    """Here a difference: TensorFlow's product with the limit overflows first."""
    close(clip_by_norm(torch.tensor([1e30]), 1e20), [1e20])


@pytest.mark.parametrize("limit", [6.5, torch.tensor(6.5)], ids=["number", "tensor"])
def test_global_norm_over_the_limit_is_clipped(limit):
    (x, y), norm = clip_by_global_norm((X[:1], X[1:]), limit)
    assert float(norm) == 13.0
    close(x, [[-1.5, 0.0, 0.0]])
    close(y, [[2.0, 0.0, 6.0]])


def test_global_norm_supports_none():
    clipped, norm = clip_by_global_norm((X[:1], None, X[1:], None), 6.5)
    assert float(norm) == 13.0
    assert clipped[1] is None
    assert clipped[3] is None
    close(clipped[2], [[2.0, 0.0, 6.0]])


def test_global_norm_of_rows_is_clipped():
    clipped, norm = clip_by_global_norm([X, rows([[84.0], [0.0]], [3, 4], 6)], 17.0)
    assert float(norm) == 85.0
    close(clipped[1].values(), [[16.8], [0.0]])


def test_global_norm_adds_rows_at_one_index_up():
    """Here a difference: TensorFlow measures 3 and 4 apart, and a norm over the limit is left."""
    (x,), norm = clip_by_global_norm([rows([[3.0], [4.0]], [1, 1], 3)], 1.0)
    assert float(norm) == 7.0
    close(x.to_dense(), [[0.0], [1.0], [0.0]])


def test_global_norm_preserves_the_dense_shape():
    (x,), _ = clip_by_global_norm([rows([1.0], [0], 1)], 1.0)
    assert x.shape == (1,)


def test_global_norm_within_the_limit_changes_nothing():
    (x,), norm = clip_by_global_norm([X], 14.0)
    assert float(norm) == 13.0
    assert torch.equal(x, X)


def test_global_norm_of_zeros_changes_nothing():
    (x, y), norm = clip_by_global_norm([torch.zeros(2, 3), torch.zeros(2)], 6.0)
    assert float(norm) == 0.0
    assert not x.any()
    assert not y.any()


def test_infinite_global_norm_zeroes_finite_elements():
    """Here a difference: TensorFlow makes every element NaN on purpose; this is torch's way."""
    (x, y), norm = clip_by_global_norm([torch.tensor([-2.0, math.inf]), torch.ones(2)], 6.0)
    assert float(norm) == math.inf
    torch.testing.assert_close(x, torch.tensor([-0.0, math.nan]), equal_nan=True)
    assert y.tolist() == [0.0, 0.0]


def test_nan_in_the_global_norm_makes_all_nan():
    (x, y), norm = clip_by_global_norm([torch.tensor([math.nan]), torch.ones(2)], 6.0)
    assert norm.isnan()
    assert x.isnan().all()
    assert y.isnan().all()


def test_global_norm_that_is_known_is_used():
    (x,), norm = clip_by_global_norm([X], 6.5, use_norm=26.0)
    assert float(norm) == 26.0
    torch.testing.assert_close(x, X / 4)


def test_global_norm_of_nothing_is_zero():
    assert clip_by_global_norm([], 1.0)[0] == []
    assert float(global_norm([])) == 0.0


def test_global_norm_of_mixed_dtypes_is_measured():
    """Here a difference: TensorFlow raises."""
    assert float(global_norm([torch.tensor([3.0]).half(), torch.tensor([4.0]).double()])) == 5.0


@pytest.mark.parametrize("limit", [0.8, torch.tensor(0.8)], ids=["number", "tensor"])
def test_average_norm_over_the_limit_is_clipped(limit):
    """The norm 5 of 6 elements: an average of 5/6."""
    x = torch.tensor([-3.0, 0.0, 0.0, 4.0, 0.0, 0.0])
    close(clip_by_average_norm(x, limit), [-2.88, 0.0, 0.0, 3.84, 0.0, 0.0])


def test_average_norm_within_the_limit_changes_nothing():
    assert torch.equal(clip_by_average_norm(X, 2.2), X)


def test_average_norm_of_zeros_changes_nothing():
    assert not clip_by_average_norm(torch.zeros(2, 3), 0.9).any()


def test_average_norm_is_the_norm_with_a_limit_times_the_count():
    assert torch.equal(clip_by_average_norm(X, 0.8), clip_by_norm(X, 0.8 * X.numel()))


def test_clipnorm_clips_each_gradient_by_its_own_norm():
    gradients = [torch.tensor([100.0, 100.0]), torch.tensor([0.3, 0.4])]
    first, second = clip_by_norm(gradients, 1.0)
    torch.testing.assert_close(first, torch.full((2,), 0.5**0.5))
    assert torch.equal(second, gradients[1])


def test_clipvalue_clamps_every_gradient():
    first, second = clip_by_value([torch.tensor([100.0, -100.0]), torch.tensor([0.5])], -1.0, 1.0)
    assert first.tolist() == [1.0, -1.0]
    assert second.tolist() == [0.5]


def test_global_clipnorm_clips_all_gradients_by_one_norm():
    gradients = [torch.tensor([30.0, 0.0]), None, torch.tensor([40.0])]
    clipped, _ = clip_by_global_norm(gradients, 1.0)
    torch.testing.assert_close(clipped[0], torch.tensor([0.6, 0.0]))
    assert clipped[1] is None
    torch.testing.assert_close(clipped[2], torch.tensor([0.8]))


def test_one_gradient_is_clipped_alike_by_clipnorm_and_global_clipnorm():
    x = torch.tensor([100.0, 100.0])
    assert torch.equal(clip_by_norm(x, 1.0), clip_by_global_norm([x], 1.0)[0][0])


def test_max_norm_limits_the_incoming_weights_of_each_unit():
    """Keras's MaxNorm(2.0, axis=0), over a kernel whose units are its columns."""
    weight = torch.tensor([[0.0, 1.0, 3.0, 3.0], [0.0, 0.0, 0.0, 3.0], [0.0, 0.0, 0.0, 3.0]])
    limited = clip_by_norm(weight, 2.0, dim=0)
    side = 2.0 / 3**0.5
    expected = torch.tensor([[0.0, 1.0, 2.0, side], [0.0, 0.0, 0.0, side], [0.0, 0.0, 0.0, side]])
    torch.testing.assert_close(limited, expected)


def test_max_norm_limits_convolution_filters_over_three_axes():
    """A filter of torch is one of the first dimension, of Keras of the last."""
    weight = torch.ones(4, 3, 2, 2)
    norms = torch.linalg.vector_norm(clip_by_norm(weight, 1.5, dim=(1, 2, 3)), dim=(1, 2, 3))
    torch.testing.assert_close(norms, torch.full((4,), 1.5))
