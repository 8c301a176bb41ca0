"""The state of a rule between calls, and the rule bound to it for one call."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from tritonclip.modes import outside_inference
from tritonclip.rules.rule import Adaptive, Measured, Rule, advanced, kind_of

# The dtypes of saved values, which programs may have cast.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ClipState:
    """Remembers norms and steps between calls of `clip_`, for one rule and list of parameters.

    Make one before the loop and pass it to :func:`clip_` at every call. Two kinds of rules need
    one: rules whose limit follows the norms of earlier calls, and rules whose limit is a function
    of the step, an int that counts earlier calls from 0. A :class:`ClippedOptimizer` keeps these
    states itself; its step is the number of earlier calls of its `step`, skipped ones included.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> rule = tritonclip.ClipByGlobalNorm(lambda step: 5.0 if step < 1 else 1.0)
        >>> state = tritonclip.ClipState()
        >>> for step in range(2):
        ...     weight.grad = 2 * weight.detach()
        ...     norm = tritonclip.clip_(weight, rule, state=state)
        ...     print(weight.grad)
        tensor([3.0000, 4.0000])
        tensor([0.6000, 0.8000])

    Attributes:
        steps: the number of calls so far.

    Notes:
        A state refuses any list but its own. It knows the list by the number of parameters and by
        the first one or, for a rule that remembers the norm of each gradient, by all parameters in
        order. It keeps these alive. A copied or loaded state accepts any list of that length.

        Norms are remembered where they are measured, on the gradients' device; no call waits for
        it. In a captured CUDA graph, each replay updates the norms, but the step stays the one at
        which the graph was captured.
    """

    def __init__(self) -> None:
        self._steps, self._kind = 0, ""
        # The values: one row, or one for each parameter; a list of numbers if the host judged.
        self._kept: Tensor | list[float] | None = None
        # Whether the values were loaded and not checked yet; and the last rule that fits them.
        self._is_loaded, self._known_rule = False, None
        # The length of the list, for a rule with one row of values.
        self._n_parameters: int | None = None
        self._list: Sequence[Tensor] = ()
        # The row of a parameter before its first norm.
        self._start: Sequence[float] | None = None
        # The positions of gradients on a device, cached under the device and the positions.
        self._index: tuple[tuple[object, ...], Tensor] | None = None

    @property
    def steps(self) -> int:
        """The number of calls so far."""
        return self._steps

    def state_dict(self, rows: Sequence[int] | None = None) -> dict[str, Any]:
        """Copies the state: `kind`, `steps`, `parameters`, and `values`, numbers or None.

        The copy has no tensors, because `torch.distributed.checkpoint` loads tensors by their
        shape, which a new state does not know.

        Args:
            rows: the rows to copy, in order, if the rule remembers the norm of each gradient; None
                for all.
        """
        saved = self.copied(rows)
        values = saved["values"]
        return {**saved, "values": None if values is None else values.tolist()}

    def copied(self, rows: Sequence[int] | None = None) -> dict[str, Any]:
        """Copies the state as `state_dict` does, but with the values as a tensor."""
        values = self._values
        if values is not None and rows is not None and values.dim() == 2:
            values = self._at(values, rows)
        counts = {"kind": self._kind, "steps": self._steps, "parameters": self._n_parameters}
        return {**counts, "values": None if values is None else values.clone()}

    @property
    def _shape(self) -> tuple[int, ...]:
        """The shape of the values: `(k,)`, or `(n, k)` for n parameters; () without values."""
        return () if self._values is None else tuple(self._values.shape)

    def _at(self, values: Tensor, rows: Sequence[int]) -> Tensor | None:
        """Returns these rows, new ones with the start's values; None if the start is unknown."""
        n = len(values)
        if max(rows, default=0) >= n:
            if self._start is None:
                # The state was loaded for a rule that the program no longer has.
                return None
            values = torch.cat([values, values.new_tensor([self._start])])
        return values[[min(row, n) for row in rows]]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the result of `state_dict`, also with values as a tensor, which is copied.

        Raises:
            ValueError: anything else; nothing is loaded. Values that the rule of the next call
                cannot have left are refused by that call.
        """
        if isinstance(state, dict) and isinstance(state.get("values"), list):
            with suppress(TypeError, ValueError, OverflowError):
                rows = torch.tensor(state["values"], dtype=torch.float64, device="cpu")
                state = {**state, "values": rows}
        if not _is_state(state):
            raise ValueError(
                "expected the result of ClipState.state_dict(), a dict with kind (a str), steps "
                "(an int), parameters (an int or None) and values (numbers, or None), "
                f"got {state!r:.200}. Nothing was loaded"
            )
        values = state["values"]
        # Later calls could not write to an inference tensor.
        copied = outside_inference(torch.clone)
        if values is not None:
            values = copied(values.detach(), memory_format=torch.contiguous_format)
        self._values, self._is_loaded, self._known_rule = values, values is not None, None
        self._kind, self._steps, self._index = state["kind"], state["steps"], None
        self._n_parameters, self._list = state["parameters"], ()

    def remembers(self, rule: Any) -> bool:
        """Whether the state fits a rule, which either needs no norms or is of the state's kind.

        Rules of one kind have the same class and the same window.

        Raises:
            ValueError: loaded values that the rule never leaves.
        """
        if rule is self._known_rule:
            return True
        rule_name = kind_of(rule)
        if not rule_name or not self._kind:
            return True
        shape, start = self._shape, rule.start()
        n_dims = 1 + getattr(rule, "per_gradient", False)
        if rule_name != self._kind or (shape and (shape[-1] != len(start) or len(shape) != n_dims)):
            return False
        values = self._values if self._is_loaded else None
        if values is not None and not values.is_meta:
            values = values.to("cpu", torch.float64)
            if not rule.accepts(values):
                raise ValueError(
                    f"the loaded state has values that {rule} never leaves, got {values!s:.200}; "
                    "expected the result of state_dict() of a run with this rule"
                )
        self._is_loaded = False
        self._known_rule, self._start = rule, start
        return True

    def advance(
        self,
        rule: Any,
        norm: float | Tensor,
        rows: Sequence[int] | None = None,
        n: int | None = None,
        *,
        grows: bool = False,
    ) -> tuple[float | Tensor, list[float] | Tensor]:
        """Returns the limit for a norm, and all values after it for `commit`, on its device.

        For a rule that remembers the norm of each of n parameters, `rows` are the rows of the
        norms, None for all in order. Only if the list `grows` may n be more than before. A norm
        that is a float is for a rule with one row, which is advanced in numbers.
        """
        if not isinstance(norm, Tensor):
            kept = self._kept
            if not isinstance(kept, list):
                kept = self._values_on(torch.device("cpu"), rule, n, grows=grows).tolist()
            number, numbers = rule.advance_numbers(kept, norm)
            return number, numbers
        values = self._values_on(norm.device, rule, n, grows=grows)
        norm = norm.to(values.dtype)
        if rows is None:
            return advanced(rule, values, norm)
        index = self._index_of(rows, values.device)
        limit, after = advanced(rule, values[index], norm)
        return limit, values.index_copy(0, index, after)

    def check_list(self, parameters: Sequence[Tensor], n: int | None) -> None:
        """Raises ValueError for a list of n parameters that is not the one the state knows.

        `parameters` is the first one alone, unless the rule remembers the norm of each. n is None
        for a rule that remembers no norms.
        """
        if not all(map(is_, self._list, parameters)):
            pairs = zip(self._list, parameters, strict=False)
            at, expected, got = next((i, a, b) for i, (a, b) in enumerate(pairs) if a is not b)
            raise ValueError(
                f"this state belongs to another list of parameters: at position {at} expected the "
                f"parameter of its first call, of shape {tuple(expected.shape)}, got another one, "
                f"of shape {tuple(got.shape)}; pass the same parameters in the same order, or make "
                "a new ClipState() for another model. If parameters were replaced, load the state "
                "into a new one: new_state.load_state_dict(state.state_dict())"
            )
        shape = self._shape
        n_known = shape[0] if len(shape) == 2 else self._n_parameters
        if n is not None and n_known not in (None, n):
            raise _other_list(n_known, n)

    @property
    def _values(self) -> Tensor | None:
        if isinstance(self._kept, list):
            self._kept = upload(self._kept, torch.float64, torch.device("cpu"))
        return self._kept

    @_values.setter
    def _values(self, values: Tensor | None) -> None:
        self._kept = values

    @outside_inference
    def __getstate__(self) -> dict[str, Any]:
        # A copy drops the list, as parameters may be copied too, and gets values to write to.
        values = None if self._values is None else self._values.clone()
        return {**self.__dict__, "_list": (), "_known_rule": None, "_kept": values}

    def _values_on(
        self, device: torch.device, rule: Adaptive, n: int | None, *, grows: bool
    ) -> Tensor:
        """Returns the values on a device without waiting for it: one row, or one for each of n."""
        values, n_known = self._values, 0 if self._values is None else len(self._values)
        if n is not None and values is not None and (n < n_known or (n > n_known and not grows)):
            raise _other_list(n_known, n)
        dtype = dtype_on(device)
        if values is None or values.device != device or values.dtype != dtype or n_known < (n or 0):
            self._kind, self._start = kind_of(rule), rule.start()
            start = upload(self._start, dtype, device)
            values = self._values = self._moved(start, None if n is None else n - n_known)
        return values

    @outside_inference
    def _moved(self, start: Tensor, n_new: int | None) -> Tensor:
        """Moves the values to the device of `start`, and appends `n_new` rows of it, if any."""
        values, rows = self._values, start if n_new is None else start.repeat(n_new, 1)
        if values is None:
            return rows
        values = values.to(start, non_blocking=values.device.type == "cpu")
        return torch.cat([values, rows]) if n_new else values

    def _index_of(self, positions: Sequence[int], device: torch.device) -> Tensor:
        """Returns positions on a device, and uploads them if they differ from the last call's."""
        key = (device, *positions)
        if self._index is None or self._index[0] != key:
            self._index = key, upload(positions, torch.int64, device)
        return self._index[1]

    def commit(
        self,
        values: list[float] | Tensor | None,
        left_out: bool | Tensor,
        parameters: Sequence[Tensor] = (),
    ) -> None:
        """Ends a step: counts it, and keeps its values unless it was left out.

        The state knows its list by `parameters`, which have passed `check_list`.
        """
        self._steps += 1
        if len(parameters) > len(self._list):
            self._list = list(parameters)
        if isinstance(values, list):
            # With tensors, a window's numbers take 17 us more per step.
            self._kept = self._kept if left_out else values
            return
        before = self._values
        if values is None or before is None or left_out is True:
            return
        if isinstance(left_out, Tensor):
            values = torch.where(left_out.to(values.device), before, values)
        # Written in place, because CUDA graphs replay with the same memory.
        before.copy_(values)

    def __repr__(self) -> str:
        calls = "1 call" if self._steps == 1 else f"{self._steps} calls"
        return f"<ClipState of {self._kind or 'no norms'} after {calls}>"


