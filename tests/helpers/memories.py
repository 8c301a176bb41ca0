"""Rules that remember, beside references that do: for lists that change, and steps left out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helpers import histories, reference, units
from helpers.arena import Arena, OptimizerArena
from helpers.cases import assert_bits
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByOwnHistory,
    ClipByOwnQuantile,
    ClipByQuantile,
    ClipByRMS,
    ClipByUnitNorm,
    ClipByZScore,
    ClipState,
    Outlier,
)

# Few steps, so that their ends are met.
ADAPTIVE: tuple[tuple[Any, Callable[..., Any], tuple[Any, ...]], ...] = (
    (ClipByQuantile, histories.quantile, (0.5, 4)),
    (ClipByQuantile, histories.quantile, (0.8, 3, 5.0)),
    (ClipByZScore, histories.zscore, (1.5, 0.9, 2)),
    (ClipByZScore, histories.zscore, (0.5, 0.5, 3, 5.0)),
    (ClipByOwnHistory, histories.own_history, (0.9, 0.9, 2, 3.0)),
    (ClipByOwnQuantile, histories.own_quantile, (0.6, 3, 5.0)),
)


def by_step(step: int) -> float:
    """A limit that is a function of the step."""
    return 0.5 * (1 + step % 3)


def scheduled() -> Callable[..., Any]:
    """The limits of `by_step`, one for each norm of a call."""
    steps = count()

    def limits(norms: Any, places: Sequence[int] | None = None) -> Any:
        limit = by_step(next(steps))
        return [limit] * len(norms) if isinstance(norms, list) else limit

    return limits


class Follower:
    """A rule of any kind for lists that change, with its reference; each list has its memory.

    `limits` makes those of the reference, which remember; None for a rule that does not.
    """

    def __init__(self, rule: Any, limits: Callable[[], Any] | None = None) -> None:
        self.rule, self._make = rule, limits
        self._known: dict[tuple[int, int], tuple[Tensor, ClipState, Any]] = {}
        self._state = ClipState()
        self._limits: Any = None
        self._left: dict[str, Any] = {}

    def options(self, params: Sequence[Tensor]) -> dict[str, Any]:
        """The options of a call on a list, which is known by its first parameter and its length."""
        if self._make is None:
            return {}
        key = id(params[0]), len(params)
        if key not in self._known:
            self._known[key] = params[0], ClipState(), self._make()
        _, self._state, self._limits = self._known[key]
        self._left = self._state.state_dict()
        return {"state": self._state}

    def assert_left_alone(self) -> None:
        """The memory is that of before the call, which was refused."""
        if self._make is not None:
            left = self._state.state_dict()
            assert left["steps"] == self._left["steps"]
            assert_remembers(self.rule, values_of(self._left), values_of(left))

    def truths(
        self, grads: Sequence[Tensor], weights: Sequence[Tensor], places: Sequence[int]
    ) -> list[np.ndarray]:
        """The gradients after clipping, float64; `places` are theirs among all parameters."""
        rule = self.rule
        if rule.per_unit:
            return [units.expected(g, w, rule) for g, w in zip(grads, weights, strict=True)]
        norms = reference.norms(grads, rule.norm_type)
        if isinstance(rule, ClipByRMS):
            limits = [rule.max_rms * max(grad.numel(), 1) ** 0.5 for grad in grads]
        elif rule.per_gradient:
            limits = self._limits(norms, places)
        else:
            norm = reference.total_norm(grads, rule.norm_type)
            norms, limits = ([of_all] * len(grads) for of_all in (norm, self._limits(norm)))
        return [
            units.wide(elements(grad)) * coefficient(norm, limit, rule.eps)
            for grad, norm, limit in zip(grads, norms, limits, strict=True)
        ]


def elements(grad: Tensor) -> Tensor:
    """The strided tensor that holds the elements of a gradient."""
    return grad._values() if grad.layout == torch.sparse_coo else grad


def coefficient(norm: float, limit: float, eps: float) -> float:
    """``min(1, limit / (norm + eps))``; 1 of nothing, and without a limit."""
    if norm + eps == 0 or (limit == np.inf and not np.isnan(norm)):
        return 1.0
    return float(np.minimum(1.0, limit / (norm + eps)))


def assert_near(grad: Tensor, truth: np.ndarray, *, double: bool) -> None:
    """To some 1e-6 for each norm that enters, and half a unit in the last place."""
    info = torch.finfo(grad.dtype)
    np.testing.assert_allclose(
        units.wide(grad),
        truth,
        rtol=(1e-11 if double else 1e-5) + info.eps,
        atol=info.smallest_normal * info.eps,
        equal_nan=True,
    )


def random_follower(choice: random.Random) -> Follower:
    """A rule without a reference bit for bit."""
    kind = choice.randrange(5)
    if kind == 0:
        return Follower(ClipByRMS(10 ** choice.uniform(-2, 1)))
    if kind == 1:
        return Follower(ClipByUnitNorm(10 ** choice.uniform(-2, 1), choice.choice([1e-3, 1.0])))
    if kind == 2:
        return Follower(choice.choice([ClipByGlobalNorm, ClipByNorm])(by_step), scheduled)
    make, limits, numbers = choice.choice(ADAPTIVE)
    return Follower(make(*numbers), lambda: limits(*numbers))


def remembered(arena: Arena, state: ClipState | None) -> dict[str, Tensor | None]:
    """Copies of the norms that are remembered for an arena, by owner: "rule" and "outliers"."""
    if isinstance(arena, OptimizerArena):
        memory = arena.optimizer.state_dict()["tritonclip"].get("memory", {})
        return {owner: values_of(saved) for owner, saved in memory.items()}
    return {"rule": None if state is None else values_of(state.state_dict())}


def values_of(saved: dict[str, Any]) -> Tensor | None:
    """The values in the result of `ClipState.state_dict`, as a tensor."""
    values = saved["values"]
    return None if values is None else torch.tensor(values, dtype=torch.float64)


def assert_remembers(rule: Any, before: Tensor | None, after: Tensor | None) -> None:
    """Nothing has entered; what was made meanwhile is as at the start."""
    if after is None:
        assert before is None
        return
    start = before if before is not None else after.new_tensor(rule.start()).expand_as(after)
    assert_bits([after], [start])


def random_skip_bound(choice: random.Random, *, follows: bool) -> tuple[Any, Callable[..., Any]]:
    """A bound for skipped steps, and the largest norm that it takes, by the reference."""
    if follows and choice.random() < 0.5:
        # Of the norms met here, up to 1.4 are taken.
        return Outlier(1.5, 4), histories.outlier(1.5, 4)
    above = 10 ** choice.uniform(-1, 3)
    return above, lambda norm: above
