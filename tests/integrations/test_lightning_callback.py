"""The callback for PyTorch Lightning: one line that wraps every optimizer, and logs.

A loop by hand is the truth.
"""

import math
from typing import Any, cast

import pytest
import torch

import tritonclip
from helpers.cases import assert_bits

pytest.importorskip("lightning", reason="needs tritonclip[integrations]")

import lightning
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

from helpers.digits import BATCHES, MAX_NORM, loader, loss_of, network, sgd, train_by_hand
from helpers.lightning_trainer import FITTING, logged, quiet_trainer
from tritonclip.integrations.lightning import Clipping

pytestmark = FITTING


class Digits(lightning.LightningModule):
    """Knows nothing of clipping."""

    def __init__(self):
        super().__init__()
        self.model = network()

    def configure_optimizers(self):
        optimizer = sgd(self.model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def training_step(self, batch, index):
        return loss_of(self.model, batch)


class Unscheduled(Digits):
    def configure_optimizers(self):
        return sgd(self.model)


class Manual(Digits):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        self.manual_backward(loss_of(self.model, batch))
        optimizer.step()
        optimizer.zero_grad()


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


def stats_of(trainer, index=0):
    return trainer.optimizers[index].stats.summary()


@pytest.mark.parametrize("kind", [Digits, Manual], ids=["automatic", "manual"])
def test_callback_clips_once_a_step(tmp_path, kind):
    module, by_hand = kind(), network()
    trainer = trainer_of(tmp_path)

    trainer.fit(module, loader())

    norms = train_by_hand(by_hand, loader())
    assert stats_of(trainer)["steps"] == stats_of(trainer)["clipped_steps"] == len(norms)
    assert_bits(module.model.parameters(), by_hand.parameters())


def test_callback_clips_the_sum_of_accumulated_batches(tmp_path):
    module, by_hand = Digits(), network()
    trainer = trainer_of(tmp_path, accumulate_grad_batches=3)

    trainer.fit(module, loader())

    norms = train_by_hand(by_hand, loader(), 3)
    assert_bits(module.model.parameters(), by_hand.parameters())
    assert logged(tmp_path, "clip/norm") == dict(enumerate(norms))


def test_callback_clips_unscaled_gradients(tmp_path):
    module, by_hand = Unscheduled(), network()
    options: Any = {"init_scale": 2.0**20, "growth_interval": 3}
    precision = MixedPrecision("16-mixed", "cpu", scaler=tritonclip.GradScaler("cpu", **options))
    trainer = trainer_of(tmp_path, plugins=[precision])

    trainer.fit(module, loader())

    twin = torch.amp.GradScaler("cpu", **options)
    norms = train_by_hand(by_hand, loader(), 1, torch.float16, twin)
    assert stats_of(trainer)["steps"] == len(norms) < BATCHES
    assert_bits(module.model.parameters(), by_hand.parameters())


def test_callback_wraps_every_optimizer_apart(tmp_path):
    module, by_hand = TwoOptimizers(), network()
    trainer = trainer_of(tmp_path)

    trainer.fit(module, loader())

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
    trainer = trainer_of(tmp_path)

    trainer.fit(Digits(), loader())

    norms = train_by_hand(network(), loader())
    assert logged(tmp_path, "clip/norm") == dict(enumerate(norms))
    expected = [MAX_NORM / norm for norm in norms]
    assert [*logged(tmp_path, "clip/coefficient").values()] == pytest.approx(expected, rel=1e-5)
    assert set(logged(tmp_path, "clip/clipped_share").values()) == {1.0}
    assert trainer.callback_metrics["clip/norm"] == norms[-1]


def test_callback_reads_statistics_at_the_logging_interval_only(tmp_path, reads):
    trainer_of(tmp_path, log_every=2, accumulate_grad_batches=3).fit(Digits(), loader())

    # Four steps of three batches.
    assert len(reads) == 2
    assert [*logged(tmp_path, "clip/norm")] == [1, 3]


def test_callback_can_be_silent(tmp_path):
    trainer = trainer_of(tmp_path, Clipping(MAX_NORM, log=False))

    trainer.fit(Digits(), loader())

    assert not any(name.startswith("clip") for name in trainer.callback_metrics)
    assert stats_of(trainer)["clipped_steps"] == BATCHES


def test_callback_logs_nothing_that_is_not_measured(tmp_path):
    trainer = trainer_of(tmp_path, Clipping(tritonclip.ClipByValue(1e-3)))

    trainer.fit(Digits(), loader())

    assert not any(name.startswith("clip") for name in trainer.callback_metrics)
    assert stats_of(trainer)["steps"] == BATCHES


def test_resumed_run_equals_one_that_went_on(tmp_path):
    straight, first, second = Digits(), Digits(), Digits()
    whole = trainer_of(tmp_path / "whole", epochs=2)
    whole.fit(straight, loader())
    begun = trainer_of(tmp_path / "begun")
    begun.fit(first, loader())
    begun.save_checkpoint(tmp_path / "half.ckpt")
    resumed = trainer_of(tmp_path / "resumed", epochs=2)

    resumed.fit(second, loader(), ckpt_path=tmp_path / "half.ckpt")

    assert stats_of(resumed) == stats_of(whole)
    assert stats_of(resumed)["steps"] == 2 * BATCHES
    assert_bits(second.model.parameters(), straight.model.parameters())


def test_trainer_fits_a_second_module(tmp_path):
    trainer, module, by_hand = trainer_of(tmp_path), Digits(), network()
    trainer.fit(Digits(), loader())
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit_loop.epoch_loop.reset_restart_stage()

    trainer.fit(module, loader())

    train_by_hand(by_hand, loader())
    assert_bits(module.model.parameters(), by_hand.parameters())


class KeepsItsOptimizer(Digits):
    def __init__(self):
        super().__init__()
        self.inner = sgd(self.model)

    def configure_optimizers(self):
        return self.inner


def test_module_that_keeps_its_optimizer_is_fitted_again(tmp_path):
    module = KeepsItsOptimizer()
    first = trainer_of(tmp_path / "first")
    first.fit(module, loader())

    second = trainer_of(tmp_path / "second", Clipping(0.5 * MAX_NORM))
    second.fit(module, loader())

    assert second.optimizers[0] is first.optimizers[0]
    assert second.optimizers[0].clip == tritonclip.ClipByGlobalNorm(0.5 * MAX_NORM)
    assert stats_of(second)["steps"] == 2 * BATCHES


def test_learning_rates_are_monitored_as_before(tmp_path):
    trainer = trainer_of(tmp_path, callbacks=[LearningRateMonitor()])

    trainer.fit(Digits(), loader())

    assert set(logged(tmp_path, "lr-SGD").values()) == {0.2}
    assert "lr-ClippedOptimizer" not in trainer.callback_metrics


def test_policy_reaches_the_wrapper(tmp_path):
    trainer = trainer_of(tmp_path, Clipping(MAX_NORM, nonfinite="skip"))

    trainer.fit(Digits(), loader())

    assert trainer.optimizers[0].nonfinite == "skip"


def test_recorder_reaches_the_wrapper(tmp_path, recorders):
    ours = cast(Any, "ours")
    trainer_of(tmp_path, Clipping(MAX_NORM, recorder=ours)).fit(Digits(), loader())

    assert recorders == ["ours"]


def test_each_of_several_optimizers_has_its_recorder(tmp_path):
    recorders = [tritonclip.record(tmp_path / f"{i}.csv") for i in range(2)]
    trainer = trainer_of(tmp_path, Clipping(MAX_NORM, recorder=recorders))

    trainer.fit(TwoOptimizers(), loader())

    assert [one.recorder for one in trainer.optimizers] == recorders
    assert [one.steps for one in recorders] == [BATCHES, BATCHES]


@pytest.mark.parametrize("n", [1, 3])
def test_other_numbers_of_recorders_than_of_optimizers_are_refused(tmp_path, n):
    recorders = [tritonclip.record(tmp_path / f"{i}.csv") for i in range(n)]
    trainer = trainer_of(
        tmp_path, Clipping(MAX_NORM, recorder=recorders if n > 1 else recorders[0])
    )

    with pytest.raises(ValueError, match=f"a recorder for each of the 2 optimizers, got {n}"):
        trainer.fit(TwoOptimizers(), loader())


class DeepSpeedStrategy(SingleDeviceStrategy):
    """Stands for Lightning's, which needs DeepSpeed; known by its name."""


def test_deepspeed_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, strategy=DeepSpeedStrategy("cpu"))

    with pytest.raises(RuntimeError, match="DeepSpeed clips in its engine"):
        trainer.fit(Digits(), loader())


