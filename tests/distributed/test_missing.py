"""Processes that lack gradients, or parameters, take part all the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import tritonclip
from helpers import reference
from helpers.cases import assert_norm
from helpers.processes import in_processes
from helpers.spread import (
    assert_same_everywhere,
    collectives_at,
    collectives_of,
    local,
    mesh_of,
    parameter,
    values,
    whole,
)
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByUnitNorm, ClipByValue
from tritonclip.rules import Rule

ORDERS = [2.0, 20.0, 100.0, math.inf]


def _without(parameters, rank: int, places: list[int]) -> list[torch.Tensor]:
    """Takes gradients away in one process; the full gradients that count."""
    wholes = []
    for i, one in enumerate(parameters):
        full = whole(one.grad).double()
        if i in places:
            # Only this process's piece is missing.
            there = torch.ones_like(one.grad)
            local(there).mul_(dist.get_rank() != rank)
            full = full[whole(there).bool()]
        wholes.append(full)
    if dist.get_rank() == rank:
        for i in places:
            parameters[i].grad = None
    return wholes


# The process without gradients, and the shards whose gradients it lacks.
MISSING = {"one": (1, [1]), "all": (0, [0, 1, 2])}


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("beside", ["shards", "plain"])
@pytest.mark.parametrize("p", ORDERS)
@in_processes(2, 4)
def test_clip_gradients_missing_in_one_process(p: float, beside: str, missing: str) -> None:
    mesh = mesh_of(-1)
    parameters = [parameter((8, 3), mesh, [Shard(0)], seed=i) for i in range(3)]
    if beside == "plain":
        # All that a process may have.
        parameters.append(parameter((5,), None, seed=3))
    wholes = _without(parameters, *MISSING[missing])
    norm, n = collectives_of(lambda: tritonclip.clip_(parameters, ClipByGlobalNorm(0.5, p)))
    assert n == collectives_at(p)
    assert_norm(norm, reference.total_norm(wholes, p))
    assert_same_everywhere(norm)


@pytest.mark.parametrize("p", ORDERS)
@in_processes(2)
def test_clip_each_gradient_missing_in_one_process(p: float) -> None:
    mesh = mesh_of(-1)
    parameters = [parameter((8, 3), mesh, [Shard(0)], seed=i) for i in range(3)]
    wholes = _without(parameters, 1, [1])
    norms = tritonclip.clip_(parameters, ClipByNorm(0.5, p))
    expected = reference.norms(wholes, p)
    if dist.get_rank() == 1:
        del expected[1]
    assert_norm(norms, expected)


@in_processes(2)
def test_clip_by_value_process_without_gradients() -> None:
    """It has none that are complex, which this rule would refuse."""
    parameters = [parameter((8, 3), mesh_of(-1), [Shard(0)], seed=i) for i in range(2)]
    wholes = _without(parameters, 1, [0, 1])
    tritonclip.clip_(parameters, ClipByValue(0.1))
    if dist.get_rank() == 0:
        for one, full in zip(parameters, wholes, strict=True):
            assert one.grad is not None
            own = one.grad.to_local().double()
            torch.testing.assert_close(
                own.flatten(), full.flatten().clamp(-0.1, 0.1), rtol=1e-6, atol=0
            )


@in_processes(2)
def test_clip_parameters_without_any_gradient() -> None:
    mesh = mesh_of(-1)
    parameters = [parameter((8, 3), mesh, [Shard(0)]), parameter((3,), mesh, [Replicate()])]
    for one in parameters:
        one.grad = None
    for p in (2.0, math.inf):
        assert tritonclip.clip_(parameters, ClipByGlobalNorm(1.0, p)) == 0
        norms = tritonclip.clip_(parameters, ClipByNorm(1.0, p), nonfinite="error")
        assert norms.shape == (0,)


@in_processes(2)
def test_clip_empty_list_within_a_group() -> None:
    """A stage without parameters."""
    one = torch.nn.Parameter(torch.zeros(2))
    one.grad = torch.tensor([3.0, 4.0])
    parameters = [one] if dist.get_rank() else []
    norm = tritonclip.clip_(parameters, 1.0, process_group=dist.group.WORLD)
    assert_norm(norm, 5.0)
    torch.testing.assert_close(one.grad, torch.tensor([0.6, 0.8]) if parameters else one.grad)


# Rows that each of two processes has of three parameters, and the dtypes of these. The last one is
# a vector, which is one unit over both.
EMPTY = {
    "one": ([(2, 2), (6, 0), (2, 3)], [torch.float32] * 3),
    "several": ([(0, 4), (6, 0), (0, 5)], [torch.float32] * 3),
    "one process": ([(4, 0), (6, 0), (5, 0)], [torch.float32] * 3),
    "all processes": ([(2, 2), (0, 0), (5, 0)], [torch.float32] * 3),
    "float64": ([(2, 2), (0, 0), (2, 3)], [torch.float32, torch.float64, torch.float32]),
    "float16 and float64": (
        [(4, 0), (0, 6), (5, 0)],
        [torch.float16, torch.float64, torch.float32],
    ),
}
WAYS = {
    "clip_": lambda params, rule, **group: tritonclip.clip_(params, rule, **group),
    "clip_grad_norm_": lambda params, rule, **group: tritonclip.clip_grad_norm_(
        params, rule.max_norm, rule.norm_type, **group
    ),
    "step": lambda params, rule, **group: stepped(params, rule, **group),
}


def stepped(params, rule, **group):
    optimizer = tritonclip.ClippedOptimizer(torch.optim.SGD(params, lr=0.1), rule, **group)
    optimizer.step()
    return optimizer.stats.last_norm


BY_GLOBAL_NORM: list[Rule] = [ClipByGlobalNorm(0.5, p) for p in (2.0, 20.0, math.inf)]
BY_EACH: list[Rule] = [ClipByNorm(0.5), ClipByNorm(0.5, 20.0), ClipByUnitNorm(0.05)]
CALLS = [
    (how, rule, way) for how in ("plain", "DTensors") for rule in BY_GLOBAL_NORM for way in WAYS
]
# Of plain lists no process knows which of the others' tensors belong to its own.
CALLS += [("DTensors", rule, way) for rule in BY_EACH for way in ("clip_", "step")]


@pytest.mark.parametrize(("how", "rule", "way"), CALLS)
@pytest.mark.parametrize("empty", EMPTY)
@in_processes(2)
def test_clip_empty_gradient_gives_the_norm_of_one_process(empty, how, rule, way) -> None:
    (rows, dtypes), clip = EMPTY[empty], WAYS[way]
    mesh, rank = mesh_of(-1), dist.get_rank()
    alone, own = [], []
    for i, (of_ranks, dtype) in enumerate(zip(rows, dtypes, strict=True)):
        shape = (sum(of_ranks), *(3, 2)[i:][:1])
        made = parameter(shape, None, seed=i, dtype=dtype)
        with torch.no_grad():
            made.copy_(values(shape, 9 + i, dtype))
        shard, grad = (one.split(of_ranks)[rank] for one in (made.detach(), made.grad))
        if how == "DTensors":
            shard, grad = (
                DTensor.from_local(
                    one, mesh, [Shard(0)], run_check=False, shape=made.shape, stride=made.stride()
                )
                for one in (shard, grad.clone())
            )
        alone.append(made)
        own.append(torch.nn.Parameter(shard.clone()))
        own[-1].grad = grad.clone()
    expected = clip(alone, rule)
    norm = clip(own, rule, **({"process_group": dist.group.WORLD} if how == "plain" else {}))
    torch.testing.assert_close(whole(norm), expected, rtol=1e-6, atol=0)
    for one, made, of_ranks in zip(own, alone, rows, strict=True):
        for found, right in ((one.grad, made.grad), (one.detach(), made.detach())):
            assert found is not None
            torch.testing.assert_close(local(found), right.split(of_ranks)[rank])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("beside", ["empty", "without gradient", "nothing"])
@in_processes(2)
def test_norm_has_the_dtype_of_the_parameters_here(beside, p, way) -> None:
    """Known without a wait: a process alone with float64 parameters has a float64 norm."""
    is_first = dist.get_rank() == 0
    dtype = torch.float64 if is_first == (beside == "nothing") else torch.float32
    # An optimizer has parameters.
    nothing = [torch.nn.Parameter(torch.zeros(2))] if way == "step" else []
    own = nothing if beside == "nothing" else [parameter((0,), None, dtype=dtype)]
    if beside == "without gradient":
        own[0].grad = None
    if is_first:
        own = [parameter((2,), None, dtype=dtype)]
        own[0].grad = torch.tensor([3.0, 4.0], dtype=dtype)
    norm = WAYS[way](own, ClipByGlobalNorm(1.0, p), process_group=dist.group.WORLD)
    assert_norm(norm, reference.total_norm([torch.tensor([3.0, 4.0])], p))
    assert norm.dtype == dtype


@in_processes(2)
def test_get_total_norm_of_distributed_tensors() -> None:
    mesh = mesh_of(-1)
    grads = [parameter((8, 3), mesh, [Shard(0)], seed=i).grad for i in range(3)]
    expected = reference.total_norm([whole(grad) for grad in grads])
    assert_norm(whole(tritonclip.get_total_norm(grads)), expected)
