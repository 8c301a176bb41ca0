"""Optimizers, rules, policies and parameter groups that ClippedOptimizer refuses, unwritten."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer

from helpers.cases import assert_bits, copies, normal, parameter, parameters
from helpers.optimizers import one_weight
from helpers.param_groups import ABSENT, grads_of, grouped, three_groups, values_of
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, ClippedOptimizer, use_backend


def _weights():
    return [torch.nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        (None, "NoneType"),
        (torch.nn.Linear(1, 1), "Linear"),
        (torch.optim.lr_scheduler.ConstantLR(SGD(_weights())), "ConstantLR"),
        (SGD, "type"),
    ],
    ids=["None", "module", "scheduler", "class"],
)
def test_constructor_refuses_what_is_no_optimizer(optimizer, kind):
    message = rf"must be a torch\.optim\.Optimizer .*, got {kind}; expected one such as"
    with pytest.raises(TypeError, match=message):
        ClippedOptimizer(optimizer, 1.0)


class _Around:
    """As wrappers write it that do not call Optimizer.__init__."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class _Lookahead(_Around, Optimizer):
    """An Optimizer by inheritance."""


@pytest.mark.parametrize("around", [_Around, _Lookahead])
def test_wrapper_around_an_optimizer_is_refused_with_what_to_wrap(around):
    outer = around(SGD([one_weight()[0]]))
    message = rf"got {around.__name__}; .*around another one, wrap that inside"
    with pytest.raises(TypeError, match=message):
        ClippedOptimizer(outer, 1.0)
    # The remedy serves.
    weight, inner = one_weight()
    around(inner).step()
    assert weight.tolist() == [-1.5, -2.0]


def test_constructor_refuses_a_wrapper():
    weight, wrapper = one_weight()
    with pytest.raises(ValueError, match="would clip twice; to change its rule, set"):
        ClippedOptimizer(wrapper, 1.0)
    wrapper.step()
    assert weight.tolist() == [-1.5, -2.0]


