"""Lightning on gloo: ModelParallelStrategy with FSDP2 inside, and FSDPStrategy with FSDP1."""

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import tritonclip
from helpers.processes import in_processes
from helpers.spread import as_torchrun, assert_same_everywhere, network, norm_alone, values

lightning: Any = pytest.importorskip("lightning", reason="needs tritonclip[integrations]")

STEPS, MAX_NORM = 3, 0.05


class _Model(lightning.LightningModule):
    def __init__(self, model: torch.nn.Module | None) -> None:
        super().__init__()
        self.network: Any = model

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.network(batch).square().mean()
        return loss


def _fitted(model: Any, batches: list[torch.Tensor], strategy: Any, by: str) -> Any:
    """A Trainer that has fitted a model, each process on its part of every batch."""
    from tritonclip.integrations.lightning import Clipping

    rows: Any = torch.cat([batch.chunk(2)[dist.get_rank()] for batch in batches])
    with pytest.MonkeyPatch.context() as environment:
        as_torchrun(environment)
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
    return trainer


@pytest.mark.parametrize("by", ["hand", "callback"])
@in_processes(2)
def test_model_parallel_strategy_trains_as_one_process(by: str) -> None:
    class Model(_Model):
        def configure_model(self) -> None:
            if self.network is None:
                self.network = fully_shard(network(), mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self) -> Any:
            inner = super().configure_optimizers()
            return tritonclip.ClippedOptimizer(inner, MAX_NORM) if by == "hand" else inner

    batches = [values((4, 3), step) for step in range(STEPS)]
    model = Model(None)
    strategy = lightning.pytorch.strategies.ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1
    )
    trainer = _fitted(model, batches, strategy, by)

    norm = norm_alone(batches, model, MAX_NORM)
    stats = trainer.optimizers[0].stats
    assert stats.summary()["clipped_steps"] == STEPS
    assert_same_everywhere(stats.last_norm)
    torch.testing.assert_close(stats.last_norm, norm, rtol=1e-5, atol=0)


def test_fsdp_strategy_refuses_a_cpu() -> None:
    """Why docs/trainers.md says that it needs an accelerator."""
    with pytest.raises(ValueError, match="The strategy `fsdp` requires a GPU accelerator"):
        lightning.Trainer(accelerator="cpu", devices=2, strategy="fsdp")


class _Sharded(lightning.pytorch.strategies.FSDPStrategy):
    """Passes the check for a GPU, and shards on a CPU: Lightning names a device by its index."""

    def _setup_model(self, model: Any) -> Any:
        self.model = FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            sharding_strategy=self.sharding_strategy,
        )
        return self.model


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("by", ["hook", "callback"])
@in_processes(2)
def test_fsdp_strategy_trains_as_one_process(by: str, sharding: str) -> None:
    norms = []

    class Model(_Model):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if by == "hook":
                options = {"process_group": self.trainer.strategy.model.process_group}
                if sharding == "NO_SHARD":
                    # As docs/distributed.md says for FSDP1: all processes hold everything.
                    options["copies"] = lambda parameter: dist.get_world_size()
                norms.append(tritonclip.clip_(self.parameters(), MAX_NORM, **options))

    batches = [values((4, 3), step) for step in range(STEPS)]
    model = Model(network())
    trainer = _fitted(model, batches, _Sharded(sharding_strategy=sharding), by)

    sharded = trainer.strategy.model
    with FullyShardedDataParallel.summon_full_params(sharded, writeback=False):
        norm = norm_alone(batches, model, MAX_NORM)
    ours = norms[-1] if by == "hook" else trainer.optimizers[0].stats.last_norm
    assert_same_everywhere(ours)
    torch.testing.assert_close(ours, norm, rtol=1e-5, atol=0)
