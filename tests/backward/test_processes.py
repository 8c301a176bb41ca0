"""Clipping inside backward over several processes: before DDP's average, after FSDP2's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import tritonclip
from helpers.cases import normal
from helpers.processes import in_processes
from tritonclip import ClipByNorm, ClipByValue, clip_on_backward_

RULES = [
    pytest.param(ClipByNorm(0.05), id="by-norm"),
    pytest.param(ClipByValue(0.01), id="by-value"),
]


def model_of() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def batch_of(rank: int) -> torch.Tensor:
    """Gradients of the second process are larger."""
    return normal((3, 5), seed=rank) * (1 + 3 * rank)


def grads_on_each(world: int) -> list[list[Any]]:
    """The gradients that the batches of all processes give, computed here."""
    grads = []
    for rank in range(world):
        model = model_of()
        model(batch_of(rank)).square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    return grads


def clipped(grads: list[Any], rule: Any) -> list[Any]:
    parameters = [torch.nn.Parameter(grad) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    tritonclip.clip_(parameters, rule)
    return [p.grad for p in parameters]


def average(lists: list[list[Any]]) -> list[Any]:
    return [torch.stack(grads).mean(0) for grads in zip(*lists, strict=True)]


@pytest.mark.parametrize("views", [False, True], ids=["buckets", "bucket-views"])
@pytest.mark.parametrize("rule", RULES)
@in_processes(2)
def test_ddp_averages_what_each_process_has_clipped(rule, views):
    model = model_of()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
    clip_on_backward_(model.parameters(), rule)
    for _ in range(2):
        ddp.zero_grad(set_to_none=not views)
        ddp(batch_of(dist.get_rank())).square().mean().backward()
    expected = average([clipped(grads, rule) for grads in grads_on_each(2)])
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


@pytest.mark.parametrize("rule", RULES)
@in_processes(2)
def test_fully_sharded_gradients_are_clipped_after_their_average(rule):
    model = model_of()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    clip_on_backward_(model, rule)
    model(batch_of(dist.get_rank())).square().mean().backward()
    expected = clipped(average(grads_on_each(2)), rule)
    torch.testing.assert_close([p.grad.full_tensor() for p in model.parameters()], expected)


@in_processes(2)
def test_ddp_is_warned_of():
    ddp = DistributedDataParallel(model_of())
    for module in (ddp, torch.nn.Sequential(ddp)):
        with pytest.warns(UserWarning, match="averages gradients after they have arrived"):
            clip_on_backward_(module, ClipByNorm(1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip_on_backward_(ddp.parameters(), ClipByNorm(1.0))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "original"])
@in_processes(2)
def test_fsdp1_is_refused(use_orig_params):
    """It would call no hook of original parameters."""
    module = FullyShardedDataParallel(
        model_of(), device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )
    with pytest.raises(TypeError, match="those of FullyShardedDataParallel, which accumulates"):
        clip_on_backward_(module, ClipByNorm(1.0))
