"""FullyShardedDataParallel: shards have no norm of the whole, and whole parameters are clipped."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from cases import assert_bits, copies, grad_of, parameters
from torch.multiprocessing.spawn import spawn

import tritonclip
from tritonclip import ClipByNorm, ClipByValue, ClippedOptimizer, FlatGradients

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]

FORMS: list[Callable[[torch.nn.Module], Any]] = [
    lambda module: module,
    lambda module: torch.nn.ModuleList([torch.nn.Linear(2, 2), module]),
    lambda module: list(module.parameters()),
    lambda module: module.named_parameters(),
]


def _in_processes(rank: int, folder: str, work: Callable[[str, bool], None]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/init",
        rank=rank,
        world_size=2,
        timeout=timedelta(minutes=1),
    )
    for use_orig_params in (False, True):
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
            work(strategy, use_orig_params)
    work("NO_SHARD", False)
    work("NO_SHARD", True)
    torch.distributed.barrier()
    # To take the group down ends a process in twenty by a signal: "terminate called without an
    # active exception" (torch 2.13).
    os._exit(0)


def _module(strategy: str, use_orig_params: bool) -> torch.nn.Module:
    """A model after its backward; the second process may have no gradient at all."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 1))
    module = FullyShardedDataParallel(
        layers,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
    )
    module(torch.ones(2, 5)).sum().backward()
    return module


def _refuses_norms(strategy: str, use_orig_params: bool) -> None:
    module = _module(strategy, use_orig_params)
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    before = copies(grads)
    sharded = strategy != "NO_SHARD"
    if sharded:
        for form, rule in itertools.product(FORMS, (1.0, ClipByNorm(1.0))):
            with pytest.raises(TypeError, match="shards of FullyShardedDataParallel"):
                tritonclip.clip_(form(module), rule)
        with pytest.raises(TypeError, match="shards of FullyShardedDataParallel"):
            tritonclip.clip_grad_norm_(module.parameters(), 1.0)
        with pytest.raises(TypeError, match="shards of FullyShardedDataParallel"):
            FlatGradients(module)
        if grads:
            optimizer = ClippedOptimizer(torch.optim.SGD(module.parameters(), lr=0.0), 1.0)
            with pytest.raises(TypeError, match="shards of FullyShardedDataParallel"):
                optimizer.step()
        assert_bits(grads, before)
    else:
        norm = tritonclip.clip_(module, 0.5)
        assert_bits(grads, [reference.scaled(g, reference.coefficient(norm, 0.5)) for g in before])


def _refuses_shards_behind_another_parameter(strategy: str, use_orig_params: bool) -> None:
    """A list of the same form, of whole gradients, has left a plan."""
    if strategy == "NO_SHARD":
        return
    module = _module(strategy, use_orig_params)
    shards = [p for p in module.parameters() if p.grad is not None]
    if not shards:
        return
    first, *wholes = parameters([torch.ones(2), *copies(map(grad_of, shards))])
    tritonclip.clip_([first, *wholes], 1.0)
    with pytest.raises(TypeError, match="shards of FullyShardedDataParallel"):
        tritonclip.clip_([first, *shards], 1.0)


def _clamps(strategy: str, use_orig_params: bool) -> None:
    """Elements are clamped alike wherever they lie."""
    module = _module(strategy, use_orig_params)
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    before = copies(grads)
    tritonclip.clip_(module, ClipByValue(0.1))
    assert_bits(grads, [reference.clamped(grad, -0.1, 0.1) for grad in before])


def _scales_by_the_norm_of_all(strategy: str, use_orig_params: bool) -> None:
    """The norm of all processes is known, so that shards are scaled rightly."""
    module = _module(strategy, use_orig_params)
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    before = copies(grads)
    total = torch.tensor(4.0)
    tritonclip.clip_grads_with_norm_(module.parameters(), 1.0, total)
    assert_bits(grads, [reference.scaled(g, reference.coefficient(total, 1.0)) for g in before])


@pytest.mark.parametrize(
    "work",
    [
        _refuses_norms,
        _refuses_shards_behind_another_parameter,
        _clamps,
        _scales_by_the_norm_of_all,
    ],
    ids=lambda work: work.__name__,
)
def test_clip_of_shards(tmp_path: Path, work: Callable[[str, bool], None]) -> None:
    spawn(_in_processes, (str(tmp_path), work), nprocs=2)


def test_clip_of_a_lone_process_is_that_of_the_module() -> None:
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        for use_orig_params in (False, True):
            module = _module("FULL_SHARD", use_orig_params)
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            before = copies(grads)
            for _ in range(2):
                for grad, old in zip(grads, before, strict=True):
                    grad.copy_(old)
                norm = tritonclip.clip_(module, 0.5)
                by = reference.coefficient(norm, 0.5)
                assert norm.item() == pytest.approx(reference.total_norm(before), rel=1e-6)
                assert_bits(grads, [reference.scaled(grad, by) for grad in before])
            del module
    finally:
        distributed.destroy_process_group()
