"""Copies of ClippedOptimizer, by copy and by pickle, train on and apart."""

from __future__ import annotations

import io
import pickle
from copy import copy, deepcopy

import pytest
import torch
from torch.optim import SGD

from helpers.cases import assert_bits, copies
from helpers.optimizers import (
    CLASSES,
    LIMIT,
    OPTIONS,
    assert_same,
    assert_shared,
    build,
    made,
    one_weight,
    train,
)
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClippedOptimizer

# A copy of torch's LBFGS cannot step: it lacks the attribute _params, wrapped or not.
COPYABLE = pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, OPTIONS.get(name, [{}])[0], id=name)
        for name in CLASSES
        if name != "LBFGS"
    ],
)


def deep_copied(pair):
    return deepcopy(pair)


def pickled(pair):
    return pickle.loads(pickle.dumps(pair))


def torch_saved(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIED = pytest.mark.parametrize("copied", [deep_copied, pickled, torch_saved])


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
    target = copied(ClippedOptimizer(inner, ClipByGlobalNorm(2.0, 1.0), nonfinite="skip"))
    assert target.clip == ClipByGlobalNorm(2.0, 1.0)
    assert target.nonfinite == "skip"
    assert target.param_groups[0]["clip"] == ClipByNorm(0.5)
    assert "clip" not in target.state_dict()["param_groups"][0]
    assert_shared(target)


@COPIED
def test_copy_counts_as_a_wrapper(copied):
    _, wrapper = one_weight()
    target = copied(wrapper)
    with pytest.raises(ValueError, match="wrapped already"):
        ClippedOptimizer(target.optimizer, LIMIT)


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
