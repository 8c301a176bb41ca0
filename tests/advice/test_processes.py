"""`find_max_norm` in several processes: one decision on all of them."""

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from advice.searches import draw, find, loss, training
from helpers.processes import in_processes


def find_on_all(wrap: Any, loss: Any = loss) -> Any:
    """The answer for batches of each process; raises unless all have the same."""

    def make():
        model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
        return model, torch.optim.SGD(model.parameters(), 0.1)

    train = training(make, draw(24, seed=dist.get_rank()), loss)
    found = find(train, progress=lambda done, most: None, steps=24, seeds=2)
    answers: list[Any] = [None] * dist.get_world_size()
    losses = [(one.clip, one.seeds, one.losses) for one in found.candidates]
    dist.all_gather_object(answers, (found.clip, losses, found.spent))
    assert all(answer == answers[0] for answer in answers)
    return found


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
@in_processes(2)
def test_find_max_norm_decides_once(wrap):
    assert find_on_all(wrap).max_norm is not None


@in_processes(2)
def test_find_max_norm_ends_a_trial_on_all_processes_at_once():
    """Also where they train apart, and one of them has a loss that is NaN."""

    def of(model: nn.Module, x: torch.Tensor) -> Any:
        value = loss(model, x)
        return value * float("nan") if dist.get_rank() and value > 1e4 else value

    find_on_all(lambda model: model, of)
