"""An optimizer that clips where clipping belongs: in its own step, once, before the update."""

from __future__ import annotations

import warnings
from operator import is_
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from tritonclip.distributed.domain import Copies, check_holders
from tritonclip.engine import twice
from tritonclip.engine.planner import PlanCache
from tritonclip.flat.flat_gradients import FlatGradients
from tritonclip.monitor.stats import ClipStats, Outcomes
from tritonclip.optim import fused
from tritonclip.optim.attempt import Attempt
from tritonclip.optim.callers import GRAD_SCALER, asks
from tritonclip.optim.checkpoint import STATS_KEY, split_own, with_own
from tritonclip.optim.closures import (
    NO_LOSS_FOR_LBFGS,
    Closure,
    evaluate,
    step_checking,
    step_evaluating,
)
from tritonclip.optim.delegating import DelegatingOptimizer
from tritonclip.optim.guard import guard_
from tritonclip.optim.memory import Judgement, Memory, SkipWatch, as_skip_bound
from tritonclip.optim.observation import Observation, as_recorder
from tritonclip.optim.param_groups import (
    check_group,
    not_in_buffers,
    rule_of,
    unclipped,
    with_present_rules,
    without_rules,
)
from tritonclip.optim.step import StepClipping
from tritonclip.rules import Outlier, Rule, as_rule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tritonclip.monitor.recorder import Recorder

StepNonfinite = Literal["propagate", "error", "zero", "skip"]
_POLICIES = ("propagate", "error", "zero", "skip")
_CLIPPED_TWICE = (
    "clip_ has clipped these gradients, and the ClippedOptimizer clips them again, so that its "
    "statistics are of clipped gradients; expected one of the two: remove the call, or use the "
    "bare optimizer. To measure only, call get_total_norm"
)
_wrappers: WeakKeyDictionary[Optimizer, ref[ClippedOptimizer]] = WeakKeyDictionary()


