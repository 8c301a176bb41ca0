"""How the numbers travel: on a device of the group, and by how many collectives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

import tritonclip
from helpers.cases import NoHostRead
from helpers.processes import in_processes
from helpers.refusing import as_on_accelerator
from helpers.serving import decided_on_device
from helpers.spread import (
    check_clip,
    collectives_at,
    collectives_of,
    mesh_of,
    parameter,
    unchanged,
    with_partial,
)
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByUnitNorm, ClipByValue, ClippedOptimizer


class _SentError(Exception):
    pass


@pytest.mark.parametrize(
    ("config", "device"),
    [("meta:nccl,xpu:xccl", "meta"), ("meta:nccl,cpu:gloo", "cpu"), ("gloo", "cpu")],
    ids=["offload", "both", "one"],
)
@pytest.mark.parametrize("p", [2.0, 8.0, math.inf])
@in_processes(2)
def test_clip_sends_numbers_on_a_device_of_the_group(p: float, config: str, device: str) -> None:
    """With CPU offload gradients lie on the CPU, for which NCCL has no collective."""
    parameters = [parameter((8, 3), mesh_of(-1), [Shard(0)])]

    def send(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        # Nothing but its device can be seen of a tensor of another kind here.
        assert tensor.device.type == device
        raise _SentError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group=None: config)
        patch.setattr(dist, "all_reduce", send)
        with pytest.raises(_SentError):
            tritonclip.clip_(parameters, ClipByGlobalNorm(1.0, p))
    # The device was found for one domain; another mesh has its own.
    tritonclip.clip_([parameter((8, 3), mesh_of(-1), [Shard(0)])], 1.0)


RULES = [ClipByGlobalNorm(0.1, p) for p in (2.0, 100.0, math.inf)]


@pytest.mark.parametrize("policy", ["propagate", "zero"])
@pytest.mark.parametrize("rule", [*RULES, ClipByNorm(0.1), ClipByUnitNorm(0.01), ClipByValue(0.1)])
@in_processes(2)
def test_clip_waits_for_no_device(rule: Any, policy: Any) -> None:
    """As on an accelerator: from the norm to the writing nothing is read on the host."""
    mesh = mesh_of(-1)
    parameters = [
        parameter((8, 3), mesh, [Shard(0)], seed=1),
        parameter((4,), mesh, [Replicate()], seed=2),
        parameter((5, 2), None, seed=3),
    ]
    if not (rule.per_unit or rule.clamps):
        parameters.append(with_partial(parameter((6,), mesh, [Replicate()]), [Partial()]))
    if rule.clamps:
        # Rounded on the host, once.
        rule.bounds[torch.float32]
    with decided_on_device(), as_on_accelerator(), tritonclip.use_backend("torch"), NoHostRead():
        for _ in range(2):
            tritonclip.clip_(parameters, rule, nonfinite=policy)


@pytest.mark.parametrize("rule", [*RULES, ClipByNorm(0.1)])
@in_processes(2)
def test_clip_is_right_where_reading_a_number_would_wait(rule: Any) -> None:
    parameters = [
        parameter((8, 3), mesh_of(-1), [Shard(0)], seed=1),
        parameter((4,), mesh_of(-1), [Replicate()], seed=2),
    ]
    with as_on_accelerator():
        check_clip(parameters, rule, collectives=collectives_at(rule.norm_type))


@in_processes(2)
def test_clip_by_default_sends_one_number_and_a_mark() -> None:
    """The mark tells that a process refuses its gradients."""
    parameters = [parameter((8, 3), mesh_of(-1), [Shard(0)], seed=i) for i in range(3)]
    all_reduce, sizes = dist.all_reduce, []

    def send(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append((tensor.numel(), tensor.dtype))
        return all_reduce(tensor, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", send)
        tritonclip.clip_(parameters, 1.0)
        tritonclip.clip_(parameters, tritonclip.ClipByNorm(1.0))
    assert sizes == [(2, torch.float64), (4, torch.float64)]


@in_processes(2)
def test_clip_bumps_versions() -> None:
    one = parameter((8, 3), mesh_of(-1), [Shard(0)])
    before = one.grad._version, one.grad._local_tensor._version
    tritonclip.clip_([one], math.inf)
    assert before == (one.grad._version, one.grad._local_tensor._version)
    tritonclip.clip_([one], 0.1)
    assert one.grad._version > before[0]
    assert one.grad._local_tensor._version > before[1]
    before = one.grad._version, one.grad._local_tensor._version
    # Nothing to clip, but a loss scale to divide by.
    tritonclip.clip_([one], math.inf, grad_scale=2.0)
    assert one.grad._version > before[0]
    assert one.grad._local_tensor._version > before[1]


@in_processes(2)
def test_clipped_optimizer_rules_share_a_domain() -> None:
    """A group whose own parameters lie on a part of the mesh, and one of plain tensors."""
    mesh = mesh_of(1, -1, names=("dp", "tp"))
    whole_mesh = parameter((8, 3), mesh, [Replicate(), Shard(0)], seed=1)
    part = parameter((8,), mesh["tp"], [Shard(0)], seed=2)
    plain = parameter((5,), None, seed=3)
    left_out = parameter((5,), None, seed=4)
    left_out.need_clip = False
    if dist.get_rank():
        plain.grad[0] = math.nan
        left_out.grad = None
    groups: Any = [
        {"params": [whole_mesh, left_out]},
        {"params": [part], "clip": 0.5},
        {"params": [plain], "clip": ClipByGlobalNorm(0.5)},
    ]
    optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 1.0, nonfinite="skip")
    with unchanged((whole_mesh, part, plain)):
        _, n = collectives_of(optimizer.step)
    # A sum for each rule, a maximum for the gradient that has none.
    assert n == 4
    assert optimizer.stats.summary()["skipped_steps"] == 1
