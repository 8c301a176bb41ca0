"""Plans serve only lists of the form that they were made for."""

from __future__ import annotations

import pytest
import torch

import tritonclip
from helpers.cases import normal
from helpers.plan_lists import LISTS, contiguous, described, planned
from helpers.workers import python
from tritonclip.engine import plan_cache
from tritonclip.engine.plan_cache import PlanCache


@pytest.mark.parametrize("make", LISTS)
def test_a_plan_serves_the_list_it_was_built_for(plans, built, make):
    grads = make()
    first = planned(grads, plans)
    second = planned(grads, plans)
    assert second.plan is first.plan
    assert described(second) == described(first)
    assert len(built) == 1


@pytest.mark.parametrize("make", LISTS)
def test_a_plan_reads_the_tensors_of_this_call(plans, built, make):
    planned(make(), plans)
    other = make()
    found = described(planned(other, plans))
    assert len(built) == 1
    assert found == described(planned(other, PlanCache()))


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(lambda g: normal(6), id="size"),
        pytest.param(lambda g: normal(5).view(1, 5), id="shape"),
        pytest.param(lambda g: g.double(), id="dtype"),
        pytest.param(lambda g: normal(10)[::2], id="strides"),
        pytest.param(lambda g: torch._neg_view(g), id="negated"),
        pytest.param(lambda g: g.clone().requires_grad_(), id="requires-grad"),
        pytest.param(lambda g: g.to_sparse(), id="sparse"),
        pytest.param(lambda g: torch.nn.Parameter(g), id="type"),
        pytest.param(lambda g: torch.empty_like(g, device="meta"), id="device"),
        pytest.param(torch.inference_mode()(torch.clone), id="inference"),
    ],
)
@pytest.mark.parametrize("place", [0, 2])
def test_a_changed_gradient_has_no_plan(plans, built, changed, place):
    grads = [normal(5) for _ in range(3)]
    planned(grads, plans)
    grads[place] = changed(grads[place])
    planned(grads, plans)
    assert len(built) == 2


@pytest.mark.parametrize("resized", [lambda g: g.resize_(2), lambda g: g.t_(), lambda g: g.set_()])
def test_a_gradient_changed_in_place_has_no_plan(plans, built, resized):
    grads = [normal(10).view(5, 2) for _ in range(3)]
    planned(grads, plans)
    resized(grads[1])
    planned(grads, plans)
    assert len(built) == 2


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_plan_serves_the_backend_it_was_built_for(plans, built, backend):
    grads = contiguous()
    planned(grads, plans)
    with tritonclip.use_backend(backend):
        planned(grads, plans)
    assert len(built) == (1 if backend == "auto" else 2)


def test_lists_of_two_dtypes_keep_both_plans(plans, built):
    lists = [contiguous(), [grad.bfloat16() for grad in contiguous()]]
    for grads in lists * 3:
        planned(grads, plans)
    assert len(built) == 2


def test_a_sparse_gradient_is_read_anew_at_every_call(plans, built):
    grads = [normal(3).to_sparse()]
    planned(grads, plans)
    planned(grads, plans)
    assert len(built) == 2


@pytest.mark.parametrize("at", [0, 2])
def test_lists_of_one_length_are_told_apart(plans, built, at):
    lists = [[normal(5), normal(7), normal(8)] for _ in range(2)]
    lists[1][at] = normal(3)
    for grads in lists * 3:
        planned(grads, plans)
    assert len(built) == len(lists)


@pytest.mark.parametrize(
    "missing",
    ["del torch._C._dynamo.guards.TensorGuards", "sys.modules['torch._C._dynamo'] = None"],
    ids=["class", "module"],
)
def test_guards_in_python_take_the_place_of_missing_ones(missing):
    done = python(
        "-c",
        f"import sys, torch\n{missing}\nfrom tritonclip.engine import plan_cache\n"
        "print(plan_cache.TensorGuards)\n",
    )
    assert (done.returncode, done.stdout.strip()) == (0, "None"), done.stderr


def test_torch_has_the_guards():
    """Without them calls are slower: a PyTorch that moved them should be noticed here."""
    assert plan_cache.TensorGuards is not None
