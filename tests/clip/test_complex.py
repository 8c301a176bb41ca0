"""Complex gradients: norms by modulus, and no clipping by value."""

from __future__ import annotations

import pytest
import torch

import tritonclip
from helpers import reference
from helpers.cases import (
    CHUNK,
    NORM_TYPES,
    check_clip,
    copies,
    named,
    normal,
    of_sizes,
    parameter,
    parameters,
    unchanged,
    untouched,
)
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue

COMPLEX = pytest.mark.parametrize("dtype", named((torch.complex64, torch.complex128)))
SIZES = (0, 1, 7, 2049, CHUNK // 2 + 1)


@COMPLEX
@pytest.mark.parametrize("kind", [ClipByGlobalNorm, ClipByNorm], ids=["global", "by-norm"])
@pytest.mark.parametrize("p", NORM_TYPES)
def test_complex_gradient_is_measured_by_modulus_and_scaled(device, dtype, p, kind):
    check_clip(of_sizes(SIZES, dtype, device), kind(0.5, norm_type=p))


@COMPLEX
def test_complex_gradient_below_the_limit_changes_no_bit(device, dtype):
    grad = normal(33, dtype, device)
    with unchanged([grad]):
        tritonclip.clip_([parameter(grad)], 1e3)


@pytest.mark.parametrize("p", [1.0, 2.0, torch.inf])
@pytest.mark.parametrize("magnitude", [1e30, 1e-30])
def test_complex_norm_neither_overflows_nor_underflows(device, magnitude, p):
    grad = normal(33, torch.complex64, device) * magnitude
    check_clip([grad], ClipByGlobalNorm(torch.inf, norm_type=p))


@pytest.mark.parametrize("part", ["real", "imag"])
def test_complex_gradient_with_nan_is_zeroed(device, part):
    grad = normal(9, torch.complex64, device)
    getattr(grad, part)[2] = torch.nan
    tritonclip.clip_([parameter(grad)], 1.0, nonfinite="zero")
    assert torch.equal(grad.cpu(), torch.zeros(9, dtype=torch.complex64))


def test_complex_gradient_carries_a_loss_scale(device):
    check_clip([normal(9, torch.complex64, device)], 100.0, grad_scale=4.0)


@COMPLEX
def test_complex_gradient_has_no_clipping_by_value(device, dtype):
    grads = [torch.full((3,), 8.0, device=device), normal(3, dtype, device)]
    with untouched(grads), pytest.raises(TypeError, match="complex"):
        tritonclip.clip_(parameters(grads), ClipByValue(1.0))


@pytest.mark.filterwarnings("ignore:tritonclip's kernels read:UserWarning")
@pytest.mark.parametrize("p", [1.0, 3.0])
def test_norm_of_two_complex_groups_is_right(device, p):
    """Moduli are temporaries, which kernels know by their addresses only."""
    grads = [
        torch.full((1000,), 3 + 4j, dtype=torch.complex64, device=device),
        torch.full((1000,), 3e3 + 4e3j, dtype=torch.complex128, device=device),
        torch.full((2000,), 3 + 4j, dtype=torch.complex64, device=device)[::2],
    ]
    norm = tritonclip.get_total_norm(grads, p)
    assert float(norm) == pytest.approx(reference.total_norm(copies(grads), p), rel=1e-6)


@pytest.mark.parametrize("p", [1.0, 1.5, 3.0, torch.inf])
@pytest.mark.parametrize("kind", [tritonclip.ClipByGlobalNorm, tritonclip.ClipByNorm])
def test_complex_moduli_over_the_largest_float32(device, p, kind):
    """The modulus of 3e38+3e38j is 4.2e38; divided by the loss scale, norm and gradient fit."""
    grad = torch.full((4,), 3e38 + 3e38j, dtype=torch.complex64, device=device)
    norm = tritonclip.clip_([parameter(grad)], kind(1.0, p), grad_scale=1e6)
    largest = abs(complex(torch.tensor(3e38).item(), torch.tensor(3e38).item()))
    exact = largest / 1e6 * 4 ** (1 / p)
    assert norm.flatten().tolist() == pytest.approx([exact], rel=1e-6)
    clipped = grad.cpu().to(torch.complex128).abs() * (exact * 1e6 / largest)
    assert clipped.tolist() == pytest.approx([1.0] * 4, rel=1e-5)
