"""Warns of steps that bypass the wrapper and clip nothing, or that clip gradients twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonclip.engine import twice
from tritonclip.warn import warn_user


class StepGuard:
    """A step pre-hook of a wrapped optimizer.

    Attributes:
        open: the wrapper is in its step, or another one that is meant.
        wrapper: while it is alive, steps without it are not.
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
    """Guards the steps of an optimizer from now on, for a new wrapper."""
    guard = _guard_of(optimizer)
    if guard is None:
        guard = StepGuard(wrapper)
        optimizer.register_step_pre_hook(guard)
    guard.wrapper = ref(wrapper)
    return guard


@contextmanager
def opened(optimizer: Optimizer) -> Iterator[None]:
    """Steps of the optimizer in the block are meant."""
    guard = _guard_of(optimizer)
    if guard is None:
        yield
        return
    before, guard.open = guard.open, True
    try:
        yield
    finally:
        guard.open = before


def warn_if_clipped(written: Sequence[Tensor]) -> None:
    """Warns, of the gradients of a step, if `clip_` was called for them."""
    if twice.is_noticed(written):
        warn_user(
            "clip_, or a function with torch's name, was called for these gradients, and the "
            "ClippedOptimizer clips them after it, so that its statistics are not of gradients "
            "before clipping; expected one of the two: remove the call, or use the bare optimizer. "
            "To measure only, call get_total_norm"
        )


def _guard_of(optimizer: Optimizer) -> StepGuard | None:
    hooks = optimizer._optimizer_step_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, StepGuard)), None)
