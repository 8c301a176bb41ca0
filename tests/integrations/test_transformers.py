"""`ClippingTrainer`: the Hugging Face Trainer that clips once a step, and logs its norms.

The Trainer's own loop, with clipping by hand just before a bare optimizer's step, is the truth.
"""

import math
from typing import Any, cast

import pytest
import torch

import tritonclip
from helpers.cases import assert_bits

pytest.importorskip("transformers", reason="needs tritonclip[integrations]")
pytest.importorskip("accelerate", reason="needs tritonclip[integrations]")

from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from integrations.hugging_face import arguments_of, language_model, sequences
from tritonclip.integrations.transformers import ClippingMixin, ClippingTrainer

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

MAX_NORM = 0.5
STEPS = 6
LOGGED = {"logging_steps": 1, "weight_decay": 0.01}


class ClipByHand(TrainerCallback):
    """Clips before each step of a bare optimizer."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, optimizer, **_):
        # In the wrapper's order, in which their squares are added up.
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.norms.append(tritonclip.clip_(params, MAX_NORM).item())


class Report(TrainerCallback):
    """Stands for what `report_to` names: TensorBoard, Weights & Biases and the like."""

    def __init__(self):
        self.norms = []

    def on_log(self, args, state, control, logs, **_):
        self.norms += [logs["clip/norm"]] if "loss" in logs else []


def trainer_of(folder, kind=ClippingTrainer, accumulate=1, callbacks=(), max_norm=None, **options):
    """A trainer with SGD, to which the length of a gradient matters."""
    clipping = {}
    if issubclass(kind, ClippingMixin):
        clipping["max_norm"] = MAX_NORM if max_norm is None else max_norm
        clipping["nonfinite"] = options.pop("nonfinite", "propagate")
    else:
        options = {"max_grad_norm": 0.0, **options}
    return kind(
        model=language_model(),
        args=arguments_of(folder, gradient_accumulation_steps=accumulate, **{**LOGGED, **options}),
        train_dataset=sequences(STEPS * accumulate),
        callbacks=[*callbacks],
        **clipping,
    )


def trained(folder, *arguments, **options):
    trainer = trainer_of(folder, *arguments, **options)
    trainer.train()
    return trainer


def stats_of(trainer):
    return trainer.optimizer.optimizer.stats.summary()


def column(trainer, name):
    return [row[name] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 3], ids=["each", "accumulate-3"])
def test_trainer_clips_once_a_step(tmp_path, accumulate, bf16):
    hand = ClipByHand()
    trainer = trained(tmp_path, accumulate=accumulate, bf16=bf16)

    # Made now, because every Trainer seeds the shuffling and the dropout that follow.
    by_hand = trained(tmp_path, Trainer, accumulate, [hand], bf16=bf16)
    assert len(hand.norms) == STEPS
    assert max(hand.norms) > MAX_NORM
    assert stats_of(trainer)["steps"] == STEPS
    assert stats_of(trainer)["clipped_steps"] == sum(norm > MAX_NORM for norm in hand.norms)
    assert_bits(trainer.model.parameters(), by_hand.model.parameters())


def test_options_of_the_arguments_reach_the_wrapped_optimizer(tmp_path):
    trainer = trainer_of(tmp_path)

    optimizer = trainer.create_optimizer()

    assert isinstance(optimizer, tritonclip.ClippedOptimizer)
    assert trainer.create_optimizer() is optimizer
    groups = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert groups == [(0.2, 0.01), (0.2, 0.0)]


def test_log_writes_the_norm_before_clipping(tmp_path):
    hand, report = ClipByHand(), Report()
    trainer = trained(tmp_path, callbacks=[report])

    trained(tmp_path, Trainer, callbacks=[hand])
    assert column(trainer, "clip/norm") == report.norms == hand.norms
    assert column(trainer, "grad_norm") == hand.norms
    assert column(trainer, "clip/clipped_share")[-1] == stats_of(trainer)["clipped_share"]


def test_log_leaves_evaluation_alone(tmp_path):
    trainer = trainer_of(tmp_path)

    metrics = trainer.evaluate(trainer.train_dataset)

    assert "eval_loss" in metrics
    assert not any(name.startswith("clip/") for name in metrics)


def test_the_wrapper_measures_and_is_read_at_the_logging_interval_only(
    tmp_path, reads, monkeypatch
):
    """With max_grad_norm=0 a Trainer of today still measures, by an infinite limit."""
    calls = []
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args, **_: calls.append(args))

    trained(tmp_path, logging_steps=3)

    assert calls == []
    assert len(reads) == STEPS // 3


def test_rules_that_measure_nothing_log_nothing(tmp_path):
    trainer = trained(tmp_path, max_norm=tritonclip.ClipByValue(1e-3))

    assert stats_of(trainer)["steps"] == STEPS
    assert not any(name.startswith("clip") for row in trainer.state.log_history for name in row)


def test_second_training_goes_on_with_one_wrapper(tmp_path):
    trainer = trained(tmp_path)

    trainer.train()

    assert isinstance(trainer.optimizer.optimizer, tritonclip.ClippedOptimizer)
    assert not isinstance(trainer.optimizer.optimizer.optimizer, tritonclip.ClippedOptimizer)
    assert stats_of(trainer)["clipped_steps"] > 0


def test_optimizer_of_the_user_is_wrapped(tmp_path):
    """With its scheduler, which was made for the bare one."""
    model = language_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
    given: Any = {"train_dataset": sequences(STEPS), "optimizers": (inner, scheduler)}
    trainer = ClippingTrainer(model, arguments_of(tmp_path), max_norm=MAX_NORM, **given)

    trainer.train()

    assert trainer.optimizer.optimizer.optimizer is inner
    assert stats_of(trainer)["clipped_steps"] > 0


def test_resumed_run_equals_one_that_went_on(tmp_path):
    # One that does not depend on the number of epochs.
    schedule = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2 * STEPS}
    whole = trained(tmp_path / "whole", num_train_epochs=2, **schedule)
    trained(tmp_path / "run", save_strategy="steps", save_steps=STEPS, **schedule)
    resumed = trainer_of(tmp_path / "run", num_train_epochs=2, **schedule)

    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{STEPS}"))

    assert stats_of(resumed) == stats_of(whole)
    assert stats_of(resumed)["steps"] == 2 * STEPS
    assert_bits(resumed.model.parameters(), whole.model.parameters())


def test_recorder_reaches_the_wrapper(tmp_path, recorders):
    trainer = ClippingTrainer(
        language_model(), arguments_of(tmp_path), max_norm=1.0, recorder="ours"
    )

    trainer.create_optimizer()

    assert recorders == ["ours"]


class WithDeepSpeed(Trainer):
    """Stands for a Trainer under DeepSpeed, which is not installed."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.is_deepspeed_enabled = True


