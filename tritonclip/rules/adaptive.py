"""The interface of limits that follow the norms of earlier calls.

The state of such a rule is one tensor, float64 where the device has it. It moves, is saved and
changes in one piece. `advance` is a pure function of tensors, so that nothing waits for the device,
and a step that is left out leaves no trace.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tritonclip.rules.arguments import Schedule, as_number
from tritonclip.rules.rule import Measured, Rule, needs_state


class Adaptive:
    """A limit that follows the norms of earlier calls."""

    __slots__ = ()

    def start(self) -> Sequence[float]:
        """The state before the first call, k numbers."""
        raise NotImplementedError

    def advance(self, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The limit for a norm, and the state after it.

        A norm that is NaN, inf or 0 must leave the state as it was.

        Args:
            state: float64[k]; float64[n, k] for a rule that is per gradient.
            norm: before clipping, float64, 0-d; [n] for a rule that is per gradient.

        Returns:
            The limit, shaped as `norm`, inf for none; the new state, shaped as `state`.
        """
        raise NotImplementedError


class AdaptiveRule(Adaptive, Rule):
    """A rule whose limit follows the norms of earlier calls."""

    __slots__ = ()

    def limit(self, measured: Measured) -> Tensor:
        """Refuses: only a `Following` knows the norms of earlier calls."""
        raise needs_state(self.name)

    @property
    def fixed(self) -> bool:
        """Never."""
        return False


def counts(norm: Tensor) -> Tensor:
    """Whether norms may enter a state: finite, and not 0."""
    return torch.isfinite(norm) & (norm > 0)


def bounded(limit: Tensor, max_norm: float | Schedule) -> Tensor:
    """A limit that is at most `max_norm`, which is a number in the rule of a step."""
    return limit.clamp(max=as_number("max_norm", max_norm))


@lru_cache(maxsize=64)
def kind_of(rule: Any) -> str:
    """The class and row length that the state of an adaptive rule must have; "" for other rules."""
    if not isinstance(rule, Adaptive):
        return ""
    return f"{type(rule).__name__} with {len(rule.start())} numbers"
