"""Overflows under a GradScaler, which skips the step and lowers the scale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

import tritonclip
from helpers.cases import assert_bits, copies, grad_of
from helpers.loss_scale import (
    SCALE,
    UNSCALED_BEFORE,
    assert_same_run,
    backward,
    grads_at,
    hand_step,
    scaled_step,
    spoiled,
)
from helpers.serving import decided_on_device
from helpers.training import (
    INNERS,
    POLICIES,
    new_params,
    unchanged,
    wrapped,
)
from tritonclip import ClipByGlobalNorm, ClippedOptimizer


def test_error_is_raised_for_what_came_after_the_scaler_looked(scaler, make):
    """It found no overflow, so that NaN is an error of the program."""
    params, optimizer = wrapped(make, 1.0, nonfinite="error")
    backward(scaler, params, grads_at(0))
    scaler.unscale_(optimizer)
    grad_of(params[1]).fill_(torch.nan)
    error = pytest.raises(RuntimeError, match=r"param_groups\[0\]\['params'\]\[1\]")
    with error, unchanged(params, optimizer):
        scaler.step(optimizer)


@pytest.mark.parametrize("make", INNERS)
def test_scaler_run_is_right_after_overflows_from_the_start(scaler, make):
    """torch's fused SGD takes its momentum for filled after a first step that did not happen."""
    params, twins = new_params(), new_params()
    optimizer, bare = ClippedOptimizer(make(params), 1.0), make(twins)
    for _ in range(2):
        scaled_step(scaler, optimizer, params, spoiled(grads_at(0)))
    assert_bits(params, copies(twins))
    for step in range(4):
        scaled_step(scaler, optimizer, params, grads_at(step))
        hand_step(bare, twins, grads_at(step), ClipByGlobalNorm(1.0))
        assert_same_run(params, twins)


def test_scaler_judges_two_optimizers_apart(scaler, make):
    """One overflows and stays; the other steps, and is not skipped; the scale backs off once."""
    first, second, twins = new_params(), new_params(), new_params()
    one, other = ClippedOptimizer(make(first), 1.0), ClippedOptimizer(make(second), 1.0)
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


def steps_called(
    scaler: torch.amp.GradScaler, optimizer: Optimizer, params: list[Tensor], unscale: bool
) -> list[str]:
    """The step hooks that run in four steps, the third of which overflows."""
    log: list[str] = []
    number = 0
    optimizer.register_step_pre_hook(lambda *_: log.append(f"before {number}"))
    optimizer.register_step_post_hook(lambda *_: log.append(f"after {number}"))
    for number in range(4):
        grads = spoiled(grads_at(0)) if number == 2 else grads_at(number)
        scaled_step(scaler, optimizer, params, grads, unscale=unscale)
    return log


@pytest.mark.covering(2)
@UNSCALED_BEFORE
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", INNERS)
def test_scaler_overflow_calls_step_as_torch_does(scaler, make, policy, unscale):
    """Not at all, so that an average of weights does not count it, unless the device decides."""
    params, twins = new_params(), new_params()
    optimizer, bare = ClippedOptimizer(make(params), 1.0, nonfinite=policy), make(twins)
    ours = steps_called(scaler, optimizer, params, unscale)
    torchs = steps_called(torch.amp.GradScaler("cpu", init_scale=SCALE), bare, twins, unscale)
    assert ours == torchs
    assert ("after 2" in ours) == bool(bare.param_groups[0].get("fused"))
    assert int(optimizer.stats.steps) == 3


@pytest.mark.parametrize("options", [{"nonfinite": "skip"}, {"skip_above": 100.0}], ids=str)
def test_scaler_calls_no_step_that_the_wrapper_skips(options):
    params, optimizer = wrapped(SGD, 1.0, **options)
    scaler = tritonclip.GradScaler("cpu", init_scale=SCALE)
    log: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: log.append("before"))
    optimizer.register_step_post_hook(lambda *_: log.append("after"))
    backward(scaler, params, grads_at(0))
    scaler.unscale_(optimizer)
    # The scaler has looked.
    grad_of(params[1]).fill_(torch.nan if "nonfinite" in options else 1e4)
    with unchanged(params, optimizer):
        scaler.step(optimizer)
    scaler.update()
    assert (log, int(optimizer.stats.skipped_steps)) == ([], 1)
    scaled_step(scaler, optimizer, params, grads_at(0))
    assert (log, int(optimizer.stats.steps)) == (["before", "after"], 1)


@pytest.mark.parametrize(
    "options", [*({"nonfinite": policy} for policy in POLICIES), {"skip_above": 1e9}], ids=str
)
def test_scaler_and_wrapper_read_one_flag_of_the_device(monkeypatch, options):
    """An error is raised after a second one. A read is a wait on a GPU."""
    params, optimizer = wrapped(SGD, 1.0, **options)
    scaler = tritonclip.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, params, grads_at(0))
    seen = []

    def read(flag: Tensor) -> bool:
        seen.append(flag)
        return bool(flag.item())

    monkeypatch.setattr(Tensor, "__bool__", read)
    with decided_on_device():
        scaler.step(optimizer)
    monkeypatch.undo()
    assert len(seen) == (2 if "error" in options.get("nonfinite", "") else 1)
