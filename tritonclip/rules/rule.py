"""The interface of rules: every number that a call needs to clip by one.

The engine asks a rule and never its class, so that a new rule is a new file.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from tritonclip.rules.arguments import Schedule, as_number


class Measured(Protocol):
    """The measurements of a call before it writes; nothing here waits for the device."""

    def norm(self) -> Tensor:
        """The norm before clipping, divided by the loss scale; costs a launch on a GPU.

        0-d; or 1-d with one for each gradient, also of those that only other processes have.
        """

    def sizes(self) -> Tensor:
        """The number of elements of each gradient; float64, 1-d."""

    def positions(self) -> tuple[Sequence[int] | None, int]:
        """Where the gradients stand among the parameters, and how many parameters there are.

        None where every parameter has a gradient.
        """


class Rule:
    """Base class of all rules.

    Attributes:
        norm_type: p of the p-norm that is measured.
        eps: added to the norm before the limit is divided by it.
        known_limit: a float where the rule alone decides the limit: `limit` gives the same, and may
            not be asked. Anything else where a norm or a memory is needed.
        per_gradient: each gradient has its own norm and coefficient, rather than all one.
        per_unit: each slice of a gradient along its first dimension has its own coefficient.
            `limit` is the largest norm of a slice in norms of its weights, and `eps` the norm that
            weights count with at least.
        clamps: elements are clamped to `bounds`; a norm is measured only where a policy for NaN and
            inf asks for one.
        bounds: the least and the largest value of an element, as a dtype holds them; only of a rule
            that clamps.
    """

    __slots__ = ("bounds",)
    # The numbers that make up a rule, in the order of its constructor; a dataclass sets it.
    __match_args__: ClassVar[tuple[str, ...]] = ()
    # Those that may be functions of the step.
    schedules: ClassVar[tuple[str, ...]] = ()

    norm_type: float
    eps: float
    known_limit: ClassVar[Any] = None
    per_gradient: ClassVar[bool] = False
    per_unit: ClassVar[bool] = False
    clamps: ClassVar[bool] = False
    bounds: Mapping[torch.dtype, tuple[float, float]]

    def limit(self, measured: Measured) -> float | Tensor:
        """The largest norm after clipping.

        Args:
            measured: the norm before clipping, or the norms where `per_gradient`.

        Returns:
            A number, or a tensor on any device: 0-d, or 1-d with a limit for each norm.
        """
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Names the rule in messages."""
        return type(self).__name__

    @property
    def fixed(self) -> bool:
        """Whether every call has the same limit, so that nothing needs to be remembered."""
        return not any(callable(getattr(self, name)) for name in self.schedules)

    def at(self, step: int) -> "Rule":
        """The rule of a step: numbers that are functions of the step become their values."""
        if self.fixed:
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
        """The arguments of its constructor that are numbers, in order."""
        return tuple(getattr(self, name) for name in self.__match_args__)

    @property
    def excludes(self) -> int:
        """The number of parameters that were named as exempt, of any model."""
        return 0

    def exempt(self, parameters: Sequence[Tensor]) -> list[bool]:
        """Whether the gradient of each of these parameters has no limit; for `per_unit`.

        The constructor of such a rule takes those that have none as `exclude`.
        """
        return [False] * len(parameters)


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
        """Refuses: only a `BoundRule` knows the norms of earlier calls."""
        raise needs_state(self.name)

    @property
    def fixed(self) -> bool:
        """Never."""
        return False


def needs_state(name: str) -> ValueError:
    """The error for a rule whose limit changes from call to call, and no memory of these."""
    return ValueError(
        f"{name} has a limit that changes from call to call, and needs a memory between them: "
        "make state = tritonclip.ClipState() once, before the loop, and pass state=state, or use "
        "ClippedOptimizer, which remembers"
    )


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
