"""Steps with a closure: gradients are clipped after each evaluation, and a step can be undone."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any
from weakref import ref

import torch
from torch.optim import LBFGS, Optimizer

from tritonclip.modes import without_grad
from tritonclip.monitor.stats import SKIPPED, Outcomes, as_tensor
from tritonclip.optim.param_groups import Groups
from tritonclip.optim.step import Step, StepLog, version_of

Closure = Callable[[], Any]
# Measures the gradients of an evaluation, or raises `refusal=`, which other processes get.
Measure = Callable[..., Step]
_NO_LOSS = (
    "the closure computed gradients and returned None; expected the loss: end it with "
    "`return loss`, after loss.backward(). Nothing was clipped or updated"
)
CLOSURE_UNDER_SCALER = (
    "a closure computes gradients after the GradScaler looked at them; expected "
    "scaler.step(optimizer) without one: call backward first"
)
NO_LOSS_FOR_LBFGS = (
    "LBFGS needs a closure that evaluates the model, calls backward and returns the loss; expected "
    "step(closure), got none, or one that returned None. Nothing was clipped or updated"
)


class _NonfiniteEvaluationError(Exception):
    """A closure that was evaluated again, within a step, gave gradients that are not finite."""


def step_evaluating(
    inner: Optimizer,
    closure: Closure,
    measure: Measure,
    log: StepLog,
    first: tuple[Any, Step] | None = None,
) -> tuple[Any, bool]:
    """Clips after each evaluation; the result of the step, and whether it was taken, not undone.

    `first`, loss and step of an evaluation that was checked while nothing had changed, takes the
    place of the first one. The step then ends where a later one is not finite.
    """
    counted: Step | None = None
    losses: list[Any] = []
    restore = None
    if first is not None:
        loss, counted = first
        losses.append(loss)
        _clip_(counted)
        restore = snapshot(inner) if isinstance(inner, LBFGS) else None
    untouched = _watch(inner.param_groups)

    def evaluate_and_clip() -> Any:
        nonlocal counted
        if losses:
            if not untouched():
                raise RuntimeError(
                    f"{type(inner).__name__} changes parameters or gradients before it evaluates "
                    "its closure, so that the evaluation that was looked at is not the one it asks "
                    "for: nonfinite='skip' and 'error' and skip_above cannot be kept. Use "
                    "nonfinite='propagate' or 'zero', or wrap the optimizer inside it"
                )
            return losses.pop()
        loss = evaluate(closure, inner, measure)
        step = measure()
        if step.policy.skips and bool(step.nonfinite()):
            raise _NonfiniteEvaluationError
        if step.policy.raises:
            step.raise_if_nonfinite(
                "This was a later evaluation of the closure within a step. Parameters and state "
                + ("are those before the step" if restore else "are as changed by the step so far")
            )
        outcomes = _clip_(step)
        if counted is None:
            counted = step
        else:
            counted.outcomes = _merged(counted.outcomes, outcomes)
        return loss

    result = None
    try:
        result = inner.step(evaluate_and_clip)
    except _NonfiniteEvaluationError:
        if restore is None:
            raise RuntimeError(
                f"{type(inner).__name__} evaluated its closure more than once, and a later "
                "evaluation gave gradients that are not finite: the step cannot be undone, so "
                "nonfinite='skip' cannot be kept. Use nonfinite='zero' or 'error'"
            ) from None
        restore()
        assert counted is not None
        counted.verdict = SKIPPED
    except BaseException:
        if restore is not None:
            restore()
        raise
    if counted is None:
        raise RuntimeError(
            f"{type(inner).__name__} updated without evaluating the closure, so nothing was "
            "clipped; expected an optimizer that evaluates it: call backward, then step() without "
            "a closure"
        )
    log.add(counted)
    if counted.verdict is SKIPPED:
        assert first is not None
        return first[0], False
    return result, True


# Its caller may compute gradients.
_clip_ = torch.compiler.disable(without_grad(Step.clip_))


def _merged(earlier: Outcomes, later: Outcomes) -> Outcomes:
    """The norms of the earlier evaluation, and the least coefficients of both."""
    merged = dict(earlier)
    for index, outcome in later.items():
        before = merged.get(index)
        if outcome is not None and before is not None:
            both = [as_tensor(o.coefficient, before.norm) for o in (before, outcome)]
            merged[index] = before._replace(coefficient=torch.minimum(*both))
    return merged


def _watch(groups: Groups) -> Callable[[], bool]:
    """Remembers parameters and gradients; the result says whether they are still the same."""

    def seen() -> list[tuple[int, int, int]]:
        return [
            (version_of(p), id(p.grad), -1 if p.grad is None else version_of(p.grad))
            for group in groups
            for p in group["params"]
        ]

    before = seen()
    return lambda: seen() == before


def evaluate(closure: Closure, inner: Optimizer, measure: Measure) -> Any:
    """The loss; None of a closure that leaves gradients alone. Any other None is refused."""
    groups = inner.param_groups
    before = [
        (ref(p.grad), version_of(p.grad))
        for group in groups
        for p in group["params"]
        if p.grad is not None
    ]
    with torch.enable_grad():
        loss = closure()
    if loss is None:
        there = {id(grad): version for weak, version in before if (grad := weak()) is not None}
        grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        # By `measure`: other processes, which have evaluated theirs, may wait for norms.
        if any(there.get(id(grad)) != version_of(grad) for grad in grads):
            measure(refusal=TypeError(_NO_LOSS))
        elif isinstance(inner, LBFGS):
            measure(refusal=TypeError(NO_LOSS_FOR_LBFGS))
    return loss


def snapshot(optimizer: Optimizer) -> Callable[[], None]:
    """Remembers parameters and state; the result brings them back."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    values = [p.detach().clone() for p in parameters]
    state = {p: deepcopy(optimizer.state[p]) for p in parameters if p in optimizer.state}

    @without_grad
    def restore() -> None:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(state)

    return restore
