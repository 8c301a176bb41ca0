"""`accumulate_` in several processes: each clips its own micro-batches, or all clip one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import tritonclip
from helpers import reference
from helpers.processes import in_processes
from helpers.spread import assert_same_everywhere, mesh_of, parameter, values, whole
from tritonclip import accumulate_

LIMIT, MICRO_BATCHES = 0.3, 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    loss: Tensor = model(values((8, 4), 10 * rank + step)).square().mean()
    return loss


def expected_sums(batches: Sequence[Sequence[tuple[int, int]]]) -> list[Tensor]:
    """In float64: the mean gradient of each list of micro-batches, clipped, and their sum."""
    model = network().double()
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for group in batches:
        model.zero_grad()
        for rank, step in group:
            batch = values((8, 4), 10 * rank + step).double()
            (model(batch).square().mean() / len(group)).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        factor = min(1.0, LIMIT / (reference.total_norm(grads) + 1e-6))
        for own, grad in zip(sums, grads, strict=True):
            own += factor * grad
    return sums


def assert_grads(model: nn.Module, expected: Sequence[Tensor]) -> None:
    for param, own in zip(model.parameters(), expected, strict=True):
        assert param.grad is not None
        found = whole(param.grad)
        assert_same_everywhere(found)
        torch.testing.assert_close(found.double(), own, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("as_views", [False, True])
@in_processes(2)
def test_ddp_clips_the_micro_batches_of_each_process(as_views: bool) -> None:
    """The sums are averaged once, as the docs write it."""
    model = DistributedDataParallel(network(), gradient_as_bucket_view=as_views)
    rank, n = dist.get_rank(), dist.get_world_size()
    for _ in range(2):
        model.zero_grad()
        for step in range(MICRO_BATCHES):
            with model.no_sync(), accumulate_(model, LIMIT):
                loss_of(model, rank, step).backward()
        param: Any
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= n
        own = [[(r, step)] for r in range(n) for step in range(MICRO_BATCHES)]
        assert_grads(model, [total / n for total in expected_sums(own)])


@in_processes(2)
def test_ddp_may_average_and_clip_every_micro_batch() -> None:
    model = DistributedDataParallel(network())
    rank, n = dist.get_rank(), dist.get_world_size()
    for _ in range(2):
        model.zero_grad()
        for step in range(MICRO_BATCHES):
            with accumulate_(model.module, LIMIT):
                loss_of(model, rank, step).backward()
        every = [[(r, step) for r in range(n)] for step in range(MICRO_BATCHES)]
        assert_grads(model, expected_sums(every))


@in_processes(2)
def test_ddp_that_would_average_the_last_micro_batch_alone_is_refused() -> None:
    model = DistributedDataParallel(network())
    with pytest.raises(RuntimeError, match=r"expected `with model.no_sync\(\), accumulate_"):
        accumulate_(model, LIMIT).__enter__()
    inside = nn.Sequential(model)
    with pytest.raises(RuntimeError, match=r"expected `with model.0.no_sync\(\), accumulate_"):
        accumulate_(inside, LIMIT).__enter__()
    loss_of(model, dist.get_rank(), 0).backward()


@in_processes(2)
def test_fsdp_clips_every_micro_batch_by_the_norm_of_all_shards() -> None:
    model: Any = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(MICRO_BATCHES):
        with accumulate_(model, LIMIT) as micro_batch:
            loss_of(model, rank, step).backward()
        assert micro_batch.norm is not None
        assert_same_everywhere(micro_batch.norm)
    every = [[(r, step) for r in range(n)] for step in range(MICRO_BATCHES)]
    assert_grads(model, expected_sums(every))
    # The optimizer takes them as they are.
    torch.optim.AdamW(model.parameters()).step()


@in_processes(2)
def test_fsdp_without_gradient_sync_is_refused() -> None:
    model: Any = network()
    fully_shard(model)
    model.set_requires_gradient_sync(False)
    with (
        pytest.raises(RuntimeError, match=r"without set_requires_gradient_sync\(False\)"),
        accumulate_(model, LIMIT),
    ):
        loss_of(model, dist.get_rank(), 0).backward()


@in_processes(2)
def test_stages_share_the_norm_of_a_micro_batch() -> None:
    """One shard of each DTensor, and a plain tensor on each of two stages."""
    rank = dist.get_rank()
    stage: Any = nn.Parameter(torch.zeros(5))
    scale, sums = 4.0, torch.zeros(5, dtype=torch.float64)
    for step in range(2):
        with accumulate_(
            [stage], LIMIT, grad_scale=scale, process_group=dist.group.WORLD
        ) as micro_batch:
            stage.grad = values((5,), 10 * rank + step) * scale
        total = reference.total_norm([values((5,), 10 * r + step) for r in range(2)])
        assert micro_batch.norm is not None
        torch.testing.assert_close(float(micro_batch.norm), total, rtol=1e-6, atol=0)
        sums += values((5,), 10 * rank + step).double() * scale * LIMIT / (total + 1e-6)
    torch.testing.assert_close(stage.grad.double(), sums, rtol=1e-5, atol=1e-7)


@in_processes(2)
def test_nonfinite_gradient_of_one_process_leaves_the_micro_batch_out_on_all() -> None:
    weight, bad = (parameter((4, 3), mesh_of(-1), [Shard(0)], seed=seed) for seed in range(2))
    kept = whole(weight.grad)
    if dist.get_rank() == 1:
        bad.grad.to_local()[0, 0] = torch.nan
    with tritonclip.accumulate_([weight], LIMIT, nonfinite="zero"):
        weight.grad = bad.grad.clone()
    assert torch.equal(whole(weight.grad), kept)
    named = pytest.raises(RuntimeError, match=r"parameters\[0\] \(on rank 1\)")
    with named, tritonclip.accumulate_([weight], LIMIT, nonfinite="error"):
        weight.grad = bad.grad
    assert torch.equal(whole(weight.grad), kept)


@in_processes(2)
def test_sum_that_one_process_cannot_write_is_refused_on_all() -> None:
    stage: Any = nn.Parameter(torch.zeros(3))
    sums = torch.zeros(3) if dist.get_rank() == 0 else torch.zeros(()).expand(3)
    stage.grad = sums
    refused = pytest.raises(ValueError, match=r"\.grad of parameters\[0\] has elements that share")
    with refused, accumulate_([stage], LIMIT, process_group=dist.group.WORLD):
        stage.grad = torch.ones(3)
    assert stage.grad is sums
    assert torch.equal(sums, torch.zeros(3))
