"""FullyShardedDataParallel: flat parameters are plain tensors, of which the group is to be said."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from cases import assert_norm
from processes import in_processes
from spread import assert_same_everywhere, values
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import tritonclip
from tritonclip import ClippedOptimizer


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def _backward(model: nn.Module, part: int | None = None) -> None:
    batch = values((8, 6), 1)
    if part is not None:
        batch = batch.chunk(dist.get_world_size())[part]
    model(batch).square().mean().backward()


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@in_processes(2)
def test_clip_flat_parameters_by_group(strategy: Any, original: bool) -> None:
    alone = _model()
    _backward(alone)
    expected = reference.total_norm(
        [one.grad for one in alone.parameters() if one.grad is not None]
    )
    sharded = FullyShardedDataParallel(
        _model(),
        sharding_strategy=strategy,
        use_orig_params=original,
        device_id=torch.device("cpu"),
    )
    _backward(sharded, dist.get_rank())
    group = sharded.process_group
    with pytest.raises(TypeError, match="expected process_group="):
        tritonclip.clip_(sharded, 1.0)
    norm = tritonclip.clip_(sharded, expected / 2, process_group=group)
    assert_norm(norm, expected)
    assert_same_everywhere(norm)
    clipped = tritonclip.clip_(sharded, float("inf"), process_group=group)
    assert float(clipped) == pytest.approx(expected / 2, rel=1e-5)


@in_processes(2)
def test_clip_copied_flat_parameters_by_group_and_copies() -> None:
    """NO_SHARD keeps all of them everywhere."""
    alone = _model()
    _backward(alone)
    expected = reference.total_norm(
        [one.grad for one in alone.parameters() if one.grad is not None]
    )
    copied = FullyShardedDataParallel(
        _model(), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
    )
    _backward(copied, dist.get_rank())
    world = dist.get_world_size()
    norm = tritonclip.clip_(
        copied, 1.0, process_group=dist.group.WORLD, copies=lambda parameter: world
    )
    assert_norm(norm, expected)


@in_processes(2)
def test_clipped_optimizer_of_flat_parameters_trains_as_one_process() -> None:
    alone = _model()
    sharded = FullyShardedDataParallel(_model(), device_id=torch.device("cpu"))
    optimizers = [
        ClippedOptimizer(torch.optim.SGD(alone.parameters(), lr=0.1), 0.05),
        ClippedOptimizer(
            torch.optim.SGD(sharded.parameters(), lr=0.1),
            0.05,
            process_group=sharded.process_group,
        ),
    ]
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        _backward(alone)
        _backward(sharded, dist.get_rank())
        for optimizer in optimizers:
            optimizer.step()
    ours, theirs = (optimizer.stats.summary() for optimizer in optimizers)
    assert ours["clipped_steps"] == 5
    assert theirs == pytest.approx(ours, rel=1e-5)
    with FullyShardedDataParallel.summon_full_params(sharded):
        for one, other in zip(sharded.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.flatten(), other.flatten(), rtol=1e-5, atol=1e-6)
