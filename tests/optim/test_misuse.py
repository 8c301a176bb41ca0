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
from helpers.cases import normal, parameters
from helpers.optimizers import COPIED
from tritonclip import ClippedOptimizer


def without_grads(n=2):
    return [torch.nn.Parameter(normal(4, seed=i)) for i in range(n)]


def give(params):
    for one in params:
        one.grad = normal(4)


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
