"""state_dict and load_state_dict of ClippedOptimizer: those of the bare one, and statistics."""

from __future__ import annotations

import io
from copy import deepcopy
from typing import Any

import pytest
import torch
from optimizers import (
    EVERY,
    LIMIT,
    ONE_OF_EACH,
    assert_same,
    assert_same_state,
    build,
    made,
    one_weight,
    train,
)
from torch.optim import SGD

from tritonclip import ClipByNorm, ClippedOptimizer


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


@ONE_OF_EACH
def test_state_dict_is_the_bare_one_and_statistics(name, options):
    params = made(name)
    wrapper = ClippedOptimizer(build(name, params, options), LIMIT)
    train(name, wrapper, params)
    ours, theirs = wrapper.state_dict(), wrapper.optimizer.state_dict()
    assert set(ours) - set(theirs) == {"tritonclip"}
    assert_same_state(ours, theirs)


@pytest.mark.parametrize("clip", [0.5, ClipByNorm(0.5), None], ids=["number", "rule", "None"])
def test_state_dict_leaves_the_rules_of_groups_out(clip):
    weight = torch.nn.Parameter(torch.zeros(2))
    wrapper = ClippedOptimizer(SGD([{"params": [weight], "clip": clip}]), LIMIT)
    assert "clip" not in wrapper.state_dict()["param_groups"][0]
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


def test_load_state_dict_brings_statistics_back():
    _, source = one_weight()
    source.step()
    _, target = one_weight()
    target.load_state_dict(source.state_dict())
    assert target.stats.summary() == source.stats.summary()
    assert target.stats.summary()["norm"] == 5.0


def test_load_state_dict_copies_statistics():
    _, source = one_weight()
    source.step()
    saved = source.state_dict()
    _, target = one_weight()
    target.load_state_dict(saved)
    source.step()
    target.step()
    assert int(saved["tritonclip"]["steps"]) == 1
    assert int(target.stats.steps) == 2


def test_load_state_dict_of_a_bare_optimizer_starts_statistics_anew():
    _, wrapper = one_weight()
    wrapper.step()
    wrapper.load_state_dict(SGD([torch.nn.Parameter(torch.zeros(2))]).state_dict())
    assert int(wrapper.stats.steps) == int(wrapper.stats.clipped_steps) == 0
    assert wrapper.stats.last_norm.isnan()


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
    file = io.BytesIO()
    torch.save(wrapper.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    expected = wrapper.state_dict()
    assert loaded.pop("param_groups") == expected.pop("param_groups")
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0, equal_nan=True)