def test_gradient_clip_val_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, gradient_clip_val=0.1)

    with pytest.raises(RuntimeError, match=r"gradient_clip_val=0\.1\) would clip before it"):
        trainer.fit(Digits(), loader())


def test_module_that_clips_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"ClipsToo\.configure_gradient_clipping would clip"):
        trainer_of(tmp_path).fit(ClipsToo(), loader())


def test_two_callbacks_are_refused(tmp_path):
    trainer = trainer_of(tmp_path, callbacks=[Clipping(1.0)])

    with pytest.raises(RuntimeError, match=r"2 callbacks Clipping.*expected one.*'clip'"):
        trainer.fit(Digits(), loader())


def test_marks_on_modules_are_refused(tmp_path):
    module: Any = Digits()
    module.model[0].need_clip = False

    with pytest.raises(ValueError, match=r"module\.model\.0 .* has need_clip = False"):
        trainer_of(tmp_path).fit(module, loader())


def test_callback_without_a_clip_says_what_to_write():
    with pytest.raises(TypeError, match=r"missing a required .*: 'clip'; write Clipping\(1\.0\)"):
        cast(Any, Clipping)()
    with pytest.raises(TypeError, match=r"argument 'max_norm'; write Clipping\(2\.0\)"):
        cast(Any, Clipping)(max_norm=2.0)


def test_callback_logs_no_norm_for_a_step_that_was_skipped(tmp_path):
    class Spoiled(Digits):
        def on_before_optimizer_step(self, optimizer):
            if self.global_step == 1:
                optimizer.param_groups[0]["params"][0].grad.fill_(torch.nan)

    trainer_of(tmp_path, Clipping(MAX_NORM, nonfinite="skip")).fit(Spoiled(), loader())

    norms = logged(tmp_path, "clip/norm")
    assert [step for step, norm in norms.items() if math.isnan(norm)] == [1]
    assert [*logged(tmp_path, "clip/skipped_steps").values()] == [0, *[1] * (len(norms) - 1)]


def test_other_clips_than_rules_are_refused():
    with pytest.raises(TypeError, match="clip must be a number"):
        Clipping(cast(Any, "1.0"))


class ClipsByHand(Manual):
    def training_step(self, batch, index):
        optimizer = self.optimizers()
        self.manual_backward(loss_of(self.model, batch))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


def test_callback_warns_of_another_clip_to_the_same_limit(tmp_path):
    trainer = trainer_of(tmp_path, epochs=12 // BATCHES + 1)
    with pytest.warns(tritonclip.ClippingWarning, match="something else clips to the same limit"):
        trainer.fit(ClipsByHand(), loader())
