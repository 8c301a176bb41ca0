"""The interface of rules: `Rule`, and `AdaptiveRule` for limits that follow earlier norms.

The engine asks a rule for its numbers, and never checks its class. Users write rules too: what
docs/clipping.md names is stable, and all other attributes are for the rules of this folder.
docs/architecture.md lists the edits that add a rule here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import dataclass_transform

from tritonclip.rules.arguments import OF_SCHEDULE, Schedule, as_eps, as_norm_type, as_number

Kind = TypeVar("Kind", bound=type)
# All classes that `rule` made, which a checkpoint may have.
RULE_CLASSES: list[Any] = []


class Norm(NamedTuple):
    """A kind of norm to measure.

    Attributes:
        order: p of the p-norm.
        each: each gradient has a norm, in place of one of all together.
        by_unit: each slice along the first dimension has a norm, and so have its weights.
    """

    order: float = 2.0
    each: bool = False
    by_unit: bool = False


class Measured(Protocol):
    """The measurements of a call before it writes; users' rules read `norm` and `sizes`."""

    def norm(self) -> Tensor:
        """The norm before clipping, divided by the loss scale; costs a launch on a GPU.

        It is 0-d; for a rule that is `per_gradient`, it is 1-d with the norm of each gradient, also
        of gradients that only other processes have.
        """

    def sizes(self) -> Tensor:
        """The number of elements of each gradient; float64, 1-d."""

    def positions(self) -> tuple[Sequence[int] | None, int]:
        """The positions of gradients among parameters, None for all; the number of parameters."""


def _overrides(cls: type, method: str, other: str) -> bool:
    """Whether the class that defines `method` comes before the one that defines `other`."""
    defined = [
        next(i for i, base in enumerate(cls.__mro__) if n in vars(base)) for n in (method, other)
    ]
    return defined[0] < defined[1]


def checked(check: Callable[[str, object], object], *, default: Any = MISSING) -> Any:
    """Declares a field of a `rule`, whose value becomes `check(name, value)`."""
    return field(default=default, metadata={"check": check})


@dataclass_transform(frozen_default=True, field_specifiers=(checked,))
def rule(cls: Kind) -> Kind:
    """Makes a class a frozen dataclass of `checked` fields, which a checkpoint may have."""
    made: Any = dataclass(frozen=True)(cls)
    made.checks = tuple(
        (item.name, item.metadata["check"]) for item in fields(made) if "check" in item.metadata
    )
    RULE_CLASSES.append(made)
    return made  # type: ignore[no-any-return]


class _Checked:
    """Checks the arguments of a `rule`."""

    # The names and checks of fields, in order.
    checks: ClassVar[Sequence[tuple[str, Callable[[str, object], object]]]] = ()

    def __post_init__(self) -> None:
        for name, check in self.checks:
            object.__setattr__(self, name, check(name, getattr(self, name)))


