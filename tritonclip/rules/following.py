"""The rule of one call, with the limit that the state of a rule gives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tritonclip.rules.adaptive import Adaptive
from tritonclip.rules.rule import Measured, Rule

if TYPE_CHECKING:
    from tritonclip.rules.state import ClipState

# The row of each parameter of a list, and how many rows there are.
Numbering = Callable[[], tuple[Sequence[int], int]]


class Following(Rule):
    """The rule of one call, with the limit that its state gives it; found once."""

    def __init__(self, rule: Any, state: ClipState, numbering: Numbering | None = None) -> None:
        self.rule, self._state, self._numbering = rule, state, numbering
        self._limit: float | Tensor | None = None
        self._list: Sequence[Tensor] = ()
        self._measured: Measured | None = None
        self._values: Tensor | None = None
        if isinstance(rule, Rule):
            self.norm_type, self.eps = rule.norm_type, rule.eps
            self.per_gradient = rule.per_gradient  # type: ignore[misc]  # of this rule
            self.per_unit = rule.per_unit  # type: ignore[misc]
            self.clamps = rule.clamps  # type: ignore[misc]
            if self.clamps:
                self.bounds = rule.bounds

    def limit(self, measured: Measured) -> float | Tensor:
        """The limit of the step; later calls get the same."""
        if self._limit is None:
            if isinstance(self.rule, Adaptive):
                self._measured = measured
                self._limit, self._values = self._state.advance(
                    self.rule, measured, self._numbering
                )
            else:
                self._limit = self.rule.limit(measured)
        return self._limit

    def interval(self) -> tuple[float, float]:
        """As the rule's."""
        low, high = self.rule.interval()
        return low, high

    @property
    def keeps_zero(self) -> bool:
        """As the rule's."""
        return bool(self.rule.keeps_zero)

    @property
    def excludes(self) -> int:
        """As the rule's."""
        return int(self.rule.excludes)

    def exempt(self, parameters: Sequence[Tensor]) -> list[bool]:
        """As the rule's."""
        exempt: list[bool] = self.rule.exempt(parameters)
        return exempt

    @property
    def name(self) -> str:
        """As the rule's."""
        return str(self.rule.name)

    def __repr__(self) -> str:
        return repr(self.rule)

    def meet(self, parameters: Sequence[Tensor]) -> None:
        """Checks the list of the call, before it is measured.

        Args:
            parameters: with and without a gradient.

        Raises:
            ValueError: another list than that of the state.
        """
        adaptive = isinstance(self.rule, Adaptive)
        self._list = parameters if adaptive and self.per_gradient else parameters[:1]
        if parameters:
            self._state.check_list(self._list, len(parameters) if adaptive else None)

    def onto(self, state: ClipState, numbering: Numbering) -> Following:
        """The same call, for another state to remember, which has other rows."""
        moved = Following(self.rule, state, numbering)
        if self._measured is not None:
            moved.limit(self._measured)
        return moved

    def commit(self, left_out: Tensor | bool | None = None) -> None:
        """Makes the state remember this call; one that was left out is only counted.

        Args:
            left_out: whether it was; a 0-d bool may be on any device. None for no.
        """
        if self._list:
            self._state.begin_with(self._list)
        if isinstance(left_out, bool):
            self._state.commit(None if left_out else self._values, None)
        else:
            self._state.commit(self._values, left_out)
