"""Lightning's ModelParallelStrategy on gloo: FSDP2 inside, the wrapper clips."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import in_processes
from spread import assert_same_everywhere, values, whole
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

import tritonclip

lightning: Any = pytest.importorskip("lightning", reason="needs tritonclip[integrations]")

STEPS, MAX_NORM = 3, 0.05


def _network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def _as_torchrun(environment: pytest.MonkeyPatch) -> None:
    """What torchrun tells its processes, of the group that is there already."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    more = {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**names, **more, "TORCHELASTIC_RUN_ID": "tests"}.items():
        environment.setenv(name, value)


@pytest.mark.parametrize("by", ["hand", "callback"])
@in_processes(2)
def test_model_parallel_strategy_trains_as_one_process(by: str) -> None:
    from tritonclip.integrations.lightning import Clipping

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network: Any = None

        def configure_model(self) -> None:
            if self.network is None:
                self.network = fully_shard(_network(), mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self) -> Any:
            inner = torch.optim.SGD(self.parameters(), lr=0.1)
            return tritonclip.ClippedOptimizer(inner, MAX_NORM) if by == "hand" else inner

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.network(batch).square().mean()
            return loss

    batches = [values((4, 3), step) for step in range(STEPS)]
    # A batch is a half of each of these.
    rows: Any = torch.cat([batch.chunk(2)[dist.get_rank()] for batch in batches])
    model = Model()
    with pytest.MonkeyPatch.context() as environment:
        _as_torchrun(environment)
        strategy = lightning.pytorch.strategies.ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1
        )
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=strategy,
            callbacks=[Clipping(MAX_NORM)] if by == "callback" else [],
            max_steps=STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=2))

    alone = _network()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        alone(batch).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)
        optimizer.step()
    stats = trainer.optimizers[0].stats
    assert stats.summary()["clipped_steps"] == STEPS
    assert_same_everywhere(stats.last_norm)
    torch.testing.assert_close(stats.last_norm, norm, rtol=1e-5, atol=0)
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.detach()), theirs.detach(), rtol=1e-5, atol=1e-7)
