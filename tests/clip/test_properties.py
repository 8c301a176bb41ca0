"""What holds for any gradients and any limit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import tritonclip
from helpers import reference
from helpers.cases import check_clip, copies, parameters, unchanged
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue

# 60 elements of 2**120 have norms that float32 holds, for p of 1 and more.
ELEMENTS = st.floats(-(2.0**120), 2.0**120, width=32)
# Values of one magnitude, as gradients are: far more of them are clipped to other than zero.
USUAL = st.floats(-8.0, 8.0, width=32)


def tensors(elements):
    """One to four gradients of up to 15 elements each."""
    return st.lists(st.lists(elements, max_size=15), min_size=1, max_size=4)


LISTS = st.one_of(tensors(ELEMENTS), tensors(USUAL))
# From 1 on, the coefficient of 60 elements of 2**120 is a normal float32, 1.25e-38: subnormal ones
# keep fewer digits than the tolerances allow for.
LIMITS = st.floats(1.0, 1e3)
NORM_TYPES = st.sampled_from([1.0, 2.0, 3.0, torch.inf])
RULES = [ClipByGlobalNorm, ClipByNorm]


def on(device, values):
    return [torch.tensor(row, dtype=torch.float32).to(device) for row in values]


@pytest.mark.parametrize("kind", RULES)
@given(values=LISTS, p=NORM_TYPES)
def test_norms_are_right(device, kind, values, p):
    check_clip(on(device, values), kind(torch.inf, norm_type=p))


@given(values=LISTS, limit=LIMITS, p=NORM_TYPES)
def test_clipped_norm_is_at_most_the_limit(device, values, limit, p):
    """The norm is right to 1e-6; the coefficient and each element are off by 2**-24."""
    grads = on(device, values)
    tritonclip.clip_(parameters(grads), ClipByGlobalNorm(limit, norm_type=p, eps=0.0))
    assert reference.total_norm(grads, p) <= limit * (1 + 1.3e-6)


@given(values=LISTS, limit=LIMITS)
def test_clipped_norm_of_every_gradient_is_at_most_the_limit(device, values, limit):
    grads = on(device, values)
    tritonclip.clip_(parameters(grads), ClipByNorm(limit, eps=0.0))
    assert all(norm <= limit * (1 + 1.3e-6) for norm in reference.norms(grads))


@pytest.mark.parametrize("kind", RULES)
@given(values=LISTS, limit=LIMITS)
def test_clip_by_norm_is_the_stated_formula(device, kind, values, limit):
    check_clip(on(device, values), kind(limit))


@pytest.mark.parametrize("kind", RULES)
@given(values=LISTS, limit=LIMITS)
def test_clip_by_norm_twice_is_once(device, kind, values, limit):
    """A second call finds the limit itself, to 1e-6 and two roundings."""
    grads = on(device, values)
    tritonclip.clip_(parameters(grads), kind(limit, eps=0.0))
    once = copies(grads)
    tritonclip.clip_(parameters(grads), kind(limit, eps=0.0))
    for ours, old in zip(grads, once, strict=True):
        torch.testing.assert_close(ours.cpu(), old, rtol=2.5e-6, atol=2.0**-149)


@pytest.mark.parametrize("kind", RULES)
@given(values=LISTS, limit=LIMITS)
def test_clip_by_norm_turns_no_sign_and_enlarges_nothing(device, kind, values, limit):
    grads = on(device, values)
    before = copies(grads)
    tritonclip.clip_(parameters(grads), kind(limit))
    for ours, old in zip(copies(grads), before, strict=True):
        assert torch.equal(ours.signbit(), old.signbit())
        assert (ours.abs() <= old.abs()).all()


@pytest.mark.parametrize("kind", RULES)
@given(values=LISTS)
def test_clip_below_the_limit_changes_no_bit(device, kind, values):
    grads = on(device, values)
    limit = reference.total_norm(grads) * (1 + 1e-5) + 2e-6
    with unchanged(grads):
        tritonclip.clip_(parameters(grads), kind(limit))


@given(values=LISTS, first=st.floats(-10, 10), second=st.floats(-10, 10))
def test_clip_by_value_ends_within_the_bounds(device, values, first, second):
    low, high = sorted((first, second))
    grads = on(device, values)
    expected = [reference.clamped(grad, low, high) for grad in grads]
    tritonclip.clip_(parameters(grads), ClipByValue(low, high))
    # By value: where a bound is 0.0, a gradient of -0.0 may stay or become it.
    for ours, truth in zip(copies(grads), expected, strict=True):
        assert torch.equal(ours, truth)


@given(values=LISTS, limit=LIMITS, power=st.integers(-20, 20))
def test_grad_scale_by_a_power_of_two_is_unscaling_first(device, values, limit, power):
    """Powers of two round nothing, so both ways give the same bits."""
    scale = 2.0**power
    grads, unscaled = on(device, values), on(device, values)
    assume(all((grad.abs()[grad != 0] > 1e-20).all() for grad in grads))
    for grad in unscaled:
        grad.div_(scale)
    assume(all(grad.isfinite().all() for grad in unscaled))
    assume(reference.total_norm(unscaled) < 1e38)
    norm = tritonclip.clip_(parameters(grads), limit, grad_scale=scale)
    expected = tritonclip.clip_(parameters(unscaled), limit)
    torch.testing.assert_close(norm, expected, rtol=2e-6, atol=0)
    for ours, truth in zip(grads, unscaled, strict=True):
        torch.testing.assert_close(ours, truth, rtol=3e-6, atol=1e-44)
