"""The state of rules that follow earlier norms: saved, loaded, copied, and refused."""

import copy
import math
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonclip
from helpers.cases import assert_bits, grad_of, parameters, same_parameters
from helpers.histories import ADAPTIVE, of_norm, run
from helpers.serving import decided_on_device
from tritonclip import (
    ClipByNorm,
    ClipByOwnHistory,
    ClipByOwnQuantile,
    ClipByQuantile,
    ClipByValue,
    ClipByZScore,
    ClipState,
)


def _loaded(state: ClipState, **changed: Any) -> ClipState:
    """A state loaded from a saved one, some of which was changed."""
    other = ClipState()
    other.load_state_dict({**copy.deepcopy(state.state_dict()), **changed})
    return other


@pytest.mark.parametrize(
    "rule", [*ADAPTIVE, pytest.param(ClipByNorm(lambda t: 1 / (1 + t)), id="schedule")]
)
@pytest.mark.parametrize(
    "again",
    [_loaded, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))],
    ids=["state_dict", "deepcopy", "pickle"],
)
def test_a_resumed_state_clips_as_one_that_went_on(rule, again):
    state = ClipState()
    run(rule, state, range(30))
    other = again(state)
    assert_bits(run(rule, other, range(30, 60)), run(rule, state, range(30, 60)))
    assert other.steps == 60


@pytest.mark.parametrize("rule", ADAPTIVE)
def test_a_call_that_raises_leaves_the_state(rule):
    state = ClipState()
    run(rule, state, range(3))
    before = state.state_dict()
    weights = same_parameters([of_norm(math.nan), of_norm(1.0, 3)])
    with pytest.raises(RuntimeError, match="non-finite"):
        tritonclip.clip_(weights, rule, state=state, nonfinite="error")
    after = state.state_dict()
    assert repr(after["values"]) == repr(before["values"])
    assert after["steps"] == before["steps"]


@pytest.mark.parametrize("other", [ClipByZScore(), ClipByQuantile(0.7, 21)], ids=["rule", "window"])
def test_a_state_refuses_another_rule(other):
    state = ClipState()
    run(ClipByQuantile(0.7, 20), state, range(2))
    (weight,) = parameters([of_norm(100.0)])
    with pytest.raises(ValueError, match=r"remembers norms for ClipByQuantile.*new ClipState"):
        tritonclip.clip_(weight, other, state=state)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("rule", ADAPTIVE)
@pytest.mark.parametrize("fresh", [True, False], ids=["loaded", "same"])
def test_a_state_refuses_another_list(rule, n, fresh):
    state = ClipState()
    run(rule, state, range(2))
    state = _loaded(state) if fresh else state
    weights = same_parameters([of_norm(100.0), of_norm(1.0, 3), of_norm(1.0)][:n])
    before = [grad_of(weight).clone() for weight in weights]
    with pytest.raises(ValueError, match=f"norms of 2 parameters, got {n}"):
        tritonclip.clip_(weights, rule, state=state)
    assert_bits(map(grad_of, weights), before)


def _given(*sizes: float) -> list[Tensor]:
    """Weights that have gradients of these norms."""
    weights = [torch.zeros(1, requires_grad=True) for _ in sizes]
    for weight, size in zip(weights, sizes, strict=True):
        weight.grad = torch.tensor([size])
    return weights


LISTS = {
    "list": lambda weights: weights,
    "named": lambda weights: [(f"w{i}", weight) for i, weight in enumerate(weights)],
}


ALL_OTHERS = r"at position 0 .*got another one.*new ClipState\(\)"


def _all_others(weights: list[Tensor]) -> list[Tensor]:
    return _given(4.0, 5.0, 6.0)


def _reordered(weights: list[Tensor]) -> list[Tensor]:
    return [weights[0], weights[2], weights[1]]


def _with_another(weights: list[Tensor]) -> list[Tensor]:
    return [*weights[:2], *_given(3.0)]


