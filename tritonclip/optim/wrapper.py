"""A wrapper around an optimizer: the scale it is handed, its groups, and its checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonclip.engine import misuse
from tritonclip.engine.plan_cache import PlanCache
from tritonclip.flat.view_watch import zero_gradient_
from tritonclip.optim import fused
from tritonclip.optim.attempt import Attempt
from tritonclip.optim.callers import GRAD_SCALER, asks
from tritonclip.optim.checkpoint import STATS_KEY, split_own, with_own
from tritonclip.optim.delegating import DelegatingOptimizer
from tritonclip.optim.guard import IN_VAIN, guard_, warn_if_clipped, warn_of_nothing
from tritonclip.optim.memory import SkipWatch
from tritonclip.optim.param_groups import (
    check_group,
    options_of,
    rules_of,
    unclipped,
    with_present_rules,
    without_rules,
)
from tritonclip.optim.registry import check_optimizer, register
from tritonclip.optim.replaceable import Replaceable
from tritonclip.optim.step import StepClipping
from tritonclip.optim.step_log import StepLog
from tritonclip.rules import Rule


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
