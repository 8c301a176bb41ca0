"""Mixed precision: torch's protocol between a GradScaler and an optimizer, on both sides.

A scaler hands loss scale and overflow to the `step` of an optimizer that takes them, as the fused
ones of torch do. Towards a scaler a ClippedOptimizer is one that takes them; towards the optimizer
that it wraps, it takes the place of the scaler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from tritonclip.optim.step import Step
from tritonclip.signatures import ABSENT


class Handshake:
    """The side of a ClippedOptimizer: all that a GradScaler leaves with it for one step.

    Attributes:
        scale: the loss scale of a GradScaler, during its step; None for gradients without one,
            `ABSENT` outside.
        user_scale: the loss scale that a user has set, as torch's fused optimizers take it, or
            `ABSENT`.
        found_inf: whether gradients overflow, 0-d or None.
        on_device: in a step of our GradScaler, whether the device decides to leave it out; else
            None.
        measured: the step to come, where the scaler had its overflow measured.
        begun: the step to come, where it was decided already to take it.
    """

    def __init__(self) -> None:
        self.on_device: bool | None = None
        self.user_scale: Any = ABSENT
        self.measured: Step | None = None
        self.begun: Step | None = None
        self.clear_step()

    @property
    def loss_scale(self) -> Any:
        """The scale that gradients carry at the next step, or `ABSENT`."""
        return self.user_scale if self.scale is ABSENT else self.scale

    def clear_step(self) -> None:
        """Forgets what a scaler hands over for one step."""
        self.scale: Any = ABSENT
        self.found_inf: Any = None

    def clear(self) -> None:
        """Forgets the scale of a user, too; a scaler takes its own back only from a success."""
        self.user_scale = ABSENT
        self.clear_step()


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
    return not isinstance(optimizer, SGD) or not any(_lacks_momentum(optimizer, g) for g in groups)


def has_momentum(optimizer: Optimizer) -> bool:
    """Whether it is SGD with momentum, which decides on the device once its state is complete."""
    return isinstance(optimizer, SGD) and any(g["momentum"] for g in optimizer.param_groups)


def _lacks_momentum(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    return bool(group["momentum"]) and any(
        p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None
        for p in group["params"]
    )


def step_unless(optimizer: Any, stop: Tensor) -> Any:
    """A step that updates nothing where `stop`, on the device, is true."""
    try:
        optimizer.found_inf = stop.to(torch.float32)
        return optimizer.step()
    finally:
        vars(optimizer).pop("found_inf", None)
