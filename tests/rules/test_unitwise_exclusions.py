"""Parameters that a rule by unit excludes, and those that need no clipping."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import tritonclip
from helpers.cases import assert_bits, assert_norm, copies, grad_of, normal
from helpers.units import make, wide
from tritonclip import ClipByUnitNorm, FlatGradients


def test_an_exhausted_iterator_excludes_nothing_and_raises():
    used = torch.nn.Linear(2, 2).parameters()
    list(used)
    with pytest.raises(ValueError, match=r"got a generator that yields nothing.*exclude=None"):
        ClipByUnitNorm(0.01, exclude=used)
    assert ClipByUnitNorm(0.01, exclude=[]).excludes == 0


@pytest.mark.parametrize("exclude", ["head", 3, ["head"], [1.0], {"head": 1}], ids=repr)
def test_rule_by_unit_refuses_to_exclude_what_is_no_parameter(exclude):
    with pytest.raises(TypeError, match=r"exclude must be a module, a parameter.*got"):
        ClipByUnitNorm(exclude=exclude)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_rule_by_unit_copied_with_a_model_excludes_the_copys_parameters(again):
    model = torch.nn.Linear(2, 2)
    rule, twin = again((ClipByUnitNorm(exclude=model.bias), model))
    assert rule.exempt([model.bias, twin.bias, twin.weight]) == [False, True, False]


def test_clip_by_unit_leaves_what_is_excluded(device):
    parameters = make([(5, 8), (3, 700), (70,), (2, 2)], device=device)
    rule = ClipByUnitNorm(1e-4, exclude=[parameters[1], parameters[2]])
    before = copies(map(grad_of, parameters))
    norms = tritonclip.clip_(parameters, rule)
    assert_norm(norms, [float(np.linalg.norm(wide(g))) for g in before])
    now = copies(map(grad_of, parameters))
    assert_bits(now[1:3], before[1:3])
    assert all((a.abs() < b.abs()).all() for a, b in zip(now[::3], before[::3], strict=True))


def test_clip_by_unit_unscales_what_is_excluded(device):
    parameters = make([(5, 8), (3, 700)], device=device)
    before = copies(map(grad_of, parameters))
    tritonclip.clip_(parameters, ClipByUnitNorm(0.0, exclude=parameters[1]), grad_scale=4.0)
    assert_bits([grad_of(parameters[1])], [before[1] / 4])


def test_clip_by_unit_excludes_a_module(device):
    body, head = torch.nn.Linear(4, 4, device=device), torch.nn.Linear(4, 2, device=device)
    model = torch.nn.Sequential(body, head)
    (model(torch.ones(3, 4, device=device)) ** 2).sum().backward()
    before = copies(map(grad_of, model.parameters()))
    tritonclip.clip_(model, ClipByUnitNorm(1e-6, exclude=head))
    now = copies(map(grad_of, model.parameters()))
    assert_bits(now[2:], before[2:])
    assert not torch.equal(now[0], before[0])


@pytest.mark.parametrize("of", [list, FlatGradients], ids=["list", "flat"])
def test_clip_by_unit_refuses_to_exclude_parameters_of_another_model(device, of):
    """As a rule does that was not copied with its model: nothing would be excluded."""
    theirs, ours = make([(5, 8), (2,)], device=device), make([(5, 8), (2,)], device=device)
    before = copies(map(grad_of, ours))
    rule = ClipByUnitNorm(0.0, exclude=theirs[1])
    with pytest.raises(ValueError, match=r"1 parameters, none of which is among the 2.*deepcopy"):
        tritonclip.clip_(of(ours), rule)
    assert_bits(copies(map(grad_of, ours)), before)


@pytest.mark.parametrize("of", [list, FlatGradients], ids=["list", "flat"])
@pytest.mark.parametrize("way", ["frozen", "need_clip"])
def test_clip_by_unit_excludes_parameters_without_a_gradient(device, of, way):
    parameters = make([(5, 8), (2,)], device=device)
    if way == "frozen":
        parameters[1].requires_grad_(False)
        parameters[1].grad = None
    else:
        parameters[1].need_clip = False  # type: ignore[attr-defined]
    tritonclip.clip_(of(parameters), ClipByUnitNorm(0.0, exclude=parameters[1]))
    assert not grad_of(parameters[0]).any()


def test_clip_by_unit_leaves_out_what_needs_no_clipping(device):
    parameters = make([(5, 8), (3, 7)], device=device)
    parameters[0].need_clip = False  # type: ignore[attr-defined]
    before = copies(map(grad_of, parameters))
    assert tritonclip.clip_(parameters, ClipByUnitNorm(0.0)).shape == (1,)
    assert_bits([grad_of(parameters[0])], before[:1])
    assert not grad_of(parameters[1]).any()


def test_clip_by_unit_of_another_rule_excludes_others(device):
    """The form of the list is the same, so that all but the rule is known."""
    parameters = make([(5, 8), (3, 700)], device=device)
    for kept in (0, 1, 0):
        for i, one in enumerate(parameters):
            grad_of(one).copy_(normal(one.shape, seed=i))
        before = copies(map(grad_of, parameters))
        tritonclip.clip_(parameters, ClipByUnitNorm(exclude=parameters[kept]))
        now = copies(map(grad_of, parameters))
        assert [torch.equal(a, b) for a, b in zip(now, before, strict=True)] == [
            kept == i for i in range(2)
        ]
