"""Closures: what a step evaluates itself, and how one that went wrong on the way is undone."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

Closure = Callable[[], Any]
Groups = Sequence[Mapping[str, Any]]


def evaluate(closure: Closure, groups: Groups) -> Any:
    """The loss, or None of a closure that leaves gradients alone, as trainers pass.

    Raises:
        TypeError: a closure that computes gradients and returns None.
    """
    before = [
        (ref(p.grad), p.grad._version)
        for group in groups
        for p in group["params"]
        if p.grad is not None
    ]
    with torch.enable_grad():
        loss = closure()
    if loss is None and not _all_of(groups, before):
        raise TypeError(
            "the closure computed gradients and returned None; expected the loss: end it with "
            "`return loss`, after loss.backward(). Nothing was clipped or updated"
        )
    return loss


def _all_of(groups: Groups, known: list[tuple[ref[Tensor], int]]) -> bool:
    """Whether every gradient there is now was there before, and has not been written to since."""
    there = {id(grad): version for weak, version in known if (grad := weak()) is not None}
    grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    return all(there.get(id(grad)) == grad._version for grad in grads)


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
