"""Clamping by operators on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import tritonclip
from helpers import reference
from helpers.cases import FLOATS, assert_bits, grad_of, normal, parameters
from tritonclip import ClipByValue

pytestmark = pytest.mark.usefixtures("operators")

# Numbers of elements, 2-d where they are negative.
LISTS = {
    "some empty": [0, 7, 0] * 100,
    "beside 2-d and large ones": [9, -12, 4096, 9, 9] * 100,
    "large": [4096, 4097] * 20,
}


def gradients(sizes, dtype):
    return [
        (0.01 * normal(abs(n), torch.float32, seed=i)).to(dtype).view((-1,) if n >= 0 else (-1, 3))
        for i, n in enumerate(sizes)
    ]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("every", [1, 7, 10**9])
def test_each_gradient_is_clamped(sizes, dtype, every):
    grads = gradients(sizes, dtype)
    for i, grad in enumerate(grads):
        if grad.numel() and i % every == every - 1:
            grad.view(-1)[-1] = 2.0
    expected = [reference.clamped(grad, -1.0, 0.5) for grad in grads]
    tritonclip.clip_(parameters(grads), ClipByValue(-1.0, 0.5))
    assert_bits(grads, expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_gradients_are_clamped(dtype):
    grads = gradients([4] * 9, dtype)
    grads[3][0] = 2.0
    expected = [grad.float().clamp(-1.0, 0.5) for grad in grads]
    tritonclip.clip_(parameters(grads), ClipByValue(-1.0, 0.5))
    for grad, truth in zip(grads, expected, strict=True):
        assert torch.equal(grad.float(), truth)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_gradients_are_clamped_under_autocast(dtype, autocast):
    grads = gradients([4] * 9, dtype)
    grads[3][0] = 2.0
    with torch.autocast("cpu", dtype=autocast):
        tritonclip.clip_(parameters(grads), ClipByValue(-1.0, 0.5))
    assert grads[3][0] == 0.5


OUTLIERS = {
    "none": (),
    "few": (0, 5, 1700, 2999),
    "most": range(1800, 3000),
    "all": range(3000),
}


@pytest.mark.parametrize("value", [5.0, torch.nan, -torch.inf], ids=str)
@pytest.mark.parametrize("outliers", OUTLIERS.values(), ids=OUTLIERS)
def test_clip_by_value_finds_outliers_among_many_small_gradients(outliers, value):
    grads = [1e-3 * normal(1 + i % 60, seed=i) for i in range(3000)]
    for place in outliers:
        grads[place][-1] = value
    expected = [reference.clamped(grad, -0.5, 0.25) for grad in grads]
    tritonclip.clip_(parameters(grads), ClipByValue(-0.5, 0.25))
    assert_bits(grads, expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1000, 4095])
def test_clip_by_value_of_medium_gradients(dtype, size):
    grads = [normal(size, dtype, seed=i).clamp_(-1, 1) for i in range(80)]
    grads[50][7] = 3.0
    expected = [reference.clamped(grad, -1.5, 2.0) for grad in grads]
    tritonclip.clip_(parameters(grads), ClipByValue(-1.5, 2.0))
    assert_bits(grads, expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("n_small", [1, 300])
def test_clip_by_value_of_dual_gradients_clamps_values_and_tangents(n_small):
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (5000, *[5] * n_small)]
    with forward_ad.dual_level():
        params[0].grad = torch.ones(5000)
        for param in params[1:]:
            param.grad = forward_ad.make_dual(torch.ones(5), torch.ones(5))
        tritonclip.clip_(params, ClipByValue(0.5))
        assert all((grad_of(param) == 0.5).all() for param in params)
        for param in params[1:]:
            tangent = forward_ad.unpack_dual(grad_of(param)).tangent
            assert tangent is not None
            assert not tangent.any()
