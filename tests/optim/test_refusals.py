"""Optimizers, rules and policies that ClippedOptimizer refuses."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer

from helpers.optimizers import one_weight
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


class _Around:
    """As wrappers write it that do not call Optimizer.__init__."""

    def __init__(self, optimizer, **options):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        vars(self).update(options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class _Lookahead(_Around, Optimizer):
    """An Optimizer by inheritance."""


AROUND = pytest.mark.parametrize("around", [_Around, _Lookahead])


@AROUND
def test_wrapper_around_an_optimizer_is_refused_with_what_to_wrap(around):
    outer = around(SGD([one_weight()[0]]))
    message = r"got (\w+).*; wrap the optimizer inside it: \1\(ClippedOptimizer\(optimizer, 1"
    with pytest.raises(TypeError, match=message):
        ClippedOptimizer(outer, 1.0)
    # What was refused does not count as a wrapper, and the remedy serves.
    weight, inner = one_weight()
    around(inner).step()
    assert weight.tolist() == [-1.5, -2.0]


@AROUND
def test_differentially_private_optimizer_is_refused_with_its_own_limit(around):
    """Opacus' DPOptimizer adds noise in its step: inside it, the noise would be clipped."""
    outer = around(SGD([one_weight()[0]]), noise_multiplier=1.0, max_grad_norm=1.0)
    with pytest.raises(TypeError, match=r"adds noise, .*: set its max_grad_norm, and use it bare"):
        ClippedOptimizer(outer, 1.0)


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


def _weights():
    return [torch.nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    "meet",
    [
        lambda _: ClippedOptimizer(SGD(_weights(), differentiable=True), 1.0),
        lambda wrapper: wrapper.add_param_group({"params": _weights(), "differentiable": True}),
        # By default.
        lambda wrapper: wrapper.add_param_group({"params": _weights()}),
        lambda wrapper: wrapper.load_state_dict(SGD(_weights(), differentiable=True).state_dict()),
    ],
    ids=["constructor", "group", "default", "checkpoint"],
)
def test_differentiable_updates_are_refused(meet):
    """A gradient through them would take the clip for a constant."""
    groups: list[dict[str, Any]] = [{"params": _weights(), "differentiable": False}]
    wrapper = ClippedOptimizer(SGD(groups, lr=0.5, differentiable=True), 1.0)
    message = r"param_groups\[\d\] has differentiable=True, .* clip of tritonclip\.functional"
    with pytest.raises(ValueError, match=message):
        meet(wrapper)
    assert [group["lr"] for group in wrapper.param_groups] == [0.5]


def test_no_rule_at_all_is_refused_with_what_to_write():
    with pytest.raises(TypeError, match=r"got None; .* of their own, write float\('inf'\)"):
        ClippedOptimizer(SGD([one_weight()[0]]), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["ignore", None, True], ids=repr)
@pytest.mark.parametrize("where", ["constructor", "attribute"])
def test_unknown_policy_is_refused(policy, where):
    weight, wrapper = one_weight()
    message = "nonfinite must be 'propagate', 'error', 'async_error', 'zero' or 'skip', got "
    if where == "constructor":
        inner = SGD([weight])
        with pytest.raises(ValueError, match=message):
            ClippedOptimizer(inner, 1.0, nonfinite=policy)
        ClippedOptimizer(inner, 1.0)
    else:
        with pytest.raises(ValueError, match=message):
            wrapper.nonfinite = policy
        assert wrapper.nonfinite == "propagate"
