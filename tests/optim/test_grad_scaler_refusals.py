"""Calls of a GradScaler that are refused for a wrapper, and closures."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD

import tritonclip
from helpers.cases import assert_bits, copies, grad_of
from helpers.loss_scale import backward, grads_at, weight_under
from helpers.training import PLAIN_AND_FUSED, SCALERS, new_params, wrapped
from tritonclip import ClippedOptimizer


@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_refuses_a_second_step_before_update(scaler_type, make):
    params, optimizer = wrapped(make)
    scaler = scaler_type("cpu")
    backward(scaler, params, grads_at(1))
    scaler.step(optimizer)
    before = copies(params)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since"):
        scaler.step(optimizer)
    assert_bits(params, before)


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


@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_refuses_to_unscale_twice(scaler_type, make):
    params, optimizer = wrapped(make)
    scaler = scaler_type("cpu")
    backward(scaler, params, grads_at(1))
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_without_gradients_asserts_as_torch(scaler_type, make):
    """In `step` or, for an optimizer that takes the scale itself, in `update`."""
    params = new_params()
    scaler = scaler_type("cpu")
    scaler.scale(torch.ones(()))
    optimizer = ClippedOptimizer(make(params), 1.0)

    def step_and_update() -> None:
        scaler.step(optimizer)
        scaler.update()

    with pytest.raises(AssertionError, match=r"No inf checks were recorded"):
        step_and_update()


@pytest.mark.parametrize("scaler_type", SCALERS)
def test_scaler_refuses_a_closure_as_torch(scaler_type):
    params = new_params()
    optimizer = ClippedOptimizer(SGD(params), 1.0)
    scaler = scaler_type("cpu")
    backward(scaler, params, grads_at(1))
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


@pytest.mark.parametrize("scaler_type", SCALERS)
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
