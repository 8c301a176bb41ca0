"""Steps of the wrapped optimizer itself are warned of."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from typing import Any

import pytest
import torch

from helpers.cases import normal, parameter
from tritonclip import ClippedOptimizer

INNER = r"SGD\.step\(\) was called on the optimizer inside"


def made(n=3, **options):
    parameters = [parameter(normal(4, seed=i)) for i in range(n)]
    return parameters, ClippedOptimizer(torch.optim.SGD(parameters, lr=0.1), 1.0, **options)


def give(parameters):
    for i, one in enumerate(parameters):
        one.grad = normal(4, seed=i)


def step(parameters, optimizer):
    """One turn of a training loop."""
    give(parameters)
    optimizer.step()
    optimizer.zero_grad()


def test_step_of_the_wrapped_optimizer_is_warned_of_once():
    _, optimizer = made()

    with pytest.warns(UserWarning, match=INNER) as caught:
        optimizer.optimizer.step()
    optimizer.optimizer.step()
    assert [warning.filename for warning in caught] == [__file__]

    assert optimizer.stats.summary()["steps"] == 0


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
