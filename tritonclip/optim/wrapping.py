"""Mistakes around a ClippedOptimizer: refused, or warned of where they would pass in silence.

An optimizer is wrapped in a second one, or stepped past its wrapper; gradients are never there; a
number is set that belongs to a rule.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer

from tritonclip.messages import warn_user

# Steps in a row without a gradient that are warned of.
PATIENCE = 3


class StepGuard:
    """A step pre-hook of a wrapped optimizer, which knows its one wrapper while that is alive.

    `open`: the wrapper is in its step.
    """

    def __init__(self, wrapper: Optimizer) -> None:
        self.open = False
        self.wrapper = ref(wrapper)
        self._warned = False

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Warns, unless the step is meant; a compiled step is not seen."""
        if torch.compiler.is_compiling() or self.open or self._warned or self.wrapper() is None:
            return
        self._warned = True
        warn_user(
            f"{type(optimizer).__name__}.step() was called on the optimizer inside a "
            "ClippedOptimizer, so nothing was clipped or counted; expected step() of the "
            "ClippedOptimizer. To update without clipping, set its attribute clip to float('inf')"
        )


def guard_(optimizer: Optimizer, wrapper: Optimizer) -> StepGuard:
    """Makes a wrapper that of an optimizer, whose steps past it are warned of from now on."""
    guard = _guard_of(optimizer)
    if guard is None:
        guard = StepGuard(wrapper)
        optimizer.register_step_pre_hook(guard)
    guard.wrapper = ref(wrapper)
    return guard


def _guard_of(optimizer: Optimizer) -> StepGuard | None:
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    return next((hook for hook in hooks if isinstance(hook, StepGuard)), None)


def wrapper_of(optimizer: Optimizer) -> Any:
    """The ClippedOptimizer around an optimizer, while it is alive; else None."""
    guard = _guard_of(optimizer)
    wrapper = None if guard is None else guard.wrapper()
    # A copy of an optimizer may have its hooks.
    return wrapper if getattr(wrapper, "optimizer", None) is optimizer else None


def warn_of_no_gradient(n_parameters: int) -> None:
    """Warns of the first steps of a wrapper, none of which found a gradient."""
    warn_user(
        f"{PATIENCE} steps in a row found no gradient in any of the {n_parameters} parameters "
        "of the ClippedOptimizer, and neither clipped nor updated anything; expected step() after "
        "backward() and before zero_grad(), and an optimizer of the parameters that the model has "
        "now and that require gradients"
    )


def check_optimizer(optimizer: object) -> None:
    """Refuses an object that cannot be wrapped, and an optimizer that is wrapped already."""
    expected = "optimizer must be a torch.optim.Optimizer"
    if isinstance(optimizer, type):
        raise TypeError(f"{expected}, got the class; write {optimizer.__name__}(parameters, ...)")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{expected}, got {type(optimizer).__name__}; {_remedy(optimizer)}")
    if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        raise TypeError(
            f"{expected} that ran Optimizer.__init__, got {type(optimizer).__name__}, which did "
            f"not; {_remedy(optimizer)}"
        )
    if isinstance(vars(optimizer).get("_guard"), StepGuard):
        raise ValueError(
            "optimizer is a ClippedOptimizer, which would clip twice; to change its rule, set its "
            "attribute clip, or give a parameter group the key 'clip'"
        )
    if wrapper_of(optimizer) is not None:
        raise ValueError(
            f"this {type(optimizer).__name__} is wrapped already, and a second wrapper would keep "
            "statistics of its own; use the first wrapper, or make a new optimizer"
        )


def _remedy(refused: object) -> str:
    """The object to wrap in place of one that cannot be wrapped, or the call to write."""
    name = type(refused).__name__
    if hasattr(refused, "noise_multiplier"):
        return (
            "its step clips the gradient of each example and then adds noise, and a "
            "ClippedOptimizer around or inside it would clip the noise or nothing: set its "
            "max_grad_norm, and use it bare"
        )
    if not any(isinstance(value, Optimizer) for value in getattr(refused, "__dict__", {}).values()):
        return "write ClippedOptimizer(optimizer, 1.0), with an optimizer such as torch.optim.SGD"
    if not hasattr(refused, "zero_grad"):
        return "wrap its optimizer, before a scheduler is made of it"
    return f"wrap the optimizer inside it: {name}(ClippedOptimizer(optimizer, 1.0), ...)"


def of_rule(name: str) -> property:
    """A number of a rule, which an optimizer has not: set there, it would change nothing."""

    def read(optimizer: Any) -> None:
        raise AttributeError(f"{name} belongs to a rule; expected optimizer.clip, {optimizer.clip}")

    def refuse(_: object, value: object) -> None:
        raise AttributeError(
            f"{name} belongs to a rule, and would change nothing here; expected a new rule, such "
            f"as optimizer.clip = ClipByGlobalNorm(2.0), got {name} = {value!r:.40}"
        )

    return property(read, refuse)
