"""The memory of a wrapper between steps: states of its rules, and of its test for outliers.

Outliers are norms and losses above a limit, which may follow those of earlier steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float
from functools import lru_cache, partial
from numbers import Real
from operator import is_
from typing import Any

import torch
from torch import Tensor

from tritonclip.distributed.domain import mean_of_all
from tritonclip.monitor.stats import Flag, either
from tritonclip.optim.checkpoint import IN_STATE, refuse_missing
from tritonclip.optim.clip_groups import ClipGroup, Grouping, key_of
from tritonclip.rules import BoundRule, ClipState, LossOutlier, Outlier, Rule
from tritonclip.rules.arguments import as_limit
from tritonclip.rules.rule import Adaptive, kind_of

# A state with more numbers is a tensor in a checkpoint.
_FEW = 16
# The keys of the states of the test for outliers.
_OUTLIERS, _LOSSES = "outliers", "losses"
# The states of tests, each with its values after the step.
Judged = Sequence[tuple[ClipState, list[float] | Tensor]]


def as_skip_bound(skip_above: object) -> float | Outlier | None:
    """Checks the user's `skip_above`."""
    if skip_above is None or isinstance(skip_above, Outlier):
        return skip_above
    try:
        bound = as_limit("skip_above", skip_above)
    except TypeError:
        remedy = ""
        if isinstance(skip_above, type) and issubclass(skip_above, Outlier):
            remedy = f", the class; write {skip_above.__name__}()"
        raise TypeError(
            "skip_above must be a number (the largest norm that is not skipped), an Outlier or "
            f"None, got {skip_above!r:.80}{remedy}"
        ) from None
    if bound == 0:
        raise ValueError(
            "skip_above must be over 0, got 0, above which every norm lies, so that every step "
            "would be skipped; expected None to skip none"
        )
    return bound


def as_loss(loss: object) -> float | Tensor | None:
    """Checks the user's `loss`, and copies a tensor without its graph."""
    if loss is None:
        return None
    if isinstance(loss, Real) and not isinstance(loss, bool):
        return float(loss)
    got = type(loss).__name__
    if isinstance(loss, Tensor) and not hasattr(loss, "full_tensor"):
        if loss.is_floating_point() and loss.dim() == 0:
            # A copy: a running sum may be reset before the step.
            return loss.detach().clone()
        got = f"shape {tuple(loss.shape)} of {loss.dtype}"
    raise TypeError(
        f"loss must be a floating-point tensor without dimensions, or a number, got {got}; "
        "expected the mean over the batch, of a DTensor loss.full_tensor()"
    )


def _tests_of(skip_above: float | Outlier | None) -> dict[str, Outlier]:
    """Returns the tests that remember something, by the keys of their states."""
    if not isinstance(skip_above, Outlier):
        return {}
    return {_OUTLIERS: skip_above, _LOSSES: _of_losses(skip_above)}


@lru_cache(maxsize=16)
def _of_losses(above: Outlier) -> LossOutlier:
    """Makes the test of losses that goes with a test of norms."""
    return LossOutlier(above.sigmas, above.window)


