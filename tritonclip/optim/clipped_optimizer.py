"""An optimizer that clips in its own step, once, before the update."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from tritonclip.distributed.domain import Copies, check_processes
from tritonclip.messages import warn_user
from tritonclip.modes import without_grad
from tritonclip.monitor.recorder import Recorder, as_recorder, saved_steps
from tritonclip.monitor.stats import ClipStats
from tritonclip.optim.amp import ScalerSide
from tritonclip.optim.checkpoint import (
    begin_,
    drop_loaded_,
    end_,
    is_unflattening,
    is_zero,
    mark_,
    may_make_state,
    split_part,
    with_names,
    with_part,
    with_present_rules,
    without_rules,
)
from tritonclip.optim.clip_groups import (
    Grouping,
    grads_in,
    refuse_differentiable,
    rule_of,
    unclipped_in,
)
from tritonclip.optim.closures import Closure, refuse_judging, take_closure
from tritonclip.optim.refusals import StepNonfinite, policy_of
from tritonclip.optim.states import RuleStates, as_loss, as_skip_bound
from tritonclip.optim.step import Step, StepRecord
from tritonclip.optim.watches import SkipWatch
from tritonclip.optim.wrapping import check_optimizer, step_unless
from tritonclip.rules import Outlier, Rule, as_rule
from tritonclip.rules.arguments import saved_count

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_DIVIDED = (
    "the step before ended with an error, and may have divided these gradients by the loss scale; "
    "expected new ones: call zero_grad() of the ClippedOptimizer, then backward()"
)


class ClippedOptimizer(ScalerSide):
    """Wraps an optimizer so that every `step` clips the gradients first, and counts clipped steps.

    The wrapper is a `torch.optim.Optimizer` with the parameter groups, state and defaults of the
    optimizer that it wraps. Pass it to schedulers, GradScaler, checkpoints and trainers instead of
    that optimizer. Do not clip by other means as well.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> inner = torch.optim.SGD([weight], lr=1.0)
        >>> optimizer = tritonclip.ClippedOptimizer(inner, 1.0)
        >>> for step in range(2):
        ...     optimizer.zero_grad()
        ...     (weight * weight).sum().backward()
        ...     optimizer.step()
        >>> weight.data
        tensor([1.8000, 2.4000])
        >>> optimizer.stats.last_norm, optimizer.stats.clipped_steps
        (tensor(8.), tensor(2))

    A parameter group may carry a rule under the key `clip`, and then has its own norm; None clips
    nothing. Groups without the key share the wrapper's rule, under one norm. A parameter with
    `need_clip = False` is left out.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        max_norm: the largest norm of all gradients together; or a rule, such as
            :class:`ClipByNorm` or :class:`ClipByValue`.
        nonfinite: the policy for a step whose gradients or norms are NaN or inf.

            - "propagate", "zero": as for :func:`clip_`, for all gradients that share a rule.
            - "error": raises RuntimeError, which names the parameters, and changes nothing. Every
              step waits for the device.
            - "skip": parameters, optimizer state and step counts stay as they are. A wrapped
              optimizer that takes `found_inf` (Adam, AdamW, SGD and Adagrad with `fused=True`)
              decides on an accelerator. With any other, every step waits for the accelerator.

            The last two check all gradients, including those that are not clipped. A step that a
            GradScaler skips because of an overflow raises no error.
        skip_above: skips a step, as "skip" does, if the 2-norm of all clipped gradients, before
            clipping, is larger: a number, or :class:`Outlier` for a limit that follows the norms of
            earlier steps, and their losses, if the attribute `loss` is set before each step. A norm
            of inf is larger, NaN is not. None skips no step.
        max_consecutive_skips: the number of skipped steps in a row at which `step` raises
            RuntimeError. None raises none, and warns at 100. If steps do not wait for the
            accelerator, the error comes eight steps later, in the same step on every process.
        recorder: a recorder made by :func:`record`. It takes norm, coefficient and limit of every
            step, whether the step was skipped, the attribute `loss` if it is set, and the norms of
            groups that have a rule. Deep copies of the wrapper have no recorder.
        process_group: the processes whose gradients share one norm, if no DTensors say so, as for
            :func:`clip_`.
        copies: how many processes hold the same shard of a parameter, as for :func:`clip_`.

    Attributes:
        optimizer: the wrapped optimizer.
        stats: norms, coefficients and counts; see :class:`~tritonclip.monitor.stats.ClipStats`.

    Raises:
        TypeError: an argument that is not an optimizer, or not a rule.
        ValueError: an optimizer that is a ClippedOptimizer; an unknown policy; "skip", "error" or
            `skip_above` for an optimizer that needs a closure, such as LBFGS;
            `max_consecutive_skips` although no step is skipped; a parameter group with
            differentiable=True.

    Notes:
        Public methods and attributes of the wrapped optimizer, such as `train` and `eval` of
        schedule-free optimizers, can be used on the wrapper too. Only `step` clips: methods that
        update parameters without it, such as `second_step` of SAM, do not. An attribute that is set
        on the wrapper is not set on the wrapped optimizer.

        Under a GradScaler, gradients are unscaled before they are clipped, with or without a call
        of `unscale_`: docs/mixed_precision.md. With a closure, gradients are clipped after each
        evaluation; "skip", "error" and `skip_above` evaluate it once, and step without it.

        Checkpoints do not contain rules: like the class of the optimizer, they are part of the
        program. `state_dict` returns the wrapped optimizer's, with the statistics and the norms
        that rules remember. The wrapper and the bare optimizer load each other's checkpoints.
        docs/optimizer.md has more on all of these.

        After a step that raised, for example by Ctrl-C, the next one begins anew. If the failed one
        may have divided the gradients by a loss scale, steps raise RuntimeError until there are new
        gradients or `zero_grad` is called.

    References:
        Paddle, `Optimizer(grad_clip=)`; Keras, `Optimizer(global_clipnorm=)`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_norm: float | Rule,
        *,
        nonfinite: StepNonfinite = "propagate",
        skip_above: float | Outlier | None = None,
        max_consecutive_skips: int | None = None,
        recorder: Recorder | None = None,
        process_group: ProcessGroup | DeviceMesh | None = None,
        copies: Copies | None = None,
    ) -> None:
        check_optimizer(optimizer)
        super().__init__(optimizer)
        processes = check_processes(process_group, copies)
        drop_loaded_(optimizer)
        self._grouping = Grouping(optimizer, as_rule("max_norm", max_norm), processes)
        self._states = RuleStates(self._grouping)
        self._policy, self._watch = policy_of(nonfinite), SkipWatch()
        self.skip_above = skip_above
        self.max_consecutive_skips = max_consecutive_skips
        self.stats = ClipStats(self._grouping.device)
        self.recorder = recorder
        for number, group in enumerate(optimizer.param_groups):
            refuse_differentiable(number, group)
        # The gradients that a failed step may have divided by a loss scale; empty while such a step
        # runs and has not updated the parameters yet; None in all other cases.
        self._divided: list[ref[Tensor]] | None = None
        self._handed = SimpleNamespace(scale=None, found_inf=None)
        # Whether the wrapped optimizer has stepped, and so made the state that it keeps.
        self._has_stepped = False
        # Last, so that a refused argument leaves the optimizer as it was.
        begin_(optimizer, self)

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        if not is_unflattening():
            return self.optimizer.state
        # torch loads only those flattened entries whose names it finds here.
        owners = self._states.owners_of_many()
        return with_names(self.optimizer, owners, has_stepped=self._has_stepped)

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def clip(self) -> Rule:
        """The rule for all groups that carry none. May be replaced by a rule or a number."""
        return self._grouping.rule

    @clip.setter
    def clip(self, clip: float | Rule) -> None:
        self._grouping.rule = as_rule("clip", clip)

    def _refuse_max_norm(self, *_: object) -> NoReturn:
        # An optimizer has no max_norm: setting one here would change nothing.
        raise AttributeError(
            f"max_norm belongs to a rule; expected optimizer.clip, which is {self.clip}, and may "
            "be replaced by a number or a rule"
        )

    max_norm = property(_refuse_max_norm, _refuse_max_norm)

    @property
    def nonfinite(self) -> str:
        """The policy for a step that is not finite. May be replaced."""
        return self._policy.name

    @nonfinite.setter
    def nonfinite(self, nonfinite: str) -> None:
        policy = policy_of(nonfinite)
        refuse_judging(self.optimizer, policy, self.skip_above)
        self._policy = policy

    @property
    def skip_above(self) -> float | Outlier | None:
        """The norm above which a step is skipped, or an Outlier, or None. May be replaced."""
        return self._states.skip_above

    @skip_above.setter
    def skip_above(self, skip_above: float | Outlier | None) -> None:
        skip_above = as_skip_bound(skip_above)
        refuse_judging(self.optimizer, self._policy, skip_above)
        self._states.skip_above = skip_above
        if not isinstance(skip_above, Outlier):
            # Without an Outlier, nothing judges a loss.
            self._states.loss = None

    @property
    def loss(self) -> float | Tensor | None:
        """The loss of the next step, for a recorder and for `Outlier`; None if there is none.

        Set it before each step, in a closure too: the loss over all micro-batches, not scaled. A
        copy without its graph is kept, which the step drops. A recorder writes it beside the norm.
        `Outlier` judges the mean over all processes of `torch.distributed`, so each of them must
        set a loss, or none. Without a recorder and an `Outlier`, nothing reads it.
        """
        return self._states.loss

    @loss.setter
    def loss(self, loss: float | Tensor | None) -> None:
        self._states.loss = as_loss(loss)

    @property
    def max_consecutive_skips(self) -> int | None:
        """The number of skipped steps in a row at which a step raises. May be replaced."""
        return self._watch.most

    @max_consecutive_skips.setter
    def max_consecutive_skips(self, most: int | None) -> None:
        watch = SkipWatch(most)
        watch.refuse_without_skips(self._policy, self.skip_above)
        self._watch = watch

    @property
    def recorder(self) -> Recorder | None:
        """The recorder that takes the norms of every step, or None. May be replaced."""
        return self._recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._recorder = as_recorder(recorder)

    @torch.compiler.disable(recursive=False)
    def step(
        self, closure: Closure | None = None, *, grad_scale: float | Tensor | None = None
    ) -> Any:
        """Clips, then lets the wrapped optimizer update the parameters.

        Args:
            closure: evaluates the model, calls backward, and returns the loss. Gradients are
                clipped after each evaluation.
            grad_scale: a loss scale that the gradients of this step carry, after every evaluation,
                as for :func:`clip_`. Not under a GradScaler, which hands over its own.

        Returns:
            The result of the wrapped optimizer: the loss of the first evaluation, or None without
            a closure.

        Raises:
            RuntimeError: gradients that are not finite, with nonfinite="error"; a closure that
                the wrapped optimizer does not evaluate; a closure or a `grad_scale` under a
                GradScaler that hands over its own, as torch's does to a fused optimizer.
            TypeError: a closure that computes gradients and returns None; gradients as for
                :func:`clip_`.
            TypeError, ValueError: a `grad_scale` that :func:`clip_` refuses.
        """
        optimizer = self.optimizer
        args: tuple[Any, ...] = (self,) if closure is None else (self, closure)
        kwargs: dict[str, Any] = {} if grad_scale is None else {"grad_scale": grad_scale}
        try:
            if self._optimizer_step_pre_hooks:
                args, kwargs = self._before_step(args, kwargs)
                closure, grad_scale = _arguments(*args[1:], **kwargs)
            if grad_scale is not None or self._handed.scale is not None:
                grad_scale = self._loss_scale(grad_scale, closure)
            result, step = None, None
            if closure is not None or isinstance(optimizer, LBFGS):
                measure = partial(self._measure_without_grad, grad_scale)
                result, step = take_closure(
                    optimizer,
                    closure,
                    measure,
                    judges=self._policy.checks or self.skip_above is not None,
                    under_scaler=isinstance(self.found_inf, Tensor),
                )
            if step is None:
                # `torch.distributed.checkpoint` makes state by a step outside of the training.
                makes_state = not (torch.is_grad_enabled() or optimizer.state)
                step = self._prepare(grad_scale, makes_state=makes_state)
                left_out = step.verdict.left_out
                if left_out is not True:
                    # An interrupted `step_unless` may have left its flag behind, by which the
                    # device would leave this step out.
                    vars(optimizer).pop("found_inf", None)
                    if left_out is False:
                        updated = optimizer.step()
                    else:
                        updated = step_unless(optimizer, left_out)
                    self._divided = None
                    result = updated if closure is None else result
            step.finish(self.stats)
            if step.verdict.left_out is not True:
                self._has_stepped = True
                for after in tuple(self._optimizer_step_post_hooks.values()):
                    after(self, args, kwargs)
            return result
        except BaseException:
            # A GradScaler takes back what it handed over only if the step succeeds.
            self._take_back()
            if self._divided == []:
                self._divided = [ref(grad) for grad in grads_in(self.param_groups)]
            raise

    @torch.compiler.disable
    @without_grad
    def _prepare(
        self,
        grad_scale: Tensor | float | None,
        *,
        makes_state: bool = False,
        is_judged_only: bool = False,
    ) -> Step:
        """Measures and judges a step, and clips it unless the host leaves it out."""
        if makes_state:
            has_shards = self._grouping.processes is not None
            makes_state = may_make_state(self.optimizer.param_groups, has_shards=has_shards)
        # A GradScaler may have had the step measured or even judged already. Hooks run after that
        # and may have changed anything.
        step, self._measured = self._measured, None
        if step is None or (self._optimizer_step_pre_hooks and not is_judged_only):
            step = self._measure(grad_scale, is_recorded=not makes_state)
        if not step.is_judged:
            found_inf = self._handed.found_inf
            step.judge(found_inf.reshape(()) > 0 if isinstance(found_inf, Tensor) else False)
        if step.verdict.left_out is not True and not is_judged_only:
            if step.policy.raises and not step.verdict.left_out:
                step.raise_if_nonfinite()
            if step.limited:
                step.ask_limits()
            self._divided = [] if step.is_scaled else None
            step.clip_()
            if makes_state:
                outcomes = [outcome for outcome in step.outcomes.values() if outcome is not None]
                step.is_counted = not all(is_zero(outcome.norm) for outcome in outcomes)
        return step

    def _measure(
        self,
        grad_scale: Tensor | float | None = None,
        *,
        check_finite: bool = False,
        refusal: Exception | None = None,
        is_recorded: bool = True,
    ) -> Step:
        """Measures a step. If it is refused, other processes that may wait get the error."""
        grouping, recorder, policy = self._grouping, self._recorder, self._policy
        self.stats.follow_(grouping.device)
        if self._divided is not None and self._has_divided():
            refusal = refusal or RuntimeError(_DIVIDED)
        # Under a GradScaler, a step that is not finite is an overflow.
        overflow = check_finite or self._handed.found_inf
        check_finite = check_finite or policy.checks
        clip_groups, fault = grouping.divide(covers_all=check_finite or grad_scale is not None)
        refusal = refusal or fault
        record = None
        if recorder is not None and is_recorded:
            record = self._record(recorder)
            refusal = refusal or (None if record is None else record.refusal)
        step = Step(
            clip_groups,
            self._states,
            policy,
            self._watch,
            record,
            1.0 if grad_scale is None else grad_scale,
            is_scaled=grad_scale is not None,
            check_finite=check_finite,
        )
        step.measure(refusal, overflow=overflow)
        return step

    def _record(self, recorder: Recorder) -> StepRecord | None:
        """Makes the record of a step; in a fork, drops the recorder and returns None."""
        if not recorder.is_elsewhere:
            return StepRecord(recorder, self._grouping)
        self.recorder = None
        warn_user(
            "a fork has no recorder: the process that made it records its own steps. Make one with "
            "another path here to record these",
            RuntimeWarning,
        )
        return None

    def _has_divided(self) -> bool:
        """Whether gradients are left that a failed step may have divided by the loss scale.

        New ones do not count, such as those that come after `zero_grad` of the model.
        """
        divided = {id(grad) for weak in self._divided or () if (grad := weak()) is not None}
        if self._divided and divided.isdisjoint(map(id, grads_in(self.param_groups))):
            self._divided = None
        return self._divided is not None

    # For callers outside no_grad.
    _measure_without_grad = torch.compiler.disable(without_grad(_measure))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, which may carry a rule under the key `clip`.

        Args:
            param_group: a dict with the key "params", as for any optimizer.

        Raises:
            TypeError, ValueError: a `clip` that is no rule; differentiable=True.
        """
        if isinstance(param_group, dict):
            number, filled = len(self.param_groups), {**self.defaults, **param_group}
            refuse_differentiable(number, filled)
            if "clip" in filled:
                rule_of(number, filled)
        super().add_param_group(param_group)
        mark_(self.param_groups)
        self._grouping.rules()

    def unwrap(self) -> Optimizer:
        """Ends the wrapper, and returns the wrapped optimizer without the wrapper's hooks and keys.

        Rules that groups carry stay, as they are the user's. If a shallow copy or another wrapper
        of the optimizer is left, hooks and keys stay until the last one ends.

        Returns:
            The wrapped optimizer.
        """
        end_(self.optimizer, self)
        return self.optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets gradients, as the wrapped optimizer does."""
        self._divided = None
        super().zero_grad(set_to_none)

    def _save(self) -> dict[str, Any]:
        # Drops rules here as well, for optimizers that do not run their hooks.
        saved = without_rules(self.optimizer, self.optimizer.state_dict())
        groups = self.optimizer.param_groups
        return with_part(saved, self._part(), groups, has_stepped=self._has_stepped)

    def _part(self) -> dict[str, Any]:
        """Returns the wrapper's part of a checkpoint, for all rules of the program."""
        part: dict[str, Any] = self.stats.state_dict()
        part["calls"] = torch.tensor(self._states.steps, device="cpu")
        if states := self._states.for_checkpoint():
            part["memory"] = states
        if self.recorder is not None:
            part["recorder"] = self.recorder.state_dict()
        return part

    def _load(self, state_dict: dict[str, Any]) -> None:
        rest, part = split_part(state_dict)
        for number, group in enumerate(rest["param_groups"]):
            refuse_differentiable(number, group)
        stats, states, recorded = self._loaded(part)
        self.optimizer.load_state_dict(with_present_rules(self.optimizer, rest))
        # Updated in place, because users may hold `stats`.
        vars(self.stats).update(vars(stats))
        self._states = states
        self._watch.forget()
        if self.recorder is not None and recorded is not None:
            self.recorder.load_state_dict(recorded)

    def _loaded(self, part: object) -> tuple[ClipStats, RuleStates, dict[str, Any] | None]:
        """Makes statistics, rule states and a recorder's state from the wrapper's part."""
        if not isinstance(part, dict):
            raise ValueError(
                "the part of the ClippedOptimizer in a saved state must be a dict, got "
                f"{part!r:.80}; expected the result of its state_dict(). Nothing was loaded"
            )
        part = dict(part)
        states = RuleStates(self._grouping, self.skip_above)
        states.load_state_dict(part.pop("memory", {}))
        states.steps = saved_count("calls", part.pop("calls", 0))
        recorded = part.pop("recorder", None)
        if recorded is not None:
            saved_steps(recorded)
        part.pop("has_state", None)
        stats = ClipStats(self._grouping.device)
        stats.load_state_dict(part)
        return stats, states, recorded

    def __copy__(self) -> ClippedOptimizer:
        """Makes a wrapper that shares everything with this one, like shallow copies in torch."""
        twin = ClippedOptimizer.__new__(type(self))
        vars(twin).update(vars(self))
        begin_(twin.optimizer, twin)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        group, copies, _ = self._grouping.processes or (None, None, ())
        return {
            "arguments": {
                "optimizer": self.optimizer,
                "max_norm": self.clip,
                "nonfinite": self.nonfinite,
                "skip_above": self.skip_above,
                "process_group": group,
                "copies": copies,
            },
            "max_consecutive_skips": self.max_consecutive_skips,
            "memory": self._states,
            "stats": self.stats,
            "unclipped": unclipped_in(self.param_groups),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        arguments = state["arguments"]
        for number, position in state["unclipped"]:
            # Copies of parameters lose their attributes.
            arguments["optimizer"].param_groups[number]["params"][position].need_clip = False
        ClippedOptimizer.__init__(self, **arguments)
        # As an argument it would be refused if the policy was replaced by one that skips no step.
        self._watch = SkipWatch(state["max_consecutive_skips"])
        self.stats, self._states = state["stats"], state["memory"]
        self._states.grouping = self._grouping

    def __repr__(self) -> str:
        above = "" if self.skip_above is None else f"skip_above={self.skip_above}, "
        return (
            f"ClippedOptimizer(max_norm={self.clip}, nonfinite={self.nonfinite!r}, {above}"
            f"optimizer={self.optimizer!r})"
        )


def _arguments(
    closure: Closure | None = None, *, grad_scale: float | Tensor | None = None
) -> tuple[Closure | None, float | Tensor | None]:
    """Checks the arguments of `step` that a hook returned."""
    return closure, grad_scale
