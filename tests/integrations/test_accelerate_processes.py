"""Accelerate with FSDP on gloo, as far as it goes: it leaves FSDP out on a CPU, unless forced."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

import tritonclip
from helpers.processes import in_processes
from helpers.spread import as_torchrun, assert_same_everywhere, network, norm_alone, values
from tritonclip import ClippedOptimizer

accelerate: Any = pytest.importorskip("accelerate", reason="needs tritonclip[integrations]")

STEPS, MAX_NORM = 3, 0.05


@contextmanager
def _accelerator(*, forced: bool) -> Iterator[Any]:
    """An Accelerator for FSDP2 within the default group, forced to take it on a CPU or not."""
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True
    )
    with pytest.MonkeyPatch.context() as environment:
        as_torchrun(environment)
        environment.setenv("ACCELERATE_USE_FSDP", "false")
        try:
            made = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
            if forced:
                made.state.distributed_type = accelerate.DistributedType.FSDP
                made.state.fsdp_plugin = plugin
            yield made
        finally:
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
            accelerate.state.GradientState._reset_state()


@in_processes(2)
def test_accelerate_leaves_fsdp_out_on_a_cpu() -> None:
    """Why the recipe runs only forced."""
    with _accelerator(forced=False) as accelerator:
        assert accelerator.distributed_type == accelerate.DistributedType.MULTI_CPU
        model = accelerator.prepare(network())
        assert isinstance(model, torch.nn.parallel.DistributedDataParallel)


@pytest.mark.parametrize("by", ["hand", "optimizer"])
@in_processes(2)
def test_accelerate_with_fsdp2_trains_as_one_process(by: str) -> None:
    batches = [values((4, 3), step) for step in range(STEPS)]
    with _accelerator(forced=True) as accelerator:
        bare = network()
        inner: Any = torch.optim.SGD(bare.parameters(), lr=0.1)
        wrapper = ClippedOptimizer(inner, MAX_NORM) if by == "optimizer" else None
        model, optimizer = accelerator.prepare(bare, wrapper or inner)
        assert all(isinstance(one, DTensor) for one in model.parameters())
        for batch in batches:
            optimizer.zero_grad()
            loss = model(batch.chunk(2)[dist.get_rank()]).square().mean()
            accelerator.backward(loss)
            if wrapper is None and accelerator.sync_gradients:
                norm = tritonclip.clip_(model, MAX_NORM)
            optimizer.step()
        ours = norm if wrapper is None else wrapper.stats.last_norm
    expected = norm_alone(batches, model, MAX_NORM)
    assert_same_everywhere(ours)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)
