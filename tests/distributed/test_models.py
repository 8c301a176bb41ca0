"""Real models under every parallelism of torch: the norm, and training as in one process."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.optim import SGD

import tritonclip
from helpers import reference
from helpers.cases import assert_norm
from helpers.processes import in_processes
from helpers.spread import (
    assert_same_everywhere,
    collectives_of,
    grads_of,
    local,
    mesh_of,
    values,
    weights_of,
    whole,
)
from helpers.transformer import Transformer, loss_of, parallelize, shard, tokens
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClippedOptimizer

ORDERS = (2.0, 1.0, 3.0, math.inf)
STEPS = 4


# The collectives of a clip: a second one sums the parts of Partial gradients.
LAYOUTS = {"fsdp": 1, "hsdp": 1, "tp": 1, "sp": 2, "tp-fsdp": 1, "sp-fsdp": 1}


def _distributed(layout: str) -> tuple[nn.Module, int, int]:
    """The model, this process's part of a batch, and of how many."""
    model, rank, world = Transformer(), dist.get_rank(), dist.get_world_size()
    if layout == "fsdp":
        return shard(model, mesh_of(-1)), rank, world
    if layout == "hsdp":
        return shard(model, mesh_of(2, -1, names=("replicate", "shard"))), rank, world
    by_sequence = layout.startswith("sp")
    if "-" not in layout:
        return parallelize(model, mesh_of(-1), sequence=by_sequence), 0, 1
    mesh = mesh_of(2, -1, names=("dp", "tp"))
    model = parallelize(model, mesh["tp"], sequence=by_sequence)
    return shard(model, mesh["dp"]), mesh.get_local_rank("dp"), 2


def _backward(model: nn.Module, step: int, part: int, of: int) -> None:
    loss_of(model, tokens(step).chunk(of)[part]).backward()


@pytest.mark.parametrize("layout", LAYOUTS)
@in_processes(4)
def test_clip_model(layout: str) -> None:
    model, part, of = _distributed(layout)
    _backward(model, 0, part, of)
    grads = grads_of(model.parameters())
    wholes = [whole(grad) for grad in grads]
    before = [local(grad).clone() for grad in grads]
    for p in ORDERS:
        expected = reference.total_norm(wholes, p)
        each = tritonclip.clip_(model, ClipByNorm(math.inf, p))
        assert_norm(each, reference.norms(wholes, p))
        rule = ClipByGlobalNorm(expected / 2, p)
        norm, count = collectives_of(partial(tritonclip.clip_, model, rule))
        assert_norm(norm, expected)
        assert_same_everywhere(norm)
        assert count == LAYOUTS[layout]
        for grad, right, old in zip(
            grads, reference.clipped(before, rule, norm), before, strict=True
        ):
            torch.testing.assert_close(local(grad), right, rtol=0, atol=0)
            local(grad).copy_(old)


@pytest.mark.parametrize("layout", LAYOUTS)
@in_processes(4)
def test_clipped_optimizer_trains_as_one_process(layout: str) -> None:
    model, part, of = _distributed(layout)
    alone = Transformer()
    wrappers = [
        ClippedOptimizer(SGD(m.parameters(), lr=0.1), 0.3, nonfinite="skip") for m in (model, alone)
    ]
    for step in range(STEPS):
        for one, wrapper, (i, n) in zip(
            (model, alone), wrappers, ((part, of), (0, 1)), strict=True
        ):
            wrapper.zero_grad()
            _backward(one, step, i, n)
            wrapper.step()
    # float64: a step's rounding, 2**-53, grows in 4 steps, by much less than 1e6.
    torch.testing.assert_close(weights_of(model), weights_of(alone), rtol=1e-8, atol=1e-10)
    assert wrappers[0].stats.clipped_steps > STEPS / 2
    assert wrappers[0].stats.summary() == pytest.approx(wrappers[1].stats.summary(), rel=1e-6)
    assert_same_everywhere(wrappers[0].stats.last_norm)


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
    torch.testing.assert_close(weights_of(part), weights_of(alone[stage]), rtol=1e-8, atol=1e-10)
    assert ours.stats.summary() == pytest.approx(theirs.stats.summary(), rel=1e-6)
    assert int(ours.stats.skipped_steps) == (policy == "skip")
    assert int(ours.stats.clipped_steps) > 5
    assert_same_everywhere(ours.stats.last_norm)
