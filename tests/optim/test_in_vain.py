"""Calls of clip_, and steps of a wrapper, that never find a gradient, are warned of once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import tritonclip
from helpers.cases import normal, parameter, parameters
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


def left_out():
    params = without_grads()
    give(params)
    for one in params:
        one.need_clip = False
    return params


@pytest.mark.parametrize("params", [[], left_out()], ids=["no-parameters", "need_clip=False"])
def test_lists_that_have_nothing_to_clip_do_not_warn(params):
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
    optimizer = ClippedOptimizer(torch.optim.SGD([{"params": params, "clip": None}], lr=0.1), 1.0)
    for _ in range(4):
        give(params)
        optimizer.step()


def test_steps_of_flat_gradients_do_not_warn():
    params = without_grads()
    flat = tritonclip.FlatGradients(params)
    optimizer = ClippedOptimizer(torch.optim.SGD(params, lr=0.1), 1.0, flat=flat)
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
