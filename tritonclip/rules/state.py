"""The state of a rule between calls, and the rule bound to it for one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from tritonclip.modes import outside_inference
from tritonclip.rules.rule import Adaptive, Measured, Rule, kind_of


class ClipState:
    """The memory of one rule for one list of parameters, where its limit changes from call to call.

    Two kinds of rules need one: those that follow the norms of earlier calls, and those with a
    limit that is a function of the step. A list is known by its first parameter, as long as that is
    alive, and by their number; where the norm of each is remembered, also by the others, in their
    order. A copy and a loaded state begin anew with the list that comes. The step is the number of
    calls before this one, an int: ``ClipByGlobalNorm(lambda step: 10.0 if step < 100 else 1.0)``. A
    :class:`ClippedOptimizer` keeps such memories itself; the step is then the number of calls of
    its `step` before, of those that skipped too.

    Norms are remembered in a tensor on the gradients' device, which no call waits for. A captured
    CUDA graph goes on to remember; the step of a schedule stays that of the capture.

    Example:
        >>> from tritonclip import ClipByQuantile, clip_
        >>> weight = torch.tensor([0.0, 0.0], requires_grad=True)
        >>> state = ClipState()
        >>> rule = ClipByQuantile(0.5, window=100)
        >>> for size in (1.0, 1.0, 50.0):
        ...     weight.grad = torch.tensor([0.0, size])
        ...     norm = clip_(weight, rule, state=state)
        >>> weight.grad
        tensor([0., 1.])
    """

    def __init__(self) -> None:
        self._steps, self._kind = 0, ""
        self._values: Tensor | None = None
        # Of the list, for a rule with one row.
        self._n_parameters: int | None = None
        self._list: list[ref[Tensor]] = []
        self._ids: tuple[int, ...] = ()
        # The row of a parameter that has no norm yet.
        self._start: Sequence[float] | None = None
        self._places: tuple[tuple[object, ...], Tensor] | None = None

    @property
    def steps(self) -> int:
        """Calls so far."""
        return self._steps

    def follow(
        self, rule: Rule, *, step: int | None = None, numbering: Numbering | None = None
    ) -> BoundRule:
        """The rule of the next call.

        Args:
            rule: any rule.
            step: calls before this one, where another object counts them.
            numbering: the rows of the list's parameters, and how many rows there are by now, of
                which the last may be new; None for a row for each, as at the call before.

        Raises:
            ValueError: a rule of another kind than the one whose norms are remembered.
        """
        if not self.remembers(rule):
            raise ValueError(
                f"this state remembers norms for {self._kind}, and the rule is {kind_of(rule)}; "
                "expected the rule that it began with: make a new ClipState() for another one"
            )
        return BoundRule(rule.at(self._steps if step is None else step), self, numbering)

    def state_dict(self, rows: Sequence[int] | None = None) -> dict[str, Any]:
        """A copy of everything: `kind`, `steps`, `parameters`, and `values`, a tensor or None.

        Args:
            rows: of a state of the norms of each parameter, the rows to copy, in order; None for
                all.
        """
        values = self._values
        if values is not None and rows is not None and values.dim() == 2:
            values = self._at(values, rows)
        known = {"kind": self._kind, "steps": self._steps, "parameters": self._n_parameters}
        return {**known, "values": None if values is None else values.clone()}

    def _at(self, values: Tensor, rows: Sequence[int]) -> Tensor | None:
        """The values at these rows; those that are not there yet begin, or else all do."""
        n = len(values)
        if max(rows, default=0) >= n:
            if self._start is None:
                # Loaded, and the program has no such rule.
                return None
            values = torch.cat([values, values.new_tensor([self._start])])
        return values[[min(row, n) for row in rows]]

    def begin_as(self, rule: Any) -> None:
        """Learns from a rule that remembers norms how histories begin."""
        if self._start is None and isinstance(rule, Adaptive):
            self._start = rule.start()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the result of `state_dict`; tensors stay on the device that they are on.

        Raises:
            ValueError: anything else.
        """
        if not _is_state(state):
            raise ValueError(
                "expected the result of ClipState.state_dict(): kind, a text, steps, a count, "
                "parameters, a count or None, and values, a floating-point tensor or None; got "
                f"{state!r:.200}"
            )
        values = state["values"]
        # Never an inference tensor, which no later call could write to.
        copied = outside_inference(torch.clone)
        self._values = None if values is None else copied(values.detach())
        self._kind, self._steps, self._places = state["kind"], state["steps"], None
        self._n_parameters, self._list, self._ids = state["parameters"], [], ()

    def remembers(self, rule: Any) -> bool:
        """Whether it can go on with a rule: one that needs no norms, or of the kind it began with.

        A kind is a class of rules, with the same window.
        """
        kind = kind_of(rule)
        if not kind or not self._kind:
            return True
        return kind == self._kind and (
            self._values is None or self._values.shape[-1] == len(rule.start())
        )

    def advance(
        self, rule: Any, measured: Measured, numbering: Numbering | None = None
    ) -> tuple[Tensor, Tensor]:
        """The limit for the measured norm, or norms, and the values after it."""
        norm = measured.norm()
        # Some devices have no float64.
        norm = norm.to(torch.float32 if norm.device.type == "mps" else torch.float64)
        if not getattr(rule, "per_gradient", False):
            if numbering is None:
                self._n_parameters = measured.positions()[1]
            limit, values = rule.advance(self._values_for(rule, norm, None), norm)
            return limit, values
        positions, n = measured.positions()
        if numbering is not None:
            rows, n_rows = numbering()
            positions, n = [rows[i] for i in (range(n) if positions is None else positions)], n_rows
        values = self._values_for(rule, norm, n, may_grow=numbering is not None)
        places = None if positions is None else self._places_of(positions, norm.device)
        limit, rows = rule.advance(values if places is None else values[places], norm)
        return limit, rows if places is None else values.index_copy(0, places, rows)

    def check_list(self, parameters: Sequence[Tensor], n: int | None) -> None:
        """Refuses a list with another parameter in the place of one, while the first is alive.

        Args:
            parameters: the first of the list, or all for a rule that remembers the norm of each.
            n: parameters in it; None for a rule that needs no norms.

        Raises:
            ValueError: another parameter, or another number of them.
        """
        alive = bool(self._list) and self._list[0]() is not None
        if alive and tuple(map(id, parameters)) != self._ids[: len(parameters)]:
            for position, (weak, parameter) in enumerate(zip(self._list, parameters, strict=False)):
                known = weak()
                if known is not None and known is not parameter:
                    raise _other_parameter(position, known, parameter)
        values = self._values
        n_known = self._n_parameters if values is None or values.dim() == 1 else len(values)
        if n is not None and n_known not in (None, n):
            raise _other_list(n_known, n)

    def begin_with(self, parameters: Sequence[Tensor]) -> None:
        """Knows the list by these parameters from now on."""
        ids = tuple(map(id, parameters))
        if ids != self._ids[: len(ids)] or self._list[0]() is not parameters[0]:
            self._list, self._ids = list(map(ref, parameters)), ids

    def __getstate__(self) -> dict[str, Any]:
        # A copy is for copies of the parameters.
        return {**self.__dict__, "_list": [], "_ids": ()}

    def _values_for(
        self, rule: Any, norm: Tensor, n: int | None, *, may_grow: bool = False
    ) -> Tensor:
        """The values, made where there are none: one row, or one for each of n parameters."""
        values = self._values
        if values is not None and (values.device, values.dtype) != (norm.device, norm.dtype):
            values = self._values = outside_inference(values.to)(norm.device, norm.dtype)
        if n is not None:
            self.begin_as(rule)
        n_known = 0 if values is None or n is None else len(values)
        if values is not None and (n is None or n == n_known):
            return values
        if values is not None and not (may_grow and n is not None and n > n_known):
            raise _other_list(n_known, n)
        self._kind = kind_of(rule)
        self._values = _grown(values, rule, norm, None if n is None else n - n_known)
        return self._values

    def _places_of(self, positions: Sequence[int], device: torch.device) -> Tensor:
        """Positions on the device; uploaded where they are not those of the call before."""
        key = (device, *positions)
        if self._places is None or self._places[0] != key:
            places = torch.tensor(positions, dtype=torch.int64, device=device)
            self._places = key, places
        return self._places[1]

    def commit(self, values: Tensor | None, left_out: Tensor | None) -> None:
        """Goes on to the next step, with new values unless the step was left out."""
        self._steps += 1
        if values is None or self._values is None:
            return
        if left_out is not None:
            values = torch.where(left_out.to(values.device), self._values, values)
        # In place, for CUDA graphs, and in one piece.
        self._values.copy_(values)

    def __repr__(self) -> str:
        return f"<ClipState of {self._kind or 'no norms'} after {self._steps} calls>"


