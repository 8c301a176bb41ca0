"""Overflows under a GradScaler, which skips the step and lowers the scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import assert_bits, copies, grad_of, normal
from loss_scale import SCALE, assert_same_run, backward, grads_at, hand_step, scaled_step, spoiled
from torch.optim import SGD
from training import (
    INNERS,
    PLAIN_AND_FUSED,
    POLICIES,
    RULES,
    SCALERS,
    new_params,
    state_of,
    wrapped,
)

from tritonclip import ClipByGlobalNorm, ClippedOptimizer


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scaler_type", SCALERS)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_scaler_overflow_changes_and_counts_nothing(scaler_type, policy, make, rule, value):
    """Under every policy: an overflow is the scaler's to handle, neither an error nor a skip."""
    params, optimizer = wrapped(make, rule, nonfinite=policy)
    scaler = scaler_type("cpu", init_scale=SCALE)
    scaled_step(scaler, optimizer, params, grads_at(2))
    before, state = copies(params), state_of(optimizer, params)
    stats = optimizer.stats.state_dict()
    scaled_step(scaler, optimizer, params, spoiled(grads_at(1), value))
    assert_bits(params, before)
    assert_bits(state_of(optimizer, params), state)
    assert_bits(optimizer.stats.state_dict().values(), stats.values())
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_error_is_raised_for_what_came_after_the_scaler_looked(scaler_type, make):
    """It found no overflow, so that NaN is an error of the program."""
    params, optimizer = wrapped(make, 1.0, nonfinite="error")
    scaler = scaler_type("cpu", init_scale=SCALE)
    backward(scaler, params, grads_at(0))
    scaler.unscale_(optimizer)
    grad_of(params[1]).fill_(torch.nan)
    before = copies(params)
    with pytest.raises(RuntimeError, match=r"param_groups\[0\]\['params'\]\[1\]"):
        scaler.step(optimizer)
    assert_bits(params, before)


@pytest.mark.parametrize("norm_type", [0.0, -torch.inf, torch.inf, 1.0, 2.0], ids="p={}".format)
@pytest.mark.parametrize("scaler_type", SCALERS)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_scaler_sees_an_overflow_under_every_norm_type(scaler_type, norm_type, value):
    """The norms of order 0 and -inf do not show an inf by themselves."""
    params = new_params()
    optimizer = ClippedOptimizer(SGD(params, lr=1.0), ClipByGlobalNorm(1.0, norm_type))
    scaler = scaler_type("cpu", init_scale=SCALE)
    before = copies(params)
    scaled_step(scaler, optimizer, params, spoiled(grads_at(1), value))
    assert_bits(params, before)
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("scaler_type", SCALERS)
@pytest.mark.parametrize("make", INNERS)
def test_scaler_run_is_right_after_overflows_from_the_start(scaler_type, make):
    """torch's fused SGD takes its momentum for filled after a first step that did not happen."""
    params, twins = new_params(), new_params()
    optimizer, bare = ClippedOptimizer(make(params), 1.0), make(twins)
    scaler = scaler_type("cpu", init_scale=SCALE)
    for _ in range(2):
        scaled_step(scaler, optimizer, params, spoiled(grads_at(0)))
    assert_bits(params, copies(twins))
    for step in range(4):
        scaled_step(scaler, optimizer, params, grads_at(step))
        hand_step(bare, twins, grads_at(step), ClipByGlobalNorm(1.0))
        assert_same_run(params, twins)


@pytest.mark.parametrize("at", [0, 1, 2, 3], ids=["common", "need_clip", "clip=None", "own rule"])
@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_sees_an_overflow_in_any_group(scaler_type, make, at):
    params = new_params(((3,), (4,), (5,), (6,)))
    setattr(params[1], "need_clip", False)  # noqa: B010
    groups: list[dict[str, Any]] = [
        {"params": params[:2]},
        {"params": [params[2]], "clip": None},
        {"params": [params[3]], "clip": 2.0},
    ]
    optimizer = ClippedOptimizer(make(groups), 1.0)
    scaler = scaler_type("cpu", init_scale=SCALE)
    grads = [normal(param.numel(), seed=i) for i, param in enumerate(params)]
    grads[at][-1] = torch.inf
    before = copies(params)
    scaled_step(scaler, optimizer, params, grads)
    assert_bits(params, before)
    assert scaler.get_scale() == SCALE / 2
    assert optimizer.stats.group_norms.get(2, torch.tensor(torch.nan)).isnan()


@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_judges_two_optimizers_apart(scaler_type, make):
    """One overflows and stays; the other steps, and is not skipped; the scale backs off once."""
    first, second, twins = new_params(), new_params(), new_params()
    one, other = ClippedOptimizer(make(first), 1.0), ClippedOptimizer(make(second), 1.0)
    scaler = scaler_type("cpu", init_scale=SCALE)
    before = copies(first)
    backward(scaler, first, spoiled(grads_at(1)))
    backward(scaler, second, grads_at(1))
    scaler.step(one)
    scaler.step(other)
    scaler.update()
    hand_step(make(twins), twins, grads_at(1), ClipByGlobalNorm(1.0))
    assert_bits(first, before)
    assert_same_run(second, twins)
    assert (int(one.stats.steps), int(other.stats.steps)) == (0, 1)
    assert scaler.get_scale() == SCALE / 2
