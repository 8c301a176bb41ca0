"""Plans of lists with a gradient twice, with two tensors of one memory, or with empty ones."""

from __future__ import annotations

import pytest
import torch

import tritonclip
from helpers.cases import normal, parameter
from helpers.plan_lists import LISTS, described, planned
from helpers.serving import forget_plans


@pytest.mark.parametrize("again", [lambda g: g, lambda g: g.view(-1)], ids=["itself", "a view"])
def test_a_gradient_met_twice_counts_once_in_a_known_form(guards, again):
    forget_plans()
    grads = [torch.ones(4) for _ in range(2)]
    assert tritonclip.get_total_norm(grads) == 8**0.5
    assert tritonclip.get_total_norm([grads[0], again(grads[0])]) == 2


def test_a_list_that_cannot_be_recognised_has_no_plan_kept(plans):
    """A gradient, and another tensor of its memory."""
    grads = [normal(4), normal(5)]
    planned([*grads, grads[0].detach()], plans)
    assert not len(plans)


@pytest.mark.parametrize("make", LISTS)
def test_a_list_with_a_gradient_listed_twice_has_a_plan(plans, built, make):
    grads = make()
    alone = planned(grads, plans)
    for tied in ([*grads, grads[0]], [grads[0], *grads], [g for g in grads for _ in range(2)]):
        for _ in range(2):
            found = planned(tied, plans)
            assert found.plan is alone.plan
            assert described(found) == described(alone)
            assert found.label(1) == f"tensors[{[g is grads[1] for g in tied].index(True)}]"
    assert len(built) == 1


def test_a_gradient_listed_twice_and_one_of_its_memory_count_once(plans):
    grads = [normal(4), normal(5)]
    found = planned([grads[0], grads[0], grads[0].detach(), grads[1]], plans)
    assert [tensor.data_ptr() for tensor in found.tensors] == [g.data_ptr() for g in grads]
    assert found.label(1) == "tensors[3]"


def test_an_empty_gradient_listed_twice_counts_once_in_a_known_form(guards):
    forget_plans()
    two = [torch.empty(0), normal(3), torch.empty(0)]
    for _ in range(2):
        assert len(tritonclip.clip_([parameter(g) for g in two], tritonclip.ClipByNorm(1.0))) == 3
        one = parameter(torch.empty(0))
        given = [one, parameter(normal(3)), one]
        assert len(tritonclip.clip_(given, tritonclip.ClipByNorm(1.0))) == 2


def test_several_empty_gradients_have_a_plan(plans, built):
    for _ in range(3):
        planned([normal(4), torch.empty(0), normal(5), torch.empty(0)], plans)
    assert len(built) == 1


def test_a_gradient_freed_beside_empty_ones_has_no_plan(plans, built):
    grads = [normal(4), torch.empty(0), normal(5), torch.empty(0)]
    planned(grads, plans)
    grads[2].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no memory"):
        planned(grads, plans)
