"""An optimizer that clips where clipping belongs: in its own step, once, before the update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from tritonclip.distributed.process_groups import Copies, check_processes
from tritonclip.engine import misuse
from tritonclip.flat.flat_gradients import FlatGradients
from tritonclip.monitor.stats import ClipStats
from tritonclip.optim import fused
from tritonclip.optim.attempt import Attempt
from tritonclip.optim.closures import (
    CLOSURE_UNDER_SCALER,
    NO_LOSS_FOR_LBFGS,
    Closure,
    evaluate,
    step_checking,
    step_evaluating,
)
from tritonclip.optim.guard import warn_if_clipped
from tritonclip.optim.measuring_wrapper import MeasuringWrapper
from tritonclip.optim.memory import Memory, SkipWatch, as_skip_bound
from tritonclip.optim.param_groups import check_group, not_in_buffers, options_of
from tritonclip.optim.registry import check_optimizer
from tritonclip.optim.step_log import StepLog, either
from tritonclip.rules import Outlier, Rule
from tritonclip.signatures import explains_misfits

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tritonclip.monitor.recorder import Recorder

StepNonfinite = Literal["propagate", "error", "zero", "skip"]


@explains_misfits
class ClippedOptimizer(MeasuringWrapper):
    """Wraps an optimizer so that every `step` clips first, and counts how often it did.

    It is a `torch.optim.Optimizer` that shares parameter groups, state and defaults with the one it
    wraps: schedulers, `GradScaler`, checkpoints and trainers take it in its place. Use the wrapper
    only, and no other clipping beside it.

    A parameter group may carry a rule of its own under the key `clip`: groups without the key share
    the wrapper's rule, under one norm; a group with a rule has a norm of its own; None leaves the
    group alone. A parameter with `need_clip = False` is left out.

    With a closure, gradients are clipped after each of its evaluations; the statistics have the
    norm of the first and the least coefficient of all. Under a `GradScaler`, they are unscaled
    before they are clipped, whether `unscale_` was called or not; see :class:`GradScaler` for the
    variant that reads them only once.

    Public methods and attributes that only the wrapped optimizer has, such as `train` and `eval` of
    schedule-free optimizers, are reached through the wrapper. Methods that would update parameters
    past the clipping, such as `first_step` and `second_step` of SAM, raise AttributeError. An
    attribute that is set stays on the wrapper: those of the wrapped optimizer are set on
    `optimizer.optimizer`.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        clip: a rule, such as :class:`ClipByGlobalNorm`, :class:`ClipByNorm` or
            :class:`ClipByValue`; a number means ClipByGlobalNorm(number). The state of
            adaptive rules is part of checkpoints.
        nonfinite: the policy for a step whose gradients or norms are NaN or inf.
            "propagate", "zero": as for :func:`clip_`, for those that share a rule.
            "error": RuntimeError that names the parameters; nothing is changed; waits for the
            device at every step.
            "skip": parameters, optimizer state and step counts stay as they are. An inner optimizer
            that takes `found_inf` (Adam, AdamW, SGD and Adagrad with `fused=True`) decides on the
            device; with any other every step waits for the device.
            "error" and "skip" look at all gradients, also at those that are not clipped. A step
            that a GradScaler skips because of an overflow is neither an error nor counted.
        skip_above: steps whose gradients have a larger norm are left out as those of "skip" are:
            the largest norm that is not skipped, or :class:`Outlier` for one that follows the
            norms. Compared is the 2-norm before clipping of all gradients that are clipped; inf is
            above, NaN is not. Of a closure the first evaluation is looked at. None skips none.
        max_consecutive_skips: skipped steps in a row at which `step` raises RuntimeError; None for
            no error, and a warning at 100. Where no step waits for a GPU, it raises eight steps
            later, in every process at the same one. May be replaced.
        recorder: of :func:`record`: takes norm, coefficient, limit and skips of every step, and the
            norms of groups that have a rule; may be replaced. Copies of the wrapper have none.
        flat: the :class:`FlatGradients` of the optimizer's parameters; may be replaced. Steps then
            do not look at every parameter (unless a group has a rule of its own), and `zero_grad`
            sets gradients to 0, never to None.
        process_group: the processes that hold the gradients between them, where DTensors do not say
            so; see :func:`clip_`.
        copies: how many of them hold the same piece of a parameter's gradient; see :func:`clip_`.

    Attributes:
        optimizer: the wrapped optimizer.
        stats: norms, coefficients and counts; see :class:`ClipStats`.

    Raises:
        TypeError: an argument that is no optimizer, or no rule.
        ValueError: an optimizer that is wrapped already; an unknown policy; a `flat` of other
            parameters; `max_consecutive_skips` where no step is skipped.

    Notes:
        Rules are not part of a checkpoint: the program states them, as it does the class of the
        optimizer. `state_dict` adds the statistics, and the norms that rules remember, to the
        wrapped optimizer's; either one loads the checkpoint of the other.
        `torch.distributed.checkpoint` carries them in the parameter groups, under the key
        `tritonclip`.

        With a closure, "skip" and "error" evaluate it before the wrapped optimizer does, and refuse
        one that changes anything before it evaluates. LBFGS then keeps a copy of parameters and
        state during a step, for an evaluation within the step that is not finite.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = ClippedOptimizer(torch.optim.SGD([weight], lr=1.0), 1.0)
        >>> (weight * weight).sum().backward()
        >>> optimizer.step()
        >>> weight.data
        tensor([2.4000, 3.2000])
        >>> optimizer.stats.last_norm
        tensor(10.)

    References:
        Paddle, `Optimizer(grad_clip=)`; Keras, `Optimizer(global_clipnorm=)`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        clip: float | Rule,
        *,
        nonfinite: StepNonfinite = "propagate",
        skip_above: float | Outlier | None = None,
        max_consecutive_skips: int | None = None,
        recorder: Recorder | None = None,
        flat: FlatGradients | None = None,
        process_group: ProcessGroup | DeviceMesh | None = None,
        copies: Copies | None = None,
    ) -> None:
        check_optimizer(optimizer)
        self._holders = check_processes(process_group, copies)
        self.clip, self.nonfinite = clip, nonfinite
        memory, watch = Memory(as_skip_bound(skip_above)), SkipWatch(max_consecutive_skips)
        watch.refuse_without_skips(nonfinite, skip_above)
        self._log = StepLog(ClipStats(fused.device_of(optimizer)), memory, watch)
        self.recorder = recorder
        for number, group in enumerate(optimizer.param_groups):
            check_group(number, group, options_of(optimizer))
        # Refuses wrong parameters, while this does not count as a wrapper.
        not_in_buffers(flat, optimizer.param_groups, self._holders)
        self._attach(optimizer)
        self.flat = flat

    @torch.compiler.disable(recursive=False)
    def step(self, closure: Closure | None = None) -> Any:
        """Clips, then lets the wrapped optimizer update the parameters.

        Args:
            closure: evaluates the model, calls backward, and returns the loss. Gradients are
                clipped after each evaluation.

        Returns:
            The result of the wrapped optimizer: the loss of the first evaluation, None without a
            closure.

        Raises:
            RuntimeError: gradients that are not finite, with nonfinite="error"; a closure that the
                wrapped optimizer does not evaluate, or one under a GradScaler.
            TypeError: a closure that computes gradients and returns None; gradients as for
                :func:`clip_`.
        """
        self._guard.open = True
        try:
            return super().step(closure)
        except BaseException as error:
            self._end_failed(error)
            raise
        finally:
            self._guard.open = False

    @torch.compiler.disable(recursive=False)
    def _step(self, closure: Closure | None = None) -> tuple[Any, bool]:
        self._move_stats()
        if closure is None:
            if isinstance(self.optimizer, LBFGS):
                # Not told to other processes: they have begun to evaluate theirs, and the
                # collectives of their models wait for this process first.
                raise TypeError(NO_LOSS_FOR_LBFGS)
            return self._step_with_gradients()
        self._attempt = None
        if isinstance(self.found_inf, Tensor):
            raise RuntimeError(CLOSURE_UNDER_SCALER)
        if self._nonfinite in ("propagate", "zero") and self.skip_above is None:
            return step_evaluating(self.optimizer, closure, self._measure, self._log), True
        loss = evaluate(closure, self.optimizer, self._measure)
        if loss is None or fused.takes_found_inf(self.optimizer):
            # Nothing to hand on, or an optimizer that evaluates first and only once.
            _, taken = self._step_with_gradients()
            return loss, taken
        # Evaluated before the wrapped optimizer does it, while nothing has changed yet.
        return step_checking(
            self.optimizer, closure, loss, self._measure, self._nonfinite, self._log
        )

    def _move_stats(self) -> None:
        device = fused.device_of(self.optimizer)
        if device != self._log.stats.last_norm.device:
            self._log.stats.move_(device)

    def _step_under_scaler(
        self, scale: Tensor | None, found_inf: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Steps, unless the host leaves the step out: then `step` is not called, as by torch's.

        Args:
            scale: that gradients carry; None for none.
            found_inf: whether they overflow.
            args: of `step`.
            kwargs: of `step`.
        """
        self._scales["scaler"], self.found_inf = scale, found_inf
        try:
            # `step` refuses a closure.
            if all(argument is None for argument in (*args, *kwargs.values())):
                self._move_stats()
                self._begun = self._begin()
                if self._begun is None:
                    return None
                del self.found_inf
            return self.step(*args, **kwargs)
        except BaseException as error:
            self._end_failed(error)
            raise
        finally:
            self._begun = None
            self._scales.clear()
            vars(self).pop("found_inf", None)

    def _begin(self) -> Attempt | None:
        """Measures and judges a step; None of one that the host leaves out, which is counted."""
        clipping, self._clipping = self._clipping, None
        grad_scale = self.grad_scale if self._scales else None
        attempt = self._attempt
        if attempt is not None and attempt.goes_on(self._present()):
            attempt.remember_in(self._log.memory)
        else:
            if clipping is None or grad_scale is None:
                clipping = self._measure(grad_scale)
            nonfinite = clipping.nonfinite() if self._nonfinite == "skip" else None
            outlier = None if self._log.memory.skip_above is None else self._log.judge(clipping)
            skip = nonfinite if outlier is None else either(nonfinite, outlier.flag)
            attempt = Attempt(clipping, skip, outlier, scaled=grad_scale is not None)
            self._attempt = None
            if misuse.remembered:
                warn_if_clipped(clipping.written_to(), scaled=grad_scale is not None)
        found_inf = self.found_inf
        overflow = found_inf.reshape(()) > 0 if isinstance(found_inf, Tensor) else None

        attempt.overflow, attempt.stop = overflow, either(overflow, attempt.skip)
        if attempt.stop is not None and not self._decides_on_device():
            if bool(attempt.stop):
                self._log.add_left_out(attempt.clipping, attempt.outlier, overflow)
                return None
            attempt.stop = None
        return attempt

    def _decides_on_device(self) -> bool:
        """Whether the wrapped optimizer is told on the device to leave a step out."""
        if self._amp_scaling is None or self._optimizer_step_pre_hooks:
            return fused.takes_found_inf(self.optimizer)
        return self._amp_scaling

    def _step_with_gradients(self) -> tuple[Any, bool]:
        """Clips the gradients that are there; returns the result, and whether the step was taken.

        A step that the device leaves out counts as taken here.
        """
        begun, self._begun = self._begun, None
        if self._optimizer_step_pre_hooks:
            # They run after a GradScaler has measured, and may have changed anything.
            begun = self._clipping = None
        attempt = begun or self._begin()
        if attempt is None:
            return None, False
        stop = attempt.stop
        if attempt.outcomes is None:
            if self._nonfinite == "error" and (stop is None or not bool(stop)):
                attempt.clipping.raise_if_nonfinite()
            self._attempt = attempt
            attempt.outcomes = attempt.clipping.write_()

        # An interrupted step may have left its own.
        vars(self.optimizer).pop("found_inf", None)
        result = self.optimizer.step() if stop is None else fused.step(self.optimizer, stop)
        self._attempt = None
        if self._watches:
            self._watch()
        flags = (None, None) if stop is None else (attempt.overflow, attempt.skip)
        self._log.add(attempt.clipping, attempt.outcomes, *flags, attempt.outlier)
        return result, True

    def __repr__(self) -> str:
        return (
            f"ClippedOptimizer(clip={self.clip}, nonfinite={self.nonfinite!r}, "
            f"optimizer={self.optimizer!r})"
        )
