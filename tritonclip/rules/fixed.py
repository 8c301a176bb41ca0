"""Rules whose limit depends on no norm of gradients, and rules made from numbers."""

import math
from collections.abc import Callable, ItemsView, Iterator, ValuesView
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from tritonclip.rules.arguments import (
    Schedule,
    as_eps,
    as_limit_or_schedule,
    as_norm_type,
    as_number,
    as_number_or_schedule,
    is_function,
)
from tritonclip.rules.rule import Adaptive, Measured, Rule, checked, number_of, rule

T = TypeVar("T", bound=Rule)


@rule
class _ClipNorm(Rule):
    max_norm: float | Schedule = checked(as_limit_or_schedule)
    norm_type: float = checked(as_norm_type, default=2.0)
    eps: float = checked(as_eps, default=1e-6)

    schedules: ClassVar[tuple[str, ...]] = ("max_norm",)
    known_limit = property(attrgetter("max_norm"))


@rule
class ClipByGlobalNorm(_ClipNorm):
    """Scales all gradients by one coefficient if their norm before clipping exceeds `max_norm`.

    With the norm of all gradients together, each gradient g becomes::

        g = g * min(1, max_norm / (norm + eps))

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> inner = torch.optim.SGD([weight], lr=1.0)
        >>> optimizer = tritonclip.ClippedOptimizer(inner, tritonclip.ClipByGlobalNorm(1.0))
        >>> for step in range(2):
        ...     optimizer.zero_grad()
        ...     (weight * weight).sum().backward()
        ...     optimizer.step()
        >>> optimizer.stats.last_norm, weight.grad
        (tensor(8.), tensor([0.6000, 0.8000]))

    Args:
        max_norm: the largest norm of all gradients together after clipping; 0 or more, inf clips
            nothing. Or a function of the step; :class:`ClipState` has an example.
        norm_type: the order of the norm, from 1 to inf: 2 is Euclidean, inf the largest magnitude.
        eps: added to the norm; 1e-6 as in `torch.nn.utils.clip_grad_norm_`. With 0, as in Paddle
            and TensorFlow, gradients whose norm equals `max_norm` do not change.

    Raises:
        ValueError: a negative limit or `eps`, an infinite `eps`, a `norm_type` below 1, or NaN.
        TypeError: an argument that is not a number.

    References:
        Pascanu, Mikolov, Bengio, `On the difficulty of training recurrent neural networks
        <https://arxiv.org/abs/1211.5063>`_, 2013
    """


@rule
class ClipByNorm(_ClipNorm):
    """Scales each gradient whose norm before clipping exceeds `max_norm`, by its own coefficient.

    Each gradient g becomes::

        g = g * min(1, max_norm / (norm(g) + eps))

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> bias = torch.nn.Parameter(torch.tensor(0.1))
        >>> inner = torch.optim.SGD([weight, bias], lr=1.0)
        >>> optimizer = tritonclip.ClippedOptimizer(inner, tritonclip.ClipByNorm(1.0))
        >>> for step in range(2):
        ...     optimizer.zero_grad()
        ...     ((weight * weight).sum() + bias * bias).backward()
        ...     optimizer.step()
        >>> weight.grad, bias.grad
        (tensor([0.6000, 0.8000]), tensor(-0.2000))

    Args:
        max_norm: the largest norm of a gradient after clipping; 0 or more, inf clips nothing.
            Or a function of the step; :class:`ClipState` has an example.
        norm_type: the order of the norm, as for :class:`ClipByGlobalNorm`.
        eps: added to the norm; 1e-6 as in torch. With 0, as in Paddle and TensorFlow, a gradient
            whose norm equals `max_norm` does not change.

    Raises:
        ValueError: a negative limit or `eps`, an infinite `eps`, a `norm_type` below 1, or NaN.
        TypeError: an argument that is not a number.

    References:
        Paddle, `ClipGradByNorm`; TensorFlow, `clip_by_norm`.
    """

    per_gradient: ClassVar[bool] = True


