"""A pipeline of torch's own schedule: its stages train to the weights of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from helpers.processes import in_processes
from helpers.spread import assert_same_everywhere, values
from tritonclip import ClippedOptimizer

LIMIT = 0.2


def _layers() -> list[nn.Sequential]:
    """A model in two parts, the same in every process."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)).double(),
        nn.Sequential(nn.Tanh(), nn.Linear(8, 3)).double(),
    ]


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def _optimizer(parameters: Any, policy: Any, **options: Any) -> ClippedOptimizer:
    inner = torch.optim.AdamW(parameters, lr=0.05)
    return ClippedOptimizer(inner, LIMIT, nonfinite=policy, **options)


@pytest.mark.parametrize("policy", ["propagate", "error", "skip"])
@in_processes(2)
def test_pipeline_trains_as_one_process(policy: Any) -> None:
    stage, world = dist.get_rank(), dist.group.WORLD
    part, alone = _layers()[stage], nn.Sequential(*_layers())
    schedule: Any = ScheduleGPipe(
        PipelineStage(part, stage, 2, torch.device("cpu")), n_microbatches=2, loss_fn=_loss
    )
    ours = _optimizer(part.parameters(), policy, process_group=world)
    theirs = _optimizer(alone.parameters(), policy)
    for step in range(10):
        batch = values((8, 6), step, torch.float64)
        target = values((8, 3), 100 + step, torch.float64)
        ours.zero_grad()
        theirs.zero_grad()
        schedule.step(*((batch,) if stage == 0 else ()), target=target if stage else None)
        _loss(alone(batch), target).backward()
        if policy == "skip" and step == 4:
            # In the first stage only.
            for model in (part, alone[0]) if stage == 0 else (alone[0],):
                next(model.parameters()).grad[0, 0] = torch.nan  # type: ignore[index]
        ours.step()
        theirs.step()
    for one, right in zip(part.parameters(), alone[stage].parameters(), strict=True):
        torch.testing.assert_close(one, right, rtol=1e-8, atol=1e-10)
    assert ours.stats.summary() == pytest.approx(theirs.stats.summary(), rel=1e-6)
    assert int(ours.stats.skipped_steps) == (policy == "skip")
    assert int(ours.stats.clipped_steps) > 5
    assert_same_everywhere(ours.stats.last_norm)
