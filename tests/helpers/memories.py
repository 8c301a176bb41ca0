"""Rules that remember, beside references that do, and steps left out."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helpers import histories, units
from helpers.arena import Arena, OptimizerArena
from helpers.cases import assert_bits
from tritonclip import (
    ClipByOwnHistory,
    ClipByOwnQuantile,
    ClipByQuantile,
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
    info, found = torch.finfo(grad.dtype), units.wide(grad)
    if not grad.is_complex():
        # Next to the largest number, rounding may give inf.
        top = info.max * (1 - info.eps)
        is_both = (
            (np.abs(truth) > top) & (np.abs(found) > top) & (np.signbit(found) == np.signbit(truth))
        )
        truth = np.where(is_both, found, truth)
    np.testing.assert_allclose(
        found,
        truth,
        rtol=(1e-11 if double else 1e-5) + info.eps,
        atol=info.smallest_normal * info.eps,
        equal_nan=True,
    )


def remembered(arena: Arena, state: ClipState | None) -> dict[str, Tensor | None]:
    """Copies of the norms that are remembered for an arena, by owner: "rule" and "outliers"."""
    if isinstance(arena, OptimizerArena):
        # A checkpoint would also have the numbers that a rule starts with.
        memory = arena.optimizer._states.state_dict()
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


def random_skip_bound(choice: random.Random) -> tuple[Any, Callable[..., Any]]:
    """A bound for skipped steps, and the largest norm that it takes, by the reference."""
    if choice.random() < 0.5:
        # Of the norms met here, up to 1.4 are taken.
        return Outlier(1.5, 4), histories.outlier(1.5, 4)
    above = 10 ** choice.uniform(-1, 3)
    return above, lambda norm: above