@rule
class ClipByRMS(Rule):
    """Scales each gradient whose root mean square before clipping exceeds `max_rms`.

    Each gradient g becomes::

        g = g * min(1, max_rms / sqrt(mean(g * g)))

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> inner = torch.optim.SGD([weight], lr=1.0)
        >>> optimizer = tritonclip.ClippedOptimizer(inner, tritonclip.ClipByRMS(1.0))
        >>> for step in range(2):
        ...     optimizer.zero_grad()
        ...     (weight * weight).sum().backward()
        ...     optimizer.step()
        >>> weight.grad, weight.grad.square().mean().sqrt()
        (tensor([0.8485, 1.1314]), tensor(1.0000))

    Args:
        max_rms: the largest root mean square of a gradient after clipping; 0 or more, inf clips
            nothing. Or a function of the step; :class:`ClipState` has an example.

    Raises:
        ValueError: a limit that is negative or NaN.
        TypeError: an argument that is not a number.

    Notes:
        :func:`clip_` returns the 2-norms of the gradients. For complex gradients the root mean
        square is that of the moduli.

    References:
        Shazeer, Stern, `Adafactor: Adaptive Learning Rates with Sublinear Memory Cost
        <https://arxiv.org/abs/1804.04235>`_, 2018; optax, `clip_by_block_rms`.
    """

    max_rms: float | Schedule = checked(as_limit_or_schedule, default=1.0)

    schedules: ClassVar[tuple[str, ...]] = ("max_rms",)
    per_gradient: ClassVar[bool] = True

    def limit(self, measured: Measured) -> Tensor:
        max_rms = number_of(self, "max_rms")
        # Counts at least one element: for an empty gradient, the limit inf * 0 would be NaN.
        return measured.sizes().clamp(min=1).sqrt() * max_rms


@rule
class ClipByUnitNorm(Rule):
    """Scales each unit of a gradient whose norm is large relative to that of its weights (AGC).

    This is adaptive gradient clipping. For each unit, with weights w and gradient g::

        g = g * min(1, ratio * max(norm(w), eps) / norm(g))

    The units of a parameter are its slices along the first dimension: the rows of a linear layer,
    the filters of a convolution, the vectors of an embedding. A parameter with fewer than two
    dimensions is one unit.

    Example:
        >>> import torch, tritonclip
        >>> layer = torch.nn.Linear(2, 2, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([[3.0, 4.0], [0.6, 0.8]]))
        >>> inner = torch.optim.SGD(layer.parameters(), lr=1.0)
        >>> optimizer = tritonclip.ClippedOptimizer(inner, tritonclip.ClipByUnitNorm(0.1))
        >>> for step in range(2):
        ...     optimizer.zero_grad()
        ...     (0.5 * layer.weight).sum().backward()
        ...     optimizer.step()
        >>> layer.weight.grad.norm(dim=1)
        tensor([0.4506, 0.0901])

    Args:
        ratio: the largest norm of a unit's gradient, as a multiple of the norm of its weights; 0 or
            more, inf clips nothing. Or a function of the step; :class:`ClipState` has an example.
        eps: the smallest norm used for weights, so that weights that start at 0 can grow; 0 or
            more, finite.

    Raises:
        ValueError: a ratio or `eps` that is negative or NaN, an infinite `eps`.
        TypeError: an argument of another kind.

    Notes:
        A NaN spreads to all elements of its unit, and to no other unit. An inf becomes NaN, and the
        finite elements of its unit become 0. A unit whose gradient is 0 stays 0. Weights that are
        NaN count as a norm that is NaN, except over several processes. Norms and coefficients are
        computed in float64; nothing waits for the device. timm has the same units. optax expects
        the output dimension last, and takes a matrix of one row or column for one unit.

    References:
        Brock, De, Smith, Simonyan, `High-performance large-scale image recognition without
        normalization <https://arxiv.org/abs/2102.06171>`_, 2021
    """

    ratio: float | Schedule = checked(as_limit_or_schedule, default=0.01)
    eps: float = checked(as_eps, default=1e-3)

    known_limit = property(attrgetter("ratio"))
    schedules: ClassVar[tuple[str, ...]] = ("ratio",)
    per_gradient: ClassVar[bool] = True
    per_unit: ClassVar[bool] = True


