"""States of rules whose limit changes from step to step, and of the test for outliers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import c_float
from functools import lru_cache
from numbers import Real
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonclip.backends import adaptive
from tritonclip.distributed.process_groups import mean_of_all
from tritonclip.monitor.verdict import Flag
from tritonclip.optim.param_groups import Groups, key_of
from tritonclip.rules import BoundRule, ClipState, LossOutlier, Numbering, Outlier, Rule
from tritonclip.rules.arguments import as_limit
from tritonclip.rules.rule import Adaptive
from tritonclip.rules.state import Values

_OUTLIERS, _LOSSES = "outliers", "losses"


class _Norm(NamedTuple):
    """A measured norm, as a state asks for it."""

    value: float | Tensor

    def norm(self) -> Tensor:
        """The norm on its device."""
        assert isinstance(self.value, Tensor)
        return self.value

    @property
    def device(self) -> torch.device:
        """Of the norm."""
        return self.norm().device

    def advance(
        self, rule: Adaptive, values: Tensor, rows: Tensor | None, *, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        """Limit and values after this norm."""
        return adaptive.advance(rule, values, rows, self, in_place=in_place)

    def parts(self) -> adaptive.Parts:
        """The norm itself."""
        norm = self.norm()
        return adaptive.Parts(norm, norm.dtype)

    def numbers(self) -> float | None:
        """The norm, where the host decides."""
        return None if isinstance(self.value, Tensor) else self.value

    def sizes(self) -> Tensor:
        """Not asked for."""
        raise NotImplementedError

    def positions(self) -> tuple[None, int]:
        """Of one norm."""
        return None, 1


def as_skip_bound(skip_above: object) -> float | Outlier | None:
    """The user's `skip_above`.

    Raises:
        TypeError, ValueError: neither a limit, nor :class:`Outlier`, nor None.
    """
    if skip_above is None or isinstance(skip_above, Outlier):
        return skip_above
    try:
        return as_limit("skip_above", skip_above)
    except TypeError:
        raise TypeError(
            "skip_above must be a number (the largest norm that is not skipped), an Outlier or "
            f"None, got {skip_above!r:.80}"
        ) from None


def as_loss(loss: object, skip_above: float | Outlier | None) -> float | Tensor | None:
    """The user's `loss`, without its graph.

    Raises:
        TypeError: neither one real number nor None.
        ValueError: a number that nothing judges.
    """
    if loss is None:
        return None
    if not isinstance(skip_above, Outlier):
        raise ValueError(
            f"loss was set, but skip_above is {skip_above!r}, which compares norms alone; expected "
            "skip_above=Outlier(), which compares a loss with those of earlier steps"
        )
    if isinstance(loss, Real) and not isinstance(loss, bool):
        return float(loss)
    kind = type(loss).__name__
    if isinstance(loss, Tensor) and not hasattr(loss, "full_tensor"):
        if loss.is_floating_point() and loss.dim() == 0:
            # A copy: a running sum may be reset before the step.
            return loss.detach().clone()
        kind = f"shape {tuple(loss.shape)} of {loss.dtype}"
    raise TypeError(
        f"loss must be a floating-point tensor without dimensions, or a number, got {kind}; "
        "expected the mean over the batch, of a DTensor loss.full_tensor()"
    )


@lru_cache(maxsize=16)
def _of_losses(above: Outlier) -> LossOutlier:
    """The test of losses beside one of norms."""
    return LossOutlier(above.sigmas, above.window)


class RuleStates:
    """The states of the rules of an optimizer, and of its test for outliers.

    A state follows its group, and a history its parameter, wherever they stand. Their positions
    count in checkpoints and in copies only. Parameters that were met are kept alive, also where no
    group has them any more, as `optimizer.state` keeps them.

    Attributes:
        steps: calls of the wrapper's `step` so far, which functions of the step are given.
        skip_above: the largest norm that is no outlier, or :class:`Outlier`; None for no test.
        loss: of the step to come, to be judged beside its norm; None for none.
    """

    def __init__(self, skip_above: float | Outlier | None = None) -> None:
        self._states: dict[str, ClipState] = {}
        self.steps = 0
        self.skip_above = skip_above
        self.loss: float | Tensor | None = None
        # As they stood when they were met last; None for never.
        self._groups: list[Mapping[str, Any]] | None = None
        self._ids: list[list[int]] = []
        # By id: a parameter, and the row of its history in every state.
        self._rows: dict[int, tuple[Tensor, int]] = {}
        self._n_rows = 0
        # Whether the rows of all groups' parameters are all rows in order.
        self._in_order = False

    @property
    def has_rules(self) -> bool:
        """Whether it remembers anything for a rule."""
        return not self._states.keys() <= {_OUTLIERS, _LOSSES}

    def resume(self, groups: Groups) -> None:
        """Goes on with groups whose positions are those of a checkpoint or a copy."""
        # Else it would keep parameters alive that no group has any more.
        if self.has_rules:
            self.meet(groups)

    def meet(self, groups: Groups, *, each: bool = True) -> None:
        """Finds groups and parameters where they stand now.

        A new parameter in the place of one that no group holds any more takes over its history.

        Args:
            groups: of the optimizer.
            each: whether parameters may have changed in groups that have not; a look at each.
        """
        known = self._groups
        same = known is not None and len(known) == len(groups) and all(map(is_, known, groups))
        if same and not each:
            return
        ids = [list(map(id, group["params"])) for group in groups]
        if same and ids == self._ids:
            return
        before = self._indices_before(groups)
        self._states = _moved(self._states, before)
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

    def rows(
        self, parameters: Sequence[Tensor], *, grouped: bool = True
    ) -> tuple[Sequence[int] | None, int]:
        """The rows of parameters, None for all in order; and the number of all rows.

        Args:
            parameters: that were met.
            grouped: they stand in the order of their groups.
        """
        if grouped and self._in_order and len(parameters) == self._n_rows:
            return None, self._n_rows
        return [self._rows[id(parameter)][1] for parameter in parameters], self._n_rows

    def bind(self, group_index: int | None, rule: Rule, numbering: Numbering) -> BoundRule:
        """The rule, bound to its state for the next step.

        Args:
            group_index: of the one group that has it; None for the wrapper's.
            rule: any rule.
            numbering: the rows of its parameters.
        """
        owner = key_of(group_index)
        state = self._states.get(owner)
        if state is None or not state.remembers(rule):
            state = self._states[owner] = ClipState()
        return BoundRule(rule.at(self.steps), state, numbering)

    def take_over(
        self, group_index: int | None, bound_rule: BoundRule, numbering: Numbering
    ) -> BoundRule:
        """The rule of a measured step, bound to a state of another `RuleStates`.

        Args:
            group_index: as for `bind`.
            bound_rule: of the step; returned as it is where the state here is of another rule.
            numbering: the rows of its parameters here.
        """
        state = self._states.setdefault(key_of(group_index), ClipState())
        return bound_rule.onto(state, numbering) if state.remembers(bound_rule.rule) else bound_rule

    def judge(
        self,
        norm: float | Tensor,
        dtype: torch.dtype = torch.float64,
        *,
        known: Judgement | None = None,
    ) -> Judgement:
        """Whether a norm is an outlier, by those before, or the loss.

        Waits for nothing, but for a loss on another device than the norm.

        Args:
            norm: a number where the host decides; else 0-d.
            dtype: of a number, before it was one.
            known: of the same step, whose loss other processes do not send again.
        """
        above = self.skip_above
        assert above is not None
        if not isinstance(above, Outlier):
            if isinstance(norm, float) and dtype == torch.float32:
                # As a tensor of this dtype is compared with a number.
                above = c_float(above).value
            return Judgement(norm, None, norm > above, ())
        flag, own = self._test(_OUTLIERS, above, norm)
        if known is not None:
            mean = known.loss
        elif self.loss is None:
            mean = None
        else:
            mean = mean_of_all(self.loss, None if isinstance(norm, float) else norm.device)
        if mean is None:
            return Judgement(norm, None, flag, (own,))
        its_flag, its = self._test(_LOSSES, _of_losses(above), mean)
        # Two numbers, or two tensors.
        return Judgement(norm, mean, flag | its_flag, (own, its))

    def _test(
        self, owner: str, above: Outlier, number: float | Tensor
    ) -> tuple[Flag, tuple[ClipState, Values]]:
        """Whether a number is an outlier; the state of the test, and its values after it."""
        state = self._states.setdefault(owner, ClipState())
        if not state.remembers(above):
            state = self._states[owner] = ClipState()
        limit, values = state.advance(above, _Norm(number))
        assert not isinstance(limit, list)
        if isinstance(number, Tensor) and isinstance(limit, Tensor):
            limit = limit.to(number.device)
        return number > limit, (state, values)

    def state_dict(self, groups: Groups, rules: Mapping[str, Rule] | None = None) -> dict[str, Any]:
        """Copies of all states, for groups and parameters in the order in which they stand now.

        Args:
            groups: of the optimizer.
            rules: those of the program, by owner: all that may remember something have a state,
                for checkpoints are loaded into a new one with the same keys.
        """
        rows: Sequence[int] = ()
        if self.has_rules:
            self.meet(groups)
            found, n = self.rows([p for group in groups for p in group["params"]])
            rows = range(n) if found is None else found
        owners = [owner for owner, rule in (rules or {}).items() if not rule.fixed]
        if rules and isinstance(self.skip_above, Outlier):
            owners += [_OUTLIERS, _LOSSES]
        states = {**dict.fromkeys(owners, ClipState()), **self._states}
        return {owner: state.state_dict(rows) for owner, state in states.items()}

    def copy(self, groups: Groups) -> RuleStates:
        """A copy that meets the copies of groups and parameters in the order of these."""
        twin = RuleStates(self.skip_above)
        twin.steps = self.steps
        for owner, saved in self.state_dict(groups).items():
            twin._states[owner] = ClipState()
            twin._states[owner].load_state_dict(saved)
            # No step waits to look at them.
            twin._states[owner]._is_loaded = False
        return twin

    def load_state_dict(self, states: object, rules: dict[str, Rule], n_parameters: int) -> None:
        """Takes the result of `state_dict`.

        Args:
            states: as saved.
            rules: those of the program, by owner.
            n_parameters: of the optimizer.

        Raises:
            ValueError: norms that were remembered for another rule, or for more parameters; any
                other damage.
        """
        if not isinstance(states, dict):
            raise ValueError(
                "memory of a saved state must be a dict with the states of rules, got "
                f"{states!r:.80}; expected the result of state_dict(). Nothing was loaded"
            )
        loaded: dict[str, ClipState] = {}
        for owner, saved in states.items():
            state = loaded[owner] = ClipState()
            state.load_state_dict(saved)
            present: Any = rules.get(owner)
            if owner == _OUTLIERS:
                present = self.skip_above
            elif owner == _LOSSES and isinstance(self.skip_above, Outlier):
                present = _of_losses(self.skip_above)
            follows = isinstance(present, Outlier) or not getattr(present, "fixed", True)
            n = state._form[0] if len(state._form) == 2 else 0
            if follows and n > n_parameters:
                raise ValueError(
                    f"the checkpoint remembers norms of {n} parameters for {owner!r}, got an "
                    f"optimizer of {n_parameters}; expected that of the same model"
                )
            if follows and state.remembers(present):
                state.begin_as(present)
            elif follows:
                raise ValueError(
                    f"the checkpoint has {state!r} for {owner!r}, where the program has {present}; "
                    "expected the rule that the run began with. To begin anew, delete "
                    f"state_dict['tritonclip']['memory'][{owner!r}]"
                )
        self._states = loaded


def _moved(states: dict[str, ClipState], before: Sequence[int | None]) -> dict[str, ClipState]:
    """States by the indices that groups have now; those of groups that are gone drop out."""
    owners = {
        key_of(place): key_of(index) for index, place in enumerate(before) if place is not None
    }
    owners |= {owner: owner for owner in (key_of(None), _OUTLIERS, _LOSSES)}
    return {owners[owner]: state for owner, state in states.items() if owner in owners}


class Judgement(NamedTuple):
    """Whether a step is an outlier, and the states of the tests after it.

    Attributes:
        norm: of the step: a number where the host decides; else 0-d.
        loss: likewise, the mean over all processes; None where none was given.
        flag: likewise; 0-d bool.
        tests: the states of its tests, and their values after this step.
    """

    norm: float | Tensor
    loss: float | Tensor | None
    flag: Flag
    tests: Sequence[tuple[ClipState, Values]]

    def commit(self, overflow: Flag) -> None:
        """Remembers norm and loss, of a skipped step too, but not of one that overflowed."""
        for state, values in self.tests:
            state.commit(values, overflow)
