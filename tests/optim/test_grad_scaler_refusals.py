"""Calls of a GradScaler that are refused for a wrapper, closures, and steps after an error."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD

import tritonclip
from helpers.cases import assert_bits, grad_of
from helpers.loss_scale import (
    assert_same_run,
    backward,
    grads_at,
    hand_step,
    scaled_step,
    weight_under,
)
from helpers.training import SCALERS, new_params, unchanged, wrapped
from tritonclip import ClipByGlobalNorm, ClippedOptimizer


def test_scaler_refuses_a_second_step_before_update(scaler, make):
    params, optimizer = wrapped(make)
    backward(scaler, params, grads_at(1))
    scaler.step(optimizer)
    error = pytest.raises(RuntimeError, match=r"step\(\) has already been called since")
    with error, unchanged(params, optimizer):
        scaler.step(optimizer)


def test_scaler_refuses_to_unscale_twice(scaler, make):
    params, optimizer = wrapped(make)
    backward(scaler, params, grads_at(1))
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(optimizer)


def test_scaler_without_gradients_asserts_as_torch(scaler, make):
    """In `step` or, for an optimizer that takes the scale itself, in `update`."""
    _, optimizer = wrapped(make)
    with pytest.raises(AssertionError, match=r"No inf checks were recorded"):
        scaled_step(scaler, optimizer, [torch.ones((), requires_grad=True)], [torch.ones(())])


def test_scaler_refuses_a_closure_as_torch(scaler_type):
    _, optimizer, scaler = weight_under(scaler_type)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: 1.0)


@pytest.mark.parametrize("fused", [False, True])
def test_scaler_refuses_a_closure_by_position(fused):
    weight, optimizer, scaler = weight_under(tritonclip.GradScaler, fused=fused)
    with pytest.raises(RuntimeError, match=r"closure computes gradients after .*: call backward"):
        scaler.step(optimizer, lambda: torch.tensor(1.0))
    assert weight.tolist() == [0.0, 0.0]
    assert grad_of(weight).tolist() == [3072.0, 4096.0]


SCALED = torch.tensor([3072.0, 4096.0])


@pytest.mark.parametrize("unscaled", [False, True], ids=["direct", "unscale_"])
@pytest.mark.parametrize(
    ("scaler_type", "fused"),
    [(torch.amp.GradScaler, True), (tritonclip.GradScaler, True), (tritonclip.GradScaler, False)],
    ids=["torch-fused", "tritonclip-fused", "tritonclip-plain"],
)
def test_scaler_refuses_a_second_loss_scale(scaler_type, fused, unscaled):
    weight, optimizer, scaler = weight_under(scaler_type, fused=fused)
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"a loss scale; expected one of the two"):
        scaler.step(optimizer, grad_scale=8.0)
    scaler.step(optimizer)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaler_type", [*SCALERS, None])
def test_loss_scale_that_was_set_by_hand_is_refused(scaler_type, fused):
    """With the argument to write; it does not stay."""
    weight, optimizer, scaler = weight_under(scaler_type or torch.amp.GradScaler, fused=fused)
    step = optimizer.step if scaler_type is None else partial(scaler.step, optimizer)
    optimizer.grad_scale = 8.0
    with pytest.raises(RuntimeError, match=r"expected .* optimizer\.step\(grad_scale=scale\)"):
        step()
    assert_bits([weight, grad_of(weight)], [torch.zeros(2), SCALED])
    with pytest.raises(AttributeError, match="no loss scale is set"):
        _ = optimizer.grad_scale
    optimizer.step(grad_scale=1024.0)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


@pytest.mark.parametrize("how", ["position", "name"])
def test_scaler_that_is_disabled_hands_a_closure_on(scaler_type, how):
    weight, optimizer, _ = weight_under(scaler_type)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (weight * torch.tensor([30.0, 40.0])).sum() + 7
        loss.backward()
        return loss

    scaler = scaler_type("cpu", enabled=False)
    given = {"closure": closure} if how == "name" else {}
    loss = scaler.step(optimizer, *(() if given else (closure,)), **given)
    assert loss is not None
    assert float(torch.as_tensor(loss).detach()) == 7
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


@pytest.mark.parametrize("again", [True, False], ids=["with scaler", "without scaler"])
@pytest.mark.parametrize("mode", [{"foreach": False}, {"fused": True}], ids=["plain", "fused"])
def test_scaler_is_right_after_a_step_that_raised(scaler, mode, again):
    """What a scaler leaves at the optimizer for one step must not scale or skip the next one."""
    params, twins = new_params(), new_params()
    optimizer = ClippedOptimizer(SGD(params, lr=0.1, **mode), 1.0)
    backward(scaler, params, grads_at(1))
    interrupt(partial(scaler.step, optimizer), optimizer)
    scaler.update()
    following = scaler if again else torch.amp.GradScaler("cpu", enabled=False)
    scaled_step(following, optimizer, params, grads_at(2))
    hand_step(SGD(twins, lr=0.1), twins, grads_at(2), ClipByGlobalNorm(1.0))
    assert_same_run(params, twins)


def interrupt(step, optimizer):
    """Takes a step that ends in the pre-hooks of an optimizer, the wrapper or the wrapped one."""

    def fail(*_):
        handle.remove()
        raise KeyboardInterrupt

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        step()


def interrupt_a_step(scaler, optimizer):
    """Begins a step that ends before the parameters are updated."""
    interrupt(partial(scaler.step, optimizer), optimizer.optimizer)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_gradients_that_a_failed_step_divided_are_refused_until_zero_grad(scaler_type, fused):
    """Torch's scaler divides those of an optimizer that is not fused, and remembers it."""
    weight, optimizer, scaler = weight_under(scaler_type, fused=fused)
    interrupt_a_step(scaler, optimizer)
    if scaler_type is tritonclip.GradScaler or fused:
        for step in (partial(scaler.step, optimizer), optimizer.step):
            error = pytest.raises(RuntimeError, match=r"divided .* by the loss scale; .* zero_grad")
            with error, unchanged([weight], grads=True):
                step()
        optimizer.zero_grad()
        scaler.scale((weight * torch.tensor([30.0, 40.0])).sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


def test_step_under_a_loss_scale_after_one_that_raised():
    """Nothing is refused where the failed step had not divided yet, nor after it updated."""
    weight, optimizer, _ = weight_under(torch.amp.GradScaler)
    step = partial(optimizer.step, grad_scale=1024.0)
    interrupt(step, optimizer)
    step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))
    interrupt(step, optimizer.optimizer)
    with pytest.raises(RuntimeError, match="call zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


def test_step_after_one_that_raised_without_a_loss_scale_clips_again():
    weight, optimizer, _ = weight_under(torch.amp.GradScaler)
    weight.grad = torch.tensor([30.0, 40.0])
    interrupt(optimizer.step, optimizer.optimizer)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))
    assert int(optimizer.stats.steps) == 1