def _other_parameter(position: int, known: Tensor, parameter: Tensor) -> ValueError:
    place = "begins with" if position == 0 else f"has at position {position}"
    return ValueError(
        f"this state has followed a list that {place} another parameter, of shape "
        f"{tuple(known.shape)}, and this one {place} shape {tuple(parameter.shape)}; expected the "
        "list that it began with, in its order: make a new ClipState() for each model. Where "
        "parameters were replaced, go on with new_state.load_state_dict(state.state_dict())"
    )


def _other_list(known: int | None, n: int | None) -> ValueError:
    return ValueError(
        f"this state remembers norms of {known} parameters, and there are {n}; expected the list "
        "that it began with: make a new ClipState() for another one"
    )


def _is_state(state: object) -> bool:
    if not isinstance(state, dict) or set(state) != {"kind", "steps", "parameters", "values"}:
        return False
    values, n = state["values"], state["parameters"]
    counts = [state["steps"], 0 if n is None else n]
    fits = isinstance(values, Tensor) and values.is_floating_point() and values.dim() in (1, 2)
    return (
        isinstance(state["kind"], str)
        and all(type(count) is int and count >= 0 for count in counts)
        and (values is None or fits)
    )


def follow(rule: Rule, state: object) -> BoundRule:
    """The rule of the next call, as the user's `state` gives it.

    Raises:
        TypeError, ValueError: no state, or one of another rule.
    """
    if not isinstance(state, ClipState):
        raise TypeError(
            f"state must be a ClipState, got {type(state).__name__}; make state = "
            "tritonclip.ClipState() before the loop"
        )
    return state.follow(rule)


@outside_inference
def _grown(values: Tensor | None, rule: Any, norm: Tensor, n: int | None) -> Tensor:
    """The values with n more rows, or one row alone: none that a later call could not write to."""
    # Uploads once.
    row = torch.tensor(rule.start(), dtype=norm.dtype, device=norm.device)
    if n is not None:
        row = row.repeat(n, 1)
    return row if values is None else torch.cat([values, row])


# The row of each parameter of a list, and how many rows there are.
Numbering = Callable[[], tuple[Sequence[int], int]]


class BoundRule(Rule):
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

    def onto(self, state: ClipState, numbering: Numbering) -> BoundRule:
        """The same call, for another state to remember, which has other rows."""
        moved = BoundRule(self.rule, state, numbering)
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
