"""Checkpoints of ClippedOptimizer, those of the bare one and statistics; and copies of it."""

import math
from copy import copy, deepcopy
from fractions import Fraction
from io import BytesIO
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.optim import SGD
from torch.utils._pytree import tree_map_only

from helpers.cases import assert_bits, copies, grad_of
from helpers.optimizers import (
    CLASSES,
    COPIED,
    EVERY,
    LIMIT,
    OPTIONS,
    assert_same,
    assert_same_state,
    assert_shared,
    build,
    made,
    one_weight,
    torch_saved,
    train,
)
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByOwnHistory,
    ClipByOwnQuantile,
    ClipByQuantile,
    ClipByZScore,
    ClippedOptimizer,
    ClipState,
    Outlier,
    clip_,
)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "way", ["wrapper-wrapper", "bare-wrapper", "wrapper-bare", "wrapper-inner"]
)
@EVERY
def test_state_dict_goes_on_identically(name, options, way):
    source_kind, target_kind = way.split("-")
    ours = made(name)
    source = build(name, ours, options)
    if source_kind == "wrapper":
        source = ClippedOptimizer(source, LIMIT)
    train(name, source, ours)

    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    target = build(name, theirs, options)
    if target_kind != "bare":
        target = ClippedOptimizer(target, LIMIT)
    (target.optimizer if target_kind == "inner" else target).load_state_dict(
        deepcopy(source.state_dict())
    )
    for optimizer, params in ((source, ours), (target, theirs)):
        train(name, optimizer, params)
    assert_same(target, theirs, source, ours)


@pytest.mark.parametrize("clip", [0.5, ClipByNorm(0.5), None], ids=["number", "rule", "None"])
def test_state_dict_leaves_the_rules_of_groups_out(clip):
    weight = torch.nn.Parameter(torch.zeros(2))
    wrapper = ClippedOptimizer(SGD([{"params": [weight], "clip": clip}]), LIMIT)
    assert wrapper.state_dict()["param_groups"][0]["clip"] == "not saved"
    assert "clip" not in wrapper.optimizer.state_dict()["param_groups"][0]
    assert wrapper.param_groups[0]["clip"] is clip


@pytest.mark.parametrize("loader", ["wrapper", "inner"])
def test_load_state_dict_keeps_the_present_rules_of_groups(loader):
    one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    saved = SGD([{"params": [one], "clip": 9.0}, {"params": [other], "clip": 9.0}]).state_dict()
    groups: list[Any] = [{"params": [one], "clip": 0.5}, {"params": [other]}]
    wrapper = ClippedOptimizer(SGD(groups), LIMIT)
    (wrapper if loader == "wrapper" else wrapper.optimizer).load_state_dict(saved)
    assert wrapper.param_groups[0]["clip"] == 0.5
    assert "clip" not in wrapper.param_groups[1]


def test_load_state_dict_changes_nothing_where_it_raises():
    _, wrapper = one_weight(momentum=0.5)
    wrapper.step()
    before, statistics = deepcopy(wrapper.state_dict()), wrapper.stats.summary()
    groups: list[dict[str, Any]] = [{"params": [p]} for p in made("SGD")]
    other = SGD(groups).state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        wrapper.load_state_dict(other)
    assert_same_state(wrapper.state_dict(), before)
    assert wrapper.stats.summary() == statistics


@EVERY
def test_state_dict_loads_with_weights_only(name, options):
    params = made(name)
    wrapper = ClippedOptimizer(build(name, params, options), LIMIT)
    wrapper.param_groups[0]["clip"] = ClipByNorm(0.5)
    train(name, wrapper, params)
    loaded = torch_saved(wrapper.state_dict(), weights_only=True)
    expected = wrapper.state_dict()
    assert loaded.pop("param_groups") == expected.pop("param_groups")
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0, equal_nan=True)


RULES = {
    "fixed": ClipByNorm(0.5),
    "quantile": ClipByQuantile(0.5, 4),
    "zscore": ClipByZScore(warmup=2),
    "own-history": ClipByOwnHistory(warmup=1),
    "own-quantile": ClipByOwnQuantile(0.5, 4),
}
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=3),
    st.just(b"bytes"),
    st.sampled_from([[], {}, [1], {"a": 1}, (), object(), torch.ones(()).to_sparse()]),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.builds(
        lambda value, shape, dtype: torch.full(shape, value, dtype=torch.float64).to(dtype),
        st.sampled_from([0.0, 1.0, -1.0, 1e300, math.nan, math.inf, -math.inf]),
        st.sampled_from([(), (1,), (1, 1), (0,), (2, 5), (5,), (3, 2), (2, 2, 2)]),
        st.sampled_from(
            [torch.float64, torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64]
        ),
    ),
)


