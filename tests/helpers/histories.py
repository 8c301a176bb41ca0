"""Adaptive rules as their papers have them, in NumPy; norms and gradients to feed them.

What is NaN, inf or 0 enters no history here either: the papers' codes do not say so.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tritonclip
from helpers.cases import grad_of, normal, same_parameters
from tritonclip import ClipState
from tritonclip.rules.rule import RULE_CLASSES, AdaptiveRule

Limits = Callable[[float], float]


def norms(n: int = 400, seed: int = 0, *, bad: bool = True) -> list[float]:
    """Norms that drift, with spikes and, where `bad`, with NaN, inf and zeros between them."""
    random = np.random.default_rng(seed)
    values = np.exp(0.3 * random.standard_normal(n) - 0.004 * np.arange(n))
    values[random.random(n) < 0.03] *= 50
    if bad:
        for at, value in ((3, math.nan), (4, math.inf), (5, 0.0), (50, 0.0)):
            values[at] = value
        values[random.random(n) < 0.02] = math.nan
        values[random.random(n) < 0.02] = math.inf
    return [float(value) for value in values]


def enters(norm: float) -> bool:
    return math.isfinite(norm) and norm > 0


def quantile(q: float, window: int, max_norm: float = math.inf) -> Limits:
    """AutoClip, with a window."""
    history: list[float] = []

    def limit(norm: float) -> float:
        if enters(norm):
            history.append(norm)
        return min(float(np.quantile(history[-window:], q)) if history else math.inf, max_norm)

    return limit


def zscore(threshold: float, decay: float, warmup: int, max_norm: float = math.inf) -> Limits:
    """ZClip, with adaptive scaling."""
    first: list[float] = []
    mean = variance = math.nan

    def limit(norm: float) -> float:
        nonlocal mean, variance
        if len(first) < warmup:
            if enters(norm):
                first.append(norm)
                mean, variance = float(np.mean(first)), float(np.var(first))
            return max_norm
        std = math.sqrt(variance)
        z = (norm - mean) / (std + 1e-6)
        limit = mean + threshold * std / (z / threshold) if z > threshold else math.inf
        if enters(norm):
            entering = min(norm, limit)
            mean = decay * mean + (1 - decay) * entering
            variance = decay * variance + (1 - decay) * (entering - mean) ** 2
        return min(limit, max_norm)

    return limit


def outlier(sigmas: float, window: int, enters: Callable[[float], bool] = enters) -> Limits:
    """OLMo-core's test: mean and sample deviation of the last norms, once half are there."""
    history: list[float] = []

    def limit(norm: float) -> float:
        last = history[-window:]
        found = math.inf
        if len(last) >= window // 2:
            found = float(np.mean(last) + sigmas * np.std(last, ddof=1))
        if enters(norm):
            history.append(norm)
        return found

    return limit


def own_history(
    ratio: float, decay: float, warmup: int, max_norm: float
) -> Callable[..., list[float]]:
    """AdaGC, with a warm-up that counts the norms of each gradient.

    The limits take norms, and the places of their gradients among all, where some have none.
    """
    averages: dict[int, float] = defaultdict(lambda: math.inf)
    counts: dict[int, int] = defaultdict(int)

    def limits(norms: Sequence[float], places: Sequence[int] | None = None) -> list[float]:
        total = math.sqrt(sum(norm * norm for norm in norms))
        found = []
        for i, norm in zip(places or range(len(norms)), norms, strict=True):
            warm = counts[i] >= warmup
            together = norm * (max_norm / total) if total else 0.0
            # inf / inf says nothing: of an inf, any finite limit leaves 0.
            together = max_norm if norm == math.inf else together
            limit = min(ratio * averages[i], max_norm) if warm else together
            found.append(limit)
            clipped = float(np.minimum(norm, limit))
            if enters(norm) and enters(clipped):
                counts[i] += 1
                average = decay * averages[i] + (1 - decay) * clipped
                averages[i] = average if warm else min(averages[i], clipped)
        return found

    return limits


def own_quantile(q: float, window: int, max_norm: float = math.inf) -> Callable[..., list[float]]:
    """A quantile of the norms of each gradient; the limits take norms as those of `own_history`."""
    of_each: dict[int, Limits] = defaultdict(lambda: quantile(q, window, max_norm))

    def limits(norms: Sequence[float], places: Sequence[int] | None = None) -> list[float]:
        at = places or range(len(norms))
        return [of_each[i](norm) for i, norm in zip(at, norms, strict=True)]

    return limits


# Every adaptive rule of the library, with few steps, so that their ends are met.
SHORT = {"quantile": 0.7, "window": 20, "warmup": 10}
ADAPTIVE = [
    pytest.param(kind(**{n: SHORT[n] for n, _ in kind.checks if n in SHORT}), id=kind.__name__)
    for kind in RULE_CLASSES
    if issubclass(kind, AdaptiveRule) and kind.__name__ in tritonclip.__all__
]


def of_norm(size: float, shape: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    """A gradient of this norm."""
    if not math.isfinite(size):
        return torch.tensor([1.0] * (shape - 1) + [size], dtype=dtype)
    direction = normal(shape, torch.float64)
    length = float(direction.norm())
    return (direction / length * size).to(dtype)


def run(rule: Any, state: ClipState, steps: range) -> list[Tensor]:
    grads = []
    for step in steps:
        size = norms(60, seed=5)[step]
        weights = same_parameters([of_norm(size), of_norm(1.0, 3)])
        tritonclip.clip_(weights, rule, state=state)
        grads += [grad_of(weight) for weight in weights]
    return grads
