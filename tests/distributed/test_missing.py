"""Processes that lack gradients, or parameters, take part all the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import Replicate, Shard

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
    whole,
)
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue

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


@in_processes(2)
def test_get_total_norm_of_distributed_tensors() -> None:
    mesh = mesh_of(-1)
    grads = [parameter((8, 3), mesh, [Shard(0)], seed=i).grad for i in range(3)]
    expected = reference.total_norm([whole(grad) for grad in grads])
    assert_norm(whole(tritonclip.get_total_norm(grads)), expected)
