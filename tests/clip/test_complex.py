"""Complex gradients: norms by modulus, and no clipping by value."""

from __future__ import annotations

import pytest
import torch

import tritonclip
from helpers import reference
from helpers.cases import (
    CHUNK,
    NORM_TYPES,
    assert_bits,
    assert_norm,
    bits,
    clipped,
    copies,
    named,
    normal,
    of_sizes,
    parameter,
    parameters,
)
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue

COMPLEX = pytest.mark.parametrize("dtype", named((torch.complex64, torch.complex128)))
SIZES = (0, 1, 7, 2049, CHUNK // 2 + 1)


@COMPLEX
@pytest.mark.parametrize("p", NORM_TYPES)
def test_complex_norm_is_by_modulus(device, dtype, p):
    grads = of_sizes(SIZES, dtype, device)
    norm = tritonclip.clip_(parameters(grads), ClipByGlobalNorm(torch.inf, norm_type=p))
    assert_norm(norm, reference.total_norm(grads, p))


@COMPLEX
def test_complex_norms_by_gradient(device, dtype):
    grads = of_sizes(SIZES, dtype, device)
    expected = reference.norms(grads, 1.0)
    assert_norm(tritonclip.clip_(parameters(grads), ClipByNorm(1.0, norm_type=1.0)), expected)


@COMPLEX
def test_complex_gradient_is_scaled_by_the_stated_formula(device, dtype):
    grads = of_sizes(SIZES, dtype, device)
    _, expected = clipped(grads, ClipByGlobalNorm(0.5))
    assert_bits(grads, expected)


@COMPLEX
def test_complex_gradient_below_the_limit_changes_no_bit(device, dtype):
    grad = normal(33, dtype, device)
    before = bits(grad)
    tritonclip.clip_([parameter(grad)], 1e3)
    assert torch.equal(bits(grad), before)


@pytest.mark.parametrize("p", [1.0, 2.0, torch.inf])
@pytest.mark.parametrize("magnitude", [1e30, 1e-30])
def test_complex_norm_neither_overflows_nor_underflows(device, magnitude, p):
    grad = normal(33, torch.complex64, device) * magnitude
    norm = tritonclip.clip_([parameter(grad)], ClipByGlobalNorm(torch.inf, norm_type=p))
    assert_norm(norm, reference.norm(grad, p))


@pytest.mark.parametrize("part", ["real", "imag"])
def test_complex_gradient_with_nan_is_zeroed(device, part):
    grad = normal(9, torch.complex64, device)
    getattr(grad, part)[2] = torch.nan
    tritonclip.clip_([parameter(grad)], 1.0, nonfinite="zero")
    assert torch.equal(grad.cpu(), torch.zeros(9, dtype=torch.complex64))


def test_complex_gradient_carries_a_loss_scale(device):
    grad = normal(9, torch.complex64, device)
    before = copies([grad])[0]
    norm = tritonclip.clip_([parameter(grad)], 100.0, grad_scale=4.0)
    assert_norm(norm, reference.norm(before) / 4)
    assert_bits([grad], [before / 4])


@COMPLEX
def test_complex_gradient_has_no_clipping_by_value(device, dtype):
    grads = [torch.full((3,), 8.0, device=device), normal(3, dtype, device)]
    before, versions = copies(grads), [grad._version for grad in grads]
    with pytest.raises(TypeError, match="complex"):
        tritonclip.clip_(parameters(grads), ClipByValue(1.0))
    assert_bits(grads, before)
    assert [grad._version for grad in grads] == versions


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


@pytest.mark.parametrize("p", [0.5, 1.0, 3.0, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", [tritonclip.ClipByGlobalNorm, tritonclip.ClipByNorm])
def test_complex_moduli_over_the_largest_float32(device, p, kind):
    """The modulus of 3e38+3e38j is 4.2e38; divided by the loss scale, norm and gradient fit."""
    grad = torch.full((4,), 3e38 + 3e38j, dtype=torch.complex64, device=device)
    norm = tritonclip.clip_([parameter(grad)], kind(1.0, p), grad_scale=1e6)
    largest = abs(complex(torch.tensor(3e38).item(), torch.tensor(3e38).item()))
    exact = largest / 1e6 * (1.0 if p in (torch.inf, -torch.inf) else 4 ** (1 / p))
    assert norm.flatten().tolist() == pytest.approx([exact], rel=1e-6)
    clipped = grad.cpu().to(torch.complex128).abs() * (exact * 1e6 / largest)
    assert clipped.tolist() == pytest.approx([1.0] * 4, rel=1e-5)
