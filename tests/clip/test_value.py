"""Clipping by value: each element on its own, bit for bit with the stated formula."""

from __future__ import annotations

import pytest
import torch

import tritonclip
from helpers.cases import (
    CHUNK,
    FLOATS,
    SIZES,
    assert_bits,
    check_clip,
    copies,
    normal,
    of_sizes,
    parameter,
    parameters,
    unchanged,
)
from tritonclip import ClipByValue

BOUNDS = [
    *[(-0.5, 0.5), (-0.1, 1 / 3), (0.25, 0.75), (-2.0, -1.0), (0.0, 0.0)],
    *[(-torch.inf, 0.1), (-0.1, torch.inf), (-1e30, 1e-30)],
]


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("low", "high"), BOUNDS, ids="{:.3g}".format)
def test_clip_by_value_clamps_to_the_rounded_bounds(device, dtype, low, high):
    assert check_clip(of_sizes(SIZES, dtype, device), ClipByValue(low, high)) is None


@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_by_value_keeps_nan_and_bounds_inf(device, dtype):
    grad = torch.tensor([torch.nan, torch.inf, -torch.inf, 9.0], dtype=dtype, device=device)
    tritonclip.clip_([parameter(grad)], ClipByValue(-1.0, 2.0))
    assert grad[0].isnan()
    assert grad[1:].tolist() == [2.0, -1.0, 2.0]


def test_clip_by_value_keeps_every_nan_of_a_long_gradient(device):
    grad = normal(CHUNK + 7, device=device)
    grad[::5] = torch.nan
    check_clip([grad], ClipByValue(0.5))


def test_clip_by_value_to_a_bound_over_the_maximum_of_the_dtype(device):
    """1e6 is inf in float16; a finite bound stays finite."""
    grad = torch.tensor([torch.inf, -torch.inf, 5.0], dtype=torch.float16, device=device)
    tritonclip.clip_([parameter(grad)], ClipByValue(1e6))
    assert grad.tolist() == [65504.0, -65504.0, 5.0]


def test_clip_by_value_to_infinity_keeps_infinity(device):
    grad = torch.tensor([torch.inf, -torch.inf, 3e38], device=device)
    with unchanged([grad]):
        tritonclip.clip_([parameter(grad)], ClipByValue(torch.inf))


@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_by_value_within_bounds_changes_no_bit(device, dtype):
    grads = of_sizes((5, 4097, CHUNK + 1), dtype, device)
    grads[0][:3] = torch.tensor([-0.0, torch.finfo(dtype).tiny / 2, 5.0])
    with unchanged(grads):
        tritonclip.clip_(parameters(grads), ClipByValue(-5.0, 5.0))


def test_clip_by_value_changes_only_what_is_out_of_bounds(device):
    """One element of one of many chunks."""
    grads = [torch.full((3 * CHUNK,), 0.25, device=device) for _ in range(2)]
    grads[1][CHUNK + 1] = -8.0
    expected = copies(grads)
    expected[1][CHUNK + 1] = -0.5
    tritonclip.clip_(parameters(grads), ClipByValue(0.5))
    assert_bits(grads, expected)


def test_clip_by_value_rounds_the_bounds_for_each_dtype(device):
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    grads = [torch.ones(5, dtype=dtype, device=device) for dtype in dtypes]
    tritonclip.clip_(parameters(grads), ClipByValue(0.1))
    for grad, dtype in zip(grads, dtypes, strict=True):
        assert torch.equal(grad.cpu(), torch.full((5,), 0.1, dtype=torch.float64).to(dtype))
