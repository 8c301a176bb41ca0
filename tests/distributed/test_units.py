"""Clipping by unit on meshes: rows are whole, and every process agrees."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import tritonclip
from helpers import spread
from helpers.cases import assert_norm
from helpers.processes import in_processes
from helpers.spread import (
    assert_same_everywhere,
    collectives_of,
    local,
    loss_of,
    mesh_of,
    sharded_network,
    unchanged,
    weights_of,
    whole,
    with_partial,
)
from helpers.units import assert_clipped, expected
from tritonclip import ClipByUnitNorm, ClippedOptimizer

RULE = ClipByUnitNorm(0.05)


def parameter(
    shape: Sequence[int],
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] = (),
    seed: int = 0,
) -> Any:
    """A parameter with values and a gradient, placed alike; plain without a mesh."""
    made, other = (spread.parameter(shape, mesh, placements, seed=n) for n in (seed + 100, seed))
    made.data.copy_(other.grad)
    return made


def check(parameters: Sequence[Any]) -> None:
    """Clips, and compares with the formula on whole gradients and weights."""
    # Of a replicated one, the whole is the local tensor.
    grads = [whole(one.grad).clone() for one in parameters]
    weights = [whole(one.detach()) for one in parameters]
    norms, count = collectives_of(lambda: tritonclip.clip_(parameters, RULE))
    assert count == 1
    assert_norm(norms, [float(grad.norm(dtype=torch.float64)) for grad in grads])
    assert_same_everywhere(norms)
    for one, grad, weight in zip(parameters, grads, weights, strict=True):
        assert_clipped(whole(one.grad), expected(grad, weight, RULE))


@in_processes(2, 4)
def test_clip_by_unit_of_shards() -> None:
    mesh = mesh_of(-1)
    parameters = [
        parameter((8, 3), mesh, [Shard(0)], 1),
        parameter((7, 5, 2), mesh, [Shard(0)], 2),
        parameter((9,), mesh, [Shard(0)], 3),
        parameter((1, 3), mesh, [Shard(0)], 4),
        parameter((3,), mesh, [Shard(0)], 5),
        parameter((4, 4), mesh, [Replicate()], 6),
        parameter((6,), mesh, [Replicate()], 7),
        parameter((5, 3), None, (), 8),
        parameter((5,), None, (), 9),
    ]
    check(parameters)


@in_processes(2)
def test_clip_by_unit_of_shards_passes_verification() -> None:
    shapes, places = ((8, 3), (9,), (6,)), (Shard(0), Shard(0), Replicate())
    mesh = mesh_of(-1)
    parameters = [parameter(s, mesh, [p], 1) for s, p in zip(shapes, places, strict=True)]
    with tritonclip.verify():
        tritonclip.clip_(parameters, RULE)
        tritonclip.clip_(parameters, ClipByUnitNorm(0.001), grad_scale=2.0)


@in_processes(4)
def test_clip_by_unit_on_two_dimensions() -> None:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    check(
        [
            parameter((8, 4), mesh, [Shard(0), Replicate()], 1),
            parameter((8, 4), mesh, [_StridedShard(0, split_factor=2), Shard(0)], 2),
            parameter((6,), mesh, [Shard(0), Replicate()], 3),
            parameter((8,), mesh, [_StridedShard(0, split_factor=2), Shard(0)], 4),
        ]
    )


@pytest.mark.parametrize("rank", [0, 1])
@in_processes(2, 4)
def test_clip_by_unit_of_gradients_missing_in_one_process(rank: int) -> None:
    """A shard without gradient counts as zeros, beside all weights."""
    mesh = mesh_of(-1)
    parameters = [parameter(shape, mesh, [Shard(0)], 1) for shape in ((9,), (8, 3), (6,))]
    missing = parameters[:2]
    for one in missing:
        if dist.get_rank() == rank:
            local(one.grad).zero_()
    grads = [whole(one.grad).clone() for one in parameters]
    weights = [whole(one.detach()) for one in parameters]
    if dist.get_rank() == rank:
        for one in missing:
            one.grad = None
    _, count = collectives_of(lambda: tritonclip.clip_(parameters, RULE))
    assert count == 1
    for one in missing:
        if dist.get_rank() == rank:
            one.grad = torch.zeros_like(one)
    for one, grad, weight in zip(parameters, grads, weights, strict=True):
        assert_clipped(whole(one.grad), expected(grad, weight, RULE))


@pytest.mark.parametrize("placement", [Shard(1), Partial()], ids=["shard-1", "partial"])
@in_processes(2)
def test_clip_by_unit_refuses_split_rows(placement: Placement) -> None:
    mesh = mesh_of(-1)
    kept = parameter((8, 4), mesh, [Shard(0)], 1)
    if placement.is_partial():
        split = with_partial(parameter((8, 4), mesh, [Replicate()], 2), [placement])
    else:
        split = parameter((8, 4), mesh, [placement], 2)
    message = r"parameters\[1\] has the placements.*Shard\(0\), as fully"
    with unchanged([kept.grad]), pytest.raises(TypeError, match=message):
        tritonclip.clip_([kept, split], RULE)


@in_processes(2)
def test_clip_by_unit_refuses_plain_pieces_of_a_group() -> None:
    with pytest.raises(ValueError, match="ClipByUnitNorm measures each gradient"):
        tritonclip.clip_([parameter((4, 4))], RULE, process_group=dist.group.WORLD)


@pytest.mark.parametrize("policy", ["propagate", "zero", "error"])
@in_processes(2)
def test_clip_by_unit_agrees_on_nan_of_one_process(policy: Any) -> None:
    mesh = mesh_of(-1)
    parameters = [parameter((8, 3), mesh, [Shard(0)], 1), parameter((9,), mesh, [Shard(0)], 2)]
    if dist.get_rank() == 1:
        local(parameters[0].grad)[0, 0] = torch.nan
    if policy == "error":
        with pytest.raises(RuntimeError, match=r"parameters\[0\] \(on rank"):
            tritonclip.clip_(parameters, RULE, nonfinite=policy)
        return
    norms = tritonclip.clip_(parameters, RULE, nonfinite=policy)
    assert norms.isnan().tolist() == [True, False]
    if policy == "zero":
        assert not any(local(one.grad).any() for one in parameters)
    else:
        # The other rows of the gradient are whole, and finite.
        assert whole(parameters[0].grad).isnan().all(1).sum() == 1
        assert whole(parameters[1].grad).isfinite().all()


@in_processes(2)
def test_clipped_optimizer_by_unit_over_fsdp_trains_as_one_process() -> None:
    def train(*, sharded: bool) -> list[torch.Tensor]:
        model: Any = sharded_network(sharded=sharded)
        groups = [
            {"params": model[:2].parameters()},
            {"params": model[2:].parameters(), "clip": None},
        ]
        optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=0.5), ClipByUnitNorm(0.02))
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step, sharded=sharded).backward()
            optimizer.step()
        assert optimizer.stats.summary()["clipped_steps"] == 5
        return weights_of(model)

    torch.testing.assert_close(train(sharded=True), train(sharded=False), rtol=1e-5, atol=1e-6)
