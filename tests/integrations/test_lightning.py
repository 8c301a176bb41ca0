"""ClippedOptimizer under PyTorch Lightning, wrapped by hand and by the callback.

Both clip once a step and are logged; a loop by hand is the truth.
"""

import csv
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import tritonclip
from helpers.cases import assert_bits

pytest.importorskip("lightning", reason="needs tritonclip[integrations]")

import lightning
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

from helpers.digits import BATCHES, MAX_NORM, loader, loss_of, network, sgd, train_by_hand
from integrations.lightning_trainer import quiet_trainer
from tritonclip.integrations.lightning import Clipping

pytestmark = [
    # Advice for real data and real machines.
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]

PRECISIONS = ["32-true", "bf16-mixed", "16-mixed", "16-mixed-tritonclip"]


class Digits(lightning.LightningModule):
    """Knows nothing of clipping."""

    def __init__(self):
        super().__init__()
        self.model = network()

    def configure_optimizers(self):
        optimizer = sgd(self.model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def training_step(self, batch, index):
        return loss_of(self.model, batch)


class Wrapped(Digits):
    """The recipe of docs/trainers.md."""

    def configure_optimizers(self):
        return tritonclip.ClippedOptimizer(sgd(self.model), MAX_NORM)

    def on_train_batch_end(self, outputs, batch, index):
        self.log("grad_norm", self.optimizers().stats.last_norm)


class Fused(Wrapped):
    def configure_optimizers(self):
        return tritonclip.ClippedOptimizer(sgd(self.model, fused=True), MAX_NORM)


class SkipsSecondBatch(Wrapped):
    def training_step(self, batch, index):
        return None if index == 1 else loss_of(self.model, batch)


class Manual(Digits):
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


class WrappedManual(Manual, Wrapped):
    """The recipe of the README for manual optimisation, with accumulation."""


WRAPPED = pytest.mark.parametrize("kind", [Wrapped, WrappedManual], ids=["automatic", "manual"])


def logged(folder: Path, name: str) -> dict[int, float]:
    """A column of the logger's file, by step."""
    with (folder / "lightning_logs" / "run" / "metrics.csv").open() as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}


def stats_of(trainer: Any) -> dict[str, Any]:
    """The statistics of a trainer's optimizer."""
    summary: dict[str, Any] = trainer.optimizers[0].stats.summary()
    return summary


def trainer_under(folder, precision="32-true", **arguments):
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
    return quiet_trainer(folder, 1, **arguments), twin


def autocast_of(precision):
    half = torch.float16 if precision.startswith("16") else torch.bfloat16
    return None if precision == "32-true" else half


@pytest.mark.covering(1)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("accumulate", [1, 3], ids=["each", "accumulate-3"])
@WRAPPED
def test_optimisation_clips_once_a_step(tmp_path, kind, accumulate, precision):
    module, by_hand = kind(), network()
    options = {"accumulate_grad_batches": accumulate} if kind is Wrapped else {}
    module.accumulate = accumulate
    trainer, twin = trainer_under(tmp_path, precision, **options)

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
    trainer, twin = trainer_under(tmp_path, precision)

    trainer.fit(module, loader())

    norms = train_by_hand(by_hand, loader(), 1, autocast_of(precision), twin)
    assert stats_of(trainer)["steps"] == stats_of(trainer)["clipped_steps"] == len(norms)
    # The truth is not fused: torch's fused SGD takes momentum for filled after an overflow. Where
    # a fused kernel contracts a product and a sum, each step is off by a rounding of the weight.
    for ours, truth in zip(module.model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, truth, rtol=BATCHES * 2.0**-23, atol=1e-6)


@WRAPPED
def test_log_writes_the_norm_before_clipping(tmp_path, kind):
    trainer, _ = trainer_under(tmp_path)

    trainer.fit(kind(), loader())

    norms = train_by_hand(network(), loader())
    assert logged(tmp_path, "grad_norm") == dict(enumerate(norms))
    assert norms[-1] == stats_of(trainer)["norm"] > MAX_NORM


class RulesOfGroups(Wrapped):
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
    trainer, _ = trainer_under(tmp_path, limit_train_batches=2)

    trainer.fit(module, loader())

    train_by_hand(by_hand, [*loader()][:1])
    assert_bits(module.model.parameters(), by_hand.parameters())


