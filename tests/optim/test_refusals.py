"""Optimizers, rules and policies that ClippedOptimizer refuses."""

from __future__ import annotations

import gc

import pytest
import torch
from optimizers import one_weight
from torch.optim import SGD, Optimizer

from tritonclip import ClipByGlobalNorm, ClippedOptimizer


@pytest.mark.parametrize("optimizer", [None, 1.0, torch.nn.Linear(1, 1), [1]], ids=repr)
def test_constructor_refuses_what_is_no_optimizer(optimizer):
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, got \w+"):
        ClippedOptimizer(optimizer, 1.0)


def test_scheduler_is_refused_with_a_remedy():
    scheduler = torch.optim.lr_scheduler.ConstantLR(SGD([torch.nn.Parameter(torch.ones(2))]))
    with pytest.raises(TypeError, match="got ConstantLR; wrap its optimizer, before a scheduler"):
        ClippedOptimizer(scheduler, 1.0)  # type: ignore[arg-type]


def test_constructor_refuses_a_class():
    with pytest.raises(TypeError, match=r"got the class; write SGD\(parameters, \.\.\.\)"):
        ClippedOptimizer(SGD, 1.0)  # type: ignore[arg-type]


class _Around(Optimizer):
    """As wrappers write it that do not call Optimizer.__init__."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


def test_constructor_refuses_an_optimizer_without_its_own_init():
    inner = _Around(SGD([one_weight()[0]]))
    message = "that ran Optimizer.__init__, got _Around.*; wrap the optimizer inside it"
    with pytest.raises(TypeError, match=message):
        ClippedOptimizer(inner, 1.0)


def test_constructor_refuses_a_wrapper():
    _, wrapper = one_weight()
    with pytest.raises(ValueError, match="would clip twice; to change its rule, set"):
        ClippedOptimizer(wrapper, 1.0)


def test_constructor_refuses_a_second_wrapper():
    weight, wrapper = one_weight()
    with pytest.raises(ValueError, match=r"SGD is wrapped already.*use the first wrapper, or make"):
        ClippedOptimizer(wrapper.optimizer, 1.0)
    wrapper.step()
    assert weight.tolist() == [-1.5, -2.0]


def test_constructor_takes_an_optimizer_whose_wrapper_is_gone():
    weight, wrapper = one_weight()
    inner = wrapper.optimizer
    del wrapper
    gc.collect()
    ClippedOptimizer(inner, ClipByGlobalNorm(1.25, eps=0.0)).step()
    assert weight.tolist() == [-0.75, -1.0]


@pytest.mark.parametrize(
    ("clip", "error", "message"),
    [
        ("1", TypeError, "clip must be"),
        (None, TypeError, "clip must be"),
        (True, TypeError, "clip must be"),
        (-1.0, ValueError, "must be 0 or more, got -1.0"),
        (torch.nan, ValueError, "must be 0 or more, got nan"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("where", ["constructor", "attribute"])
def test_unknown_rule_is_refused(clip, error, message, where):
    weight, wrapper = one_weight()
    if where == "constructor":
        inner = SGD([weight])
        with pytest.raises(error, match=message):
            ClippedOptimizer(inner, clip)
        # What was refused does not count as a wrapper.
        ClippedOptimizer(inner, 1.0)
    else:
        with pytest.raises(error, match=message):
            wrapper.clip = clip
        assert wrapper.clip == ClipByGlobalNorm(2.5, eps=0.0)


def test_no_rule_at_all_is_refused_with_what_to_write():
    with pytest.raises(TypeError, match=r"got None; .* of their own, write float\('inf'\)"):
        ClippedOptimizer(SGD([one_weight()[0]]), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["ignore", None, True], ids=repr)
@pytest.mark.parametrize("where", ["constructor", "attribute"])
def test_unknown_policy_is_refused(policy, where):
    weight, wrapper = one_weight()
    message = "nonfinite must be 'propagate', 'error', 'zero' or 'skip', got "
    if where == "constructor":
        inner = SGD([weight])
        with pytest.raises(ValueError, match=message):
            ClippedOptimizer(inner, 1.0, nonfinite=policy)
        ClippedOptimizer(inner, 1.0)
    else:
        with pytest.raises(ValueError, match=message):
            wrapper.nonfinite = policy
        assert wrapper.nonfinite == "propagate"
