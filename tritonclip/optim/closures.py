"""Steps with a closure, which computes the gradients: they are clipped after each evaluation."""

from collections.abc import Callable
from inspect import signature
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from tritonclip.modes import without_grad
from tritonclip.monitor.stats import Outcomes, as_tensor
from tritonclip.optim.clip_groups import grads_in
from tritonclip.optim.refusals import Policy
from tritonclip.optim.step import Step

Closure = Callable[[], Any]
# Measures the gradients of an evaluation, or raises `refusal=`, which other processes get.
Measure = Callable[..., Step]
_NO_LOSS = (
    "the closure computed gradients and returned None; expected the loss: end it with "
    "`return loss`, after loss.backward(). Nothing was clipped or updated"
)
_NO_LOSS_FOR_LBFGS = (
    "LBFGS needs a closure that evaluates the model, calls backward and returns the loss; expected "
    "step(closure), got none, or one that returned None. Nothing was clipped or updated"
)


def refuse_judging(inner: Optimizer, policy: Policy, skip_above: object) -> None:
    """ValueError for steps to be judged first, of an optimizer that cannot go without a closure."""
    if not policy.checks and skip_above is None:
        return
    closure = signature(inner.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{type(inner).__name__} evaluates its closure within the step, and nonfinite='skip' "
            "and 'error' and skip_above look at the gradients before anything changes; expected "
            "nonfinite='propagate' or 'zero' without skip_above, got "
            f"nonfinite={policy.name!r} and skip_above={skip_above!r}"
        )


@torch.compiler.disable(recursive=False)
def take_closure(
    inner: Optimizer, closure: Closure | None, measure: Measure, *, judges: bool, under_scaler: bool
) -> tuple[Any, Step | None]:
    """Evaluates a closure for its result; also returns the step, if the wrapped optimizer took it.

    It does not take a step that the wrapper `judges` first, while nothing has changed yet.
    """
    if closure is None:
        # Other processes do not get this: they have begun to evaluate their closures, and the
        # collectives of their models wait for this process first.
        raise TypeError(_NO_LOSS_FOR_LBFGS)
    if isinstance(closure, Tensor):
        raise TypeError(
            "step takes a closure, a function that computes the loss, got a tensor; "
            "expected step(), after optimizer.loss = loss where a loss is to be judged"
        )
    if under_scaler:
        raise RuntimeError(
            "a closure computes gradients after the GradScaler looked at them; expected "
            "scaler.step(optimizer) without one: call backward first"
        )
    if judges:
        return _evaluate(closure, inner, measure), None
    return _step_evaluating(inner, closure, measure)


def _step_evaluating(inner: Optimizer, closure: Closure, measure: Measure) -> tuple[Any, Step]:
    """Clips after each evaluation; returns the result of the step, and the step to count."""
    counted: Step | None = None

    def evaluate_and_clip() -> Any:
        nonlocal counted
        loss = _evaluate(closure, inner, measure)
        step = measure()
        _clip_(step)
        if counted is None:
            counted = step
        else:
            counted.outcomes = _merged(counted.outcomes, step.outcomes)
        return loss

    result = inner.step(evaluate_and_clip)
    if counted is None:
        raise RuntimeError(
            f"{type(inner).__name__} updated without evaluating the closure, so nothing was "
            "clipped; expected an optimizer that evaluates it: call backward, then step() without "
            "a closure"
        )
    return result, counted


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


def _evaluate(closure: Closure, inner: Optimizer, measure: Measure) -> Any:
    """The loss; None of a closure that leaves gradients alone. Any other None is refused."""
    before = [(ref(grad), _version_of(grad)) for grad in grads_in(inner.param_groups)]
    with torch.enable_grad():
        loss = closure()
    if loss is None:
        there = {id(grad): version for weak, version in before if (grad := weak()) is not None}
        grads = grads_in(inner.param_groups)
        # By `measure`: other processes, which have evaluated theirs, may wait for norms.
        if any(there.get(id(grad)) != _version_of(grad) for grad in grads):
            measure(refusal=TypeError(_NO_LOSS))
        elif isinstance(inner, LBFGS):
            measure(refusal=TypeError(_NO_LOSS_FOR_LBFGS))
    return loss


def _version_of(tensor: Tensor) -> int:
    """How often it was written to; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version
