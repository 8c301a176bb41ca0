"""States of rules whose limit changes from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tritonclip.optim.outliers import OWNERS, OutlierTest
from tritonclip.optim.param_groups import Groups, are_same, key_of
from tritonclip.rules import BoundRule, ClipState, Numbering, Outlier, Rule


class RuleStates:
    """The states of the rules of an optimizer; `steps` counts calls of its `step`.

    A history follows its parameter, wherever it stands. Its position counts in checkpoints and in
    copies only.
    """

    def __init__(self, outliers: OutlierTest) -> None:
        self._states: dict[str, ClipState] = {}
        self.steps = 0
        self.outliers = outliers
        # The row of each parameter's history in every state. No weak references: torch refuses to
        # swap the contents of a parameter that has one.
        self._rows: dict[Tensor, int] = {}
        # All parameters as they stood when they were met last, and whether theirs are all rows in
        # order.
        self._located: list[Tensor] = []
        self._in_order = False

    def resume(self, groups: Groups) -> None:
        """Goes on with groups whose positions are those of a checkpoint or a copy."""
        # Else it would keep parameters alive that no group has any more.
        if self._states:
            self.locate(groups)

    def locate(self, groups: Groups) -> None:
        """Gives every parameter a row: its own, or a new one."""
        parameters = [p for group in groups for p in group["params"]]
        if are_same(parameters, self._located):
            return
        found = [self._rows.setdefault(p, len(self._rows)) for p in parameters]
        self._located, self._in_order = parameters, found == list(range(len(self._rows)))

    def rows(self, parameters: Sequence[Tensor]) -> tuple[Sequence[int] | None, int]:
        """The rows of parameters that were met, None for all in order; and the number of all."""
        n = len(self._rows)
        if self._in_order and len(parameters) == n:
            return None, n
        return [self._rows[parameter] for parameter in parameters], n

    def bind(self, group_index: int | None, rule: Rule, numbering: Numbering) -> BoundRule:
        """The rule of a group, None for the wrapper's, bound to its state for the next step."""
        owner = key_of(group_index)
        state = self._states.get(owner)
        if state is None or not state.remembers(rule):
            state = self._states[owner] = ClipState()
        return BoundRule(rule.at(self.steps), state, numbering)

    def state_dict(self, groups: Groups, rules: Mapping[str, Rule] | None = None) -> dict[str, Any]:
        """Copies of all states, for groups and parameters in the order in which they stand now.

        All `rules` of the program that may remember something have a state, for checkpoints are
        loaded into a new one with the same keys.
        """
        rows: Sequence[int] = ()
        if self._states:
            self.locate(groups)
            found, n = self.rows([p for group in groups for p in group["params"]])
            rows = range(n) if found is None else found
        states = {**self._states, **self.outliers.states}
        if rules is not None:
            owners = [owner for owner, rule in rules.items() if not rule.fixed]
            states = {**dict.fromkeys([*owners, *self.outliers.rules()], ClipState()), **states}
        return {owner: state.state_dict(rows) for owner, state in states.items()}

    def copy(self, groups: Groups) -> RuleStates:
        """A copy without the count of steps, for copies of groups and parameters in this order."""
        twin = RuleStates(OutlierTest(self.outliers.skip_above))
        saved = self.state_dict(groups)
        twin._keep({owner: _copy_of(state) for owner, state in saved.items()})
        return twin

    def load_state_dict(self, states: object, rules: dict[str, Rule], n_parameters: int) -> None:
        """Takes the result of `state_dict`; ValueError for any other, and for another program's."""
        if not isinstance(states, dict):
            raise ValueError(
                "memory of a saved state must be a dict with the states of rules, got "
                f"{states!r:.80}; expected the result of state_dict(). Nothing was loaded"
            )
        present: Mapping[str, Any] = {**rules, **self.outliers.rules()}
        self._keep(
            {
                owner: _loaded(owner, saved, present.get(owner), n_parameters)
                for owner, saved in states.items()
            }
        )

    def _keep(self, states: dict[str, ClipState]) -> None:
        """Goes on from other states, of rules and of the test for outliers."""
        self.outliers.states = {owner: states.pop(owner) for owner in OWNERS if owner in states}
        self._states = states


def _copy_of(saved: dict[str, Any]) -> ClipState:
    """A copy of a state from its `state_dict`, which no step waits to look at."""
    state = ClipState()
    state.load_state_dict(saved)
    state._is_loaded = False
    return state


def _loaded(owner: str, saved: Any, rule: Any, n_parameters: int) -> ClipState:
    """A saved state, which has to be one of this rule where its limit changes."""
    state = ClipState()
    state.load_state_dict(saved)
    if not isinstance(rule, Outlier) and getattr(rule, "fixed", True):
        return state
    n = state._shape[0] if len(state._shape) == 2 else 0
    if n > n_parameters:
        raise ValueError(
            f"the checkpoint remembers norms of {n} parameters for {owner!r}, got an "
            f"optimizer of {n_parameters}; expected that of the same model"
        )
    if not state.remembers(rule):
        raise ValueError(
            f"the checkpoint has {state!r} for {owner!r}, where the program has {rule}; "
            "expected the rule that the run began with. To begin anew, delete "
            f"state_dict['tritonclip']['memory'][{owner!r}]"
        )
    state.begin_as(rule)
    return state