def _other_list(expected: int | None, n: int | None) -> ValueError:
    return ValueError(
        f"this state remembers norms of {expected} parameters, got {n}; expected the parameters of "
        "its first call: make a new ClipState() for another list"
    )


def _is_state(state: object) -> bool:
    if not isinstance(state, dict) or set(state) != {"kind", "steps", "parameters", "values"}:
        return False
    rule_name, values, n = state["kind"], state["values"], state["parameters"]
    counts = [state["steps"], 0 if n is None else n]
    if not isinstance(rule_name, str) or not all(type(n) is int and 0 <= n < 2**62 for n in counts):
        return False
    return values is None or (
        isinstance(values, Tensor)
        and values.dtype in _DTYPES
        and values.layout == torch.strided
        and values.dim() in (1, 2)
        and values.numel() > 0
        and rule_name != ""
    )


def dtype_on(device: torch.device) -> torch.dtype:
    """The dtype of values; some devices have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


@outside_inference
def upload(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Makes a tensor of numbers on a device, without waiting for the device."""
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)


# A function of the positions of gradients among the parameters, or of None for all. It returns the
# row of each, None for all rows in order, and the number of all rows.
Numbering = Callable[[Sequence[int] | None], tuple[Sequence[int] | None, int]]


class BoundRule(Rule):
    """A rule bound to its state for one call: its limit is computed once, and then remembered.

    The state knows its list by `parameters`; a `numbering` gives each parameter its row.
    """

    _limit: Any = None
    _values: list[float] | Tensor | None = None

    def __init__(
        self,
        rule: Any,
        state: ClipState,
        numbering: Numbering | None = None,
        parameters: Sequence[Tensor] = (),
    ) -> None:
        self.rule, self.state = rule, state
        self._numbering, self._parameters = numbering, parameters

    def limit(self, measured: Measured) -> Any:
        """Returns the limit of the call, which is computed only once."""
        if self._limit is None and not isinstance(self.rule, Adaptive):
            self._limit = self.rule.limit(measured)
        elif self._limit is None:
            rows, n, numbering = None, None, self._numbering
            if self.per_gradient:
                rows, n = measured.positions()
                if numbering is not None:
                    rows, n = numbering(rows)
            elif numbering is None:
                self.state._n_parameters = measured.positions()[1]
            self._limit, self._values = self.state.advance(
                self.rule, measured.norm(), rows, n, grows=numbering is not None
            )
        return self._limit

    def __repr__(self) -> str:
        return repr(self.rule)

    def commit(self, left_out: bool | Tensor = False) -> None:
        """Makes the state remember this call; one that was left out is only counted."""
        self.state.commit(self._values, left_out, self._parameters)


_NUMBERS = ("norm_type", "eps", "bounds", "interval", "keeps_zero")
for _name in ("name", "per_gradient", "per_unit", "clamps", *_NUMBERS):
    setattr(BoundRule, _name, property(attrgetter(f"rule.{_name}")))


def follow(rule: Rule, state: object, parameters: Sequence[Tensor]) -> BoundRule:
    """Binds a rule to the user's `state` for the next call; raises for another list."""
    if not isinstance(state, ClipState):
        raise TypeError(
            f"state must be a ClipState, got {type(state).__name__}; make state = "
            "tritonclip.ClipState() before the loop"
        )
    if not state.remembers(rule):
        raise ValueError(
            f"this state remembers norms for {state._kind}, got the rule {kind_of(rule)}; expected "
            "the rule of its first call: make a new ClipState() for another rule"
        )
    of_step, adapts = rule.at(state.steps), isinstance(rule, Adaptive)
    # If the rule remembers each norm, all parameters are compared, also those without gradients.
    known_by = parameters if adapts and rule.per_gradient else parameters[:1]
    if parameters:
        state.check_list(known_by, len(parameters) if adapts else None)
    return BoundRule(of_step, state, None, known_by)