@pytest.mark.parametrize(
    ("clip", "error", "message"),
    [
        ("1", TypeError, "{name} must be a number"),
        (
            None,
            TypeError,
            r"{name} must be.*got None .*; float\('inf'\) measures and clips nothing",
        ),
        (True, TypeError, "{name} must be a number"),
        (-1.0, ValueError, "must be 0 or more, got -1.0"),
        (torch.nan, ValueError, "must be 0 or more, got nan"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("where", ["constructor", "attribute"])
def test_unknown_rule_is_refused(clip, error, message, where):
    weight, wrapper = one_weight()
    message = message.format(name="max_norm" if where == "constructor" else "clip")
    if where == "constructor":
        inner = SGD([weight])
        with pytest.raises(error, match=message):
            ClippedOptimizer(inner, clip)
        # What was refused is as it was.
        ClippedOptimizer(inner, 1.0)
    else:
        with pytest.raises(error, match=message):
            wrapper.clip = clip
        assert wrapper.clip == ClipByGlobalNorm(2.5, eps=0.0)


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


BAD_RULES = pytest.mark.parametrize(
    ("clip", "error"),
    [("1", TypeError), (True, TypeError), (ClipByNorm, TypeError), (-1.0, ValueError)],
    ids=["text", "bool", "class", "negative"],
)
NAMES_THE_GROUP = r"param_groups\[1\]\['clip'\]: .*got .*; None clips nothing"


@BAD_RULES
def test_constructor_refuses_the_rule_of_a_group(clip, error):
    group = [parameter(grad) for grad in three_groups()[0]]
    inner = SGD([{"params": group[:1]}, {"params": group[1:], "clip": clip}])
    with pytest.raises(error, match=NAMES_THE_GROUP):
        ClippedOptimizer(inner, 1.0)
    inner.param_groups[1]["clip"] = 1.0
    ClippedOptimizer(inner, 1.0)


@BAD_RULES
def test_add_param_group_refuses_the_rule_of_a_group(clip, error):
    optimizer = grouped(three_groups()[:1], [ABSENT])
    with pytest.raises(error, match=NAMES_THE_GROUP):
        optimizer.add_param_group({"params": _weights(), "clip": clip})
    assert len(optimizer.param_groups) == 1


def assert_rule_is_refused(optimizer, number, clip, error, message):
    """The step raises, and parameters, gradients, state and statistics are as before."""
    optimizer.step()
    grads, values = copies(grads_of(optimizer)), copies(values_of(optimizer))
    saved = deepcopy(optimizer.state_dict())
    optimizer.param_groups[number]["clip"] = clip
    with pytest.raises(error, match=message):
        optimizer.step()
    assert_bits(grads_of(optimizer), grads)
    assert_bits(values_of(optimizer), values)
    torch.testing.assert_close(optimizer.state_dict(), saved, rtol=0, atol=0)


@BAD_RULES
def test_step_refuses_a_rule_that_was_set_later(clip, error):
    optimizer = grouped(three_groups(), [ABSENT, 0.25, 0.5])
    assert_rule_is_refused(optimizer, 1, clip, error, NAMES_THE_GROUP)


def test_step_refuses_gradients_beside_a_group_without_any():
    grads = [[normal(3)], [torch.ones(2, dtype=torch.complex64)]]
    optimizer = grouped(grads, [ABSENT, ClipByValue(0.5)])
    values_of(optimizer)[0].grad = None
    with pytest.raises(TypeError, match=r"complex gradients \(param_groups\[1\]"):
        optimizer.step()


def test_step_refuses_gradients_before_any_group_is_written():
    groups = [*three_groups(), [torch.ones(2, dtype=torch.complex64)]]
    optimizer = grouped(groups, [ABSENT, 0.25, 0.5, 0.1])
    message = r"complex gradients \(param_groups\[3\]\['params'\]\[0\]\)"
    assert_rule_is_refused(optimizer, 3, ClipByValue(0.5), TypeError, message)


def test_optimizer_with_an_option_of_that_name_is_refused():
    inner = SGD(_weights())
    inner.defaults["clip"] = inner.param_groups[0]["clip"] = 1.0
    with pytest.raises(ValueError, match="has an option 'clip' of its own"):
        ClippedOptimizer(inner, 1.0)


OVERLAP = r"\[0\]\['params'\]\[0\] and .*\[1\]\['params'\]\[0\] overlap in memory"


@pytest.mark.parametrize("left_out", ["group", "parameter"])
def test_gradient_under_two_rules_is_refused(left_out):
    grad = torch.tensor([3.0, 4.0])
    one, other = parameters([grad, grad])
    groups: list[dict[str, Any]] = [{"params": [one]}, {"params": [other]}]
    if left_out == "group":
        groups[1]["clip"] = None
    else:
        other.need_clip = False  # type: ignore[attr-defined]
    optimizer = ClippedOptimizer(SGD(groups, lr=1.0), 1.0, nonfinite="skip")
    with pytest.raises(ValueError, match=OVERLAP):
        optimizer.step()
    assert grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("known", [False, True], ids=["at-once", "known"])
@pytest.mark.parametrize("left_out", [False, True], ids=["other-rule", "no-rule"])
def test_gradients_under_two_rules_that_share_a_part_are_refused(left_out, known):
    memory = torch.ones(12)
    one, other = parameters([memory[:4], memory[6:10]])
    groups: list[dict[str, Any]] = [{"params": [one]}, {"params": [other]}]
    groups[1]["clip"] = None if left_out else 0.5
    optimizer = ClippedOptimizer(SGD(groups, lr=1.0), 1.0, nonfinite="skip")
    if known:
        optimizer.step()
    before = memory.clone()
    other.grad = memory[2:6]
    with pytest.raises(ValueError, match=OVERLAP):
        optimizer.step()
    assert torch.equal(memory, before)


def test_step_refuses_a_backend_before_any_group_is_written(backend):
    if backend.name != "triton" or backend.device.type != "cpu":
        pytest.skip("needs kernels that serve CPU tensors only")
    grads = [[torch.tensor([3.0, 4.0])], [torch.zeros(2, device="meta")]]
    optimizer = grouped(grads, [ABSENT, ClipByValue(0.5)])
    with use_backend("triton"), pytest.raises(RuntimeError, match="not on meta"):
        optimizer.step()
    assert grads_of(optimizer)[0].tolist() == [3.0, 4.0]
