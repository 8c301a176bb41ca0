"""The norm and the coefficient of the last step: those before clipping, under every rule."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import SGD

from helpers.cases import assert_norm
from helpers.clip_stats import torch_norm
from helpers.training import give_grads, new_params, sgd, wrapped
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, ClippedOptimizer


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3], ids=["below", "clipped", "far above"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_last_norm_is_that_before_clipping(backend, norm_type, size):
    params, optimizer = wrapped(sgd, ClipByGlobalNorm(1.0, norm_type), backend.device)
    grads = give_grads(params, size=size)
    optimizer.step()
    norm = torch_norm(grads, norm_type)
    assert_norm(optimizer.stats.last_norm, norm)
    expected = torch.tensor(min(1.0, 1.0 / (norm + 1e-6)), dtype=torch.float64)
    # A float32 norm and a float32 quotient: two roundings of 2**-24 beside the norm's 1e-6.
    torch.testing.assert_close(
        optimizer.stats.last_coefficient.cpu().double(), expected, rtol=1.2e-6, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_last_values_are_of_the_dtype_of_norms(backend, dtype):
    params = new_params(device=backend.device, dtype=dtype)
    optimizer = ClippedOptimizer(sgd(params), 1.0)
    give_grads(params)
    optimizer.step()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for value in (optimizer.stats.last_norm, optimizer.stats.last_coefficient):
        assert (value.dtype, value.shape, value.device.type) == (wide, (), backend.device.type)
    for count in (optimizer.stats.steps, optimizer.stats.clipped_steps):
        assert (count.dtype, count.shape, count.device.type) == (
            torch.int64,
            (),
            backend.device.type,
        )


def test_last_values_of_earlier_steps_stay_what_they_were(backend):
    """A logger may collect them and read them later."""
    params, optimizer = wrapped(sgd, device=backend.device)
    kept, expected = [], []
    for step in range(3):
        expected.append(torch_norm(give_grads(params, size=1.0 + step, seed=step)))
        optimizer.step()
        kept.append(optimizer.stats.last_norm)
    for norm, truth in zip(kept, expected, strict=True):
        assert_norm(norm, truth)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_norms_have_their_dtype_whatever_the_default(dtype):
    _, optimizer = wrapped(sgd)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        made, loaded = wrapped(sgd)[1].stats, wrapped(sgd)[1]
        loaded.load_state_dict(loaded.optimizer.state_dict())
        optimizer.step()
    finally:
        torch.set_default_dtype(before)
    for stats in (made, loaded.stats, optimizer.stats):
        assert stats.last_norm.dtype == stats.last_coefficient.dtype == torch.float32


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("policy", ["skip", "error"])
def test_last_norm_is_that_of_the_last_step_taken(policy, fused):
    params = new_params()
    optimizer = ClippedOptimizer(SGD(params, lr=0.1, fused=fused), 1.0, nonfinite=policy)
    norm = torch_norm(give_grads(params))
    optimizer.step()
    give_grads(params, size=math.inf)
    if policy == "skip":
        optimizer.step()
    else:
        with pytest.raises(RuntimeError):
            optimizer.step()
    assert_norm(optimizer.stats.last_norm, norm)


def test_by_norm_shows_the_largest_norm_and_the_least_coefficient(backend):
    params, optimizer = wrapped(sgd, ClipByNorm(0.5), backend.device)
    grads = give_grads(params)
    optimizer.step()
    largest = max(torch_norm([grad]) for grad in grads)
    assert_norm(optimizer.stats.last_norm, largest)
    # As above: the tolerance of a norm, and two roundings.
    torch.testing.assert_close(
        optimizer.stats.last_coefficient.cpu().double(),
        torch.tensor(0.5 / (largest + 1e-6), dtype=torch.float64),
        rtol=1.2e-6,
        atol=0,
    )


def test_by_value_shows_nan_and_counts_steps(backend):
    params, optimizer = wrapped(sgd, ClipByValue(1e-3), backend.device)
    give_grads(params)
    optimizer.step()
    summary = optimizer.stats.summary()
    assert math.isnan(summary["norm"])
    assert math.isnan(summary["coefficient"])
    assert math.isnan(summary["clipped_share"])
    assert (summary["steps"], summary["clipped_steps"]) == (1, 0)
