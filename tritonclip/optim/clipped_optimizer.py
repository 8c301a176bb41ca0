"""The arguments of a ClippedOptimizer as attributes, which may be replaced between steps.

A wrapper around an optimizer: the scale it is handed, its groups, and its checkpoints.

A wrapper around an optimizer: how it makes the clipping of a step.

An optimizer that clips where clipping belongs: in its own step, once, before the update.
"""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from tritonclip.distributed.process_groups import Copies, Holders, check_holders
from tritonclip.engine import misuse
from tritonclip.engine.plan_cache import PlanCache
from tritonclip.flat.flat_gradients import FlatGradients
from tritonclip.flat.view_watch import zero_gradient_
from tritonclip.monitor.stats import ClipStats
from tritonclip.optim import fused
from tritonclip.optim.checkpoint import STATS_KEY, split_own, with_own
from tritonclip.optim.closures import (
    CLOSURE_UNDER_SCALER,
    NO_LOSS_FOR_LBFGS,
    Closure,
    evaluate,
    step_checking,
    step_evaluating,
)
from tritonclip.optim.log import StepLog, either
from tritonclip.optim.misuse import IN_VAIN, NoRuleNumbers, guard_, warn_if_clipped, warn_of_nothing
from tritonclip.optim.param_groups import (
    check_group,
    not_in_buffers,
    options_of,
    rule_of_all,
    rules_of,
    unclipped,
    with_present_rules,
    without_rules,
)
from tritonclip.optim.proxy import GRAD_SCALER, DelegatingOptimizer, asks, check_optimizer, register
from tritonclip.optim.states import Memory, SkipWatch, as_skip_bound
from tritonclip.optim.step import Attempt, Observation, StepClipping, as_recorder
from tritonclip.rules import Outlier, Rule
from tritonclip.signatures import explains_misfits

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tritonclip.monitor.recorder import Recorder


_POLICIES = ("propagate", "error", "zero", "skip")


class Replaceable(NoRuleNumbers):
    """Attributes that are checked where they are set."""

    param_groups: list[dict[str, Any]]
    _holders: Holders | None
    _log: StepLog

    @property
    def stats(self) -> ClipStats:
        """Norms, coefficients and counts; see :class:`ClipStats`."""
        return self._log.stats

    @stats.setter
    def stats(self, stats: ClipStats) -> None:
        self._log.stats = stats

    @property
    def clip(self) -> Rule:
        """The rule for all groups that carry none; may be replaced, by a number too."""
        return self._rule

    @clip.setter
    def clip(self, clip: float | Rule) -> None:
        self._rule = rule_of_all(clip)

    @property
    def flat(self) -> FlatGradients | None:
        """The gradients as one buffer for each device and dtype, if any; replaceable."""
        return self._flat

    @flat.setter
    def flat(self, flat: FlatGradients | None) -> None:
        self._not_in_buffers = not_in_buffers(flat, self.param_groups, self._holders)
        known = [] if flat is None else [list(group["params"]) for group in self.param_groups]
        self._flat, self._known_params = flat, known

    @property
    def nonfinite(self) -> str:
        """The policy for a step that is not finite."""
        return self._nonfinite

    @nonfinite.setter
    def nonfinite(self, nonfinite: str) -> None:
        if nonfinite not in _POLICIES:
            raise ValueError(
                f"nonfinite must be 'propagate', 'error', 'zero' or 'skip', got {nonfinite!r}"
            )
        self._nonfinite = nonfinite

    @property
    def skip_above(self) -> float | Outlier | None:
        """The largest norm of a step that is not skipped; replaceable."""
        return self._log.memory.skip_above

    @skip_above.setter
    def skip_above(self, skip_above: float | Outlier | None) -> None:
        self._log.memory.skip_above = as_skip_bound(skip_above)

    @property
    def max_consecutive_skips(self) -> int | None:
        """Skipped steps in a row at which a step raises; replaceable."""
        return self._log.watch.most

    @max_consecutive_skips.setter
    def max_consecutive_skips(self, most: int | None) -> None:
        self._log.watch = SkipWatch(most)

    @property
    def recorder(self) -> Recorder | None:
        """The recorder that takes the norms of every step, if any; replaceable."""
        return self._log.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._log.recorder = as_recorder(recorder)


