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
    """The state of one rule for one list of parameters, kept from call to call.

    Two kinds of rules need one: rules whose limit follows the norms of earlier calls, and rules
    whose limit is a function of the step, such as
    ``ClipByGlobalNorm(lambda step: 10.0 if step < 100 else 1.0)``. The step is an int, the number
    of earlier calls. A :class:`ClippedOptimizer` keeps these states itself; its step is the number
    of earlier calls of its `step`, skipped ones included.

    A state refuses another list than its own. It knows a list by the number of parameters and by
    the first one, while that is alive; for a rule that remembers the norm of each gradient, by all
    parameters in their order. A copied or loaded state accepts any list of that length.

    Norms are remembered in a tensor on the gradients' device; no call waits for it. In a captured
    CUDA graph each replay updates the norms, but the step stays that of the capture.

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
        # Of the list, for a rule with one row of values.
        self._n_parameters: int | None = None
        self._list: list[ref[Tensor]] = []
        self._ids: tuple[int, ...] = ()
        # The row of a parameter before its first norm.
        self._start: Sequence[float] | None = None
        # Positions of gradients on the device, under the device and the positions.
        self._index: tuple[tuple[object, ...], Tensor] | None = None

    @property
    def steps(self) -> int:
        """The number of calls so far."""
        return self._steps

    def follow(
        self, rule: Rule, *, step: int | None = None, numbering: Numbering | None = None
    ) -> BoundRule:
        """The rule of the next call.

        Args:
            rule: any rule.
            step: the number of earlier calls, where another object counts them.
            numbering: the rows of the list's parameters and the number of all rows, which may have
                grown; None where each parameter has its own row, in order.

        Raises:
            ValueError: the state remembers norms for a rule of another kind.
        """
        if not self.remembers(rule):
            raise ValueError(
                f"this state remembers norms for {self._kind}, got the rule {kind_of(rule)}; "
                "expected the rule of its first call: make a new ClipState() for another rule"
            )
        return BoundRule(rule.at(self._steps if step is None else step), self, numbering)

    def state_dict(self, rows: Sequence[int] | None = None) -> dict[str, Any]:
        """A copy of the state: `kind`, `steps`, `parameters`, and `values`, a tensor or None.

        Args:
            rows: the rows to copy, in order, of a rule that remembers the norm of each gradient;
                None for all.
        """
        values = self._values
        if values is not None and rows is not None and values.dim() == 2:
            values = self._at(values, rows)
        known = {"kind": self._kind, "steps": self._steps, "parameters": self._n_parameters}
        return {**known, "values": None if values is None else values.clone()}

    def _at(self, values: Tensor, rows: Sequence[int]) -> Tensor | None:
        """The values of these rows; new rows have those of the start. None without a start."""
        n = len(values)
        if max(rows, default=0) >= n:
            if self._start is None:
                # A loaded state of a rule that the program no longer has.
                return None
            values = torch.cat([values, values.new_tensor([self._start])])
        return values[[min(row, n) for row in rows]]

    def begin_as(self, rule: Any) -> None:
        """Keeps the values with which the rows of an adaptive rule start."""
        if self._start is None and isinstance(rule, Adaptive):
            self._start = rule.start()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the result of `state_dict`; its tensor is copied on its own device.

        Raises:
            ValueError: anything else.
        """
        if not _is_state(state):
            raise ValueError(
                "expected the result of ClipState.state_dict(), a dict with kind (a str), steps "
                "(an int), parameters (an int or None) and values (a floating-point tensor or "
                f"None), got {state!r:.200}"
            )
        values = state["values"]
        # Never an inference tensor, which no later call could write to.
        copied = outside_inference(torch.clone)
        self._values = None if values is None else copied(values.detach())
        self._kind, self._steps, self._index = state["kind"], state["steps"], None
        self._n_parameters, self._list, self._ids = state["parameters"], [], ()

    def remembers(self, rule: Any) -> bool:
        """Whether the state fits a rule: one that needs no norms, or is of the state's kind.

        Rules of a kind have the same class and the same window.
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
        """The limit for the measured norms, and the values after them."""
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
        index = None if positions is None else self._index_of(positions, norm.device)
        limit, rows = rule.advance(values if index is None else values[index], norm)
        return limit, rows if index is None else values.index_copy(0, index, rows)

    def check_list(self, parameters: Sequence[Tensor], n: int | None) -> None:
        """Checks that a list is the one that the state knows.

        Args:
            parameters: the first of the list; all for a rule that remembers the norm of each.
            n: the number of parameters; None for a rule that needs no norms.

        Raises:
            ValueError: another parameter, while the first one is alive; another number of them.
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
        """Keeps the parameters by which the state knows its list."""
        ids = tuple(map(id, parameters))
        if ids != self._ids[: len(ids)] or self._list[0]() is not parameters[0]:
            self._list, self._ids = list(map(ref, parameters)), ids

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to copies of the parameters.
        return {**self.__dict__, "_list": [], "_ids": ()}

    def _values_for(
        self, rule: Any, norm: Tensor, n: int | None, *, may_grow: bool = False
    ) -> Tensor:
        """The values: one row, or one for each of n parameters; made at the first call."""
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

    def _index_of(self, positions: Sequence[int], device: torch.device) -> Tensor:
        """Positions on the device; uploaded where they differ from those of the last call."""
        key = (device, *positions)
        if self._index is None or self._index[0] != key:
            self._index = key, torch.tensor(positions, dtype=torch.int64, device=device)
        return self._index[1]

    def commit(self, values: Tensor | None, left_out: Tensor | None) -> None:
        """Ends a step: counts it, and keeps its values unless it was skipped."""
        self._steps += 1
        if values is None or self._values is None:
            return
        if left_out is not None:
            values = torch.where(left_out.to(values.device), self._values, values)
        # In place, for CUDA graphs.
        self._values.copy_(values)

    def __repr__(self) -> str:
        return f"<ClipState of {self._kind or 'no norms'} after {self._steps} calls>"


