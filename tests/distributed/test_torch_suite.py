"""torch's own tests of clipping under FSDP2, by behavior: test_clip_grad_norm_1d and _2d.

They compare with a replicated model, count all-reduces, and look at every gradient afterwards. Here
they run on gloo, with the import swapped.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import reference
import torch
from processes import in_processes
from spread import collectives_of, grads_of, local, mesh_of, whole
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tritonclip import clip_grad_norm_


def _check(model: nn.Module, reference_model: nn.Module, inputs: Any, p: float) -> None:
    """Ten steps, each clipped to a hundredth; the reference has the means of all processes."""
    optimizers = [torch.optim.Adam(one.parameters(), lr=1e-2) for one in (model, reference_model)]
    for ours, theirs in inputs:
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(ours).square().mean().backward()
        reference_model(theirs).square().mean().backward()
        expected = reference.total_norm(grads_of(reference_model.parameters()), p)
        max_norm = expected / 100
        total, n = collectives_of(partial(clip_grad_norm_, model.parameters(), max_norm, p))
        assert n == 1
        torch.testing.assert_close(float(total), expected, rtol=1e-5, atol=0)
        clip_grad_norm_(reference_model.parameters(), max_norm, p)
        for one, other in zip(
            grads_of(model.parameters()), grads_of(reference_model.parameters()), strict=True
        ):
            # Every piece is below the limit, and the whole is that of the reference.
            assert reference.norm(local(one), p) <= max_norm * (1 + 1e-5)
            torch.testing.assert_close(whole(one), other, rtol=1e-4, atol=1e-7)
        for optimizer in optimizers:
            optimizer.step()


def _mlps() -> nn.Sequential:
    torch.manual_seed(42)
    layers = [nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(3)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("p", [2, 1, math.inf])
@in_processes(2)
def test_clip_grad_norm_1d(p: float) -> None:
    model = _mlps()
    reference_model = copy.deepcopy(model)
    mesh = mesh_of(-1)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inputs = []
    for step in range(10):
        torch.manual_seed(step)
        batch = torch.randn(4, 16)
        inputs.append((batch.chunk(2)[dist.get_rank()], batch))
    _check(model, reference_model, inputs, p)


@pytest.mark.parametrize("p", [2, 1, 3, math.inf])
@in_processes(4)
def test_clip_grad_norm_2d(p: float) -> None:
    model = _mlps()
    reference_model = copy.deepcopy(model)
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    for layer in model:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    inputs = []
    for step in range(10):
        torch.manual_seed(step)
        batch = torch.randn(4, 16)
        inputs.append((batch.chunk(2)[mesh.get_local_rank("dp")], batch))
    _check(model, reference_model, inputs, p)
