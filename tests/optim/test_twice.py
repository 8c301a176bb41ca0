"""Gradients that are clipped twice, and steps of the wrapped optimizer itself, are warned of."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from typing import Any

import pytest
import torch
from cases import normal, parameter
from workers import python

import tritonclip
from tritonclip import ClipByNorm, ClipByValue, ClippedOptimizer
from tritonclip.engine import misuse

TWICE = "clip_, or a function with torch's name, was called for these gradients"
INNER = r"SGD\.step\(\) was called on the optimizer inside"


pytestmark = pytest.mark.usefixtures("unnoticed")


def made(n=3, **options):
    parameters = [parameter(normal(4, seed=i)) for i in range(n)]
    return parameters, ClippedOptimizer(torch.optim.SGD(parameters, lr=0.1), 1.0, **options)


def give(parameters):
    for i, one in enumerate(parameters):
        one.grad = normal(4, seed=i)


def step(parameters, optimizer, call=None):
    """One turn of a training loop."""
    give(parameters)
    if call is not None:
        call(parameters)
    optimizer.step()
    optimizer.zero_grad()


CALLS: dict[str, Any] = {
    "number": lambda p: tritonclip.clip_(p, 0.5),
    "by-norm": lambda p: tritonclip.clip_(p, ClipByNorm(0.5)),
    "by-value": lambda p: tritonclip.clip_(p, ClipByValue(0.5)),
    "within-the-limit": lambda p: tritonclip.clip_(p, 1e3),
    "part": lambda p: tritonclip.clip_(p[1:2], 0.5),
    "clip_grad_norm_": lambda p: tritonclip.clip_grad_norm_(p, 0.5),
    "clip_grad_value_": lambda p: tritonclip.clip_grad_value_(p, 0.5),
    "clip_grads_with_norm_": lambda p: tritonclip.clip_grads_with_norm_(p, 0.5, torch.tensor(2.0)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_step_warns_of_gradients_that_a_call_has_clipped(call):
    parameters, optimizer = made()
    step(parameters, optimizer, call)

    with pytest.warns(UserWarning, match=TWICE) as caught:
        step(parameters, optimizer, call)
    assert [warning.filename for warning in caught] == [__file__]
    assert caught[0].lineno in {line for _, _, line in step.__code__.co_lines()}


def test_step_warns_once():
    parameters, optimizer = made()
    others, second = made()
    step(parameters, optimizer, CALLS["number"])
    with pytest.warns(UserWarning, match=TWICE):
        step(parameters, optimizer, CALLS["number"])

    for _ in range(3):
        step(parameters, optimizer, CALLS["number"])
        step(others, second, CALLS["number"])


def test_step_warns_of_flat_gradients():
    parameters, _ = made()
    flat = tritonclip.FlatGradients(parameters)
    optimizer = ClippedOptimizer(torch.optim.SGD(parameters, lr=0.1), 1.0, flat=flat)
    optimizer.step()
    flat.zero_()
    tritonclip.clip_(flat, 0.5)

    with pytest.warns(UserWarning, match=TWICE):
        optimizer.step()


def test_step_warns_under_a_grad_scaler():
    parameters, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def turn():
        scaler.scale(sum((p * p).sum() for p in parameters)).backward()
        scaler.unscale_(optimizer)
        tritonclip.clip_(parameters, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for one in parameters:
        one.data.fill_(1.0)
        one.grad = None
    turn()
    with pytest.warns(UserWarning, match=TWICE):
        turn()


SCALED = "was called for gradients that still carry the loss scale .*unscale_"


@pytest.mark.parametrize("scaler_of", [torch.amp.GradScaler, tritonclip.GradScaler])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_step_warns_of_a_call_before_unscaling(scaler_of, fused):
    parameters = [parameter(torch.ones(4))]
    optimizer = ClippedOptimizer(torch.optim.SGD(parameters, lr=0.1, fused=fused), 1.0)
    scaler = scaler_of("cpu", init_scale=4.0)

    def turn():
        optimizer.zero_grad()
        scaler.scale((parameters[0] ** 2).sum()).backward()
        tritonclip.clip_(parameters, 0.5)
        scaler.step(optimizer)
        scaler.update()

    turn()
    with pytest.warns(tritonclip.ClippingWarning, match=SCALED) as caught:
        turn()
    assert [warning.filename for warning in caught] == [__file__]
    turn()


def test_unscaling_warns_of_a_call_before_it():
    parameters = [parameter(torch.ones(4))]
    optimizer = ClippedOptimizer(torch.optim.SGD(parameters, lr=0.1), 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((parameters[0] ** 2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.scale((parameters[0] ** 2).sum()).backward()
    tritonclip.clip_(parameters, 0.5)

    with pytest.warns(tritonclip.ClippingWarning, match=SCALED):
        scaler.unscale_(optimizer)


QUIET: dict[str, Any] = {
    "nothing": lambda p: None,
    "infinite-limit": lambda p: tritonclip.clip_(p, torch.inf),
    "total-norm": lambda p: tritonclip.get_total_norm([one.grad for one in p]),
    "other-parameters": lambda p: tritonclip.clip_([parameter(normal(4))], 0.5),
    "written-since": lambda p: (tritonclip.clip_(p, 0.5), [one.grad.add_(1) for one in p]),
    "replaced-since": lambda p: (tritonclip.clip_(p, 0.5), give(p)),
}


@pytest.mark.parametrize("call", QUIET.values(), ids=QUIET)
def test_step_does_not_warn_of_other_calls(call):
    parameters, optimizer = made()

    for _ in range(5):
        step(parameters, optimizer, call)


def test_gradients_clipped_on_arrival_may_be_clipped_again():
    """Two calls that say so: each gradient by value, then all by their norm."""
    parameters, optimizer = made()
    tritonclip.clip_on_backward_(parameters, ClipByValue(0.5))

    for _ in range(3):
        sum((p * 3).sum() for p in parameters).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_other_optimizers_between_do_not_hide_it():
    parameters, optimizer = made()
    others, second = made()
    step(parameters, optimizer)
    give(parameters)
    tritonclip.clip_(parameters, 0.5)
    give(others)
    second._watches = 0
    second.step()

    with pytest.warns(UserWarning, match=TWICE):
        optimizer.step()


def test_nothing_is_remembered_after_the_first_steps():
    parameters, optimizer = made()

    for _ in range(2):
        step(parameters, optimizer)
    give(parameters)
    for _ in range(misuse.CALLS):
        tritonclip.clip_(parameters[:0], 0.5)

    assert misuse.calls == 0
    step(parameters, optimizer)
    assert misuse.calls == 0


def test_nothing_is_kept_alive():
    parameters, optimizer = made()
    step(parameters, optimizer)
    give(parameters)
    tritonclip.clip_(parameters, 0.5)
    assert misuse.remembered

    refs = [weak for weak, _ in misuse.remembered.values()]
    optimizer.zero_grad()

    assert [weak() for weak in refs] == [None] * len(parameters)


def test_step_of_the_wrapped_optimizer_is_warned_of_once():
    _, optimizer = made()

    with pytest.warns(UserWarning, match=INNER) as caught:
        optimizer.optimizer.step()
    optimizer.optimizer.step()
    assert [warning.filename for warning in caught] == [__file__]

    assert optimizer.stats.summary()["steps"] == 0


def test_scaler_that_steps_the_wrapped_optimizer_is_warned_of():
    parameters, optimizer = made()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(sum((p * p).sum() for p in parameters)).backward()

    with pytest.warns(UserWarning, match=INNER):
        scaler.step(optimizer.optimizer)


def test_scheduler_of_the_wrapped_optimizer_does_not_warn():
    """It replaces `step` by a function that counts."""
    parameters = [parameter(normal(4))]
    inner = torch.optim.SGD(parameters, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
    optimizer = ClippedOptimizer(inner, 1.0)

    for _ in range(2):
        step(parameters, optimizer)
        scheduler.step()


def test_wrapped_optimizer_is_free_without_its_wrapper():
    parameters, optimizer = made()
    inner = optimizer.optimizer
    del optimizer
    gc.collect()

    inner.step()
    optimizer = ClippedOptimizer(inner, 1.0)

    step(parameters, optimizer)
    with pytest.warns(UserWarning, match=INNER):
        inner.step()


def test_failed_steps_leave_the_guard():
    parameters, optimizer = made(nonfinite="error")
    parameters[0].grad.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer.step()

    with pytest.warns(UserWarning, match=INNER):
        optimizer.optimizer.step()


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))],
    ids=["deepcopy", "pickle"],
)
def test_copies_are_guarded_too(copied):
    _, optimizer = made()

    twin = copied(optimizer)

    twin.step()
    with pytest.warns(UserWarning, match=INNER):
        twin.optimizer.step()


def test_distributed_checkpoint_fills_the_state_without_a_warning():
    parameters = [parameter(normal(4))]
    optimizer = ClippedOptimizer(torch.optim.Adam(parameters), 1.0)
    model = torch.nn.Module()
    model.weight = parameters[0]
    parameters[0].grad = None
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        state: Any = get_optimizer_state_dict(model, optimizer)

    assert "exp_avg" in state["state"]["weight"]


def test_a_new_process_is_warned():
    """Whatever other tests set, the module begins so."""
    ran = python(
        "-W",
        "error",
        "-c",
        "import torch, tritonclip\n"
        "weight = torch.ones(2, requires_grad=True)\n"
        "optimizer = tritonclip.ClippedOptimizer(torch.optim.SGD([weight], lr=0.1), 1.0)\n"
        "for _ in range(2):\n"
        "    weight.grad = torch.ones(2)\n"
        "    tritonclip.clip_(weight, 0.5)\n"
        "    optimizer.step()\n",
    )
    assert f"ClippingWarning: {TWICE}" in ran.stderr
