"""Hugging Face Trainer: a trainer that clips in its optimizer, and the mixin that it is made of."""

from __future__ import annotations

from typing import Any

from tritonclip.engine.arguments import checked_parameters
from tritonclip.integrations.trainers import metrics_of, needs, wrapper_in
from tritonclip.optim.clipped_optimizer import ClippedOptimizer
from tritonclip.optim.refusals import StepNonfinite
from tritonclip.rules import Rule, as_rule

try:
    import transformers
    from transformers.trainer_pt_utils import LayerWiseDummyOptimizer
except ImportError as error:
    raise needs("transformers", error) from error

__all__ = ["ClippingMixin", "ClippingTrainer"]


class ClippingMixin:
    """Makes a `transformers.Trainer` clip by a `ClippedOptimizer`, and by nothing else.

    Put it before the class of the trainer, which may be any subclass of Trainer, such as
    `trl.SFTTrainer`.

    Example:
        >>> class MyTrainer(ClippingMixin, transformers.Seq2SeqTrainer):
        ...     pass
        >>> [cls.__name__ for cls in MyTrainer.mro()[:3]]
        ['MyTrainer', 'ClippingMixin', 'Seq2SeqTrainer']

    The Trainer's own clipping is turned off: `max_grad_norm` becomes 0. At the Trainer's logging
    interval it logs `clip/norm`, `clip/coefficient` and `clip/clipped_share` beside the loss, and
    `clip/skipped_steps` with nonfinite="skip". `grad_norm` is the norm before clipping as well.

    Args:
        *args: arguments of the trainer.
        max_norm: the largest norm of all gradients together; or a rule.
        nonfinite: the policy for NaN and inf; see :class:`~tritonclip.ClippedOptimizer`.
        recorder: a recorder for the ClippedOptimizer, made by :func:`~tritonclip.record`.
        **kwargs: arguments of the trainer.

    Raises:
        TypeError: `max_norm` is no rule.
        ValueError: `max_grad_norm` is neither its default nor 0; `optimizers=` has a
            ClippedOptimizer; a module has `need_clip = False`, which belongs on parameters.
        RuntimeError: DeepSpeed, which clips in its engine; optimizers that step inside backward.
    """

    args: Any
    model: Any
    optimizer: Any
    is_deepspeed_enabled: bool

    def __init__(
        self,
        *args: Any,
        max_norm: float | Rule,
        nonfinite: StepNonfinite = "propagate",
        recorder: Any = None,
        **kwargs: Any,
    ) -> None:
        self._clip = as_rule("max_norm", max_norm)
        self._nonfinite, self._recorder = nonfinite, recorder
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            raise RuntimeError(
                "DeepSpeed clips in its engine, out of reach of an optimizer; expected a trainer "
                "without DeepSpeed, or gradient_clipping in its configuration and a plain Trainer"
            )
        if wrapper_in(self.optimizer) is not None:
            raise ValueError(
                "optimizers= has a ClippedOptimizer, and max_norm= would wrap it once more; "
                "expected a bare optimizer"
            )
        limit = self.args.max_grad_norm
        if limit and limit != type(self.args).max_grad_norm:
            # It is not the default, so the user chose it.
            raise ValueError(
                f"max_grad_norm={limit} would clip before the optimizer, in which max_norm= clips; "
                "expected one of the two: max_grad_norm=0.0, or a plain Trainer"
            )
        self.args.max_grad_norm = 0.0

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Makes and wraps the optimizer of the trainer."""
        inner = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if wrapper_in(inner) is None:
            checked_parameters(self.model)
            if isinstance(inner, LayerWiseDummyOptimizer):
                raise RuntimeError(
                    f"optim={self.args.optim} steps inside backward, before all gradients are "
                    "there; expected another optimizer, or clip_on_backward_ before the trainer is "
                    "made, and a plain Trainer"
                )
            self.optimizer = ClippedOptimizer(
                inner, self._clip, nonfinite=self._nonfinite, recorder=self._recorder
            )
        return self.optimizer

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Measures nothing, since the Trainer would read and write all gradients once more."""
        return grad_norm

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the measurements to the training logs."""
        clipped = wrapper_in(self.optimizer)
        if "loss" in logs and clipped is not None:
            metrics = metrics_of(clipped)
            if "clip/norm" in metrics:
                logs["grad_norm"] = metrics["clip/norm"]
            logs.update(metrics)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class ClippingTrainer(ClippingMixin, transformers.Trainer):  # type: ignore[misc]  # untyped
    """A `transformers.Trainer` with the argument `max_norm`; all else is as for `ClippingMixin`.

    Example:
        >>> import tempfile, torch
        >>> sizes = {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 7}
        >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        >>> texts = torch.arange(64).view(16, 4) % 7
        >>> data = [{"input_ids": ids, "labels": ids} for ids in texts]
        >>> arguments = transformers.TrainingArguments(
        ...     tempfile.mkdtemp(), max_steps=2, logging_steps=2, use_cpu=True,
        ...     report_to="none",
        ... )
        >>> trainer = ClippingTrainer(model, arguments, train_dataset=data, max_norm=1.0)
        >>> result = trainer.train()
        {'loss': ..., 'clip/norm': ...}
        {'train_runtime': ...}
    """
