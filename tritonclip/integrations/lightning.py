"""PyTorch Lightning: a callback that clips in every optimizer of a module.

`lightning` and `pytorch_lightning` are the same classes under two names; both are served.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from tritonclip.engine.arguments import checked_parameters
from tritonclip.integrations.trainers import metrics_of, needs
from tritonclip.monitor.recorder import Recorder
from tritonclip.optim.clipped_optimizer import ClippedOptimizer
from tritonclip.optim.refusals import StepNonfinite
from tritonclip.rules import Rule, as_rule

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer
    except ImportError:
        raise needs("lightning", error) from error

__all__ = ["Clipping"]

# The wrappers that all callbacks have made.
_made: WeakSet[ClippedOptimizer] = WeakSet()


class Clipping(Callback):  # type: ignore[misc]  # Lightning has no types here
    """Wraps each optimizer of `configure_optimizers` in a :class:`~tritonclip.ClippedOptimizer`.

    Under FSDPStrategy and any strategy with DTensors, the norm is that of all shards. At the
    logging interval of the trainer, the callback logs `clip/norm`, `clip/coefficient` and
    `clip/clipped_share`, and `clip/skipped_steps` with nonfinite="skip"; with several optimizers,
    the i-th has the prefix `clip<i>/`. Checkpoints carry the statistics. docs/trainers.md has more.

    Example:
        >>> import lightning
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> trainer = lightning.Trainer(
        ...     max_steps=2, callbacks=[Clipping(1.0)], accelerator="cpu", logger=False,
        ...     enable_checkpointing=False, enable_model_summary=False,
        ...     enable_progress_bar=False,
        ... )
        >>> trainer.fit(BoringModel())
        >>> trainer.optimizers[0].stats.steps
        tensor(2)

    Args:
        max_norm: the largest norm of all gradients of an optimizer; or a rule. A parameter group
            may carry another rule under the key `clip`.
        nonfinite: the policy for NaN and inf; see :class:`~tritonclip.ClippedOptimizer`.
        log: whether to log, for which the host waits for the device.
        recorder: a recorder made by :func:`~tritonclip.record`; for several optimizers, a list with
            one recorder for each, in their order.

    Raises:
        TypeError, ValueError: `max_norm` is no rule.

    Notes:
        `fit` raises a RuntimeError if Lightning would clip as well, by `gradient_clip_val` or by
        `configure_gradient_clipping` of the module; if the trainer has two of these callbacks; and
        under DeepSpeed, which clips in its engine. It raises a ValueError if an optimizer is a
        ClippedOptimizer already, if the numbers of recorders and optimizers differ, or if a module
        has `need_clip = False`, which belongs on parameters.
    """

    def __init__(
        self,
        max_norm: float | Rule,
        *,
        nonfinite: StepNonfinite = "propagate",
        log: bool = True,
        recorder: Recorder | Sequence[Recorder] | None = None,
    ) -> None:
        self.clip = as_rule("max_norm", max_norm)
        self.nonfinite, self.recorder = nonfinite, recorder
        # Lightning sets a method under the name `log`.
        self._logs = log
        self._logged_step = -1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a trainer or a module that clips as well."""
        if stage != "fit":
            return
        n = sum(isinstance(callback, Clipping) for callback in trainer.callbacks)
        if n > 1:
            raise RuntimeError(
                f"the trainer has {n} callbacks Clipping, and the last would set the rule of all "
                "optimizers; expected one: for several rules, give parameter groups a rule under "
                "the key 'clip'"
            )
        if trainer.gradient_clip_val:
            raise RuntimeError(
                "the callback Clipping clips in the optimizer, and Trainer(gradient_clip_val="
                f"{trainer.gradient_clip_val}) would clip before it; expected one of the two: "
                "leave gradient_clip_val at None, or remove the callback"
            )
        method = type(pl_module).configure_gradient_clipping
        if method.__qualname__ != "LightningModule.configure_gradient_clipping":
            raise RuntimeError(
                f"{type(pl_module).__name__}.configure_gradient_clipping would clip before the "
                "optimizer, in which the callback Clipping clips; expected one of the two: remove "
                "the method, and look at gradients in on_before_optimizer_step"
            )
        if any(cls.__name__ == "DeepSpeedStrategy" for cls in type(trainer.strategy).__mro__):
            raise RuntimeError(
                "DeepSpeed clips in its engine, out of reach of an optimizer; expected another "
                "strategy, or gradient_clipping in the configuration of DeepSpeed and no callback "
                "Clipping"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wraps the optimizers, before their checkpoints are loaded."""
        checked_parameters(pl_module)
        options, n = _options_for(trainer.strategy.model), len(trainer.optimizers)
        recorders = self.recorder if isinstance(self.recorder, list | tuple) else [self.recorder]
        if self.recorder is None:
            recorders = [None] * n
        if len(recorders) != n:
            raise ValueError(
                f"expected a recorder for each of the {n} optimizers, got {len(recorders)}; pass "
                "Clipping(..., recorder=[...]) a list, each with another path"
            )
        trainer.strategy.optimizers = [
            self._wrap(inner, recorder, options)
            for inner, recorder in zip(trainer.optimizers, recorders, strict=True)
        ]
        self._logged_step = trainer.global_step

    def _wrap(
        self, inner: Any, recorder: Recorder | None, options: dict[str, Any]
    ) -> ClippedOptimizer:
        for made in _made:
            if made.optimizer is inner:
                # The module has kept its optimizer, and is fitted again.
                made.clip, made.nonfinite, made.recorder = self.clip, self.nonfinite, recorder
                return made
        wrapper = ClippedOptimizer(
            inner, self.clip, nonfinite=self.nonfinite, recorder=recorder, **options
        )
        _made.add(wrapper)
        return wrapper

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Logs the measurements if this batch ended in a step and the trainer logs it."""
        stepped = trainer.global_step != self._logged_step
        self._logged_step = trainer.global_step
        # Lightning's own callbacks ask the same private attribute.
        if not (self._logs and stepped and trainer._logger_connector.should_update_logs):
            return
        several = len(trainer.optimizers) > 1
        for i, optimizer in enumerate(trainer.optimizers):
            if isinstance(optimizer, ClippedOptimizer):
                pl_module.log_dict(metrics_of(optimizer, f"clip{i}/" if several else "clip/"))


def _options_for(model: Any) -> dict[str, Any]:
    """Names the processes that hold a model of FSDPStrategy, whose shards do not say so."""
    if "torch.distributed.fsdp" not in sys.modules:
        return {}
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    if not isinstance(model, FullyShardedDataParallel):
        return {}
    group: Any = model.process_group
    if model.sharding_strategy == ShardingStrategy.NO_SHARD:
        return {"process_group": group, "copies": lambda _: group.size()}
    return {"process_group": group}
