"""The norm of a call: right to the tolerance of its dtype, whatever the values, sizes and types."""

import math

import pytest
import torch

import tritonclip
from helpers import reference
from helpers.cases import (
    CHUNK,
    DOZENS,
    FLOATS,
    HALVES,
    INTERPRETED,
    LARGE,
    NORM_TYPES,
    assert_bits,
    assert_norm,
    check_clip,
    few_large,
    named,
    normal,
    of_sizes,
    parameter,
    parameters,
    unchanged,
)
from tritonclip import ClipByGlobalNorm, ClipByNorm


def measured(grads, p=2.0):
    """The norm through the public call, with a limit that leaves the gradients alone."""
    return tritonclip.clip_(parameters(grads), ClipByGlobalNorm(torch.inf, norm_type=p))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", [ClipByGlobalNorm, ClipByNorm], ids=["all", "each"])
def test_norm_does_not_depend_on_old_values_in_memory(device, dtype, kind, monkeypatch):
    """NaN in scratch, as other tests have it, may be taken for an overflow and measured again."""
    grads = of_sizes([*[9001] * (3 if INTERPRETED else 60), *[701] * 5, 3, 0], dtype, device)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(3))
    check_clip(grads, kind(torch.inf))


@pytest.mark.parametrize("dtype", HALVES + named([torch.float32]))
def test_norm_counts_the_end_of_a_very_large_gradient(dtype):
    """Beyond the pieces in which a CPU measures one."""
    grad = torch.zeros(2**25 + 2**16 + 5, dtype=dtype)
    grad[:7] = 3.0
    grad[2**25 + 2**15 :][:9] = 2.0
    grad[-5:] = 4.0
    assert_norm(measured([grad]), math.sqrt(7 * 9 + 9 * 4 + 5 * 16))


@pytest.mark.parametrize("p", NORM_TYPES)
def test_norm_is_right_across_chunks(device, p):
    grad = normal(LARGE, device=device)
    assert_norm(measured([grad], p), reference.norm(grad, p))


def with_values(grad, values):
    for at, value in values.items():
        grad[at] = value
    return grad


RARE = {
    # One chunk overflows in float32 and its neighbours do not.
    "large": lambda: [
        torch.full((50,), 1e-30),
        with_values(normal(2 * CHUNK + 1), {CHUNK + 3: 2e25}),
        torch.full((50,), 1e-30),
    ],
    # A chunk whose squares all vanish in float32 is not a chunk of zeros.
    "small": lambda: [with_values(torch.zeros(CHUNK + 9), {-1: 3e-30, 5: 4e-30})],
    # Sums of squares of each chunk fit float64, and those of two do not.
    "float64": lambda: [torch.full((6 * CHUNK,), 8.56e151, dtype=torch.float64)],
    # Moduli are temporaries, which kernels know by their addresses only.
    "complex": lambda: [
        torch.full((1000,), 3 + 4j, dtype=torch.complex64),
        torch.full((1000,), 3e3 + 4e3j, dtype=torch.complex128),
        torch.full((2000,), 3 + 4j, dtype=torch.complex64)[::2],
    ],
}


@pytest.mark.filterwarnings("ignore:tritonclip's kernels read:UserWarning")
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0], ids="p={:g}".format)
@pytest.mark.parametrize("make", RARE.values(), ids=RARE)
def test_norm_of_rare_values(device, make, p):
    grads = [grad.to(device) for grad in make()]
    is_mixed = len({grad.dtype for grad in grads}) > 1
    assert_norm(measured(grads, p), reference.total_norm(grads, p), is_mixed=is_mixed)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1.1, 1e-3], ids="{:.3g}".format)
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0], ids="p={:g}".format)
def test_norm_of_constants_is_not_biased(device, dtype, value, p):
    """Equal terms make every addition of a lane round the same way."""
    grad = torch.full((LARGE,), value, dtype=dtype, device=device)
    exact = grad[0].double().item() * LARGE ** (1 / p)
    assert_norm(measured([grad], p), exact)


@pytest.mark.covering(2)
@pytest.mark.filterwarnings("ignore:tritonclip's kernels read gradients that are dense")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", [1.0, 2.0], ids="p={:g}".format)
@pytest.mark.parametrize("gaps", [False, True], ids=["dense", "gaps"])
@pytest.mark.parametrize(
    ("period", "large"),
    [(64, 8), (128, 4), (128, 8), (128, 16), (512, 8), (4096, 256), (CHUNK, 512), (CHUNK, 2048)],
)
def test_norm_of_few_large_before_many_small(device, dtype, p, period, large, gaps):
    """Every small power is lost where it is added to a large one of its own."""
    for size in (period, 3 * period + 7, *(() if INTERPRETED else (70_001,))):
        grad = few_large(size, p, dtype, period, large).to(device)
        for one in (grad, grad.flip(0)):
            read = torch.stack([one, one], dim=1)[:, 0] if gaps else one
            assert_norm(measured([read], p), reference.norm(one, p))


@pytest.mark.skipif(INTERPRETED, reason="20M elements take minutes in the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("value", [1.0, 0.1], ids="{:g}".format)
def test_norm_of_twenty_million_constants(device, dtype, value):
    """A single float32 sum stops growing at 2**24 ones."""
    grad = torch.full((20_000_000,), value, dtype=dtype, device=device)
    assert_norm(measured([grad]), grad[0].double().item() * 20_000_000**0.5)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_norm_does_not_depend_on_the_default_dtype(device, dtype, default):
    grads = of_sizes((LARGE, 5), dtype, device)
    expected = tritonclip.get_total_norm(grads)
    empty = tritonclip.get_total_norm([])
    torch.set_default_dtype(default)
    try:
        assert_bits([tritonclip.get_total_norm(grads)], [expected])
        assert tritonclip.get_total_norm([]).dtype == empty.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.covering(2)
@pytest.mark.parametrize("limit", [3.5e38, 1e300, 1.7976931348623157e308])
@pytest.mark.parametrize("kind", [ClipByGlobalNorm, ClipByNorm])
@pytest.mark.parametrize("policy", ["propagate", "error", "zero"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_limit_over_the_largest_float32_clips_nothing(device, limit, kind, policy, dtype):
    grads = of_sizes((5, *[3] * DOZENS), dtype, device)
    with unchanged(grads):
        norm = tritonclip.clip_(parameters(grads), kind(limit), nonfinite=policy)
    assert norm.isfinite().all()


def test_a_limit_over_the_largest_float32_limits_float64(device):
    grad = torch.full((1,), 1e305, dtype=torch.float64, device=device)
    tritonclip.clip_([parameter(grad)], 1e300)
    assert grad.item() == pytest.approx(1e300)


def test_error_with_a_limit_over_the_largest_float32_names_the_gradient(device):
    grad = torch.tensor([1.0, torch.nan], device=device)
    with pytest.raises(RuntimeError, match=r"non-finite.*parameters\[0\]"):
        tritonclip.clip_([parameter(grad)], 1.7976931348623157e308, nonfinite="error")


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
