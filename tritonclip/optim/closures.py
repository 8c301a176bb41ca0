"""Steps with a closure that computes the gradients, which are clipped after each evaluation."""

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
# Measures the gradients of an evaluation, or raises `refusal=` on all processes that wait.
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
    """Raises ValueError if steps are to be judged first, but the optimizer needs a closure."""
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
    """Evaluates a closure; returns its result, and the step if the wrapped optimizer took it.

    If the wrapper `judges` steps before anything changes, the optimizer takes none here.
    """
    if closure is None:
        # Other processes cannot get this error: they have begun to evaluate their closures, where
        # the collectives of their models already wait for this process.
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
    """Lets the optimizer step with clipping after each evaluation; returns result and step."""
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


# Optimizers may evaluate a closure with gradients enabled.
_clip_ = torch.compiler.disable(without_grad(Step.clip_))


def _merged(earlier: Outcomes, later: Outcomes) -> Outcomes:
    """Combines outcomes: the norms of the earlier evaluation, the least coefficients of both."""
    merged = dict(earlier)
    for index, outcome in later.items():
        before = merged.get(index)
        if outcome is not None and before is not None:
            both = [as_tensor(o.coefficient, before.norm) for o in (before, outcome)]
            merged[index] = before._replace(coefficient=torch.minimum(*both))
    return merged


def _evaluate(closure: Closure, inner: Optimizer, measure: Measure) -> Any:
    """Returns the loss; refuses None if the closure computed gradients, or for LBFGS."""
    before = [(ref(grad), _version_of(grad)) for grad in grads_in(inner.param_groups)]
    with torch.enable_grad():
        loss = closure()
    if loss is None:
        there = {id(grad): version for weak, version in before if (grad := weak()) is not None}
        grads = grads_in(inner.param_groups)
        # `measure` raises, as other processes have evaluated their closures and wait for norms.
        if any(there.get(id(grad)) != _version_of(grad) for grad in grads):
            measure(refusal=TypeError(_NO_LOSS))
        elif isinstance(inner, LBFGS):
            measure(refusal=TypeError(_NO_LOSS_FOR_LBFGS))
    return loss


def _version_of(tensor: Tensor) -> int:
    """Returns how often a tensor was written to; inference tensors do not count that."""
    return 0 if tensor.is_inference() else tensor._version
