"""Mistakes of a program, which are warned of once or refused.

Calls of clip_ and steps of a wrapper that never find a gradient, steps of the wrapped optimizer
itself, and numbers of rules as attributes of an optimizer.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch

import tritonclip
from helpers.cases import normal, parameter, parameters
from helpers.optimizers import COPIED
from tritonclip import ClipByValue, ClippedOptimizer, ClippingWarning
from tritonclip.engine import misuse

pytestmark = pytest.mark.usefixtures("unnoticed")

CALLS: dict[str, Any] = {
    "clip_": lambda p: tritonclip.clip_(p, 1.0),
    "by-value": lambda p: tritonclip.clip_(p, ClipByValue(0.5)),
    "clip_grad_norm_": lambda p: tritonclip.clip_grad_norm_(p, 1.0),
    "clip_grad_value_": lambda p: tritonclip.clip_grad_value_(p, 0.5),
    "clip_grads_with_norm_": lambda p: tritonclip.clip_grads_with_norm_(p, 0.5, torch.tensor(2.0)),
}
NO_GRADIENT = "3 calls in a row found no gradient in any of these 2 parameters"
NO_STEP = "3 steps in a row found no gradient in any of the 2 parameters"


def without_grads(n=2):
    return [torch.nn.Parameter(normal(4, seed=i)) for i in range(n)]


def give(params):
    for one in params:
        one.grad = normal(4)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_third_call_in_a_row_without_a_gradient_warns_once(call):
    params = without_grads()
    call(params)
    call(params)
    with pytest.warns(ClippingWarning, match=NO_GRADIENT) as caught:
        call(params)
    assert [warning.filename for warning in caught] == [__file__]
    for _ in range(4):
        call(params)
        call(without_grads())


def test_call_before_backward_warns():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def turn():
        optimizer.zero_grad()
        tritonclip.clip_(model.parameters(), 1.0)
        model(normal((2, 4))).sum().backward()
        optimizer.step()

    turn()
    turn()
    with pytest.warns(ClippingWarning, match=r"expected a call between backward\(\) and step\(\)"):
        turn()


def test_lists_are_counted_one_by_one():
    lists = [without_grads() for _ in range(3)]
    for _ in range(2):
        for params in lists:
            tritonclip.clip_(params, 1.0)
    with pytest.warns(ClippingWarning, match=NO_GRADIENT):
        tritonclip.clip_(lists[1], 1.0)


def test_lists_that_die_are_no_list_that_comes_back():
    """Parameters of a later model often get the ids of those that died."""
    for _ in range(9):
        tritonclip.clip_(without_grads(), 1.0)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_that_find_a_gradient_between_do_not_warn(call):
    """As those of an expert that gets no example in some batches."""
    params, others = without_grads(), without_grads()
    give(others)
    for step in range(9):
        for one in params:
            one.grad = None
        if step % 3 == 2:
            give(params[1:])
        call(params)
        for _ in range(10):
            tritonclip.clip_(others, 1.0)


@pytest.mark.parametrize("n", [0, 2], ids=["no-parameters", "need_clip=False"])
def test_lists_that_have_nothing_to_clip_do_not_warn(n):
    params = without_grads(n)
    give(params)
    for one in params:
        one.need_clip = False
    for _ in range(5):
        tritonclip.clip_(params, 1.0)


def test_calls_are_looked_at_no_more_once_a_gradient_was_found():
    params, others = without_grads(), without_grads()
    tritonclip.clip_(params, 1.0)
    assert misuse.calls
    give(params)
    tritonclip.clip_(params, 1.0)
    assert not misuse.calls
    # Nor where the list does not come back, which is then forgotten.
    tritonclip.clip_(others, 1.0)
    for _ in range(100):
        tritonclip.clip_(params, 1.0)
    assert not misuse.calls
    for _ in range(2):
        tritonclip.clip_(others, 1.0)


def test_third_step_in_a_row_without_a_gradient_warns_once():
    optimizer = ClippedOptimizer(torch.optim.SGD(without_grads(), lr=0.1), 1.0)
    optimizer.step()
    optimizer.step()
    with pytest.warns(ClippingWarning, match=NO_STEP) as caught:
        optimizer.step()
    assert [warning.filename for warning in caught] == [__file__]
    for _ in range(4):
        optimizer.step()


def test_steps_that_find_a_gradient_between_do_not_warn():
    params = without_grads()
    optimizer = ClippedOptimizer(torch.optim.SGD(params, lr=0.1), 1.0)
    for step in range(12):
        optimizer.zero_grad()
        if step % 3 == 2:
            give(params[1:])
        optimizer.step()


def test_steps_without_a_gradient_to_clip_do_not_warn():
    params = without_grads()
    give(params)
    group = {"params": params, "clip": None}
    optimizer = ClippedOptimizer(torch.optim.SGD([group], lr=0.1), 1.0)
    for _ in range(4):
        optimizer.step()


def test_warnings_are_filtered_by_class():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClippingWarning)
        params = without_grads()
        for _ in range(3):
            tritonclip.clip_(params, 1.0)
        inner = torch.optim.SGD(parameters([normal(4)]), lr=0.1)
        wrapper = ClippedOptimizer(inner, 1.0)
        inner.step()
        assert wrapper.optimizer is inner
        tritonclip.clip_(parameter(normal(4)).data, 1.0)


INNER = r"SGD\.step\(\) was called on the optimizer inside"


def wrapped(**options) -> Any:
    params = parameters([normal(4, seed=i) for i in range(3)])
    return params, ClippedOptimizer(torch.optim.SGD(params, lr=0.1), 1.0, **options)


def turn(parameters, optimizer):
    give(parameters)
    optimizer.step()
    optimizer.zero_grad()


def test_step_of_the_wrapped_optimizer_is_warned_of_once():
    _, optimizer = wrapped()
    with pytest.warns(UserWarning, match=INNER) as caught:
        optimizer.optimizer.step()
    optimizer.optimizer.step()
    assert [warning.filename for warning in caught] == [__file__]
    assert optimizer.stats.summary()["steps"] == 0


def test_scheduler_of_the_wrapped_optimizer_does_not_warn():
    """It replaces `step` by a function that counts."""
    params = without_grads()
    inner = torch.optim.SGD(params, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
    optimizer = ClippedOptimizer(inner, 1.0)
    for _ in range(2):
        turn(params, optimizer)
        scheduler.step()


def test_wrapped_optimizer_is_free_without_its_wrapper():
    params, optimizer = wrapped()
    inner = optimizer.optimizer
    del optimizer
    gc.collect()
    inner.step()
    optimizer = ClippedOptimizer(inner, 1.0)
    turn(params, optimizer)
    with pytest.warns(UserWarning, match=INNER):
        inner.step()


def test_failed_steps_leave_the_guard():
    params, optimizer = wrapped(nonfinite="error")
    params[0].grad.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer.step()
    with pytest.warns(UserWarning, match=INNER):
        optimizer.optimizer.step()


@COPIED
def test_copies_are_guarded_too(copied):
    _, optimizer = wrapped()
    twin = copied(optimizer)
    twin.step()
    with pytest.warns(UserWarning, match=INNER):
        twin.optimizer.step()


def test_distributed_checkpoint_fills_the_state_without_a_warning():
    params, model = without_grads(1), torch.nn.Module()
    model.weight = params[0]
    optimizer = ClippedOptimizer(torch.optim.Adam(params), 1.0)
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        state: Any = get_optimizer_state_dict(model, optimizer)
    assert "exp_avg" in state["state"]["weight"]


@pytest.mark.parametrize("field", ["max_norm", "norm_type", "max_rms", "quantile"])
def test_optimizer_refuses_a_number_of_a_rule(field):
    _, optimizer = wrapped()
    before = dict(vars(optimizer))
    expected = rf"{field} belongs to a rule, .*such as optimizer\.\w+ = .*got {field} = 2\.0"
    with pytest.raises(AttributeError, match=expected):
        setattr(optimizer, field, 2.0)
    assert vars(optimizer) == before


def test_optimizer_has_no_number_of_a_rule():
    with pytest.raises(AttributeError, match=r"expected optimizer\.clip, ClipByGlobalNorm\("):
        _ = wrapped()[1].max_norm


def test_optimizer_takes_other_attributes():
    """Schedulers and trainers keep theirs on an optimizer."""
    _, optimizer = wrapped()
    optimizer.of_a_trainer = 3
    # Puts a function in the place of `step`.
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    assert optimizer.of_a_trainer == 3
    assert int(optimizer.stats.steps) == 1


def test_a_subclass_keeps_attributes_of_its_own():
    class Warming(tritonclip.ClippedOptimizer):
        def __init__(self, *args):
            super().__init__(*args)
            self.warmup, self.eps, self.window = 5, 1e-3, 10

    optimizer = Warming(torch.optim.SGD(without_grads(1), lr=0.1), 1.0)
    assert (optimizer.warmup, optimizer.eps, optimizer.window) == (5, 1e-3, 10)


def test_max_consecutive_skips_may_be_replaced():
    params, optimizer = wrapped()
    optimizer.nonfinite = "skip"
    optimizer.max_consecutive_skips = 2
    assert optimizer.max_consecutive_skips == 2
    params[0].grad.fill_(torch.nan)
    optimizer.step()
    with pytest.raises(RuntimeError, match="2 steps in a row were skipped"):
        optimizer.step()
    with pytest.raises(ValueError, match="max_consecutive_skips must be 1 or more"):
        optimizer.max_consecutive_skips = 0
    optimizer.nonfinite = "propagate"
    optimizer.max_consecutive_skips = None
    with pytest.raises(ValueError, match="no step is skipped: expected nonfinite='skip'"):
        optimizer.max_consecutive_skips = 2
    assert optimizer.max_consecutive_skips is None