class TwoOptimizers(Manual):
    """One for each layer."""

    def configure_optimizers(self):
        first, _, last = self.model
        return [sgd(first), sgd(last)]

    def training_step(self, batch, index):
        self.manual_backward(loss_of(self.model, batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


class ClipsToo(Digits):
    def configure_gradient_clipping(self, optimizer, *args, **kwargs):
        self.clip_gradients(optimizer, 0.1, "norm")


def trainer_of(folder, callback=None, epochs=1, callbacks=(), **arguments):
    callbacks = [callback or Clipping(MAX_NORM), *callbacks]
    return quiet_trainer(folder, epochs, callbacks=callbacks, **arguments)


def fitted(folder, module, callback=None, **arguments):
    """The trainer of a module, after training."""
    trainer = trainer_of(folder, callback, **arguments)
    trainer.fit(module, loader())
    return trainer


def assert_trained_by_hand(module, *arguments):
    """The module has the weights of a loop by hand; the norms of that loop."""
    by_hand = network()
    norms = train_by_hand(by_hand, loader(), *arguments)
    assert_bits(module.model.parameters(), by_hand.parameters())
    return norms


@pytest.mark.parametrize(
    ("kind", "accumulate"),
    [(Digits, 1), (Digits, 3), (Manual, 1)],
    ids=["automatic", "accumulate-3", "manual"],
)
def test_callback_clips_once_a_step(tmp_path, kind, accumulate):
    module = kind()
    options = {"accumulate_grad_batches": accumulate} if kind is Digits else {}

    stats = stats_of(fitted(tmp_path, module, **options))

    norms = assert_trained_by_hand(module, accumulate)
    assert stats["steps"] == stats["clipped_steps"] == len(norms)
    assert logged(tmp_path, "clip/norm") == dict(enumerate(norms))


def test_callback_wraps_every_optimizer_apart(tmp_path):
    module, by_hand = TwoOptimizers(), network()

    fitted(tmp_path, module)

    first, _, last = by_hand
    optimizers = [tritonclip.ClippedOptimizer(sgd(part), MAX_NORM) for part in (first, last)]
    for batch in loader():
        loss_of(by_hand, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_bits(module.model.parameters(), by_hand.parameters())
    for i, optimizer in enumerate(optimizers):
        last_row = [*logged(tmp_path, f"clip{i}/norm").values()][-1]
        assert last_row == optimizer.stats.summary()["norm"]


def test_callback_logs_norm_coefficient_and_share(tmp_path):
    trainer = fitted(tmp_path, Digits())

    norms = train_by_hand(network(), loader())
    assert logged(tmp_path, "clip/norm") == dict(enumerate(norms))
    expected = [MAX_NORM / norm for norm in norms]
    assert [*logged(tmp_path, "clip/coefficient").values()] == pytest.approx(expected, rel=1e-5)
    assert set(logged(tmp_path, "clip/clipped_share").values()) == {1.0}
    assert trainer.callback_metrics["clip/norm"] == norms[-1]


def test_callback_reads_statistics_at_the_logging_interval_only(tmp_path, reads):
    fitted(tmp_path, Digits(), log_every=2, accumulate_grad_batches=3)

    # Four steps of three batches.
    assert len(reads) == 2
    assert [*logged(tmp_path, "clip/norm")] == [1, 3]


@pytest.mark.parametrize(
    "callback", [Clipping(tritonclip.ClipByValue(1e-3)), Clipping(MAX_NORM, log=False)]
)
def test_callback_logs_nothing_that_is_not_measured_or_asked_for(tmp_path, callback):
    trainer = fitted(tmp_path, Digits(), callback)

    assert not any(name.startswith("clip") for name in trainer.callback_metrics)
    assert stats_of(trainer)["steps"] == BATCHES


@pytest.mark.parametrize(
    ("kind", "make"), [(Wrapped, quiet_trainer), (Digits, trainer_of)], ids=["hand", "callback"]
)
def test_resumed_run_equals_one_that_went_on(tmp_path, kind, make):
    straight, first, second = kind(), kind(), kind()
    whole = make(tmp_path / "whole", epochs=2)
    whole.fit(straight, loader())
    begun = make(tmp_path / "begun", epochs=1)
    begun.fit(first, loader())
    begun.save_checkpoint(tmp_path / "half.ckpt")
    resumed = make(tmp_path / "resumed", epochs=2)
    resumed.fit(second, loader(), ckpt_path=tmp_path / "half.ckpt")

    assert stats_of(resumed) == stats_of(whole)
    assert stats_of(resumed)["steps"] == 2 * BATCHES
    assert_bits(second.model.parameters(), straight.model.parameters())


def test_trainer_fits_a_second_module(tmp_path):
    trainer, module = fitted(tmp_path, Digits()), Digits()
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit_loop.epoch_loop.reset_restart_stage()

    trainer.fit(module, loader())

    assert_trained_by_hand(module)


class KeepsItsOptimizer(Digits):
    def __init__(self):
        super().__init__()
        self.inner = sgd(self.model)

    def configure_optimizers(self):
        return self.inner


def test_module_that_keeps_its_optimizer_is_fitted_again(tmp_path):
    module = KeepsItsOptimizer()

    first = fitted(tmp_path / "first", module)
    second = fitted(tmp_path / "second", module, Clipping(0.5 * MAX_NORM))

    assert second.optimizers[0] is first.optimizers[0]
    assert second.optimizers[0].clip == tritonclip.ClipByGlobalNorm(0.5 * MAX_NORM)
    assert stats_of(second)["steps"] == 2 * BATCHES


def test_learning_rates_are_monitored_as_before(tmp_path):
    trainer = fitted(tmp_path, Digits(), callbacks=[LearningRateMonitor()])

    assert set(logged(tmp_path, "lr-SGD").values()) == {0.2}
    assert "lr-ClippedOptimizer" not in trainer.callback_metrics


def test_policy_and_recorder_reach_the_wrapper(tmp_path, recorders):
    options: Any = {"nonfinite": "skip", "recorder": "ours"}
    trainer = fitted(tmp_path, Digits(), Clipping(MAX_NORM, **options))

    assert trainer.optimizers[0].nonfinite == "skip"
    assert recorders == ["ours"]


def test_each_of_several_optimizers_has_its_recorder(tmp_path):
    recorders = [tritonclip.record(tmp_path / f"{i}.csv") for i in range(2)]
    trainer = fitted(tmp_path, TwoOptimizers(), Clipping(MAX_NORM, recorder=recorders))

    assert [one.recorder for one in trainer.optimizers] == recorders
    assert [one.steps for one in recorders] == [BATCHES, BATCHES]


@pytest.mark.parametrize("n", [1, 3])
def test_other_numbers_of_recorders_than_of_optimizers_are_refused(tmp_path, n):
    recorders = [tritonclip.record(tmp_path / f"{i}.csv") for i in range(n)]
    callback = Clipping(MAX_NORM, recorder=recorders if n > 1 else recorders[0])

    with pytest.raises(ValueError, match=f"a recorder for each of the 2 optimizers, got {n}"):
        fitted(tmp_path, TwoOptimizers(), callback)


class DeepSpeedStrategy(SingleDeviceStrategy):
    """Stands for Lightning's, which needs DeepSpeed; known by its name."""


class Marked(Digits):
    def __init__(self):
        super().__init__()
        self.model[0].need_clip = False  # type: ignore[assignment]


# The module, the options of the trainer, and the error.
REFUSED = {
    "deepspeed": (Digits, {"strategy": DeepSpeedStrategy("cpu")}, "DeepSpeed clips in its engine"),
    "gradient_clip_val": (
        *(Digits, {"gradient_clip_val": 0.1}),
        r"gradient_clip_val=0\.1\) would clip before it",
    ),
    "module clips": (ClipsToo, {}, r"ClipsToo\.configure_gradient_clipping would clip"),
    "two callbacks": (
        *(Digits, {"callbacks": [Clipping(1.0)]}),
        r"2 callbacks Clipping.*expected one.*'clip'",
    ),
    "marks": (Marked, {}, r"module\.model\.0 .* has need_clip = False"),
}


@pytest.mark.parametrize(("kind", "options", "said"), REFUSED.values(), ids=REFUSED)
def test_what_would_clip_otherwise_is_refused(tmp_path, kind, options, said):
    error = ValueError if kind is Marked else RuntimeError
    with pytest.raises(error, match=said):
        fitted(tmp_path, kind(), **options)


def test_callback_logs_no_norm_for_a_step_that_was_skipped(tmp_path):
    class Spoiled(Digits):
        def on_before_optimizer_step(self, optimizer):
            if self.global_step == 1:
                optimizer.param_groups[0]["params"][0].grad.fill_(torch.nan)

    fitted(tmp_path, Spoiled(), Clipping(MAX_NORM, nonfinite="skip"))

    norms = logged(tmp_path, "clip/norm")
    assert [step for step, norm in norms.items() if math.isnan(norm)] == [1]
    assert [*logged(tmp_path, "clip/skipped_steps").values()] == [0, *[1] * (len(norms) - 1)]


def test_other_clips_than_rules_are_refused():
    with pytest.raises(TypeError, match="max_norm must be a number"):
        Clipping(cast(Any, "1.0"))


class ClipsByHand(Manual):
    def training_step(self, batch, index):
        optimizer = self.optimizers()
        self.manual_backward(loss_of(self.model, batch))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


def test_callback_warns_of_another_clip_to_the_same_limit(tmp_path):
    with pytest.warns(tritonclip.ClippingWarning, match="something else clips to the same limit"):
        fitted(tmp_path, ClipsByHand(), epochs=12 // BATCHES + 1)
