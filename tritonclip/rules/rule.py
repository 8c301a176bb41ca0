"""The interface of rules: `Rule`, and `Adaptive` for limits that follow earlier norms.

The engine asks a rule for its numbers, and never checks its class. docs/architecture.md lists the
edits for a new rule.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from tritonclip.rules.arguments import Schedule, as_number


class Measured(Protocol):
    """The measurements of a call before it writes; none waits for the device."""

    def norm(self) -> Tensor:
        """The norm before clipping, divided by the loss scale; costs a launch on a GPU.

        0-d; 1-d, one norm a gradient, for a rule that is `per_gradient`. Gradients that only other
        processes have are among them.
        """

    def numbers(self) -> float | list[float] | None:
        """`norm` in numbers, where the host decides; None where it would wait for the device."""

    def advance(
        self, rule: Adaptive, values: Tensor, rows: Tensor | None, *, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        """As `Adaptive.advance`, for these rows of the values and these norms, on their device.

        Args:
            rule: any.
            values: its state.
            rows: int64, of the norms; None for all in order.
            in_place: `values` may be written.

        Returns:
            The limit, and all values after, which may be `values` themselves.
        """

    @property
    def device(self) -> torch.device:
        """Of the norm."""

    def sizes(self) -> Tensor:
        """The number of elements of each gradient; float64, 1-d."""

    def positions(self) -> tuple[Sequence[int] | None, int]:
        """The positions of the gradients among the parameters, and the number of parameters.

        Positions are None where every parameter has a gradient.
        """


class Rule:
    """Base class of all rules.

    Attributes:
        norm_type: p of the p-norm that is measured.
        eps: added to the norm before the limit is divided by it.
        known_limit: the limit as a float, if it needs neither a norm nor a state. Any other value
            means that `limit` has to be called.
        per_gradient: each gradient has its own norm and coefficient.
        per_unit: each slice of a gradient along its first dimension has its own coefficient.
            `limit` is then the largest ratio of a slice's norm to the norm of its weights. `eps` is
            the smallest norm used for weights.
        spectral: `limit` is one of singular values, of each gradient as the matrix [out, rest]. Its
            norm, and what `norm_type` inf stands for, is the largest of them.
        soft: of a rule that is `spectral`, whether they come near the limit smoothly.
        clamps: elements are clamped to `bounds`; a norm is measured only where a policy for NaN and
            inf asks for one.
        bounds: the least and the largest value of an element, by dtype; only of a rule that
            clamps.
    """

    __slots__ = ("bounds",)
    # The arguments of the constructor, in order; a dataclass sets it.
    __match_args__: ClassVar[tuple[str, ...]] = ()
    # The arguments that may be functions of the step.
    schedules: ClassVar[tuple[str, ...]] = ()

    norm_type: float
    eps: float
    known_limit: ClassVar[Any] = None
    per_gradient: ClassVar[bool] = False
    per_unit: ClassVar[bool] = False
    spectral: ClassVar[bool] = False
    soft: bool
    clamps: ClassVar[bool] = False
    bounds: Mapping[torch.dtype, tuple[float, float]]

    def limit(self, measured: Measured) -> float | list[float] | Tensor:
        """The largest norm after clipping.

        Args:
            measured: the norm before clipping; all norms for a rule that is `per_gradient`.

        Returns:
            A number, or a list with one for each norm; or a tensor on any device: 0-d, or 1-d with
            a limit for each norm.
        """
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The name of the rule in messages."""
        return type(self).__name__

    @property
    def fixed(self) -> bool:
        """Whether every call has the same limit, so that the rule needs no state."""
        return not any(callable(getattr(self, name)) for name in self.schedules)

    def at(self, step: int) -> Rule:
        """The rule of a step: functions of the step are replaced by their values."""
        for name in self.schedules:
            if callable(getattr(self, name)):
                break
        else:
            return self
        fields = {name: getattr(self, name) for name in self.__match_args__}
        for name in self.schedules:
            if callable(fields[name]):
                fields[name] = fields[name](step)
        return type(self)(*fields.values())

    def interval(self) -> tuple[float, float]:
        """The least and the largest value of an element, for a rule that clamps."""
        raise NotImplementedError

    @property
    def keeps_zero(self) -> bool:
        """Whether an element that is 0 stays 0."""
        return True

    @property
    def numbers(self) -> tuple[float, ...]:
        """The arguments of the constructor that are numbers, in order."""
        return tuple(getattr(self, name) for name in self.__match_args__)

    @property
    def excludes(self) -> int:
        """The number of parameters that `exclude` names, of any model."""
        return 0

    def exempt(self, parameters: Sequence[Tensor]) -> list[bool]:
        """Whether each of these parameters is excluded from the limit, where `excludes`."""
        return [False] * len(parameters)


