"""Refusals of a step: errors of its clip groups, and policies for NaN and inf."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Literal, NamedTuple, NoReturn

from torch import Tensor

from tritonclip.engine.checks import (
    check,
    nonfinite_indices,
    raise_if_nonfinite,
    raise_if_unlimited,
)
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.memory import OverlapError, are_apart, find_overlap, memory_of
from tritonclip.optim.clip_groups import ClipGroup

StepNonfinite = Literal["propagate", "error", "zero", "skip"]
_REMEDY = (
    "Neither gradients nor parameters were changed. To go on, drop the gradients by zero_grad(), "
    "or set nonfinite to 'propagate', 'zero' or 'skip'"
)


class Policy(NamedTuple):
    """A policy for steps whose gradients or norms are NaN or inf.

    Attributes:
        name: the name that users pass as `nonfinite`.
        checks: every gradient is checked, even if no rule clips it.
        zeroes: all gradients that share a rule become 0.
        skips: the step is left out, and counted as skipped.
        raises: a RuntimeError names the gradients.
    """

    name: str
    checks: bool = False
    zeroes: bool = False
    skips: bool = False
    raises: bool = False


_POLICIES = (
    Policy("propagate"),
    Policy("error", checks=True, raises=True),
    Policy("zero", zeroes=True),
    Policy("skip", checks=True, skips=True),
)


def policy_of(nonfinite: object) -> Policy:
    """Returns the policy of a name; raises ValueError for an unknown one."""
    for policy in _POLICIES:
        if policy.name == nonfinite:
            return policy
    raise ValueError(f"nonfinite must be 'propagate', 'error', 'zero' or 'skip', got {nonfinite!r}")


def refuse(groups: Sequence[ClipGroup]) -> None:
    """Refuses gradients that a rule cannot clip, or that two rules share."""
    for group in groups:
        if group.gradients.error is not None:
            raise group.gradients.error
    for group in groups:
        plan = group.gradients.plan
        if plan is not None and not plan.ordinary:
            check(group.gradients, group.rule)
    if len(groups) > 1:
        _refuse_shared([group.gradients for group in groups])


def _refuse_shared(lists: Sequence[Gradients]) -> None:
    """Refuses gradients that overlap under two rules, and so would be scaled twice."""
    planned = [(g, g.plan.spans) for g in lists if g.plan is not None]
    starts = [a for g, _ in planned for a in g.addresses or map(Tensor.data_ptr, g.readable)]
    # Copies lie at other addresses than the gradients that they stand for.
    staged = any(g.copies for g, _ in planned)
    if not staged and are_apart(starts, list(chain(*(spans for _, spans in planned)))):
        return
    every = [(g, at, memory_of(grad)) for g, _ in planned for at, grad in enumerate(g.tensors)]
    there = [(g, at, region) for g, at, region in every if region is not None]
    found = find_overlap([region for *_, region in there])
    if found is not None:
        first, second = (there[i][0].label(there[i][1]) for i in found)
        raise OverlapError(
            f"the gradients of {first} and {second} overlap in memory, and have different rules; "
            "put both into one parameter group with the same need_clip, or replace one of them by "
            "grad.clone()"
        )


def refuse_nonfinite(groups: Sequence[ClipGroup]) -> NoReturn:
    """Raises RuntimeError for a step that is not finite; names the parameters with NaN or inf."""
    for group in groups:
        if group.norms is not None:
            if group.unclipped:
                # A norm of all gradients names none of them, so they are read again.
                labels = group.gradients.culprits(nonfinite_indices(group.gradients))
                if labels:
                    raise RuntimeError(
                        f"Some gradients are non-finite. {_REMEDY}. Non-finite gradients: {labels}"
                    )
            else:
                raise_if_nonfinite(group.norms, _REMEDY, group.rule)
                raise_if_unlimited(group.rule, group.norms, _REMEDY)
    if any(group.is_spread for group in groups):
        raise RuntimeError(f"Another process refuses its gradients. {_REMEDY}")
    raise RuntimeError(
        "Every gradient is finite, but divided by the loss scale the largest does not fit its "
        f"dtype. {_REMEDY}"
    )