def _other_parameter(position: int, known: Tensor, parameter: Tensor) -> ValueError:
    return ValueError(
        f"this state belongs to another list of parameters: at position {position} expected the "
        f"parameter of its first call, of shape {tuple(known.shape)}, got another one, of shape "
        f"{tuple(parameter.shape)}; pass the same parameters in the same order, or make a new "
        "ClipState() for another model. If parameters were replaced, load the state into a new "
        "one: new_state.load_state_dict(state.state_dict())"
    )


def _other_list(known: int | None, n: int | None) -> ValueError:
    return ValueError(
        f"this state remembers norms of {known} parameters, got {n}; expected the parameters of "
        "its first call: make a new ClipState() for another list"
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
    """The rule bound to the user's `state` for the next call.

    Raises:
        TypeError: no ClipState.
        ValueError: the state of another rule.
    """
    if not isinstance(state, ClipState):
        raise TypeError(
            f"state must be a ClipState, got {type(state).__name__}; make state = "
            "tritonclip.ClipState() before the loop"
        )
    return state.follow(rule)


@outside_inference
def _grown(values: Tensor | None, rule: Any, norm: Tensor, n: int | None) -> Tensor:
    """The values with n more rows; one row alone for n None. Later calls can write to them."""
    # One upload.
    row = torch.tensor(rule.start(), dtype=norm.dtype, device=norm.device)
    if n is not None:
        row = row.repeat(n, 1)
    return row if values is None else torch.cat([values, row])


# Returns the row of each parameter of a list, and the number of all rows.
Numbering = Callable[[], tuple[Sequence[int], int]]


class BoundRule(Rule):
    """A rule bound to its state for one call: its limit is computed once, and then remembered."""

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
        """The limit of the call; the same, however often it is asked for."""
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
        """Checks the list of the call before it is measured.

        Args:
            parameters: all, with and without a gradient.

        Raises:
            ValueError: another list than that of the state.
        """
        adaptive = isinstance(self.rule, Adaptive)
        self._list = parameters if adaptive and self.per_gradient else parameters[:1]
        if parameters:
            self._state.check_list(self._list, len(parameters) if adaptive else None)

    def onto(self, state: ClipState, numbering: Numbering) -> BoundRule:
        """The same call bound to another state, which has other rows."""
        moved = BoundRule(self.rule, state, numbering)
        if self._measured is not None:
            moved.limit(self._measured)
        return moved

    def commit(self, left_out: Tensor | bool | None = None) -> None:
        """Makes the state remember this call; a call that was left out is only counted.

        Args:
            left_out: whether the call was left out; a 0-d bool may be on any device. None for no.
        """
        if self._list:
            self._state.begin_with(self._list)
        if isinstance(left_out, bool):
            self._state.commit(None if left_out else self._values, None)
        else:
            self._state.commit(self._values, left_out)