class StepsInBackward(Trainer):
    """Stands for one with optim="galore_adamw_layerwise"."""

    def create_optimizer(self, *args, **options):
        self.optimizer = LayerWiseDummyOptimizer()
        return self.optimizer


class ClippingWithDeepSpeed(ClippingMixin, WithDeepSpeed): ...


class ClippingStepsInBackward(ClippingMixin, StepsInBackward): ...


def test_deepspeed_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="DeepSpeed clips in its engine"):
        trainer_of(tmp_path, ClippingWithDeepSpeed)


def test_optimizers_that_step_inside_backward_are_refused(tmp_path):
    trainer = trainer_of(tmp_path, ClippingStepsInBackward)

    with pytest.raises(RuntimeError, match="steps inside backward, before all gradients"):
        trainer.train()


@pytest.mark.parametrize("limit", [{}, {"max_grad_norm": 0.0}], ids=["default", "off"])
def test_clipping_of_the_trainer_is_turned_off(tmp_path, limit):
    trainer = trainer_of(tmp_path, **limit)

    assert trainer.args.max_grad_norm == 0


def test_chosen_max_grad_norm_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"max_grad_norm=0\.3 would clip before the optimizer"):
        trainer_of(tmp_path, max_grad_norm=0.3)


def test_wrapped_optimizers_are_refused(tmp_path):
    model = language_model()
    wrapped = tritonclip.ClippedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 1.0)

    with pytest.raises(ValueError, match="optimizers= has a ClippedOptimizer"):
        ClippingTrainer(model, arguments_of(tmp_path), optimizers=(wrapped, None), max_norm=1.0)


def test_marks_on_modules_are_refused(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.model.lm_head.need_clip = False

    with pytest.raises(ValueError, match=r"module\.lm_head .* has need_clip = False"):
        trainer.train()


def test_log_has_no_norm_for_a_step_that_was_skipped(tmp_path):
    class Spoil(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer, **_):
            if state.global_step == 1:
                optimizer.param_groups[0]["params"][0].grad.fill_(torch.nan)

    trainer = trained(tmp_path, nonfinite="skip", callbacks=[Spoil()])

    norms = column(trainer, "clip/norm")
    assert [step for step, norm in enumerate(norms) if math.isnan(norm)] == [1]
    assert column(trainer, "clip/skipped_steps") == [0, *[1] * (len(norms) - 1)]


def test_other_clips_than_rules_are_refused():
    with pytest.raises(TypeError, match="max_norm must be a number"):
        ClippingTrainer(max_norm=cast(Any, "1.0"))


class ClipByTorch(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model, **_):
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def test_trainer_warns_of_another_clip_to_the_same_limit(tmp_path):
    trainer = trainer_of(tmp_path, callbacks=[ClipByTorch()], num_train_epochs=3)
    with pytest.warns(tritonclip.ClippingWarning, match="something else clips to the same limit"):
        trainer.train()