class RuleStates:
    """The states of an optimizer's rules, and of its test for outliers, kept between steps.

    A history follows its parameter if groups change. Only checkpoints go by position.

    Attributes:
        grouping: the parameter groups and their rules.
        steps: the number of calls of the optimizer's `step`.
        skip_above: the largest norm of a step that is not skipped, or the test for outliers.
        loss: the loss of the next step.
    """

    def __init__(self, grouping: Grouping, skip_above: float | Outlier | None = None) -> None:
        self.grouping, self.skip_above = grouping, skip_above
        self._states: dict[str, ClipState] = {}
        self.steps = 0
        self.loss: float | Tensor | None = None
        # The row of each parameter's history in every state. The references are not weak, because
        # torch refuses to swap the contents of a parameter that has weak ones.
        self._rows: dict[Tensor, int] = {}
        # The parameters that `locate` saw last, and whether their rows are all rows in order.
        self._located: list[Tensor] = []
        self._in_order = False

    def locate(self) -> None:
        """Gives a new row to every parameter that has none."""
        parameters = self.grouping.parameters()
        if len(parameters) == len(self._located) and all(map(is_, parameters, self._located)):
            return
        found = [self._rows.setdefault(p, len(self._rows)) for p in parameters]
        self._located, self._in_order = parameters, found == list(range(len(self._rows)))

    def rows(
        self, parameters: Sequence[Tensor], positions: Sequence[int] | None = None
    ) -> tuple[Sequence[int] | None, int]:
        """Returns the rows of located parameters, None for all rows in order, and their number.

        With `positions`, only the parameters at these positions are looked up.
        """
        n = len(self._rows)
        if positions is not None:
            parameters = [parameters[i] for i in positions]
        elif self._in_order and len(parameters) == n:
            return None, n
        return [self._rows[parameter] for parameter in parameters], n

    def bind(self, group: ClipGroup) -> Rule:
        """Binds a clip group's rule, if its limit changes, to its state for the next step."""
        rule, parameters = group.rule, group.gradients.sources
        assert parameters is not None
        if rule.per_gradient and isinstance(rule, Adaptive):
            self.locate()
        # Binding the group would make a cycle by `group.rule`, which would keep the gradients.
        rows = partial(self.rows, parameters)
        state = self._state_of(key_of(group.index), rule)
        group.rule = BoundRule(rule.at(self.steps), state, rows)
        return group.rule

    def judge(self, norm: float | Tensor, dtype: torch.dtype) -> tuple[Flag, Judged]:
        """Judges whether norm or loss is an outlier; waits only for a loss on another device.

        After the step, `commit` of the returned states takes the returned values. `dtype` is the
        one in which the norm was measured, which a number does not tell.
        """
        above = self.skip_above
        assert above is not None
        if not isinstance(above, Outlier):
            if isinstance(norm, float) and dtype == torch.float32:
                # Comparing a float32 tensor with a number would round the number, too.
                above = c_float(above).value
            return norm > above, []
        flag: Flag = False
        judged: list[tuple[ClipState, list[float] | Tensor]] = []
        for owner, test in _tests_of(above).items():
            number: float | Tensor = norm
            if owner == _LOSSES:
                if self.loss is None:
                    break
                # The loss comes as the norm does: as a number, or as a tensor on its device.
                number = mean_of_all(self.loss, None if isinstance(norm, float) else norm.device)
            if isinstance(number, float) and type(test).advance is not Outlier.advance:
                # A user's class has no formula in numbers.
                number = torch.tensor(number, dtype=torch.float64)
            state = self._state_of(owner, test)
            limit, values = state.advance(test, number)
            judged.append((state, values))
            flag = either(flag, number > limit)
        return flag, judged

    def _state_of(self, owner: str, rule: Any) -> ClipState:
        """Returns the state of a rule or test, a new one if the old one belongs to another."""
        state = self._states.get(owner)
        if state is None or not state.remembers(rule):
            state = self._states[owner] = ClipState()
        return state

    def _have_rows(self) -> bool:
        """Whether a state has a row for each parameter."""
        return any(len(state._shape) == 2 for state in self._states.values())

    def state_dict(self) -> dict[str, Any]:
        """Copies all states, for groups and parameters in their present order."""
        rows = self._all_rows()
        return {owner: state.state_dict(rows) for owner, state in self._states.items()}

    def for_checkpoint(self) -> dict[str, Any]:
        """Copies all states as `state_dict` does, but with many values as a tensor.

        Every rule that may remember something has an entry in its final shape, because savers load
        a checkpoint into a new one with the same keys and shapes.
        """
        present, n, rows = self._present(), len(self.grouping.parameters()), self._all_rows()
        owners = [owner for owner, rule in present.items() if not getattr(rule, "fixed", False)]
        states = {**dict.fromkeys(owners, ClipState()), **self._states}
        memory = {owner: state.copied(rows) for owner, state in states.items()}
        for owner, saved in memory.items():
            rule, values = present.get(owner), saved["values"]
            if rule is not None and values is None and _has_many(rule, n):
                start = torch.tensor([*rule.start()], dtype=torch.float64, device="cpu")
                saved["kind"], values = kind_of(rule), start.expand(_shape_of(rule, n)).clone()
            if values is not None:
                saved["values"] = values if values.numel() > _FEW else values.tolist()
        return memory

    def owners_of_many(self) -> list[str]:
        """Lists the keys of rules that have a tensor in a checkpoint."""
        n = len(self.grouping.parameters())
        return [owner for owner, rule in self._present().items() if _has_many(rule, n)]

    def _present(self, *, anew: bool = False) -> dict[str, Any]:
        """Returns all rules and tests by their keys; reads those of groups again only if `anew`."""
        # By default nothing is read, as an invalid rule in a group must not keep users from saving.
        return {**self.grouping.rules(anew=anew), **_tests_of(self.skip_above)}

    def _all_rows(self) -> Sequence[int]:
        """Returns the rows of all parameters; none if no state has rows."""
        if not self._have_rows():
            return ()
        self.locate()
        found, n = self.rows(self._located)
        return range(n) if found is None else found

    def __getstate__(self) -> dict[str, Any]:
        # The loss is for the next step of this wrapper; a copied wrapper makes its own grouping.
        state, rows = {**vars(self), "grouping": None, "loss": None}, self._all_rows()
        if len(rows) < len(self._rows):
            # The copy drops parameters that no group has any more, which it would keep alive.
            state["_states"] = {owner: _at(rows, one) for owner, one in self._states.items()}
            state["_located"] = self._located[: len(rows)]
            state["_rows"] = {parameter: i for i, parameter in enumerate(state["_located"])}
            state["_in_order"] = True
        return state

    def load_state_dict(self, states: object) -> None:
        """Loads the result of `state_dict`; raises ValueError for anything else or other rules."""
        if not isinstance(states, dict):
            raise ValueError(
                "memory of a saved state must be a dict with the states of rules, got "
                f"{states!r:.80}; expected the result of state_dict(). Nothing was loaded"
            )
        present, n = self._present(anew=True), len(self.grouping.parameters())
        self._states = {
            owner: _loaded(owner, saved, present.get(owner), n) for owner, saved in states.items()
        }
        if self._have_rows():
            # Done at once, because rows go by position only in the checkpoint.
            self.locate()