class ClippedOptimizer(DelegatingOptimizer):
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

    Args:
        optimizer: any `torch.optim.Optimizer`.
        clip: a rule, such as :class:`ClipByGlobalNorm`, :class:`ClipByNorm` or
            :class:`ClipByValue`; a number means ClipByGlobalNorm(number). What adaptive rules
            remember is part of checkpoints.
        nonfinite: what happens at a step whose gradients or norms are NaN or inf.
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
            above, NaN is not. None skips none.
        max_consecutive_skips: steps in a row that may be skipped before `step` raises RuntimeError;
            None for no error, and a warning after 100. On a GPU it raises some steps later, when
            the number has arrived, because nothing waits for it.
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
            parameters.

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

    stats: ClipStats

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
        _check_optimizer(optimizer)
        self._holders = check_holders(process_group, copies)
        if clip is None:
            raise TypeError(
                "clip must be a number or a rule, got None; to clip only groups that have a rule "
                "of their own, write float('inf')"
            )
        self.clip = as_rule(clip)
        self.nonfinite = nonfinite
        self._memory = Memory(as_skip_bound(skip_above))
        self._watch = SkipWatch(max_consecutive_skips)
        self.recorder = recorder
        for number, group in enumerate(optimizer.param_groups):
            check_group(number, group, optimizer.defaults)
        # Refuses wrong parameters, while this does not count as a wrapper.
        not_in_buffers(flat, optimizer.param_groups)
        self._attach(optimizer)
        self.flat = flat
        self.stats = ClipStats(fused.device_of(optimizer))

    def _attach(self, optimizer: Optimizer) -> None:
        self._share(optimizer)
        self._scaler_waits = False
        # From the first gradient that a step writes, until it has updated the parameters.
        self._attempt: Attempt | None = None
        # Under "scaler" for one step of it; under "user" as torch's fused optimizers take it.
        self._scales: dict[str, Any] = {}
        self._clipping: StepClipping | None = None
        self._plans = PlanCache()
        self._guard = guard_(optimizer, self)
        # Steps after which calls of `clip_` are looked out for.
        self._watches = 2
        if optimizer not in _wrappers:
            optimizer.register_state_dict_post_hook(without_rules)
            optimizer.register_load_state_dict_pre_hook(with_present_rules)
        _wrappers[optimizer] = ref(self)

    @property
    def clip(self) -> Rule:
        """The rule for all groups that carry none; may be replaced, by a number too."""
        return self._rule

    @clip.setter
    def clip(self, clip: float | Rule) -> None:
        self._rule = as_rule(clip)

    @property
    def flat(self) -> FlatGradients | None:
        """The gradients as one buffer for each device and dtype, if there are any; replaceable."""
        return self._flat

    @flat.setter
    def flat(self, flat: FlatGradients | None) -> None:
        self._not_in_buffers = not_in_buffers(flat, self.param_groups)
        known = [] if flat is None else [list(group["params"]) for group in self.param_groups]
        self._flat, self._known_params = flat, known

    def _groups_changed(self) -> bool:
        """Whether the groups hold other parameters than those that were compared with `flat`."""
        groups, known = self.optimizer.param_groups, self._known_params
        return len(groups) != len(known) or not all(
            len(group["params"]) == len(params) and all(map(is_, group["params"], params))
            for group, params in zip(groups, known, strict=True)
        )

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
        return self._memory.skip_above

    @skip_above.setter
    def skip_above(self, skip_above: float | Outlier | None) -> None:
        self._memory.skip_above = as_skip_bound(skip_above)

    @property
    def recorder(self) -> Recorder | None:
        """What takes the norms of every step; replaceable."""
        return self._recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._recorder = as_recorder(recorder)

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
        return self._scaler_waits or fused.takes_scaling(self.optimizer)

    @property
    def grad_scale(self) -> Any:
        """The loss scale that gradients carry at the next step; absent where there is none.

        A GradScaler multiplies its scale with one that was set before. It does not find its own,
        which an interrupted step may have left.
        """
        for owner in ("user",) if asks(GRAD_SCALER) else ("scaler", "user"):
            if owner in self._scales:
                return self._scales[owner]
        raise AttributeError("grad_scale: no loss scale is set")

    @grad_scale.setter
    def grad_scale(self, scale: Any) -> None:
        self._scales["scaler" if asks(GRAD_SCALER) else "user"] = scale

    @grad_scale.deleter
    def grad_scale(self) -> None:
        self._scales.clear()

    def _present(self) -> list[Tensor]:
        """The gradients, and the buffers that hold them."""
        grads = [p.grad for group in self.optimizer.param_groups for p in group["params"]]
        buffers = () if self._flat is None else self._flat.buffers
        return [*(grad for grad in grads if grad is not None), *buffers]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, which may carry a rule under the key `clip`."""
        if isinstance(param_group, dict):
            check_group(len(self.param_groups), param_group, self.defaults)
        if self.flat is not None:
            raise ValueError(
                "a FlatGradients holds the gradients of the parameters that were there; expected "
                "none while a group is added: set flat to None, add the group, and set flat to a "
                "new FlatGradients"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets gradients, as the wrapped optimizer does; those of `flat` become 0, never None."""
        self._attempt = None
        if self.flat is None:
            super().zero_grad(set_to_none)
            return
        self.flat.zero_()
        for number, position in self._not_in_buffers:
            parameter = self.param_groups[number]["params"][position]
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

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
            attempt = self._attempt
            if attempt is not None:
                if attempt.outcomes is None and attempt.clipping.is_refused(error):
                    self._attempt = None
                else:
                    attempt.fail()
            # A GradScaler takes these back only from a step that succeeded.
            self._scales.clear()
            self.__dict__.pop("found_inf", None)
            raise
        finally:
            self._guard.open = False

    @torch.compiler.disable(recursive=False)
    def _step(self, closure: Closure | None = None) -> Any:
        self.stats.move_(fused.device_of(self.optimizer))
        if closure is None:
            return self._step_with_gradients()
        self._attempt = None
        if isinstance(getattr(self, "found_inf", None), Tensor):
            raise RuntimeError(
                "a closure computes gradients after the GradScaler looked at them; expected "
                "scaler.step(optimizer) without one: call backward first"
            )
        if self._nonfinite in ("propagate", "zero") and self.skip_above is None:
            clippings: list[StepClipping] = []

            def measure() -> StepClipping:
                clippings.append(self._measure())
                return clippings[-1]

            loss, outcomes = step_evaluating(self.optimizer, closure, measure)
            self._finish(clippings[0], outcomes)
            return loss
        return self._step_checking(closure)

    def _step_with_gradients(self) -> Any:
        """Clips the gradients that are there."""
        if isinstance(self.optimizer, LBFGS):
            raise TypeError(NO_LOSS_FOR_LBFGS)
        clipping, self._clipping = self._clipping, None
        grad_scale = getattr(self, "grad_scale", None)
        attempt = self._attempt
        if attempt is None or not attempt.goes_on(self._present()):
            if clipping is None or grad_scale is None or self._optimizer_step_pre_hooks:
                # Hooks run after a GradScaler has measured, and may have changed anything.
                clipping = self._measure(grad_scale)
            nonfinite = clipping.nonfinite() if self._nonfinite == "skip" else None
            outlier = self._judge(clipping)
            skip = nonfinite if outlier is None else _any(nonfinite, outlier.flag)
            attempt = Attempt(clipping, skip, outlier, scaled=grad_scale is not None)
            self._attempt = None
            if twice.remembered and twice.is_noticed(clipping.written_to()):
                warnings.warn(_CLIPPED_TWICE, UserWarning, stacklevel=8)
        found_inf = getattr(self, "found_inf", None)
        overflow = found_inf.reshape(()) > 0 if isinstance(found_inf, Tensor) else None

        stop = _any(overflow, attempt.skip)
        on_device = stop is not None and fused.takes_found_inf(self.optimizer)
        if stop is not None and not on_device and bool(stop):
            if overflow is None or not bool(overflow):
                self._leave_out(attempt.clipping, attempt.outlier)
            else:
                attempt.clipping.commit(left_out=True)
                self._record(attempt.clipping, None, True)
            return None
        if attempt.outcomes is None:
            if self._nonfinite == "error" and (overflow is None or not bool(overflow)):
                attempt.clipping.raise_if_nonfinite()
            self._attempt = attempt
            attempt.outcomes = attempt.clipping.write_()

        result = fused.step(self.optimizer, stop if on_device else None)
        self._attempt = None
        if self._watches:
            self._watches -= 1
            twice.watch()
        if on_device:
            self._finish(
                attempt.clipping, attempt.outcomes, overflow, attempt.skip, attempt.outlier
            )
        else:
            self._finish(attempt.clipping, attempt.outcomes, outlier=attempt.outlier)
        return result

    def _judge(self, clipping: StepClipping) -> Judgement | None:
        """Whether a measured step is an outlier, if outliers are skipped."""
        if self._memory.skip_above is None:
            return None
        return self._memory.judge(clipping.global_norm())

    def _finish(
        self,
        clipping: StepClipping,
        outcomes: Outcomes,
        overflow: Tensor | None = None,
        skip: Tensor | None = None,
        outlier: Judgement | None = None,
    ) -> None:
        """Remembers and counts a step; flags say on the device that it was left out after all."""
        if clipping.follows:
            clipping.commit(_any(overflow, skip))
        if outlier is not None:
            outlier.commit(overflow)
        self.stats.record_(outcomes, overflow, skip)
        if self._recorder is not None:
            self._record(clipping, outcomes, _any(overflow, skip))
        if skip is not None:
            self._watch.look(self.stats.consecutive_skips)

    def _leave_out(self, clipping: StepClipping, outlier: Judgement | None) -> None:
        """Counts a step that was left out, and remembers the norm of an outlier."""
        clipping.commit(left_out=True)
        if outlier is not None:
            outlier.commit(None)
        self.stats.record_skip_()
        self._record(clipping, None, True)
        self._watch.look(self.stats.consecutive_skips)

    def _record(
        self, clipping: StepClipping, outcomes: Outcomes | None, skipped: Tensor | bool | None
    ) -> None:
        """Hands a step to the recorder, if there is one."""
        if self._recorder is not None and clipping.observation is not None:
            clipping.observation.add_to(self._recorder, outcomes, skipped)

    def _step_checking(self, closure: Closure) -> Any:
        """Evaluates a closure before the wrapped optimizer does, while nothing has changed yet."""
        loss = evaluate(closure, self.param_groups)
        if loss is None or fused.takes_found_inf(self.optimizer):
            # Nothing to hand on, or an optimizer that evaluates first and only once.
            self._step_with_gradients()
            return loss
        clipping = self._measure()
        outlier = self._judge(clipping)
        nonfinite = self._nonfinite == "skip" and bool(clipping.nonfinite())
        if nonfinite or (outlier is not None and bool(outlier.flag)):
            self._leave_out(clipping, outlier)
            return loss
        if self._nonfinite == "error":
            clipping.raise_if_nonfinite()
        result, outcomes = step_checking(
            self.optimizer, closure, loss, clipping, self._measure, self._nonfinite
        )
        if outcomes is None:
            self._leave_out(clipping, outlier)
        else:
            self._finish(clipping, outcomes, outlier=outlier)
        return result

    @torch.compiler.disable
    def _measure(
        self, grad_scale: Tensor | float | None = None, *, check_finite: bool = False
    ) -> StepClipping:
        check_finite = check_finite or self._nonfinite in ("skip", "error")
        if self._flat is not None and self._groups_changed():
            # From outside: checks again, and refuses new parameters.
            self.flat = self._flat
        clipping = StepClipping(
            self.optimizer.param_groups,
            self._rule,
            self._nonfinite,
            grad_scale,
            check_finite=check_finite,
            plans=self._plans,
            memory=self._memory,
            flat=self._flat,
            not_in_buffers=self._not_in_buffers,
            holders=self._holders,
        )
        if self._recorder is not None:
            clipping.observation = Observation(
                clipping, self._recorder, self.optimizer.param_groups, self._flat, grad_scale
            )
        return clipping

    def _measure_scaled(self, grad_scale: Tensor) -> Tensor:
        """Measures for the step to come, and says whether it overflows: float32, 0-d, 0 or 1."""
        self._clipping = self._measure(grad_scale, check_finite=True)
        found_inf: Tensor = self._clipping.nonfinite()
        return found_inf.to(torch.float32)

    def _save(self, *, in_groups: bool) -> dict[str, Any]:
        # Also here, for optimizers that do not run their hooks.
        saved = without_rules(self.optimizer, self.optimizer.state_dict())
        own: dict[str, Any] = self.stats.state_dict()
        memory = self._memory.state_dict()
        if memory:
            own["memory"] = memory
        if self._recorder is not None:
            own["recorder"] = self._recorder.state_dict()
        return with_own(saved, own) if in_groups else {**saved, STATS_KEY: own}

    def _load(self, state_dict: dict[str, Any]) -> None:
        rest, own = split_own(state_dict)
        own = dict(own)
        memory = Memory(self.skip_above)
        memory.load_state_dict(own.pop("memory", {}), self._rules())
        recorded = own.pop("recorder", None)
        stats = ClipStats(fused.device_of(self.optimizer))
        stats.load_state_dict(own)
        super()._load(with_present_rules(self.optimizer, rest))
        self.stats.load_state_dict(stats.state_dict())
        self._memory = memory
        if self._recorder is not None and recorded is not None:
            self._recorder.load_state_dict(recorded)

    def _rules(self) -> dict[str, Rule]:
        """The rules of the program, by their owners in a checkpoint."""
        groups = enumerate(self.optimizer.param_groups)
        own = {f"group{i}": rule_of(i, group) for i, group in groups if "clip" in group}
        return {"rule": self._rule, **{owner: rule for owner, rule in own.items() if rule}}

    def __getstate__(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer,
            "clip": self.clip,
            "nonfinite": self._nonfinite,
            "memory": self._memory,
            "max_consecutive_skips": self._watch.most,
            "stats": self.stats,
            "flat": self.flat,
            "unclipped": unclipped(self.optimizer.param_groups),
            "holders": self._holders,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A shallow copy would be a second wrapper.
        _check_optimizer(state["optimizer"])
        for number, position in state["unclipped"]:
            # Copies of parameters have no attributes.
            state["optimizer"].param_groups[number]["params"][position].need_clip = False
        self.clip, self.nonfinite, self.stats = state["clip"], state["nonfinite"], state["stats"]
        self._memory, self._recorder = state["memory"], None
        self._watch = SkipWatch(state["max_consecutive_skips"])
        self._holders = state["holders"]
        self._attach(state["optimizer"])
        self.flat = state["flat"]

    def __repr__(self) -> str:
        return (
            f"ClippedOptimizer(clip={self.clip}, nonfinite={self.nonfinite!r}, "
            f"optimizer={self.optimizer!r})"
        )


def wrapper_of(optimizer: Optimizer) -> ClippedOptimizer | None:
    """The ClippedOptimizer around an optimizer, if one is alive."""
    wrapper = _wrappers.get(optimizer)
    return None if wrapper is None else wrapper()


def is_wrapped(optimizer: Optimizer) -> bool:
    """Whether a ClippedOptimizer around this optimizer is alive."""
    return wrapper_of(optimizer) is not None


def _check_optimizer(optimizer: object) -> None:
    expected = "optimizer must be a torch.optim.Optimizer"
    if isinstance(optimizer, type):
        raise TypeError(f"{expected}, got the class; write {optimizer.__name__}(parameters, ...)")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{expected}, got {type(optimizer).__name__}")
    if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        raise TypeError(
            f"{expected} that ran Optimizer.__init__, got {type(optimizer).__name__}, which did "
            "not, as wrappers around other optimizers do; wrap the optimizer inside it"
        )
    if isinstance(optimizer, ClippedOptimizer):
        raise ValueError(
            "optimizer is a ClippedOptimizer, which would clip twice; to change its rule, set its "
            "attribute clip, or give a parameter group the key 'clip'"
        )
    if is_wrapped(optimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} is wrapped already, and a second wrapper would keep "
            "statistics of its own; use the first wrapper, or make a new optimizer"
        )


def _any(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a | b.to(a.device)
