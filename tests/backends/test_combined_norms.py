"""Norms that the host joins from those of parts, in Python's numbers as in tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import forward_ad

import tritonclip
from helpers.cases import assert_bits, copies, normal, parameters
from tritonclip import ClipByGlobalNorm, ClipByValue
from tritonclip.backends.operators import combine, combine_numbers

ORDERS = (1.0, 1.5, 2.0, 3.0, 100.0, math.inf)
PARTS = {
    "one": [3.0],
    "some": [3.0, 0.0, 4.0],
    "zeros": [-0.0, 0.0],
    "huge": [1e300, 3e300],
    "tiny": [1e-300, 3e-300],
    "inf": [1.0, math.inf, 0.0],
    "nan": [math.inf, math.nan, 1.0],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_numbers_are_joined_as_tensors_are(parts, order):
    expected = float(combine(torch.tensor(parts, dtype=torch.float64), order))
    found = combine_numbers(parts, order)
    assert found == pytest.approx(expected, rel=1e-14, abs=0, nan_ok=True)
    assert math.copysign(1.0, found) == 1.0


@pytest.mark.parametrize(
    "rule", [*(ClipByGlobalNorm(0.5, order) for order in (2.0, 1.0, math.inf)), ClipByValue(0.1)]
)
@pytest.mark.parametrize("policy", ["propagate", "zero", "error"])
@pytest.mark.parametrize("scale", [None, 8.0, torch.tensor(8.0)], ids=["none", "number", "tensor"])
def test_groups_of_dtypes_are_clipped_as_one_list(rule, policy, scale):
    """As many float32 gradients beside float16 ones as alone where the others are zeros."""
    alone = [normal(n, seed=n) for n in (5, 300, 2)]
    mixed, zeros = copies(alone), [torch.zeros(n, dtype=torch.float16) for n in (7, 0, 64)]
    norm = tritonclip.clip_(parameters(alone), rule, nonfinite=policy, grad_scale=scale)
    among = parameters(one for pair in zip(zeros, mixed, strict=True) for one in pair)
    same = tritonclip.clip_(among, rule, nonfinite=policy, grad_scale=scale)
    assert_bits(alone, mixed)
    assert norm is same is None or torch.equal(norm, same)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("order", [1.0, 3.0, math.inf])
def test_norms_of_groups_have_tangents(order):
    grads = [torch.ones(3), torch.ones(4, dtype=torch.float64)]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(grad, torch.ones_like(grad)) for grad in grads]
        norm = forward_ad.unpack_dual(tritonclip.get_total_norm(duals, order))
    # All elements are alike: of the norm, too, a step by the elements doubles it.
    assert norm.tangent == pytest.approx(float(norm.primal))
