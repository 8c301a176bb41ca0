"""Mixed precision: torch's protocol between a GradScaler and an optimizer.

A scaler sets loss scale and overflow as attributes of an optimizer whose `step` takes them, such as
torch's fused ones. A ClippedOptimizer always takes them from our GradScaler, and from torch's if
the wrapped optimizer takes them, too.
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

    During the step of a GradScaler, `found_inf` is the 0-d tensor that the scaler sets. It is False
    before the scaler has set it, and after the host has ruled out an overflow.
    """

    stats: ClipStats
    _prepare: Callable[..., Step]
    _measure: Callable[..., Step]
    _measure_without_grad: Callable[..., Step]
    # Loss scale and overflow, which a scaler hands over for one step; shallow copies share them.
    _handed: SimpleNamespace
    # Whether our GradScaler is stepping, and the next step if it was measured or judged already.
    _is_under_ours = False
    _measured: Step | None = None

    @property
    def grad_scale(self) -> Any:
        """The loss scale that a GradScaler sets for its step; absent where there is none.

        For a loss scale of your own, call `step(grad_scale=scale)`.
        """
        # A scaler would multiply its scale by one that was set by hand.
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
        """Whether gradients overflow, set by a GradScaler during its step; None otherwise."""
        return self._handed.found_inf

    @found_inf.setter
    def found_inf(self, found_inf: Any) -> None:
        self._handed.found_inf = found_inf

    @found_inf.deleter
    def found_inf(self) -> None:
        self._take_back()

    def _take_back(self) -> None:
        self._handed.scale = self._handed.found_inf = None

    def _refuse_set_by_hand(self) -> None:
        """Raises RuntimeError for a loss scale without `found_inf`, as a scaler sets both."""
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
        """Returns the loss scale of this step, a scaler's or the argument; refuses to get both."""
        try:
            self._refuse_set_by_hand()
            if grad_scale is None:
                scale: Tensor | float | None = self._handed.scale
                return scale
            # If the step was judged already, `found_inf` is False and no longer a tensor.
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
                # Other processes measure under a scale, and get the error by this measurement.
                self._measure_without_grad(1.0, refusal=error)
            raise

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `step` takes scale and overflow; a GradScaler asks at the start of its step."""
        self._measured = None
        # The scaler does not pass itself, so we take it from its frame.
        share_state_(sys._getframe(1).f_locals.get("self"), self)
        self._refuse_set_by_hand()
        self._take_back()
        inner = self.optimizer
        takes = takes_found_inf(inner) if self._is_under_ours else takes_scaling(inner)
        if takes:
            # Marks the scale as a scaler's, even if an interrupt comes before it sets `found_inf`.
            self.found_inf = False
        return takes

    def _step_under_scaler(
        self, scale: Tensor | None, found_inf: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls `step`, unless the host leaves the step out, as torch's GradScaler does."""
        self._handed.found_inf, self._handed.scale = found_inf, scale
        try:
            # Any argument is a closure or a second loss scale, which `step` refuses.
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
        """Measures the next step; returns its overflow as a 0-d float32 tensor, 0 or 1."""
        self._measured = step = self._measure(scale, check_finite=True)
        nonfinite = step.nonfinite()
        if isinstance(nonfinite, Tensor):
            return nonfinite.to(torch.float32)
        return torch.full((), nonfinite, dtype=torch.float32, device=scale.device)


def share_state_(scaler: object, wrapper: ScalerSide) -> None:
    """Gives an optimizer and its wrappers one state in a GradScaler, which keeps states by id."""
    states = vars(scaler).get("_per_optimizer_states") if isinstance(scaler, GradScaler) else None
    if states is None:
        return
    own = states[id(wrapper)]
    for one in (wrapper.optimizer, *WRAPPERS[wrapper.optimizer]):
        if (other := states[id(one)]) is own:
            continue
        called = "step" if other["stage"] is OptState.STEPPED else "unscale_"
        # `unscale_` ran for both, and they share their gradients.
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
