"""Gradients that still carry a loss scale: measured, unscaled and clipped in the same passes."""

import pytest
import torch

import tritonclip
from helpers import reference
from helpers.cases import (
    DOZENS,
    FLOATS,
    assert_bits,
    check_clip,
    copies,
    each_rule,
    grad_of,
    normal,
    of_sizes,
    parameter,
    parameters,
)
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue

RULES = each_rule(1.0, 0.5)


@pytest.mark.covering(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=["0-d", "1-d", "2-d"])
def test_grad_scale_may_be_a_tensor_of_one_element(device, rule, dtype, shape):
    grads = of_sizes((33, 4097), torch.float32, device)
    again = [grad.clone() for grad in grads]
    scale = torch.full(shape, 1024.0, dtype=dtype, device=device)
    measured = tritonclip.clip_(parameters(grads), rule, grad_scale=scale)
    expected = tritonclip.clip_(parameters(again), rule, grad_scale=1024.0)
    assert_bits(grads, again)
    assert scale.tolist() == torch.full(shape, 1024.0).tolist()
    if expected is not None:
        assert torch.equal(measured, expected)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale", [1, 1.0], ids=["int", "float"])
def test_grad_scale_of_one_is_none(device, rule, scale):
    check_clip(of_sizes((33, 4097), torch.float32, device), rule, grad_scale=scale)


@pytest.mark.parametrize("rule", RULES)
def test_calls_ignore_the_default_device(device, rule):
    """Tables, scratch and scalars belong where the gradients are, not on the default device."""
    one = parameter(torch.linspace(-3, 3, 9000, device=device))
    other = parameter(grad_of(one).clone())
    with torch.device("meta"):
        tritonclip.clip_([one], rule, grad_scale=2.0)
    tritonclip.clip_([other], rule, grad_scale=2.0)
    assert torch.equal(grad_of(one), grad_of(other))


@pytest.mark.parametrize("rule", [ClipByGlobalNorm(1e-6), ClipByNorm(1e-6)], ids=["all", "each"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("n", [3, DOZENS])
def test_grad_scale_of_a_quotient_below_the_least_normal_number(device, rule, dtype, n):
    """Coefficient 1e-6 over 2^120 is a subnormal number of float32 with ten bits."""
    grads = [torch.full((5,), 1.1 * 2.0**120, dtype=dtype, device=device) for _ in range(n)]
    before = copies(grads)
    with tritonclip.verify():
        norms = tritonclip.clip_(parameters(grads), rule, grad_scale=2.0**120)
    for grad, old, norm in zip(grads, before, norms.expand(n), strict=True):
        coefficient = reference.coefficient(norm, rule.max_norm, rule.eps).double()
        # The error of a factor below 2^-126 is half a unit in the last place, 2^-150.
        torch.testing.assert_close(
            grad.cpu().double(),
            old.double() * (coefficient / 2.0**120),
            rtol=torch.finfo(dtype).eps,
            atol=float(old[0]) * 2.0**-150,
        )


@pytest.mark.parametrize("rule", [ClipByGlobalNorm(1e-20), ClipByNorm(1e-20)], ids=["all", "each"])
def test_grad_scale_of_a_quotient_below_every_number_gives_zeros(device, rule):
    grad = torch.full((1,), 2.0**126, device=device)
    with tritonclip.verify():
        tritonclip.clip_([parameter(grad)], rule, grad_scale=2.0**120)
    assert grad.tolist() == [0.0]


def test_grad_scale_by_norm_equal_to_a_coefficient_still_scales_the_others(device):
    """A coefficient over the loss scale may be 1, and the least of the list."""
    grads = [torch.tensor([value], device=device) for value in (0.25, 1.0)]
    tritonclip.clip_(parameters(grads), ClipByNorm(1.0, eps=0.0), grad_scale=0.5)
    assert [grad.tolist() for grad in grads] == [[0.5], [1.0]]


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**126], ids="{:g}".format)
def test_grad_scale_whose_reciprocal_is_just_normal_is_divided_out(device, scale):
    grad = torch.full((2,), scale, device=device)
    tritonclip.clip_([parameter(grad)], 10.0, grad_scale=scale)
    assert grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("policy", ["propagate", "error", "zero"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
def test_grad_scale_by_value_that_overflows_is_brought_to_the_bound(device, policy, dtype):
    """The policies are for NaN and inf in the gradients, before the loss scale is divided out."""
    grad = torch.tensor([torch.finfo(dtype).max, -1.0], dtype=dtype, device=device)
    with tritonclip.verify():
        tritonclip.clip_([parameter(grad)], ClipByValue(0.5), nonfinite=policy, grad_scale=2.0**-16)
    assert grad.tolist() == [0.5, -0.5]


@pytest.mark.parametrize("dtype", FLOATS)
def test_grad_scale_by_value_keeps_every_digit(device, dtype):
    grad = normal(9, dtype, device)
    halved = (grad / 2).clamp(-0.5, 0.5)
    tritonclip.clip_([parameter(grad)], ClipByValue(0.5), grad_scale=2.0)
    assert_bits([grad], [halved])
