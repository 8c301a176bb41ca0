"""`find_max_norm` in several processes: one decision on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tritonclip
from helpers.processes import in_processes


def batches_of(rank: int) -> list[torch.Tensor]:
    """Batches of one process, in which every tenth is far too large."""
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(8, 4, generator=generator) for _ in range(24)]
    for i in range(5, 24, 10):
        batches[i] *= 1000
    return batches


def loss(model: nn.Module, x: torch.Tensor) -> Any:
    return (model(x) - x[:, :1]).square().mean()


def find(wrap: Any, rank: int, **options: Any) -> tritonclip.advice.finder.Found:
    def make():
        model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
        return model, torch.optim.SGD(model.parameters(), 0.1)

    quiet = {"progress": lambda done, most: None, "steps": 24, "seeds": 2, "loss": loss}
    return tritonclip.find_max_norm(make, batches_of(rank), **{**quiet, **options})


def agree(found: Any) -> None:
    """Raises unless all processes have the same answer."""
    answers: list[Any] = [None] * dist.get_world_size()
    losses = [(one.clip, one.seeds, one.losses) for one in found.candidates]
    dist.all_gather_object(answers, (found.clip, losses, found.spent))
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
@in_processes(2)
def test_find_max_norm_decides_once(wrap):
    found = find(wrap, dist.get_rank())
    agree(found)
    assert found.max_norm is not None


@in_processes(2)
def test_find_max_norm_ends_a_trial_on_all_processes_at_once():
    """Also where they train apart, and one of them has a loss that is NaN."""

    def of(model: nn.Module, x: torch.Tensor) -> Any:
        value = loss(model, x)
        return value * float("nan") if dist.get_rank() and value > 1e4 else value

    found = find(lambda model: model, dist.get_rank(), loss=of)
    agree(found)