class Bounds(dict[torch.dtype, tuple[float, float]]):
    """Two bounds by dtype, rounded at the first lookup; a finite bound stays finite."""

    def __init__(self, low: float, high: float) -> None:
        self._low, self._high = low, high

    def __missing__(self, dtype: torch.dtype) -> tuple[float, float]:
        self[dtype] = bounds = _rounded(self._low, dtype), _rounded(self._high, dtype)
        return bounds


def _rounded(bound: float, dtype: torch.dtype) -> float:
    # inf means no bound, even for a dtype without inf; and -0.0 keeps its sign.
    if math.isinf(bound) or not bound:
        return bound
    largest = torch.finfo(dtype).max
    bound = min(max(bound, -largest), largest)
    return float(torch.tensor(bound, dtype=torch.float64, device="cpu").to(dtype))


@rule
class ClipByValue(Rule):
    """Clamps every element to `[min, max]`; NaN stays NaN.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 0.1]))
        >>> inner = torch.optim.SGD([weight], lr=1.0)
        >>> optimizer = tritonclip.ClippedOptimizer(inner, tritonclip.ClipByValue(0.5))
        >>> for step in range(2):
        ...     optimizer.zero_grad()
        ...     (weight * weight).sum().backward()
        ...     optimizer.step()
        >>> weight.grad
        tensor([ 0.5000, -0.2000])
        >>> tritonclip.ClipByValue(-1.0, 0.25)
        ClipByValue(min=-1.0, max=0.25)

    Args:
        min: the least value after clipping. As the only argument, it is 0 or more and bounds the
            absolute value: `ClipByValue(0.5)` is `ClipByValue(-0.5, 0.5)`.
        max: the largest value after clipping. Both may be functions of the step; :class:`ClipState`
            has an example.

    Raises:
        ValueError: `min > max`, a NaN, or a single bound that is negative.
        TypeError: an argument that is not a number.

    Notes:
        Bounds are rounded to the gradient's dtype first; a finite bound stays finite. A bound may
        be a one-element tensor on the CPU, which is read once, when the rule is made.

    References:
        Paddle, `ClipGradByValue`; TensorFlow, `clip_by_value`.
    """

    min: float | Schedule
    max: float | Schedule

    clamps: ClassVar[bool] = True
    known_limit: ClassVar[float] = math.inf
    schedules: ClassVar[tuple[str, ...]] = ("min", "max")
    # A norm is measured only where a policy looks for NaN and inf.
    norm_type: ClassVar[float] = math.inf  # type: ignore[misc]  # a constant here

    def __init__(self, min: float | Schedule, max: float | Schedule | None = None) -> None:
        if max is None:
            try:
                max = as_limit_or_schedule("min, which without max bounds the absolute value,", min)
            except ValueError as error:
                raise ValueError(
                    f"{error}; write ClipByValue(0.5) or ClipByValue(-0.5, 0.5)"
                ) from None
            min = _Negative(max) if callable(max) else -max
        else:
            min, max = as_number_or_schedule("min", min), as_number_or_schedule("max", max)
            if type(min) is type(max) is float and not min <= max:
                raise ValueError(
                    f"min must not exceed max, got min={min} and max={max}; the lower bound comes "
                    "first: ClipByValue(-0.5, 0.5)"
                )
        object.__setattr__(self, "min", min)
        object.__setattr__(self, "max", max)

    @cached_property
    def bounds(self) -> Bounds:  # type: ignore[override]
        return Bounds(*self.interval())

    def __getstate__(self) -> dict[str, Any]:
        # Copies have the fields, but not the cached bounds.
        return {name: value for name, value in vars(self).items() if name != "bounds"}

    @property
    def keeps_zero(self) -> bool:
        low, high = self.interval()
        return low <= 0 <= high

    def at(self, step: int) -> Rule:
        if not isinstance(self.min, _Negative):
            return super().at(step)
        # One call for both bounds: its result may be random.
        bound = as_number("max", self.min.schedule(step))
        return replace(self, min=-bound, max=bound)

    def interval(self) -> tuple[float, float]:
        return number_of(self, "min"), number_of(self, "max")


