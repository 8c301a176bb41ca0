"""Clipping by the global norm: what the gradients become, to the last bit, and when they stay."""

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
    MANY,
    SIZES,
    assert_bits,
    check_clip,
    each_rule,
    normal,
    of_sizes,
    parameter,
    parameters,
    unchanged,
)
from helpers.workers import NEEDS_FORK, run_in_fork
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue


@pytest.mark.covering(1 if INTERPRETED else 2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("max_norm", "eps"),
    [(1.0, 1e-6), (0.3, 1e-6), (7.0, 0.0), (1.0, 1.0), (1e-6, 1e-6), (1e-12, 1e-6)],
    ids="max={:g}".format,
)
def test_clip_scales_by_the_stated_formula(device, dtype, max_norm, eps):
    grads = of_sizes(SIZES, dtype, device)
    norm = check_clip(grads, ClipByGlobalNorm(max_norm, eps=eps))
    assert reference.coefficient(norm, max_norm, eps) < 1


@pytest.mark.parametrize("seed", range(4))
def test_clip_scales_by_the_stated_formula_at_any_norm(device, seed):
    """The last bit of the coefficient shows in float32: a reciprocal and a product differ."""
    for step in range(20):
        check_clip([normal(64, device=device, seed=100 * seed + step)], 0.1 + 0.37 * step / 20)


@pytest.mark.parametrize("size", SIZES)
def test_clip_scales_one_gradient_of_any_size(device, size):
    check_clip([normal(size, device=device)], 1e-3)


@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_scales_across_chunks(device, dtype):
    check_clip([normal(LARGE, dtype, device), normal(5, dtype, device)], 1.0)


@pytest.mark.parametrize("rule", each_rule(4.0, 0.5))
def test_clip_of_many_tensors(device, rule):
    check_clip(of_sizes((1 + seed % 40 for seed in range(MANY)), torch.float32, device), rule)


@pytest.mark.parametrize("p", [1.0, 1.5, 3.0, torch.inf])
def test_clip_scales_by_any_norm_type(device, p):
    grads = of_sizes((1, 33, 4097), torch.float32, device)
    grads[0].fill_(-2.0)
    norm = check_clip(grads, ClipByGlobalNorm(1e-5, norm_type=p))
    assert reference.coefficient(norm, 1e-5) < 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_below_the_limit_changes_no_bit(device, dtype):
    grads = of_sizes(SIZES, dtype, device)
    grads[2][0] = -0.0
    with unchanged(grads):
        check_clip(grads, 1e3)


def test_clip_without_eps_leaves_a_norm_equal_to_the_limit(device):
    grad = torch.tensor([3.0, -4.0], device=device)
    tritonclip.clip_([parameter(grad)], ClipByGlobalNorm(5.0, eps=0.0))
    assert grad.tolist() == [3.0, -4.0]


def test_clip_with_eps_scales_a_norm_equal_to_the_limit(device):
    grad = torch.tensor([3.0, -4.0], dtype=torch.float64, device=device)
    tritonclip.clip_([parameter(grad)], ClipByGlobalNorm(5.0, eps=1e-2))
    torch.testing.assert_close(
        grad.cpu(), torch.tensor([3.0, -4.0], dtype=torch.float64) * (5 / 5.01)
    )


@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_clip_to_zero_keeps_zeros(device, eps):
    """0 / (0 + eps) is 0 or undefined; zeros stay zeros and NaN does not come up."""
    grad = torch.zeros(9, device=device)
    norm = tritonclip.clip_([parameter(grad)], ClipByGlobalNorm(0.0, eps=eps))
    assert norm.item() == 0.0
    assert grad.tolist() == [0.0] * 9


@pytest.mark.parametrize("extra", [1.0, torch.inf], ids=["finite", "inf"])
def test_clip_to_infinity_changes_no_bit(device, extra):
    grad = torch.tensor([3e38, -2.0, extra], device=device)
    with unchanged([grad]):
        tritonclip.clip_([parameter(grad)], torch.inf)


@pytest.mark.parametrize("magnitude", [1e30, 1e-30])
def test_clip_of_extreme_values_ends_at_the_limit(device, magnitude):
    grad = normal(1000, device=device) * magnitude
    max_norm = magnitude / 4
    tritonclip.clip_([parameter(grad)], ClipByGlobalNorm(max_norm, eps=0.0))
    # Each element and the coefficient are off by at most 2**-24, the norm by 1e-6.
    assert reference.norm(grad) == pytest.approx(max_norm, rel=2e-6)


@pytest.mark.parametrize("limit", [1, 0.25], ids=["int", "float"])
def test_clip_with_a_number_is_by_global_norm(device, limit):
    grads = of_sizes((7, 4097), torch.float32, device)
    again = [grad.clone() for grad in grads]
    norm = tritonclip.clip_(parameters(grads), limit)
    other = check_clip(again, ClipByGlobalNorm(limit, norm_type=2.0, eps=1e-6))
    assert_bits([*grads, norm], [*again, other])
    assert reference.total_norm(grads) == pytest.approx(limit, rel=1e-5)


@NEEDS_FORK
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("rule", [ClipByGlobalNorm, ClipByNorm, ClipByValue])
def test_clip_below_the_limit_does_not_write(backend, rule, tmp_path):
    """The gradient lies in read-only memory, where a store of the same value is fatal too."""
    if backend.device.type != "cpu":
        pytest.skip("device memory cannot be made read-only")
    if backend.deferred:
        pytest.skip("operators multiply by 1 where the host does not decide")
    if (backend.name, rule) == ("torch", ClipByValue):
        pytest.skip("on a CPU a look at the elements costs as much as to clamp them")
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "grad"
    path.write_bytes(normal(CHUNK + 5).numpy().tobytes())
    grad = torch.from_numpy(numpy.memmap(path, dtype="float32", mode="r"))
    # A store ends the process.
    run_in_fork(lambda: tritonclip.clip_(parameter(grad), rule(1e4)))