class Adaptive:
    """A limit that follows the norms of earlier calls.

    Its state is one tensor, float64 where the device has it. One tensor is moved, saved and
    replaced as a whole. `advance` is a pure function of tensors: it never waits for the device, and
    a step that is skipped leaves no trace. Where the host decides, `advance_on_host` takes its
    place, a pure function of numbers: on a few numbers, calling an operator costs more than the
    arithmetic.
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Drops the parent's other forms of `advance` where a subclass overrides it.

        They would compute the parent's limit.
        """
        if "advance" in vars(cls):
            for name in ("in_kernel", "on_host", "advance_on_host"):
                if name not in vars(cls):
                    setattr(cls, name, getattr(Adaptive, name))

    def start(self) -> Sequence[float]:
        """The k numbers of the state before the first call."""
        raise NotImplementedError

    def advance(self, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The limit for a norm, and the state after that norm.

        A norm that is NaN, inf or 0 must not change the state.

        Args:
            state: float64[k]; float64[n, k] for a rule that is per gradient.
            norm: before clipping, float64, 0-d; [n] for a rule that is per gradient.

        Returns:
            The limit, shaped as `norm`, inf where there is none; the new state, shaped as `state`.
        """
        raise NotImplementedError

    def in_kernel(self) -> tuple[str, tuple[float, float, float, float]] | None:
        """A kind of `tritonclip.kernels.adaptive`, with three numbers and `max_norm`.

        One launch then does what `advance` does. None where no kernel does.
        """
        return None

    def on_host(self, state: array[float]) -> array[float]:
        """The state as `advance_on_host` takes it: these numbers, then values derived from them."""
        return state

    def advance_on_host(
        self, state: array[float], norm: float | list[float]
    ) -> tuple[float | list[float], array[float]]:
        """As `advance`, in numbers of float64 on the host; by `advance` unless a rule has its own.

        Args:
            state: row after row of numbers, then those that `on_host` adds; it must not change.
            norm: before clipping; a list for a rule that is per gradient.
        """
        norms = torch.tensor(norm, dtype=torch.float64, device="cpu")
        values = torch.frombuffer(state, dtype=torch.float64).view(*norms.shape, -1)
        limit, after = self.advance(values, norms)
        return limit.tolist(), array("d", after.flatten().tolist())


class AdaptiveRule(Adaptive, Rule):
    """A rule whose limit follows the norms of earlier calls."""

    __slots__ = ()

    def limit(self, measured: Measured) -> Tensor:
        """Always raises: only a `BoundRule` knows the norms of earlier calls."""
        raise needs_state(self.name)

    @property
    def fixed(self) -> bool:
        """Never."""
        return False


def needs_state(name: str) -> ValueError:
    """The error for a rule whose limit changes from call to call, without a state."""
    return ValueError(
        f"{name} has a limit that changes from call to call, and needs a state between them: make "
        "state = tritonclip.ClipState() once, before the loop, and pass state=state, or use "
        "ClippedOptimizer, which keeps one"
    )


def counts(norm: Tensor) -> Tensor:
    """Whether norms may enter a state: those that are finite and not 0."""
    return torch.isfinite(norm) & (norm > 0)


def bounded(limit: Tensor, max_norm: float | Schedule) -> Tensor:
    """A limit that is at most `max_norm`, a number in the rule of a step."""
    return limit.clamp(max=as_number("max_norm", max_norm))


@lru_cache(maxsize=64)
def kind_of(rule: Any) -> str:
    """The class and row length that the state of an adaptive rule must have; "" for other rules."""
    if not isinstance(rule, Adaptive):
        return ""
    return f"{type(rule).__name__} with {len(rule.start())} numbers"
