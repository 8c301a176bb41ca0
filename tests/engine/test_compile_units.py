"""``torch.compile(fullgraph=True)`` traces clipping by unit; the result is that of eager mode."""

from __future__ import annotations

import pytest
import torch

import tritonclip
from helpers.cases import assert_bits, copies, grad_of, normal
from helpers.graphs import COMPILING, compiled
from helpers.units import make
from tritonclip import ClipByUnitNorm, FlatGradients

pytestmark = COMPILING
SHAPES = [(5, 8), (3, 700), (70,), (2, 2)]


def fill(parameters, scale=1.0):
    """New values in the same gradients."""
    for seed, one in enumerate(parameters):
        grad_of(one).copy_(normal(one.shape, one.dtype, seed=seed + 7) * scale)


@pytest.mark.covering(1)
@pytest.mark.parametrize("policy", ["propagate", "zero"])
@pytest.mark.parametrize("scale", [None, 4.0], ids=["unscaled", "scaled"])
def test_compiled_clip_by_unit_is_eager_clip_by_unit(device, policy, scale):
    """Clipped, below the limit, and clipped again: one graph must serve them all."""
    ours, eager = make(SHAPES, device=device), make(SHAPES, device=device)
    rules = [ClipByUnitNorm(exclude=parameters[1]) for parameters in (ours, eager)]

    def step(parameters, rule):
        return tritonclip.clip_(parameters, rule, nonfinite=policy, grad_scale=scale)

    traced = compiled(step)
    for size in (1.0, 1e-6, 30.0):
        fill(ours, size)
        fill(eager, size)
        norms, expected = traced(ours, rules[0]), step(eager, rules[1])
        assert_bits([norms], [expected])
        assert_bits(copies(map(grad_of, ours)), copies(map(grad_of, eager)))


@pytest.mark.covering(0)
def test_compiled_clip_by_unit_follows_the_rule(device):
    parameters = make(SHAPES, device=device)
    traced = compiled(lambda rule: tritonclip.clip_(parameters, rule))
    for kept in (0, 1, 3):
        fill(parameters)
        before = copies(map(grad_of, parameters))
        traced(ClipByUnitNorm(exclude=parameters[kept]))
        now = copies(map(grad_of, parameters))
        same = [torch.equal(a, b) for a, b in zip(now, before, strict=True)]
        assert same == [kept == i for i in range(len(SHAPES))]


@pytest.mark.covering(0)
def test_compiled_clip_by_unit_reads_the_weights_of_the_call(device):
    (one,) = make([(5, 8)], device=device)
    rule = ClipByUnitNorm(0.5)
    traced = compiled(lambda: tritonclip.clip_([one], rule))
    for size in (1.0, 0.25):
        one.data.fill_(size)
        fill([one], 100.0)
        traced()
        expected = torch.full((5,), 0.5 * size * 8**0.5)
        torch.testing.assert_close(grad_of(one).norm(dim=1).cpu(), expected)


@pytest.mark.covering(0)
def test_compiled_clip_by_unit_of_a_module(device):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).to(device)
    rule = ClipByUnitNorm(0.0, exclude=model[1])

    @compiled
    def step(batch):
        return tritonclip.clip_(model, rule)

    model(torch.ones(2, 4, device=device)).square().sum().backward()
    head = copies(map(grad_of, model[1].parameters()))
    assert step(torch.ones(2, 4, device=device)).shape == (4,)
    assert not any(grad_of(one).any() for one in model[0].parameters())
    assert_bits(copies(map(grad_of, model[1].parameters())), head)


@pytest.mark.covering(0)
def test_compiled_clip_by_unit_refuses_to_exclude_parameters_of_another_model(device):
    theirs, ours = make(SHAPES, device=device), make(SHAPES, device=device)
    rule = ClipByUnitNorm(0.0, exclude=theirs)
    before = copies(map(grad_of, ours))
    with pytest.raises(Exception, match="none of which is among"):
        compiled(lambda: tritonclip.clip_(ours, rule))()
    assert_bits(copies(map(grad_of, ours)), before)


@pytest.mark.covering(1)
@pytest.mark.parametrize("frozen", [True, False], ids=["left-out", "held"])
def test_compiled_clip_by_unit_of_a_flat_buffer_excludes(device, frozen):
    parameters = make([(5, 8), (2,)], device=device)
    if frozen:
        parameters[1].grad = None
        parameters[1].requires_grad_(False)
    flat, rule = FlatGradients(parameters), ClipByUnitNorm(0.0, exclude=parameters[1])
    compiled(lambda: tritonclip.clip_(flat, rule))()
    assert not grad_of(parameters[0]).any()
    assert frozen or grad_of(parameters[1]).any()


@pytest.mark.covering(0)
def test_compiled_clip_by_unit_of_nothing(device):
    empty = torch.nn.Parameter(torch.ones(2, device=device))
    assert compiled(lambda: tritonclip.clip_([empty], ClipByUnitNorm()))().shape == (0,)


@pytest.mark.covering(0)
def test_compiled_clip_by_unit_names_gradients_that_are_not_finite(device):
    model = torch.nn.Linear(3, 2).to(device)
    model(torch.full((1, 3), torch.inf, device=device)).sum().backward()
    step = compiled(lambda: tritonclip.clip_(model, ClipByUnitNorm(), nonfinite="error"))
    with pytest.raises(RuntimeError, match=r"norms of order 2\.0 of weight are non-finite"):
        step()