# A cache of the rules of recent numbers. Pass only floats: it would take True for 1.
known_rule: Callable[..., Any] = lru_cache(maxsize=64)(lambda cls, *numbers: cls(*numbers))


def rule_of(cls: type[T], *numbers: float) -> T:
    """Makes the rule of some numbers, or finds it in a cache, but not under torch.compile."""
    for number in numbers:
        # A limit of 0 is not cached, because it warns at each line that passes it.
        if type(number) is not float or not number:
            return cls(*numbers)
    return cls(*numbers) if torch.compiler.is_compiling() else known_rule(cls, *numbers)


@dataclass(frozen=True, repr=False)
class _Negative:
    """The negative of a schedule; negatives of the same schedule are equal."""

    schedule: Schedule

    def __call__(self, step: int) -> float:
        return -self.schedule(step)

    def __repr__(self) -> str:
        return f"-{self.schedule!r}"


def as_rule(name: str, value: object) -> Rule:
    """Returns a rule itself, or makes `ClipByGlobalNorm` of a number or a function of the step."""
    if isinstance(value, Rule):
        _ = value.norm  # Raises for a norm_type or eps out of range.
        return value
    if type(value) is float:
        return rule_of(ClipByGlobalNorm, value)
    if isinstance(value, type) and issubclass(value, Rule):
        raise TypeError(f"{name} must be a rule, got the class; write {value.__name__}(...)")
    if is_function(value):
        return ClipByGlobalNorm(value)
    try:
        return ClipByGlobalNorm(value)  # type: ignore[arg-type]  # the rule checks
    except TypeError:
        shown = " ".join(f"{value!r:.80}".split())
        raise TypeError(
            f"{name} must be a number (the largest global norm) or a rule, such as "
            f"ClipByGlobalNorm, ClipByNorm and ClipByValue, got {shown} of type "
            f"{type(value).__name__}{_remedy(value)}"
        ) from None


def _remedy(value: object) -> str:
    """Gives advice for an argument that is no rule, or ""."""
    cls = value if isinstance(value, type) else type(value)
    if issubclass(cls, Adaptive):
        return f"; pass ClippedOptimizer(skip_above={cls.__name__}(...))"
    items = list(value) if isinstance(value, (list, tuple, ItemsView, ValuesView)) else [value]
    items = [item[-1] if isinstance(item, tuple) and item else item for item in items]
    if any(isinstance(item, Module | Parameter | Iterator) for item in items):
        return "; parameters come first: clip_(parameters, 1.0)"
    if any(isinstance(item, Tensor) for item in items):
        return "; tensors come first: clip_tensors_(tensors, 1.0)"
    if issubclass(cls, Optimizer):
        return "; it clips in its step, and comes first: ClippedOptimizer(optimizer, 1.0)"
    if isinstance(value, (list, tuple)):
        return "; write ClipByValue(-0.5, 0.5) for two bounds"
    if isinstance(value, str):
        return "; convert text by float()"
    return "; float('inf') measures and clips nothing" if value is None else ""


def rule_for_one(name: str, rule: object) -> ClipByNorm | ClipByValue:
    """Checks a rule for the function `name`, which sees one gradient at a time and no steps."""
    # Subclasses are refused, because their limit would not be asked for.
    if type(rule) is ClipByNorm or type(rule) is ClipByValue:
        if not rule.fixed:
            raise ValueError(
                f"{name} sees no steps, but the limit of {rule} is a function of the step; "
                "expected a number"
            )
        return rule
    expected = f"{name} expects ClipByNorm(...) or ClipByValue(...)"
    if isinstance(rule, ClipByGlobalNorm) or (
        isinstance(rule, int | float) and not isinstance(rule, bool)
    ):
        raise TypeError(
            f"{expected}, got {rule!r}, a norm of all gradients. Backward yields one gradient "
            "at a time, before the next one is known; clip by one norm after backward, with clip_ "
            "or a ClippedOptimizer"
        )
    if isinstance(rule, type):
        raise TypeError(f"{expected}, got the class {rule.__name__}; write {rule.__name__}(...)")
    raise TypeError(f"{expected}, got {rule!r:.80} of type {type(rule).__name__}")