class ClippingWrapper(Replaceable, DelegatingOptimizer):
    """All of a ClippedOptimizer but its steps.

    Attributes:
        found_inf: of a GradScaler, during a step; the wrapped optimizer has its own.
    """

    found_inf: Any = None

    def _attach(self, optimizer: Optimizer) -> None:
        self._share(optimizer)
        # For a step under a GradScaler of ours: whether the device decides; None for other steps.
        self._amp_scaling: bool | None = None
        # From the first gradient that a step writes, until it has updated the parameters.
        self._attempt: Attempt | None = None
        # Under "scaler" for one step of it; under "user" as torch's fused optimizers take it.
        self._scales: dict[str, Any] = {}
        self._clipping: StepClipping | None = None
        self._begun: Attempt | None = None
        self._plans = PlanCache()
        # As they were read last.
        self._own_rules = rules_of(optimizer.param_groups)
        self._guard = guard_(optimizer, self)
        # The first steps with a gradient, after which calls of `clip_` are looked out for, and the
        # steps before them.
        self._watches, self._in_vain = 2, 0
        register(optimizer, self)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler hands scale and overflow to `step` instead of dealing with them."""
        if asks(GRAD_SCALER):
            # It begins a step; whatever an interrupted one left is void.
            self._clipping = None
            self._scales.pop("scaler", None)
            self.__dict__.pop("found_inf", None)
            if self._attempt is not None:
                self._attempt.judge(self._present())
        if self._amp_scaling is not None:
            return self._amp_scaling
        return fused.takes_scaling(self.optimizer)

    @property
    def grad_scale(self) -> Any:
        """The loss scale that gradients carry at the next step; absent where there is none.

        A GradScaler multiplies its scale with one that was set before, or 1. It does not find its
        own, which an interrupted step may have left.
        """
        if asks(GRAD_SCALER):
            return self._scales.get("user", 1)
        for owner in ("scaler", "user"):
            if owner in self._scales:
                return self._scales[owner]
        raise AttributeError("grad_scale: no loss scale is set")

    @grad_scale.setter
    def grad_scale(self, scale: Any) -> None:
        self._scales["scaler" if asks(GRAD_SCALER) else "user"] = scale

    @grad_scale.deleter
    def grad_scale(self) -> None:
        self._scales.clear()

    def _end_failed(self, error: BaseException) -> None:
        """Ends a step that raises: keeps its attempt, for the next step, if it wrote anything."""
        attempt = self._attempt
        if attempt is not None:
            if attempt.outcomes is None and attempt.clipping.is_refused(error):
                self._attempt = None
            else:
                attempt.fail()
        # A GradScaler takes these back only from a step that succeeded.
        self._scales.clear()
        self.__dict__.pop("found_inf", None)

    def _before_unscaling(self) -> None:
        if self._attempt is not None:
            self._attempt.refuse_unscaling(self._present())
        if misuse.remembered:
            warn_if_clipped(self._present(), scaled=True)

    @torch.compiler.disable
    def _watch(self) -> None:
        """Looks out for mistakes that pass in silence, after one of the first steps."""
        misuse.watch()
        if self._present():
            self._watches, self._in_vain = self._watches - 1, 0
            return
        self._in_vain += 1
        n_parameters = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if self._in_vain == IN_VAIN and n_parameters:
            warn_of_nothing(n_parameters)

    def _present(self) -> list[Tensor]:
        """The gradients, and the buffers that hold them."""
        grads = [p.grad for group in self.optimizer.param_groups for p in group["params"]]
        buffers = () if self._flat is None else self._flat.buffers
        return [*(grad for grad in grads if grad is not None), *buffers]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, which may carry a rule under the key `clip`."""
        if isinstance(param_group, dict):
            check_group(len(self.param_groups), param_group, options_of(self.optimizer))
        if self.flat is not None:
            raise ValueError(
                "a FlatGradients holds the gradients of the parameters that were there; expected "
                "none while a group is added: set flat to None, add the group, and set flat to a "
                "new FlatGradients"
            )
        super().add_param_group(param_group)
        self._own_rules = rules_of(self.optimizer.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets gradients, as the wrapped optimizer does; those of `flat` become 0, never None."""
        self._attempt = None
        if self.flat is None:
            super().zero_grad(set_to_none)
            return
        # First: where it raises, nothing was changed.
        self.flat.zero_()
        for number, position in self._not_in_buffers:
            # Not from the groups, which may have changed since.
            parameter = self._known_params[number][position]
            if set_to_none:
                parameter.grad = None
            else:
                zero_gradient_(parameter)

    def _save(self, *, in_groups: bool) -> dict[str, Any]:
        # Also here, for optimizers that do not run their hooks.
        saved = without_rules(self.optimizer, self.optimizer.state_dict())
        own = self._log.state_dict(self.optimizer.param_groups)
        return with_own(saved, own) if in_groups else {**saved, STATS_KEY: own}

    def _load(self, state_dict: dict[str, Any]) -> None:
        rest, own = split_own(state_dict)
        loaded = self._log.loaded(own, self._rules(), fused.device_of(self.optimizer))
        super()._load(with_present_rules(self.optimizer, rest))
        self._log.take(*loaded, self.optimizer.param_groups)

    def _rules(self) -> dict[str, Rule]:
        """The rules of the program, by their owners in a checkpoint."""
        own = rules_of(self.optimizer.param_groups)
        return {"rule": self._rule, **{f"group{i}": rule for i, rule in own.items() if rule}}

    def __getstate__(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer,
            "clip": self.clip,
            "nonfinite": self._nonfinite,
            "memory": self._log.memory.copy(self.optimizer.param_groups),
            "max_consecutive_skips": self._log.watch.most,
            "stats": self.stats,
            "flat": self.flat,
            "unclipped": unclipped(self.optimizer.param_groups),
            "holders": self._holders,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A shallow copy would be a second wrapper.
        check_optimizer(state["optimizer"])
        for number, position in state["unclipped"]:
            # Copies of parameters have no attributes.
            state["optimizer"].param_groups[number]["params"][position].need_clip = False
        self.clip, self.nonfinite = state["clip"], state["nonfinite"]
        watch = SkipWatch(state["max_consecutive_skips"])
        self._log = StepLog(state["stats"], state["memory"], watch)
        self._holders = state["holders"]
        self._attach(state["optimizer"])
        self._log.memory.resume(self.optimizer.param_groups)
        self.flat = state["flat"]


class MeasuringWrapper(ClippingWrapper):
    """Measures the gradients of its optimizer."""

    @torch.compiler.disable
    def _measure(
        self,
        grad_scale: Tensor | float | None = None,
        *,
        check_finite: bool = False,
        refusal: Exception | None = None,
    ) -> StepClipping:
        """Measures a step, unless it is refused; other processes, which may wait, are told why.

        Args:
            grad_scale: the loss scale that all gradients still carry; None for none.
            check_finite: whether every gradient is finite will be asked for.
            refusal: is raised.

        Raises:
            TypeError, ValueError, RuntimeError: the refusal, and as for `clip_`.
        """
        groups, flat, recorder = self.optimizer.param_groups, self._flat, self._log.recorder
        if self._own_rules or any("clip" in group for group in groups):
            refusal = refusal or self._read_rules()
        if flat is not None:
            refusal = refusal or self._check_flat(flat)
        observation = None
        if recorder is not None:
            tells = self._holders is not None
            observation = Observation(recorder, groups, flat, grad_scale, tells=tells)
            refusal = refusal or observation.refusal
        return StepClipping(
            groups,
            self._rule,
            self._own_rules,
            self._nonfinite,
            grad_scale,
            check_finite=check_finite or self._nonfinite in ("skip", "error"),
            plans=self._plans,
            memory=self._log.memory,
            flat=flat,
            not_in_buffers=self._not_in_buffers,
            holders=self._holders,
            observation=observation,
            refusal=refusal,
            # Under a GradScaler, a step that is not finite is an overflow.
            names_culprits=None if check_finite else self._raises_if_nonfinite,
        )

    def _raises_if_nonfinite(self) -> bool:
        """Whether a step that is not finite raises, and is no overflow."""
        found_inf = self.found_inf
        overflows = isinstance(found_inf, Tensor) and bool(found_inf > 0)
        return self._nonfinite == "error" and not overflows

    def _measure_scaled(self, grad_scale: Tensor) -> Tensor:
        """Measures for the step to come, and says whether it overflows: float32, 0-d, 0 or 1."""
        self._clipping = self._measure(grad_scale, check_finite=True)
        found_inf: Tensor = self._clipping.nonfinite()
        return found_inf.to(torch.float32)

    def _read_rules(self) -> Exception | None:
        """Reads the rules of groups; where one is no rule, they stay those of the step before."""
        try:
            self._own_rules = rules_of(self.optimizer.param_groups)
        except (TypeError, ValueError) as error:
            return error
        return None

    def _check_flat(self, flat: FlatGradients) -> Exception | None:
        """Refuses parameters that came from outside; an error that other processes are told."""
        try:
            if self._groups_changed():
                self.flat = flat
        except (TypeError, ValueError, RuntimeError) as error:
            if self._holders is None:
                raise
            return error
        return None

    def _groups_changed(self) -> bool:
        """Whether the groups hold other parameters than those that were compared with `flat`."""
        groups, known = self.optimizer.param_groups, self._known_params
        return len(groups) != len(known) or not all(
            len(group["params"]) == len(params) and all(map(is_, group["params"], params))
            for group, params in zip(groups, known, strict=True)
        )


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
        self._holders = check_holders(process_group, copies)
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