class Rule(_Checked):
    """Base class of rules. To write a rule, define `limit` in a subclass.

    The subclass works wherever a rule does: in :func:`clip_`, :class:`ClippedOptimizer` and the
    trainers, on every backend and over several processes. If its limit follows the norms of earlier
    calls, extend :class:`AdaptiveRule` instead. All other methods and attributes are internal.

    Attributes:
        norm_type: p of the p-norm that is measured; 2 by default.
        eps: added to the norm before the limit is divided by it; 0 by default.
        per_gradient: whether each gradient has its own norm, limit and coefficient, in place of one
            of all gradients; False by default.

    Example:
        >>> import dataclasses, torch, tritonclip
        >>> @dataclasses.dataclass(frozen=True)
        ... class ClipSmoothly(tritonclip.Rule):
        ...     max_norm: float = 1.0
        ...     def limit(self, measured):
        ...         return self.max_norm / (1 + self.max_norm / measured.norm())
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> inner = torch.optim.SGD([weight], lr=0.1)
        >>> optimizer = tritonclip.ClippedOptimizer(inner, ClipSmoothly())
        >>> for step in range(2):
        ...     optimizer.zero_grad()
        ...     (weight * weight).sum().backward()
        ...     optimizer.step()
        >>> weight.grad.norm()  # of a norm of 9.8
        tensor(0.9076)
    """

    # The arguments of the constructor, in order; a dataclass sets them.
    __match_args__: ClassVar[tuple[str, ...]] = ()
    # The arguments that may be functions of the step.
    schedules: ClassVar[tuple[str, ...]] = ()

    norm_type: float = 2.0
    eps: float = 0.0
    # The limit as a float, if it needs neither a norm nor a state. For any other value `limit` has
    # to be called.
    known_limit: ClassVar[Any] = None
    per_gradient: ClassVar[bool] = False
    # Each slice of a gradient along its first dimension has its own coefficient. `limit` is then
    # the largest ratio of a slice's norm to the norm of its weights, and `eps` the smallest norm
    # used for weights.
    per_unit: ClassVar[bool] = False
    # Elements are clamped to `bounds`, the least and the largest value by dtype. A norm is measured
    # only where a policy for NaN and inf asks for one.
    clamps: ClassVar[bool] = False
    bounds: Mapping[torch.dtype, tuple[float, float]]

    def __init_subclass__(cls) -> None:
        """Drops `known_limit` if a class or mixin overrides the `limit` that it stands for."""
        super().__init_subclass__()
        if cls.limit is not Rule.limit:
            cls.known_limit = None
        if cls.clamps is True and _overrides(cls, "limit", "clamps"):
            raise TypeError(
                f"{cls.__name__} overrides limit, but its parent clamps elements and asks for no "
                "limit of a norm; extend ClipByGlobalNorm or Rule instead. Bounds that change are "
                "functions of the step: ClipByValue(lambda step: ...)"
            )

    def limit(self, measured: Measured) -> float | list[float] | Tensor:
        """The largest norm after clipping; gradients of a smaller norm are not changed.

        Args:
            measured: `measured.norm()` is the norm before clipping over all processes, without the
                loss scale: a 0-d tensor on the device of the gradients. For a rule that is
                `per_gradient` it is 1-d, with the norm of each gradient, and `measured.sizes()` has
                the number of elements of each.

        Returns:
            A number of 0 or more, or a 0-d tensor on any device. A rule that is `per_gradient` may
            also return a list or a 1-d tensor with the limit of each gradient. Processes that share
            a norm return the same.
        """
        limit: float | Schedule | None = self.known_limit
        if callable(limit):
            raise needs_state(self.name)
        if limit is not None:
            return limit
        raise NotImplementedError(
            f"{self.name} has no limit; expected a method limit(self, measured) that returns the "
            "largest norm after clipping, such as 0.5 * measured.norm(), or a subclass of "
            "tritonclip.AdaptiveRule with start and advance"
        )

    @property
    def norm(self) -> Norm:
        """The norm that the limit is for.

        Raises:
            TypeError, ValueError: a `norm_type` or `eps` of a user's rule that is out of range.
        """
        p, eps = self.norm_type, self.eps
        # Every call that measures a norm passes here, so that valid values are tested quickly.
        if not (type(p) is type(eps) is float and p >= 1 and 0 <= eps < math.inf):
            try:
                as_norm_type("norm_type", as_number("norm_type", p))
                as_eps("eps", eps)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{self.name}: {error}") from None
        return Norm(p, self.per_gradient, self.per_unit)

    @property
    def name(self) -> str:
        """The name of the rule in messages."""
        return type(self).__name__

    @property
    def fixed(self) -> bool:
        """Whether every call has the same limit, so that the rule needs no state."""
        return not any(callable(getattr(self, name)) for name in self.schedules)

    def at(self, step: int) -> Rule:
        """Returns the rule of a step, in which values replace functions of the step."""
        numbers = {}
        for name in self.schedules:
            if callable(schedule := getattr(self, name)):
                number = schedule(step)
                is_zero = isinstance(number, float | int) and number == 0
                numbers[name] = OF_SCHEDULE if is_zero and number is not False else number
        return replace(self, **numbers) if numbers else self  # type: ignore[type-var]  # a dataclass

    def interval(self) -> tuple[float, float]:
        """The least and the largest value of an element, for a rule that clamps."""
        raise NotImplementedError

    @property
    def keeps_zero(self) -> bool:
        """Whether an element that is 0 stays 0."""
        return True


class Adaptive(_Checked):
    """A limit that follows the norms of earlier calls.

    Its state is one tensor, which is moved, saved and replaced as a whole; float64 if the device
    has it. `advance` is a pure function of tensors: it never waits for the device, and a step that
    is skipped leaves no trace. On a few numbers, calling an operator costs more than its
    arithmetic, so `advance` calls few.
    """

    def __init_subclass__(cls) -> None:
        """Drops the check of states if a class or mixin overrides `advance`."""
        super().__init_subclass__()
        if _overrides(cls, "advance", "accepts"):
            cls.accepts = Adaptive.accepts  # type: ignore[method-assign]

    def start(self) -> Sequence[float]:
        """The k numbers of the state before the first call, such as ``(0.0, 0.0)``."""
        raise NotImplementedError(
            f"{type(self).__name__} has no start; expected a method start(self) that returns the "
            "numbers of its state before the first call, such as (0.0, 0.0)"
        )

    def advance(self, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the limit for a norm, and the state after that norm.

        It is a pure function of tensors, and changes neither argument. If a norm does not count,
        its state stays as it was, whatever is returned.

        Args:
            state: float64[k]; for a rule that is `per_gradient`, float64[n, k] for n gradients.
            norm: the norm before clipping, float64, 0-d; [n] for a rule that is `per_gradient`.

        Returns:
            The limit in the shape of `norm`, inf for no limit; the new state in that of `state`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no advance; expected a method advance(self, state, norm) "
            "that returns the limit and the new state"
        )

    def accepts(self, state: Tensor) -> bool:
        """Whether `advance` can have left this loaded state, which is float64 on the CPU."""
        return True

    def counts(self, norm: Any) -> Any:
        """Whether norms, a tensor or a number, enter a state: only finite ones that are not 0."""
        # 0 < norm, or NaN < norm for NaN and inf. Comparing a tensor with a number takes longer.
        return norm - norm < norm


