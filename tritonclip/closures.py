"""Closures: what a step evaluates itself, and how one that went wrong on the way is undone."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch.optim import Optimizer

Closure = Callable[[], Any]


def evaluate_once(closure: Closure) -> Any:
    """The loss; TypeError for None."""
    with torch.enable_grad():
        loss = closure()
    if loss is None:
        raise TypeError(
            "the closure returned None; expected the loss: end it with `return loss`, after "
            "loss.backward(). Nothing was clipped or updated"
        )
    return loss


def snapshot(optimizer: Optimizer) -> Callable[[], None]:
    """Remembers parameters and state; the result brings them back."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    values = [p.detach().clone() for p in parameters]
    state = {p: deepcopy(optimizer.state[p]) for p in parameters if p in optimizer.state}

    @torch.no_grad()
    def restore() -> None:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(state)

    return restore
