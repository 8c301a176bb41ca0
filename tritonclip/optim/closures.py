"""Steps with a closure: gradients are clipped after each evaluation, and a step can be undone."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from tritonclip.modes import without_grad
from tritonclip.monitor.stats import Outcomes, as_tensor
from tritonclip.optim.log import StepLog
from tritonclip.optim.param_groups import Groups
from tritonclip.optim.step import RAISING, Step, version_of

Closure = Callable[[], Any]
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


class Measure(Protocol):
    """Measures the gradients of an evaluation, or raises a refusal, which other processes get."""

    def __call__(self, *, refusal: Exception | None = None) -> Step:
        """The step, measured."""


class _NonfiniteEvaluationError(Exception):
    """A closure that was evaluated again, within a step, gave gradients that are not finite."""


def step_evaluating(inner: Optimizer, closure: Closure, measure: Measure, log: StepLog) -> Any:
    """Lets the optimizer evaluate the closure whenever it wants to, and clips each time.

    Returns:
        The result of its step.
    """
    steps: list[Step] = []
    outcomes: list[Outcomes] = []

    def evaluate_and_clip() -> Any:
        loss = evaluate(closure, inner, measure)
        steps.append(measure())
        outcomes.append(steps[-1].clip_())
        return loss

    result = inner.step(evaluate_and_clip)
    if not outcomes:
        raise RuntimeError(
            f"{type(inner).__name__} updated without evaluating the closure, so nothing was "
            "clipped; expected an optimizer that evaluates it: call backward, then step() without "
            "a closure"
        )
    steps[0].outcomes = _merged(outcomes)
    log.add(steps[0])
    return result


def step_checking(
    inner: Optimizer,
    closure: Closure,
    first: Any,
    measure: Measure,
    nonfinite: str,
    log: StepLog,
) -> tuple[Any, bool]:
    """Checks a first evaluation while nothing has changed, and hands the optimizer its result.

    Args:
        inner: the wrapped optimizer.
        closure: for evaluations after the first.
        first: the loss of the first evaluation.
        measure: measures the gradients of an evaluation.
        nonfinite: the policy: "skip" leaves the step out, or undoes it; errors are raised at once.
        log: for the step.

    Returns:
        The result of its step, `first` of one that was left out; and whether it was taken.
    """
    step = measure()
    if _leaves_out(step, nonfinite, judges=log.states.skip_above is not None):
        log.add_left_out(step)
        return first, False
    if nonfinite in RAISING:
        step.raise_if_nonfinite()
    result, outcomes = _step_on(inner, closure, first, step, measure, nonfinite)
    if outcomes is None:
        log.add_left_out(step)
    else:
        step.outcomes = outcomes
        log.add(step)
    return result, outcomes is not None


@torch.compiler.disable
@without_grad
def _leaves_out(step: Step, nonfinite: str, *, judges: bool) -> bool:
    """Whether a step is left out by the policy, or, where it `judges`, as an outlier."""
    if judges:
        step.outlier = step.judge()
    is_nonfinite = nonfinite == "skip" and bool(step.nonfinite())
    return is_nonfinite or (step.outlier is not None and bool(step.outlier.flag))


def _step_on(
    inner: Optimizer,
    closure: Closure,
    first: Any,
    step: Step,
    measure: Measure,
    nonfinite: str,
) -> tuple[Any, Outcomes | None]:
    """The result of a step whose first evaluation is clipped, and outcomes; None if undone."""
    outcomes = [step.clip_()]
    untouched = _watch(inner.param_groups)
    undone = isinstance(inner, LBFGS)
    remedy = (
        "This was a later evaluation of the closure within a step. Parameters and state are "
        + ("those before the step" if undone else "as changed by the step so far")
    )
    losses = [first]

    def evaluate_again() -> Any:
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
        later = measure()
        if _leaves_out(later, nonfinite, judges=False):
            raise _NonfiniteEvaluationError
        if nonfinite in RAISING:
            later.raise_if_nonfinite(remedy)
        outcomes.append(later.clip_())
        return loss

    restore = snapshot(inner) if undone else None
    try:
        result = inner.step(evaluate_again)
    except _NonfiniteEvaluationError:
        if restore is None:
            raise RuntimeError(
                f"{type(inner).__name__} evaluated its closure more than once, and a later "
                "evaluation gave gradients that are not finite: the step cannot be undone, so "
                "nonfinite='skip' cannot be kept. Use nonfinite='zero' or 'error'"
            ) from None
        restore()
        return first, None
    except BaseException:
        if restore is not None:
            restore()
        raise
    return result, _merged(outcomes)


def _merged(evaluations: list[Outcomes]) -> Outcomes:
    """The norms of the first evaluation, and the least coefficients of all."""
    merged = dict(evaluations[0])
    for outcomes in evaluations[1:]:
        for index, outcome in outcomes.items():
            known = merged.get(index)
            if outcome is not None and known is not None:
                both = [as_tensor(o.coefficient, known.norm) for o in (known, outcome)]
                merged[index] = known._replace(coefficient=torch.minimum(*both))
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
    """The loss, or None of a closure that leaves gradients alone, as trainers pass.

    Args:
        closure: of the user.
        inner: the wrapped optimizer.
        measure: takes the refusal of a closure, because other processes, which have evaluated
            theirs, may wait for norms.

    Raises:
        TypeError: a closure that computes gradients and returns None, or that gives LBFGS None.
    """
    groups = inner.param_groups
    before = [
        (ref(p.grad), version_of(p.grad))
        for group in groups
        for p in group["params"]
        if p.grad is not None
    ]
    with torch.enable_grad():
        loss = closure()
    if loss is None and not _all_of(groups, before):
        measure(refusal=TypeError(_NO_LOSS))
    elif loss is None and isinstance(inner, LBFGS):
        measure(refusal=TypeError(NO_LOSS_FOR_LBFGS))
    return loss


def _all_of(groups: Groups, known: list[tuple[ref[Tensor], int]]) -> bool:
    """Whether every gradient there is now was there before, and has not been written to since."""
    there = {id(grad): version for weak, version in known if (grad := weak()) is not None}
    grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    return all(there.get(id(grad)) == version_of(grad) for grad in grads)


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
