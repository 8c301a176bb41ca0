"""Singular values over processes: a shard is never clipped by its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import tritonclip
from helpers.processes import in_processes
from helpers.spread import local, loss_of, mesh_of, sharded_network
from tritonclip import ClipBySpectralNorm, ClippedOptimizer

RULE = ClipBySpectralNorm(0.01)


@pytest.mark.parametrize("call", ["clip", "step", "group"])
@in_processes(2)
def test_clip_by_spectral_norm_refuses_shards(call: str) -> None:
    model: Any = sharded_network(sharded=True)
    plain = nn.Parameter(torch.ones(3, 3))
    plain.grad = torch.ones(3, 3)
    loss_of(model, 0, sharded=True).backward()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    # A rule for plain parameters alone, of an optimizer with shards.
    groups = [{"params": model.parameters()}, {"params": [plain], "clip": RULE}]
    optimizers = {
        "step": ClippedOptimizer(sgd, RULE),
        "group": ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 1.0),
    }
    calls: dict[str, Callable[[], object]] = {
        "clip": lambda: tritonclip.clip_(model, RULE),
        **{name: optimizer.step for name, optimizer in optimizers.items()},
    }
    before = [local(one.grad).clone() for one in model.parameters()]
    with pytest.raises(TypeError, match=r"takes whole matrices.*full_tensor"):
        calls[call]()
    for one, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(local(one.grad), grad)
    assert torch.equal(plain.grad, torch.ones(3, 3))


@in_processes(2)
def test_clip_by_spectral_norm_refuses_replicas_and_pieces() -> None:
    one = nn.Parameter(DTensor.from_local(torch.ones(3, 3), mesh_of(-1), [Replicate()]))
    one.grad = one.detach().clone()
    with pytest.raises(TypeError, match="takes whole matrices"):
        tritonclip.clip_([one], RULE)
    piece = nn.Parameter(torch.ones(3, 3))
    piece.grad = torch.ones(3, 3)
    with pytest.raises(ValueError, match="which tensors of its processes are pieces"):
        tritonclip.clip_([piece], RULE, process_group=dist.group.WORLD)
