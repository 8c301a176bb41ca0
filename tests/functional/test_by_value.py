"""Clipping by value: bounds of every kind, and their rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from helpers.cases import assert_bits, grad_of, normal
from tritonclip import functional

X = torch.tensor([[-2.0, -0.5, 0.5], [2.0, math.nan, math.inf]])


def test_one_bound_leaves_the_other_side():
    x = X.nan_to_num(9.0, 8.0)
    assert functional.clip_by_value(x, min=1.0).tolist() == [[1.0, 1.0, 1.0], [2.0, 9.0, 8.0]]
    assert functional.clip_by_value(x, max=1.0).tolist() == [[-2.0, -0.5, 0.5], [1.0, 1.0, 1.0]]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_nan_stays_and_inf_comes_to_its_bound(requires_grad):
    x = torch.tensor([math.nan, math.inf, -math.inf], requires_grad=requires_grad)
    for low, high in ((-4.0, 4.0), (torch.tensor(-4.0), 4.0)):
        y = functional.clip_by_value(x, low, high)
        assert y[0].isnan()
        assert y[1:].tolist() == [4.0, -4.0]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_bounds_broadcast(requires_grad):
    x = normal((2, 3)).requires_grad_(requires_grad)
    low, high = torch.tensor([[-0.1], [-0.2]]), torch.tensor([0.1, 0.2, 0.3])
    expected = torch.minimum(torch.maximum(x, low), high)
    assert_bits([functional.clip_by_value(x, low, high)], [expected])


@pytest.mark.parametrize("requires_grad", [False, True])
def test_tensors_that_cross_give_the_upper_bound(requires_grad):
    x = torch.tensor([0.0, 2.0], requires_grad=requires_grad)
    y = functional.clip_by_value(x, torch.tensor([1.0, 3.0]), torch.tensor([-1.0, 0.0]))
    assert y.tolist() == [-1.0, 0.0]


def test_finite_bounds_beyond_the_dtype_stay_finite():
    x = torch.tensor([math.inf, 1.0], dtype=torch.float16)
    assert functional.clip_by_value(x, max=1e6).tolist() == [65504.0, 1.0]


def test_infinite_bounds_are_none():
    x = torch.tensor([math.inf, -math.inf])
    y = functional.clip_by_value(x, -math.inf, math.inf)
    assert y.tolist() == [math.inf, -math.inf]
    assert y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_infinite_bounds_of_the_other_sign_leave_nothing(requires_grad):
    x = torch.ones(2, dtype=torch.float16, requires_grad=requires_grad)
    assert functional.clip_by_value(x, max=-math.inf).tolist() == [-math.inf, -math.inf]
    assert functional.clip_by_value(x, min=math.inf).tolist() == [math.inf, math.inf]
    whole = functional.clip_by_value(torch.tensor([3], dtype=torch.uint8), min=math.inf)
    assert whole.tolist() == [255]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint8], ids=str)
def test_integers_are_clamped_within_their_range(dtype):
    x = torch.tensor([1, 2, 3, 4, 5, 6], dtype=dtype)
    y = functional.clip_by_value(x, 2, 1e30)
    assert y.tolist() == [2, 2, 3, 4, 5, 6]
    assert y.dtype == dtype


def test_integer_bounds_are_exact_and_stay_in_range():
    large = 2**60 + 1
    assert functional.clip_by_value(torch.tensor([2**62]), max=large).tolist() == [large]
    x = torch.tensor([1, 200], dtype=torch.uint8)
    y = functional.clip_by_value(x, torch.tensor(-5), torch.tensor([300, 100]))
    assert y.tolist() == [1, 100]


DTYPES = [torch.float16, torch.float32, torch.float64, torch.bfloat16]
DTYPES += [torch.int16, torch.int32, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tensors", ["neither", "min", "max", "both"])
def test_bounds_may_be_numbers_and_tensors_in_every_dtype(dtype, tensors):
    x = torch.arange(1, 7, dtype=dtype).reshape(2, 3)
    low = torch.tensor([[2, 2, 2], [3, 3, 3]], dtype=dtype)
    high = torch.full((2, 3), 5, dtype=dtype)
    bounds: Any = {"neither": (2, 5), "min": (low, 5), "max": (2, high), "both": (low, high)}
    y = functional.clip_by_value(x, *bounds[tensors])
    assert y.dtype == dtype
    assert y.tolist() == [[2, 2, 3], [4, 5, 5]]


def test_an_empty_tensor_stays_empty():
    empty, least = torch.zeros(7, 0), torch.tensor(1.0)
    for low, high in ((empty, empty), (1.0, 1.0), (empty, least), (least, empty)):
        assert functional.clip_by_value(empty, low, high).shape == (7, 0)


def test_a_hook_bounds_the_gradient_of_an_activation():
    """It clips what flows on into the layers below, as Paddle's ErrorClipByValue."""
    x = torch.tensor([1.0, -2.0, 0.1], requires_grad=True)
    hidden = x * 2
    hidden.register_hook(lambda gradient: functional.clip_by_value(gradient, -0.5, 0.5))
    (hidden * torch.tensor([3.0, -3.0, 0.25])).sum().backward()
    assert grad_of(x).tolist() == [1.0, -1.0, 0.5]