class AdaptiveRule(Adaptive, Rule):
    """Base class of rules whose limit follows the norms of earlier calls.

    To write such a rule, define `start` and `advance` in a subclass. Attributes are those of
    :class:`Rule`. A :class:`ClippedOptimizer` or a :class:`ClipState` keeps and saves the numbers
    between calls, and refuses those of another class or of another count.

    Example:
        >>> import dataclasses, torch, tritonclip
        >>> @dataclasses.dataclass(frozen=True)
        ... class ClipByLargest(tritonclip.AdaptiveRule):
        ...     share: float = 0.5  # of the largest norm so far
        ...     def start(self):
        ...         return (0.0,)
        ...     def advance(self, state, norm):
        ...         largest = torch.maximum(state[..., 0], norm)
        ...         return self.share * largest, largest[..., None]
        >>> weight, state = torch.zeros(2, requires_grad=True), tritonclip.ClipState()
        >>> for size in (8.0, 5.0):
        ...     weight.grad = torch.tensor([0.0, size])
        ...     norm = tritonclip.clip_(weight, ClipByLargest(), state=state)
        >>> weight.grad
        tensor([0., 4.])
    """

    def __init_subclass__(cls) -> None:
        """Refuses a `limit`, which nothing would call."""
        super().__init_subclass__()
        if cls.limit is not AdaptiveRule.limit:
            raise TypeError(
                f"{cls.__name__} overrides limit, but the limit of an adaptive rule comes from "
                "advance(self, state, norm); override advance instead"
            )

    def limit(self, measured: Measured) -> Tensor:
        """Always raises: only a `BoundRule` knows the norms of earlier calls."""
        raise needs_state(self.name)

    @property
    def fixed(self) -> bool:
        return False


def has_user_limit(rule: Rule) -> bool:
    """Whether a rule's limit is the user's code, which may raise on one process alone."""
    cls: Any = type(getattr(rule, "rule", rule))
    limit = cls.advance if issubclass(cls, Adaptive) else cls.limit
    return not rule.clamps and _is_users(limit)


def _is_users(method: object) -> bool:
    return not str(getattr(method, "__module__", "")).startswith("tritonclip.")


def number_of(rule: Rule, name: str) -> float:
    """Returns an attribute of a rule as a number; raises if it is a function of the step."""
    number: float | Schedule = getattr(rule, name)
    if callable(number):
        raise needs_state(rule.name)
    return number


def needs_state(name: str) -> ValueError:
    """Makes the error for a rule whose limit changes from call to call, but that has no state."""
    return ValueError(
        f"{name} has a limit that changes from call to call, and needs a state between them: make "
        "state = tritonclip.ClipState() once, before the loop, and pass state=state, or use "
        "ClippedOptimizer, which keeps one"
    )


def are_counts(numbers: Tensor) -> bool:
    """Whether all numbers may be counts of norms."""
    return bool(((numbers >= 0) & numbers.isfinite() & (numbers == numbers.floor())).all())


def bounded(limit: Tensor, max_norm: float | Schedule) -> Tensor:
    """Bounds a limit by `max_norm`, which `Rule.at` has turned into a number."""
    return limit if max_norm == math.inf else limit.clamp(max=as_number("max_norm", max_norm))


def advanced(rule: Adaptive, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Calls `advance`, and keeps the state as it was where a norm does not count.

    Raises:
        TypeError: a user's `advance` returns other things than two tensors of these shapes.
    """
    # Users may write to it, though the step may be left out.
    result = rule.advance(state.clone() if _is_users(type(rule).advance) else state, norm)
    expected = [norm.shape, state.shape]
    if isinstance(result, tuple) and [getattr(item, "shape", None) for item in result] == expected:
        limit, after = result
        counts = rule.counts(norm)
        return limit, torch.where(counts[:, None] if counts.dim() else counts, after, state)
    got = repr(result)
    if isinstance(result, tuple):
        got = str([tuple(item.shape) if isinstance(item, Tensor) else item for item in result])
    raise TypeError(
        f"{type(rule).__name__}.advance must return two tensors, a limit of shape "
        f"{tuple(norm.shape)} as the norm and a state of shape {tuple(state.shape)} as the state; "
        f"got {got:.80}"
    )


def kind_of(rule: Any) -> str:
    """Names the class and row length of an adaptive rule's state; "" for other rules."""
    if not isinstance(rule, Adaptive):
        return ""
    start = rule.start()
    if not (isinstance(start, Sequence) and start):
        raise TypeError(
            f"{type(rule).__name__}.start must return the numbers of its state, such as "
            f"(0.0, 0.0), got {start!r:.80} of type {type(start).__name__}"
        )
    return f"{type(rule).__name__} with {len(start)} numbers"
