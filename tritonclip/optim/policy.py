"""The policies of an optimizer for a step whose gradients or norms are NaN or inf."""

from __future__ import annotations

from typing import Literal, NamedTuple

StepNonfinite = Literal["propagate", "error", "async_error", "zero", "skip"]


class Policy(NamedTuple):
    """A policy.

    Attributes:
        name: as users write it.
        checks: every gradient is checked, also those that no rule clips.
        zeroes: the gradients that share a rule become 0.
        skips: the step is left out, and counted as skipped.
        raises: RuntimeError names the gradients.
        is_late: the error comes some steps later, where no step waits for the device.
    """

    name: str
    checks: bool = False
    zeroes: bool = False
    skips: bool = False
    raises: bool = False
    is_late: bool = False


_POLICIES = {
    policy.name: policy
    for policy in (
        Policy("propagate"),
        Policy("error", checks=True, raises=True),
        Policy("async_error", checks=True, raises=True, is_late=True),
        Policy("zero", zeroes=True),
        Policy("skip", checks=True, skips=True),
    )
}


def policy_of(nonfinite: object) -> Policy:
    """The policy of a name.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(nonfinite, str) and nonfinite in _POLICIES:
        return _POLICIES[nonfinite]
    raise ValueError(
        "nonfinite must be 'propagate', 'error', 'async_error', 'zero' or 'skip', got "
        f"{nonfinite!r}"
    )