@pytest.mark.parametrize("of", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize(
    ("rule", "change", "message"),
    [
        (ClipByQuantile(0.5, 9), _all_others, ALL_OTHERS),
        (ClipByOwnHistory(), _all_others, ALL_OTHERS),
        (ClipByValue(lambda step: 0.1), _all_others, ALL_OTHERS),
        # Each norm is remembered for a position.
        (ClipByOwnHistory(), _reordered, r"at position 1 .*got another one.*in the same order"),
        (ClipByOwnHistory(), _with_another, r"at position 2 .*got another one.*in the same order"),
    ],
)
def test_a_state_refuses_as_many_other_parameters(rule, change, message, of):
    state, weights = ClipState(), _given(1.0, 2.0, 3.0)
    tritonclip.clip_(of(weights), rule, state=state)
    before, changed = repr(state.state_dict()), change(weights)
    sizes = [grad_of(weight).item() for weight in changed]
    with pytest.raises(ValueError, match=message):
        tritonclip.clip_(of(changed), rule, state=state)
    assert repr(state.state_dict()) == before
    assert [grad_of(weight).item() for weight in changed] == sizes
    tritonclip.clip_(weights, rule, state=state)


@pytest.mark.parametrize("rule", [ClipByQuantile(0.5, 9), ClipByNorm(lambda step: 1.0)])
def test_a_state_of_no_single_norms_follows_a_list_in_another_order(rule):
    state, weights = ClipState(), _given(1.0, 2.0, 3.0)
    tritonclip.clip_(weights, rule, state=state)
    tritonclip.clip_(_reordered(weights), rule, state=state)
    assert state.steps == 2


@pytest.mark.parametrize("again", [copy.deepcopy, copy.copy, _loaded])
def test_a_copied_state_follows_another_model(again):
    state, rule = ClipState(), ClipByQuantile(0.5, 9)
    tritonclip.clip_(_given(1.0), rule, state=state)
    other = again(state)
    tritonclip.clip_(_given(3.0), rule, state=other)
    assert other.steps == 2


def test_values_saved_in_float32_go_on_in_float64():
    """As a checkpoint that was cast brings them."""
    rule, state = ClipByQuantile(0.5, 9), ClipState()
    run(rule, state, range(5))
    loaded = _loaded(state, values=torch.tensor(state.state_dict()["values"]))
    for one in (state, loaded):
        run(rule, one, range(5, 10))
    values = [one.state_dict()["values"] for one in (loaded, state)]
    torch.testing.assert_close(*values, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("first", [True, False], ids=["host-first", "device-first"])
@pytest.mark.parametrize("rule", ADAPTIVE)
def test_a_state_moves_between_host_and_device(rule, first):
    """As where a model is moved; the device is one by pretence."""
    state, other = ClipState(), ClipState()
    expected = run(rule, state, range(60))
    found = []
    for part, deferred in ((range(20), not first), (range(20, 40), first), (range(40, 60), False)):
        with decided_on_device() if deferred else nullcontext():
            found += run(rule, other, part)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0.0, equal_nan=True)
    assert other.steps == 60


@pytest.mark.parametrize("rule", ADAPTIVE)
def test_copies_of_a_state_go_their_own_ways(rule):
    state = ClipState()
    run(rule, state, range(12))
    saved = state.state_dict()["values"]
    before = repr(saved)
    run(rule, copy.copy(state), range(12, 30))
    assert repr(state.state_dict()["values"]) == before
    run(rule, state, range(12, 30))
    assert repr(saved) == before


@pytest.mark.parametrize("rule", ADAPTIVE)
def test_a_state_begun_in_inference_mode_goes_on(rule):
    state = ClipState()
    with torch.inference_mode():
        run(rule, state, range(12))
        loaded = _loaded(state)
    run(rule, state, range(12, 20))
    with torch.inference_mode():
        again = _loaded(state)
    run(rule, again, range(12, 20))
    with decided_on_device():
        run(rule, loaded, range(12, 20))
    assert (state.steps, again.steps, loaded.steps) == (20, 28, 20)


@pytest.mark.parametrize("rule", [ClipByQuantile(0.7, 20), ClipByOwnQuantile(0.5, 4)], ids=repr)
def test_values_of_another_shape_are_of_another_rule(rule):
    state, weights = ClipState(), _given(*[1.0] * 5)
    tritonclip.clip_(weights, rule, state=state)
    shorter = torch.tensor(state.state_dict()["values"]).flatten()[:5]
    with pytest.raises(ValueError, match="new ClipState"):
        tritonclip.clip_(weights, rule, state=_loaded(state, values=shorter))


def test_its_text_counts_calls():
    state, weight = ClipState(), torch.nn.Parameter(torch.ones(2))
    rule = tritonclip.ClipByGlobalNorm(lambda step: 1.0)
    for expected in ("0 calls", "1 call", "2 calls"):
        assert repr(state) == f"<ClipState of no norms after {expected}>"
        weight.grad = torch.ones(2)
        tritonclip.clip_(weight, rule, state=state)


@pytest.mark.parametrize(
    ("rule", "at", "value"),
    [
        (ClipByOwnQuantile(0.5, 4), 0, -2.0),
        (ClipByOwnQuantile(0.5, 4), 0, math.inf),
        (ClipByOwnQuantile(0.5, 4), 3, 1.0),
        (ClipByOwnQuantile(0.5, 4), 0, 0.0),
        (ClipByOwnHistory(), 0, 0.0),
        (ClipByOwnHistory(), 1, 0.5),
    ],
    ids=["below 0", "inf", "slot", "norm", "average", "count"],
)
def test_a_damaged_number_is_refused_by_the_next_call(rule, at, value):
    """A last slot that is filled first, a norm and an average of 0, and half a count."""
    state = ClipState()
    tritonclip.clip_(_given(1.0), rule, state=state)
    values = torch.tensor(state.state_dict()["values"])
    values[:, at] = value
    state, (weight,) = _loaded(state, values=values), _given(1.0)
    with pytest.raises(ValueError, match=rf"values that {type(rule).__name__}.* never leaves"):
        tritonclip.clip_(weight, rule, state=state)
    assert grad_of(weight).tolist() == [1.0]


def test_a_state_counts_further_than_a_training_goes():
    state, most = ClipState(), 2**62 - 1
    saved = {"kind": "", "steps": most, "parameters": most, "values": None}
    state.load_state_dict(saved)
    assert state.state_dict() == saved


class CountsDown(ClipByOwnHistory):
    """Its counts are below 0, which those of its parent never are."""

    def advance(self, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(norm, 0.5), state - 1


def test_a_rule_that_overrides_advance_takes_numbers_that_its_parent_would_refuse():
    state = ClipState()
    run(CountsDown(), state, range(2))
    other = _loaded(state)
    assert torch.tensor(other.state_dict()["values"])[:, 1].max() < 0
    assert_bits(run(CountsDown(), other, range(2)), run(CountsDown(), state, range(2)))