def optimizer_with(rule: Any) -> tuple[list[torch.nn.Parameter], ClippedOptimizer]:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    inner = SGD(weights, lr=0.1, momentum=0.9)
    return weights, ClippedOptimizer(inner, rule, skip_above=Outlier(window=6), nonfinite="skip")


def give(weights: list[torch.nn.Parameter], *grad: float) -> None:
    for weight in weights:
        weight.grad = torch.tensor(grad)


def step_with(weights: list[torch.nn.Parameter], optimizer: ClippedOptimizer, size: float) -> None:
    give(weights, size, 1.0)
    optimizer.loss = size
    optimizer.step()


def in_numbers(optimizer: ClippedOptimizer) -> str:
    """The state of an optimizer as a text, in which NaN equals NaN."""
    return repr(tree_map_only(torch.Tensor, torch.Tensor.tolist, optimizer.state_dict()))


def damage(data: st.DataObject, state: dict[Any, Any]) -> None:
    """Replaces, removes or adds an entry, or an element of a tensor, somewhere in a state."""
    at, key = state, data.draw(st.sampled_from([*state, "new"]))
    while isinstance(at.get(key), dict) and at[key] and data.draw(st.integers(0, 3)):
        at = at[key]
        key = data.draw(st.sampled_from([*at, "new"]))
    found = at.get(key)
    if isinstance(found, torch.Tensor) and found.dim() and data.draw(st.booleans()):
        where = data.draw(st.integers(0, found.numel() - 1))
        found.view(-1)[where] = data.draw(st.floats())
    elif key in at and data.draw(st.integers(0, 3)) == 0:
        del at[key]
    else:
        at[key] = deepcopy(data.draw(JUNK))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@settings(max_examples=60, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_damaged_state_is_refused_as_a_whole_or_goes_on(rule, data):
    weights, source = optimizer_with(rule)
    for size in (1.0, 3.0, 2.0):
        step_with(weights, source, size)
    saved = deepcopy(source.state_dict())
    for _ in range(data.draw(st.integers(1, 2))):
        damage(data, saved["tritonclip"])
    weights, target = optimizer_with(rule)
    step_with(weights, target, 7.0)
    before = in_numbers(target)
    try:
        target.load_state_dict(saved)
    except ValueError:
        assert in_numbers(target) == before
    for size in (2.0, 5.0):
        step_with(weights, target, size)
    target.load_state_dict(deepcopy(target.state_dict()))
    assert all(math.isfinite(number) for weight in weights for number in weight.tolist())
    target.stats.summary()


def test_a_damaged_mark_of_saved_state_is_refused():
    saved = optimizer_with(1.0)[1].state_dict()
    saved["tritonclip"]["has_state"] = torch.ones(2, 5)
    with pytest.raises(ValueError, match="has_state of a saved state must be a count"):
        optimizer_with(1.0)[1].load_state_dict(saved)


@pytest.mark.parametrize("rule", [*RULES.values()][1:], ids=[*RULES][1:])
@settings(max_examples=60, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_damaged_clip_state_is_refused_or_goes_on(rule, data):
    weights, state = optimizer_with(rule)[0], ClipState()
    for size in (1.0, 3.0):
        give(weights, size, 1.0)
        clip_(weights, rule, state=state)
    saved = state.state_dict()
    damage(data, saved)
    other = ClipState()
    give(weights, 3.0, 4.0)
    try:
        other.load_state_dict(saved)
        clip_(weights, rule, state=other)
    except ValueError:
        assert [grad_of(weight).tolist() for weight in weights] == [[3.0, 4.0]] * 2
    else:
        assert float(grad_of(weights[0]).norm()) <= 5.0


def saved_and_new() -> tuple[dict[str, Any], ClippedOptimizer]:
    """A checkpoint after a step, and an optimizer for it."""
    (_, source), (_, target) = one_weight(momentum=0.5), one_weight(momentum=0.5)
    source.step()
    return source.state_dict(), target


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory", None),
        ("calls", 2**70),
        ("calls", 2**62),
        ("calls", torch.tensor(math.inf)),
        ("steps", torch.tensor(-1)),
        ("consecutive_skips", torch.zeros(1, 1, dtype=torch.int64)),
        ("last_norm", "5"),
        ("recorder", {"steps": 2**70}),
        ("recorder", [1]),
        ("stepz", torch.tensor(1)),
    ],
    ids=str,
)
def test_damaged_entry_is_named_and_nothing_is_loaded(name, value):
    saved, target = saved_and_new()
    saved["tritonclip"][name] = value
    before = deepcopy(target.state_dict())
    with pytest.raises(ValueError, match=name.title() if name == "recorder" else name):
        target.load_state_dict(saved)
    assert_same_state(target.state_dict(), before)
    assert int(target.stats.steps) == 0


