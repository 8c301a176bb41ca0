"""A group of one process clips as no group does: scripts are tried out on one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import copies, grad_of, parameters

import tritonclip
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClippedOptimizer, FlatGradients

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)
POLICIES = ("propagate", "error", "skip", "zero")


@pytest.fixture
def group() -> Iterator[Any]:
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def both() -> tuple[list[Any], list[Any]]:
    """The same parameters twice, with gradients of norm 6."""
    grads = [torch.full((4,), 2.0), torch.full((5,), 2.0)]
    return parameters(copies(grads)), parameters(copies(grads))


@pytest.mark.parametrize("is_flat", [False, True], ids=["gradients", "flat"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scale", [None, 2.0])
def test_step_of_a_lone_process(group, policy, is_flat, scale):
    ours, others = both()
    for params, options in ((ours, {"process_group": group}), (others, {})):
        flat = None
        if is_flat:
            values = copies(map(grad_of, params))
            flat = FlatGradients(params)
            for param, value in zip(params, values, strict=True):
                grad_of(param).copy_(value)
        optimizer = ClippedOptimizer(
            torch.optim.SGD(params, lr=0.1), 1.0, nonfinite=policy, flat=flat, **options
        )
        if scale is None:
            optimizer.step()
        else:
            scaler = tritonclip.GradScaler("cpu", init_scale=scale)
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
        assert optimizer.stats.last_norm == pytest.approx(6.0 / (scale or 1.0))
    for one, other in zip(ours, others, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rule", [ClipByGlobalNorm(1.0), ClipByNorm(1.0)])
def test_no_gradient_in_a_lone_process(group, rule):
    params = [torch.nn.Parameter(torch.ones(3))]
    options: Any = {} if rule.per_gradient else {"process_group": group}
    norm = tritonclip.clip_(params, rule, **options)
    assert norm.tolist() == ([] if rule.per_gradient else 0.0)


def test_group_without_gradients_in_a_lone_process(group):
    ours, _ = both()
    groups: list[Any] = [
        {"params": ours},
        {"params": [torch.nn.Parameter(torch.ones(3))], "clip": 1.0},
    ]
    optimizer = ClippedOptimizer(
        torch.optim.SGD(groups, lr=0.1), math.inf, nonfinite="error", process_group=group
    )
    optimizer.step()
    assert optimizer.stats.last_norm == pytest.approx(6.0)
