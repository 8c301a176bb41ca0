"""Mixed precision: torch's protocol between a GradScaler and an optimizer.

A scaler hands loss scale and overflow to the `step` of an optimizer that takes them, as the fused
ones of torch do. Towards a scaler a ClippedOptimizer is one that takes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from tritonclip.modes import without_grad
from tritonclip.monitor.stats import ClipStats
from tritonclip.optim.checkpoint import WRAPPERS
from tritonclip.optim.step import Step
from tritonclip.optim.wrapping import OptimizerProxy, takes_found_inf, takes_scaling
from tritonclip.rules.arguments import as_grad_scale


class ScalerSide(OptimizerProxy):
    """The part of a wrapper that a GradScaler calls.

    `found_inf` is 0-d during the step of a GradScaler, which sets it; False where it is known that
    no gradient overflows.
    """

    stats: ClipStats
    _prepare: Callable[..., Step]
    _measure: Callable[..., Step]
    _measure_without_grad: Callable[..., Step]
    # What a scaler hands over for one step, loss scale and overflow; shallow copies share it.
    _handed: SimpleNamespace
    # In a step of our GradScaler; and the step to come, which it had measured, or had judged.
    _is_under_ours = False
    _measured: Step | None = None

    @property
    def grad_scale(self) -> Any:
        """The loss scale that a GradScaler sets for its step; absent where there is none.

        For a loss scale of your own, call `step(grad_scale=scale)`.
        """
        # A scaler multiplies its own by it.
        self._refuse_set_by_hand()
        if self._handed.scale is None:
            raise AttributeError("grad_scale: no loss scale is set")
        return self._handed.scale

    @grad_scale.setter
    def grad_scale(self, scale: Any) -> None:
        self._handed.scale = scale

    @grad_scale.deleter
    def grad_scale(self) -> None:
        self._take_back()

    @property
    def found_inf(self) -> Any:
        """Whether gradients overflow, as a GradScaler says during its step; None without one."""
        return self._handed.found_inf

    @found_inf.setter
    def found_inf(self, found_inf: Any) -> None:
        self._handed.found_inf = found_inf

    @found_inf.deleter
    def found_inf(self) -> None:
        self._take_back()

    def _take_back(self) -> None:
        """Forgets what a scaler hands over for one step."""
        self._handed.scale = self._handed.found_inf = None

    def _refuse_set_by_hand(self) -> None:
        """RuntimeError where no scaler has set the loss scale, which it sets with `found_inf`."""
        scale = self._handed.scale
        if scale is not None and self.found_inf is None:
            self._take_back()
            raise RuntimeError(
                "the attribute grad_scale is for a GradScaler, which also sets found_inf; expected "
                "the loss scale of your own as an argument, optimizer.step(grad_scale=scale), got "
                f"optimizer.grad_scale = {scale!r:.40}"
            )

    @torch.compiler.disable
    def _loss_scale(self, grad_scale: object, closure: object) -> Tensor | float | None:
        """The loss scale of this step: that of a scaler, or the argument of `step`; not both."""
        try:
            self._refuse_set_by_hand()
            if grad_scale is None:
                scale: Tensor | float | None = self._handed.scale
                return scale
            # Of a step that was judged, the overflow is no tensor any more.
            is_judged = self._measured is not None
            if is_judged or self._handed.scale is not None or isinstance(self.found_inf, Tensor):
                raise RuntimeError(
                    "grad_scale was given to a step of a GradScaler, which hands over a loss "
                    "scale; expected one of the two: scaler.step(optimizer), or "
                    "optimizer.step(grad_scale=...)"
                )
            return as_grad_scale(grad_scale)
        except (TypeError, ValueError, RuntimeError) as error:
            if closure is None:
                # For other processes, which measure under a scale.
                self._measure_without_grad(1.0, refusal=error)
            raise

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler hands scale and overflow to `step`; asked where a step begins."""
        self._measured = None
        # Its step, which asks, hands over no scaler.
        share_state_(sys._getframe(1).f_locals.get("self"), self)
        self._refuse_set_by_hand()
        self._take_back()
        inner = self.optimizer
        takes = takes_found_inf(inner) if self._is_under_ours else takes_scaling(inner)
        if takes:
            # What is set now is not set by hand, even if an interrupt comes before the overflow.
            self.found_inf = False
        return takes

    def _step_under_scaler(
        self, scale: Tensor | None, found_inf: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Steps, unless the host leaves the step out: then `step` is not called, as by torch's."""
        self._handed.found_inf, self._handed.scale = found_inf, scale
        try:
            # `step` refuses a closure, and a second loss scale.
            if all(argument is None for argument in (*args, *kwargs.values())):
                self._measured = step = self._prepare(scale, is_judged_only=True)
                if step.verdict.left_out is True:
                    step.finish(self.stats)
                    return None
                self.found_inf = False
            return self.step(*args, **kwargs)
        finally:
            self._measured = None
            self._take_back()

    @torch.compiler.disable
    @without_grad
    def _measure_scaled(self, scale: Tensor) -> Tensor:
        """Measures the step to come; says whether it overflows: float32, 0-d, 0 or 1."""
        self._measured = step = self._measure(scale, check_finite=True)
        nonfinite = step.nonfinite()
        if isinstance(nonfinite, Tensor):
            return nonfinite.to(torch.float32)
        return torch.full((), nonfinite, dtype=torch.float32, device=scale.device)


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