def _at(rows: Sequence[int], state: ClipState) -> ClipState:
    """Copies some rows of a state to a new one."""
    found = ClipState()
    found.load_state_dict(state.copied(rows))
    found._is_loaded = False
    return found


def _loaded(owner: str, saved: Any, rule: Any, n_parameters: int) -> ClipState:
    """Loads a saved state, which must be one of this rule if the rule's limit changes."""
    state, is_fixed = ClipState(), not isinstance(rule, Outlier) and getattr(rule, "fixed", True)
    if isinstance(saved, dict) and isinstance(saved.get("values"), str):
        if saved["values"] == IN_STATE and not is_fixed:
            refuse_missing(f"the norms that {rule} remembers")
        # The values of a rule that the program no longer has are not needed.
        saved = {**saved, "values": None}
    state.load_state_dict(saved)
    if is_fixed:
        return state
    if not state.steps:
        return ClipState()
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
    return state


def _has_many(rule: Any, n_parameters: int) -> bool:
    """Whether a rule remembers so many numbers that they are a tensor in a checkpoint."""
    try:
        return isinstance(rule, Adaptive) and math.prod(_shape_of(rule, n_parameters)) > _FEW
    except Exception:
        # An invalid rule must not keep users from saving; the step refuses it.
        return False


def _shape_of(rule: Any, n_parameters: int) -> tuple[int, ...]:
    """Returns the shape of the values of an adaptive rule."""
    k = len(rule.start())
    return (n_parameters, k) if getattr(rule, "per_gradient", False) else (k,)