def archive_of(anything: object) -> bytes:
    """As torch.save writes it, of any class."""
    torch.save(anything, file := BytesIO())
    return file.getvalue()


@pytest.mark.parametrize("damaged", [b"no archive", 5, "text", archive_of(Fraction(1))], ids=repr)
def test_damaged_bytes_in_a_group_are_refused(damaged):
    saved, target = saved_and_new()
    # As torch.distributed.checkpoint carries it.
    del saved["tritonclip"]
    saved["param_groups"][0]["tritonclip"] = damaged
    with pytest.raises(ValueError, match="must be bytes that state_dict"):
        target.load_state_dict(saved)


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {},
        {"state": {}, "param_groups": 3},
        {"state": {}, "param_groups": [3]},
        {"param_groups": []},
    ],
)
def test_what_is_no_checkpoint_is_refused(state):
    with pytest.raises(ValueError, match=r"expected the result of state_dict\(\)"):
        one_weight()[1].load_state_dict(state)


@pytest.mark.parametrize("calls", [{"calls": 2**62 - 1}, {}], ids=["most", "missing"])
def test_counts_come_back_as_far_as_they_go_or_begin_anew(calls):
    saved, target = saved_and_new()
    del saved["tritonclip"]["calls"]
    saved["tritonclip"].update(calls)
    target.load_state_dict(saved)
    assert int(target.state_dict()["tritonclip"]["calls"]) == calls.get("calls", 0)


# A copy of torch's LBFGS cannot step: it lacks the attribute _params, wrapped or not.
COPYABLE = pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, OPTIONS.get(name, [{}])[0], id=name)
        for name in CLASSES
        if name != "LBFGS"
    ],
)


@pytest.mark.covering(1)
@COPIED
@COPYABLE
def test_copy_goes_on_identically_and_apart(name, options, copied):
    ours = made(name)
    source = ClippedOptimizer(build(name, ours, options), LIMIT)
    train(name, source, ours)
    theirs, target = copied((ours, source))
    left_alone = copies(ours)
    train(name, target, theirs)
    assert_bits(ours, left_alone)
    train(name, source, ours)
    assert_same(target, theirs, source, ours)
    assert target.stats.summary() == source.stats.summary()


@COPIED
def test_copy_keeps_rules_and_policy(copied):
    weight = torch.nn.Parameter(torch.zeros(2))
    inner = SGD([{"params": [weight], "clip": ClipByNorm(0.5)}])
    options: dict[str, Any] = {"nonfinite": "skip", "max_consecutive_skips": 3}
    target = copied(ClippedOptimizer(inner, ClipByGlobalNorm(2.0, 1.0), **options))
    assert target.clip == ClipByGlobalNorm(2.0, 1.0)
    assert (target.nonfinite, target.max_consecutive_skips) == ("skip", 3)
    assert target.param_groups[0]["clip"] == ClipByNorm(0.5)
    assert target.state_dict()["param_groups"][0]["clip"] == "not saved"
    assert_shared(target)


def test_shallow_copy_shares_everything_with_the_wrapper():
    weight, wrapper = one_weight()
    twin = copy(wrapper)
    twin.step()
    wrapper.step()
    assert twin.optimizer is wrapper.optimizer
    assert twin.stats is wrapper.stats
    assert int(wrapper.stats.steps) == 2
    assert weight.tolist() == [-3.0, -4.0]
    assert isinstance(twin, ClippedOptimizer)
    with pytest.raises(ValueError, match="optimizer is a ClippedOptimizer"):
        ClippedOptimizer(twin, LIMIT)
