"""ClippedOptimizer under PyTorch Lightning, wrapped by hand: clips once a step, and is logged."""

import pytest
import torch

import tritonclip
from helpers.cases import assert_bits

pytest.importorskip("lightning", reason="needs tritonclip[integrations]")

import lightning
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision

from helpers.digits import BATCHES, MAX_NORM, loader, loss_of, network, sgd, train_by_hand
from integrations.lightning_trainer import FITTING, assert_resumes, logged, quiet_trainer, stats_of

pytestmark = FITTING

PRECISIONS = ["32-true", "bf16-mixed", "16-mixed", "16-mixed-tritonclip"]


class Digits(lightning.LightningModule):
    """The recipe of docs/trainers.md."""

    def __init__(self):
        super().__init__()
        self.model = network()

    def configure_optimizers(self):
        return tritonclip.ClippedOptimizer(sgd(self.model), MAX_NORM)

    def training_step(self, batch, index):
        return loss_of(self.model, batch)

    def on_train_batch_end(self, outputs, batch, index):
        self.log("grad_norm", self.optimizers().stats.last_norm)


class Fused(Digits):
    def configure_optimizers(self):
        return tritonclip.ClippedOptimizer(sgd(self.model, fused=True), MAX_NORM)


class SkipsSecondBatch(Digits):
    def training_step(self, batch, index):
        return None if index == 1 else loss_of(self.model, batch)


class Manual(Digits):
    """The recipe of the README for manual optimisation, with accumulation."""

    accumulate = 1

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        self.manual_backward(loss_of(self.model, batch) / self.accumulate)
        if (index + 1) % self.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def trainer_of(folder, precision="32-true", epochs=1, **arguments):
    """A quiet trainer, and its GradScaler's twin for the loop by hand."""
    twin = None
    if precision.startswith("16-mixed"):
        kind = torch.amp.GradScaler if precision == "16-mixed" else tritonclip.GradScaler
        # Overflows at first.
        scaler = kind("cpu", init_scale=2.0**20, growth_interval=3)
        twin = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
        arguments["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    else:
        arguments["precision"] = precision
    return quiet_trainer(folder, epochs, **arguments), twin


def autocast_of(precision):
    half = torch.float16 if precision.startswith("16") else torch.bfloat16
    return None if precision == "32-true" else half


@pytest.mark.covering(1)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("accumulate", [1, 3], ids=["each", "accumulate-3"])
@pytest.mark.parametrize("kind", [Digits, Manual], ids=["automatic", "manual"])
def test_optimisation_clips_once_a_step(tmp_path, kind, accumulate, precision):
    module, by_hand = kind(), network()
    options = {"accumulate_grad_batches": accumulate} if kind is Digits else {}
    module.accumulate = accumulate
    trainer, twin = trainer_of(tmp_path, precision, **options)

    trainer.fit(module, loader())

    norms = train_by_hand(by_hand, loader(), accumulate, autocast_of(precision), twin)
    overflows = BATCHES // accumulate - len(norms)
    assert bool(overflows) == precision.startswith("16")
    assert stats_of(trainer)["steps"] == stats_of(trainer)["clipped_steps"] == len(norms)
    assert_bits(module.model.parameters(), by_hand.parameters())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fused_optimizer_is_clipped_unscaled(tmp_path, precision):
    """Lightning leaves unscaling to it, and therefore to the wrapper."""
    module, by_hand = Fused(), network()
    trainer, twin = trainer_of(tmp_path, precision)

    trainer.fit(module, loader())

    norms = train_by_hand(by_hand, loader(), 1, autocast_of(precision), twin)
    assert stats_of(trainer)["steps"] == stats_of(trainer)["clipped_steps"] == len(norms)
    # The truth is not fused: torch's fused SGD takes momentum for filled after an overflow. Where
    # a fused kernel contracts a product and a sum, each step is off by a rounding of the weight.
    for ours, truth in zip(module.model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, truth, rtol=BATCHES * 2.0**-23, atol=1e-6)


@pytest.mark.parametrize("kind", [Digits, Manual], ids=["automatic", "manual"])
def test_log_writes_the_norm_before_clipping(tmp_path, kind):
    trainer, _ = trainer_of(tmp_path)

    trainer.fit(kind(), loader())

    norms = train_by_hand(network(), loader())
    assert logged(tmp_path, "grad_norm") == dict(enumerate(norms))
    assert norms[-1] == stats_of(trainer)["norm"] > MAX_NORM


def test_resumed_run_equals_one_that_went_on(tmp_path):
    assert_resumes(tmp_path, lambda *args, **named: trainer_of(*args, **named)[0], Digits)


class RulesOfGroups(Digits):
    """The head has a rule; the body is added by a callback, with another."""

    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def configure_optimizers(self):
        groups = [{"params": [self.model[2].weight], "clip": self.rule}]
        return tritonclip.ClippedOptimizer(torch.optim.SGD(groups, lr=0.2, momentum=0.9), MAX_NORM)


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.model[0])

    def finetune_function(self, module, epoch, optimizer):
        if epoch >= 1:
            # Again in a run that is resumed, which begins frozen.
            self.make_trainable(module.model[0])
        if epoch == 1:
            group = {"params": [*module.model[0].parameters()], "clip": module.rule}
            optimizer.add_param_group(group)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(
    "rule",
    [tritonclip.ClipByNorm(0.1), tritonclip.ClipByOwnHistory(warmup=3)],
    ids=["by-norm", "own-history"],
)
def test_resumed_finetuning_has_the_rules_of_groups(tmp_path, rule):
    """Lightning saves the keys of groups, and loads with weights_only."""
    modules = []
    for begin in ("whole", "resumed"):
        module, folder = RulesOfGroups(rule), tmp_path / begin
        saves = ModelCheckpoint(folder / "saved", filename="{epoch}", save_top_k=-1)
        trainer = quiet_trainer(
            folder, 3, enable_checkpointing=True, callbacks=[Unfreezes(), saves]
        )
        ckpt_path = tmp_path / "whole/saved/epoch=1.ckpt" if begin == "resumed" else None
        trainer.fit(module, loader(), ckpt_path=ckpt_path)
        assert [group["clip"] for group in trainer.optimizers[0].param_groups] == [rule, rule]
        modules.append(module)
    assert_bits(modules[1].model.parameters(), [p.detach() for p in modules[0].model.parameters()])


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_training_step_without_loss_leaves_parameters(tmp_path):
    module, by_hand = SkipsSecondBatch(), network()
    trainer, _ = trainer_of(tmp_path, limit_train_batches=2)

    trainer.fit(module, loader())

    train_by_hand(by_hand, [*loader()][:1])
    assert_bits(module.model.parameters(), by_hand.parameters())
