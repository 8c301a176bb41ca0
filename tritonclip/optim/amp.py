"""Mixed precision: torch's protocol between a GradScaler and an optimizer, on both sides.

A scaler hands loss scale and overflow to the `step` of an optimizer that takes them, as the fused
ones of torch do. Towards a scaler a ClippedOptimizer is one that takes them; towards the optimizer
that it wraps, it takes the place of the scaler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import SGD, Optimizer

from tritonclip.modes import without_grad
from tritonclip.monitor.stats import ClipStats, Flag
from tritonclip.optim.checkpoint import WRAPPERS
from tritonclip.optim.step import Step
from tritonclip.optim.wrapping import OptimizerProxy
from tritonclip.rules.arguments import as_grad_scale


class ScalerState:
    """All that a GradScaler leaves with a ClippedOptimizer for one step.

    Attributes:
        grad_scale: the loss scale that gradients carry; None for none.
        found_inf: whether gradients overflow, 0-d; False where it is known that none does; None
            outside of the step of a GradScaler.
        is_begun: a GradScaler has begun a step, and hands over both.
        on_device: in a step of our GradScaler, whether the device decides to leave it out; else
            None.
        step: the step to come, where the scaler had its overflow measured, or had it judged.
    """

    def __init__(self) -> None:
        self.on_device: bool | None = None
        self.step: Step | None = None
        self.clear()

    def clear(self) -> None:
        """Forgets what a scaler hands over for one step."""
        self.grad_scale: Any = None
        self.found_inf: Any = None
        self.is_begun = False

    @property
    def overflow(self) -> Flag:
        """Whether a GradScaler found an overflow; a tensor where it handed over one."""
        found_inf = self.found_inf
        return found_inf.reshape(()) > 0 if isinstance(found_inf, Tensor) else False

    def refuse_set_by_hand(self) -> None:
        """RuntimeError where no scaler has set the loss scale, which it sets with `found_inf`."""
        scale = self.grad_scale
        if scale is not None and self.found_inf is None:
            self.clear()
            raise RuntimeError(
                "the attribute grad_scale is for a GradScaler, which also sets found_inf; expected "
                "the loss scale of your own as an argument, optimizer.step(grad_scale=scale), got "
                f"optimizer.grad_scale = {scale!r:.40}"
            )

    def scale_with(self, grad_scale: object) -> Tensor | float | None:
        """The loss scale of this step: that of a scaler, or the argument of `step`; not both."""
        self.refuse_set_by_hand()
        if grad_scale is None:
            scale: Tensor | float | None = self.grad_scale
            return scale
        if self.found_inf is not None:
            raise RuntimeError(
                "grad_scale was given to a step of a GradScaler, which hands over a loss scale; "
                "expected one of the two: scaler.step(optimizer), or optimizer.step(grad_scale=...)"
            )
        return as_grad_scale(grad_scale)


class ScalerSide(OptimizerProxy):
    """The part of a wrapper that a GradScaler calls."""

    stats: ClipStats
    _scaler: ScalerState
    _prepare: Callable[..., Step]
    _measure: Callable[..., Step]

    @property
    def grad_scale(self) -> Any:
        """The loss scale that a GradScaler sets for its step; absent where there is none.

        For a loss scale of your own, call `step(grad_scale=scale)`.
        """
        # A scaler multiplies its own by it.
        self._scaler.refuse_set_by_hand()
        if self._scaler.grad_scale is None:
            raise AttributeError("grad_scale: no loss scale is set")
        return self._scaler.grad_scale

    @grad_scale.setter
    def grad_scale(self, scale: Any) -> None:
        if self._scaler.is_begun:
            # Not by hand, even if an interrupt comes before the overflow.
            self._scaler.found_inf = False
        self._scaler.grad_scale = scale

    @grad_scale.deleter
    def grad_scale(self) -> None:
        self._scaler.clear()

    @property
    def found_inf(self) -> Any:
        """Whether gradients overflow, as a GradScaler says during its step; None without one."""
        return self._scaler.found_inf

    @found_inf.setter
    def found_inf(self, found_inf: Any) -> None:
        self._scaler.found_inf = found_inf

    @found_inf.deleter
    def found_inf(self) -> None:
        self._scaler.clear()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler hands scale and overflow to `step`; asked where a step begins."""
        scaler = self._scaler
        scaler.step = None
        # Its step, which asks, hands over no scaler.
        share_state_(sys._getframe(1).f_locals.get("self"), self)
        scaler.refuse_set_by_hand()
        scaler.clear()
        scaler.is_begun = takes_scaling(self.optimizer)
        return scaler.is_begun if scaler.on_device is None else scaler.on_device

    def _step_under_scaler(
        self, scale: Tensor | None, found_inf: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Steps, unless the host leaves the step out: then `step` is not called, as by torch's."""
        scaler = self._scaler
        scaler.found_inf, scaler.grad_scale = found_inf, scale
        try:
            # `step` refuses a closure, and a second loss scale.
            if all(argument is None for argument in (*args, *kwargs.values())):
                scaler.step = step = self._prepare(scale, is_judged_only=True)
                if step.verdict.left_out is True:
                    step.finish(self.stats)
                    return None
                scaler.found_inf = False
            return self.step(*args, **kwargs)
        finally:
            scaler.step = None
            scaler.clear()

    @torch.compiler.disable
    @without_grad
    def _measure_scaled(self, scale: Tensor) -> Tensor:
        """Measures the step to come; says whether it overflows: float32, 0-d, 0 or 1."""
        self._scaler.step = step = self._measure(scale, check_finite=True)
        nonfinite = step.nonfinite()
        if isinstance(nonfinite, Tensor):
            return nonfinite.to(torch.float32)
        return torch.full((), nonfinite, dtype=torch.float32, device=scale.device)

    def _decides_on_device(self) -> bool:
        """Whether the device makes the wrapped optimizer leave a step out."""
        if self._scaler.on_device is None or self._optimizer_step_pre_hooks:
            return takes_found_inf(self.optimizer)
        return self._scaler.on_device


def share_state_(scaler: object, wrapper: ScalerSide) -> None:
    """Gives an optimizer and its wrappers one state in a GradScaler, which knows ids."""
    states = vars(scaler).get("_per_optimizer_states") if isinstance(scaler, GradScaler) else None
    if states is None:
        return
    own = states[id(wrapper)]
    for one in (wrapper.optimizer, *WRAPPERS[wrapper.optimizer]):
        if (other := states[id(one)]) is own:
            continue
        called = "step" if other["stage"] is OptState.STEPPED else "unscale_"
        # Both were unscaled, and have the same gradients.
        is_divided_twice = other["stage"] is own["stage"] is OptState.UNSCALED
        if called == "step" or is_divided_twice:
            raise RuntimeError(
                f"{called}() has already been called for the wrapped optimizer, or for another "
                "wrapper of it, since the last update()"
                f"{', and divided its gradients twice' * is_divided_twice}; "
                f"expected scaler.{called}(optimizer) with one ClippedOptimizer only"
            )
        if other["stage"] is OptState.UNSCALED:
            own.update(other)
        states[id(one)] = own


def takes_scaling(optimizer: Optimizer) -> bool:
    """Whether a GradScaler hands scale and overflow to its `step`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Whether the device can make it leave out an update."""
    groups = optimizer.param_groups
    if not (takes_scaling(optimizer) and all(group.get("fused") for group in groups)):
        return False
    # torch fills momentum buffers at the first update only, but takes them for filled after a
    # first one that did not happen.
    return not isinstance(optimizer, SGD) or not any(
        p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None
        for group in groups
        if group["momentum"]
        for p in group["params"]
    )


def step_unless(optimizer: Any, stop: Tensor) -> Any:
    """A step that updates nothing where `stop`, on the device, is true."""
    try:
        optimizer.found_inf = stop.to(torch.float32)
        return optimizer.step()
    finally:
        vars(optimizer).pop("found_inf", None)
