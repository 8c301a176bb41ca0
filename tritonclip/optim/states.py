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

    A state follows its group, and a history its parameter, wherever they stand. Their positions
    count in checkpoints and in copies only.
    """

    def __init__(self, outliers: OutlierTest) -> None:
        self._states: dict[str, ClipState] = {}
        self.steps = 0
        self.outliers = outliers
        # As they stood when they were met last; None for never.
        self._groups: list[Mapping[str, Any]] | None = None
        self._ids: list[list[int]] = []
        # By id: a parameter, which stays alive, and the row of its history in every state.
        self._rows: dict[int, tuple[Tensor, int]] = {}
        self._n_rows = 0
        # Whether the rows of all groups' parameters are all rows in order.
        self._in_order = False

    def resume(self, groups: Groups) -> None:
        """Goes on with groups whose positions are those of a checkpoint or a copy."""
        # Else it would keep parameters alive that no group has any more.
        if self._states:
            self.locate(groups)

    def locate(self, groups: Groups, *, each: bool = True) -> None:
        """Finds groups and parameters where they stand now; new ones may replace those before.

        Without `each`, parameters of groups that have not changed are not looked at.
        """
        is_same = self._groups is not None and are_same(self._groups, groups)
        if is_same and not each:
            return
        ids = [list(map(id, group["params"])) for group in groups]
        if is_same and ids == self._ids:
            return
        before = self._indices_before(groups)
        owners = {
            key_of(place): key_of(index) for index, place in enumerate(before) if place is not None
        }
        owners[key_of(None)] = key_of(None)
        # Those of groups that are gone drop out.
        self._states = {owners[o]: state for o, state in self._states.items() if o in owners}
        self._number(groups, before)
        self._groups, self._ids = list(groups), ids

    def _indices_before(self, groups: Groups) -> list[int | None]:
        """The place of each group when groups were met last; None of a new one."""
        if self._groups is None:
            return list(range(len(groups)))
        places = {id(group): index for index, group in enumerate(self._groups)}
        before = [places.get(id(group)) for group in groups]
        # Loading a checkpoint makes other dicts for the same parameters.
        gone = set(places.values()).difference(before)
        home = {i: index for index in gone for i in self._ids[index]}
        for index, group in enumerate(groups):
            if before[index] is None:
                homes = (home.get(id(p)) for p in group["params"] if id(p) in self._rows)
                before[index] = next((i for i in homes if i in gone), None)
                gone.discard(before[index])
        return before

    def _number(self, groups: Groups, before: Sequence[int | None]) -> None:
        """Gives every parameter a row: its own, that of the one that it replaces, or a new one."""
        numbered = dict(self._rows)
        gone = numbered.keys() - {id(p) for group in groups for p in group["params"]}
        for group, place in zip(groups, before, strict=True):
            ids = self._ids[place] if place is not None and self._ids else []
            replaces = len(ids) == len(group["params"])
            for position, parameter in enumerate(group["params"]):
                if id(parameter) in numbered:
                    continue
                if replaces and ids[position] in gone:
                    gone.remove(ids[position])
                    _, row = numbered.pop(ids[position])
                else:
                    row, self._n_rows = self._n_rows, self._n_rows + 1
                numbered[id(parameter)] = parameter, row
        self._rows = numbered
        found = [numbered[id(p)][1] for group in groups for p in group["params"]]
        self._in_order = found == list(range(self._n_rows))

    def rows(self, parameters: Sequence[Tensor]) -> tuple[Sequence[int] | None, int]:
        """The rows of parameters that were met, None for all in order; and the number of all."""
        if self._in_order and len(parameters) == self._n_rows:
            return None, self._n_rows
        return [self._rows[id(parameter)][1] for parameter in parameters], self._n_rows

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
