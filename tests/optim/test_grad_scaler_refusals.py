"""Calls of a GradScaler that are refused for a wrapper, closures, and steps after an error."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD

import tritonclip
from helpers.cases import assert_bits, copies, grad_of
from helpers.loss_scale import (
    assert_same_run,
    backward,
    grads_at,
    hand_step,
    scaled_step,
    weight_under,
)
from helpers.training import SCALERS, give_grads, new_params, unchanged, wrapped
from tritonclip import ClipByGlobalNorm, ClippedOptimizer, FlatGradients
from tritonclip.optim.clip_groups import ClipGroup


def test_scaler_refuses_a_second_step_before_update(scaler, make):
    params, optimizer = wrapped(make)
    backward(scaler, params, grads_at(1))
    scaler.step(optimizer)
    error = pytest.raises(RuntimeError, match=r"step\(\) has already been called since")
    with error, unchanged(params, optimizer):
        scaler.step(optimizer)


@pytest.mark.parametrize("method", ["unscale_", "step"])
def test_scaler_refuses_an_optimizer_that_is_wrapped(method):
    params = new_params()
    inner = SGD(params, lr=1.0)
    wrapper = ClippedOptimizer(inner, 1.0)
    scaler = tritonclip.GradScaler("cpu")
    backward(scaler, params, grads_at(1))
    before = copies([*params, *map(grad_of, params)])
    with pytest.raises(ValueError, match=r"this SGD is wrapped .*; pass the wrapper"):
        getattr(scaler, method)(inner)
    assert_bits([*params, *map(grad_of, params)], before)
    getattr(scaler, method)(wrapper)


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


@pytest.mark.parametrize("fused", [False, True])
def test_scaler_does_not_unscale_again_after_a_step_that_raised(scaler_type, fused):
    weight, optimizer, scaler = weight_under(scaler_type, fused=fused)
    interrupt_a_step(scaler, optimizer)
    scaler.step(optimizer)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


def test_gradients_that_torchs_scaler_divides_again_are_refused():
    """It does not ask before; the wrapper knows that it divided them itself."""
    weight, optimizer, scaler = weight_under(torch.amp.GradScaler, fused=True)
    interrupt_a_step(scaler, optimizer)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_ .* divided them again.* zero_grad and"):
        scaler.step(optimizer)
    assert not weight.any()
    optimizer.zero_grad()
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


@pytest.mark.parametrize("fused", [False, True])
def test_unscale_after_a_step_that_raised_is_refused(fused):
    """The step has divided and clipped, and another one goes on."""
    weight, optimizer, scaler = weight_under(tritonclip.GradScaler, fused=fused)
    interrupt_a_step(scaler, optimizer)
    # A scaler that has unscaled refuses by itself until then.
    scaler.update()
    before = grad_of(weight).clone()
    with pytest.raises(RuntimeError, match=r"divided .* another step"):
        scaler.unscale_(optimizer)
    assert torch.equal(grad_of(weight), before)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


@pytest.mark.parametrize("flat", [False, True], ids=["list", "flat"])
def test_unscale_of_new_gradients_after_a_step_that_raised_is_right(scaler_type, flat):
    weight, optimizer, scaler = weight_under(scaler_type, fused=True)
    optimizer.flat = FlatGradients([weight]) if flat else None

    interrupt_a_step(scaler, optimizer)
    weight.grad = None if not flat else grad_of(weight).zero_()
    scaler.scale((weight * torch.tensor([30.0, 40.0])).sum()).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(grad_of(weight), torch.tensor([30.0, 40.0]))
    scaler.step(optimizer)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


def interrupted_under_a_scale(optimizer, scale, *, clipped):
    """Begins a step under a loss scale that ends before or after it clips."""
    where = optimizer.optimizer if clipped else optimizer
    interrupt(partial(optimizer.step, grad_scale=scale), where)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_step_under_a_loss_scale_can_be_repeated(fused, clipped):
    weight, optimizer, _ = weight_under(torch.amp.GradScaler, fused=fused)
    interrupted_under_a_scale(optimizer, 1024.0, clipped=clipped)
    optimizer.step(grad_scale=torch.tensor(1024.0))
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))
    assert optimizer.stats.last_norm == 5.0


def test_step_under_another_loss_scale_is_refused_for_gradients_that_were_divided():
    weight, optimizer, _ = weight_under(torch.amp.GradScaler)
    interrupted_under_a_scale(optimizer, 1024.0, clipped=True)
    left = grad_of(weight).clone()
    with pytest.raises(RuntimeError, match=r"scale 1024, got grad_scale=512; .* call zero_grad"):
        optimizer.step(grad_scale=512.0)
    assert torch.equal(grad_of(weight), left)
    assert not weight.any()
    optimizer.step(grad_scale=1024.0)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


def test_step_under_another_loss_scale_divides_gradients_that_were_not():
    weight, optimizer, _ = weight_under(torch.amp.GradScaler)
    interrupted_under_a_scale(optimizer, 1024.0, clipped=False)
    optimizer.step(grad_scale=8192.0)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.375, -0.5]))


def test_refused_loss_scale_leaves_a_step_that_was_interrupted_within_to_be_refused(monkeypatch):
    """The first of two parameter groups was clipped, and must not be clipped again."""
    params = new_params()
    groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "clip": 0.5}]
    optimizer = ClippedOptimizer(SGD(groups, lr=0.1), 0.5)
    give_grads(params)
    write = ClipGroup.clip_

    def write_and_fail(*args, **kwargs):
        write(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ClipGroup, "clip_", write_and_fail)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    with pytest.raises(TypeError, match="grad_scale must be a number"):
        optimizer.step(grad_scale="8")
    with pytest.raises(RuntimeError, match="call zero_grad and backward"):
        optimizer.step()
