"""Clipping each gradient by its own norm."""

from __future__ import annotations

import pytest
import torch

import tritonclip
from helpers import reference
from helpers.cases import (
    CHUNK,
    FLOATS,
    INTERPRETED,
    LARGE,
    NORM_TYPES,
    SIZES,
    check_clip,
    few_large,
    normal,
    of_sizes,
    parameter,
    parameters,
    unchanged,
)
from tritonclip import ClipByNorm


@pytest.mark.covering(1 if INTERPRETED else 2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("eps", [1e-6, 0.0, 1.0], ids="eps={:g}".format)
def test_clip_by_norm_scales_by_the_stated_formula(device, dtype, eps):
    check_clip(of_sizes(SIZES, dtype, device), ClipByNorm(0.75, eps=eps))


def test_clip_by_norm_scales_across_chunks(device):
    check_clip(of_sizes((5, LARGE, CHUNK), torch.float32, device), ClipByNorm(1.0))


@pytest.mark.parametrize("p", NORM_TYPES)
def test_clip_by_norm_measures_and_scales_by_any_norm_type(device, p):
    check_clip(of_sizes((1, 33, 4097), torch.float32, device), ClipByNorm(1e-5, norm_type=p))


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.float16, torch.bfloat16), torch.float32),
        ((torch.bfloat16, torch.float64, torch.float32), torch.float64),
    ],
    ids=["halves", "with-float64"],
)
def test_clip_by_norm_of_mixed_dtypes_keeps_the_order(device, dtypes, expected):
    grads = [normal(20 + seed, dtypes[seed % len(dtypes)], device, seed) for seed in range(7)]
    truth = reference.norms(grads)
    norms = tritonclip.clip_(parameters(grads), ClipByNorm(1.0))
    assert norms.dtype == expected
    assert norms.device.type == device.type
    # The norm of a gradient below float64 is right to 1e-6 in a float64 result too.
    torch.testing.assert_close(
        norms.cpu().double(), torch.tensor(truth, dtype=torch.float64), rtol=1e-6, atol=0
    )
    for grad in grads:
        step = torch.finfo(grad.dtype).eps
        assert reference.norm(grad) == pytest.approx(1.0, rel=2e-6 + step)


@pytest.mark.parametrize("magnitude", [1e30, 1e-30])
def test_clip_by_norm_neither_overflows_nor_underflows(device, magnitude):
    grads = [normal(50, device=device) * magnitude, normal(50, device=device)]
    check_clip(grads, ClipByNorm(magnitude / 2, eps=0.0))
    assert reference.norm(grads[0]) == pytest.approx(magnitude / 2, rel=2e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_by_norm_of_tiny_gradients_of_any_magnitude(dtype):
    """Up to 64 elements are squared one by one on a CPU; float64 squares may leave their range."""
    largest, least = torch.finfo(dtype).max / 64, torch.finfo(dtype).tiny
    grads = [
        normal(size, dtype, seed=size) * magnitude
        for size in (0, 1, 63, 64, 65)
        for magnitude in (0, 1, largest / 8, least)
    ]
    check_clip(grads, ClipByNorm(torch.inf))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", [1.0, 2.0], ids="p={:g}".format)
def test_clip_by_norm_of_few_large_before_many_small(device, dtype, p):
    grads = [few_large(size, p, dtype, 128, 8).to(device) for size in (*SIZES, 70_001)]
    check_clip(grads, ClipByNorm(torch.inf, p))


def test_clip_by_norm_of_zeros_and_nothing(device):
    grads = [torch.zeros(3, device=device), torch.zeros(0, device=device)]
    norms = tritonclip.clip_(parameters(grads), ClipByNorm(0.0, eps=0.0))
    assert norms.tolist() == [0.0, 0.0]
    assert grads[0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.filterwarnings("ignore:tritonclip's kernels read gradients that are dense")
@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_by_norm_keeps_apart_what_is_measured_in_different_ways(device, dtype):
    """Rows of 128, gathered up to 8,192 elements; zeros, gaps and tiny values go other ways."""
    grads = of_sizes((127, 128, 129, 8191, 8192, 8193, 9000, 40_000), dtype, device)
    grads[1].zero_()
    grads[3] = normal((50, 80), dtype, device)[:, :70]
    grads[5] *= 2.0**-14
    grads[6][100:] = 0
    norms = check_clip(grads, ClipByNorm(0.75))
    assert norms[1] == 0


def test_clip_by_norm_of_an_empty_list(device):
    norms = tritonclip.clip_([parameter(None, device)], ClipByNorm(1.0))
    assert norms.shape == (0,)
    assert norms.dtype == torch.float32
    assert norms.device.type == device.type


def test_clip_by_norm_to_infinity_changes_no_bit(device):
    grads = [torch.tensor([3e38, torch.inf], device=device), normal(9, device=device)]
    with unchanged(grads):
        tritonclip.clip_(parameters(grads), ClipByNorm(torch.inf))
