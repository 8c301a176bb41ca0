"""A limit from the moving mean and deviation of the norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from tritonclip.rules.arguments import (
    Schedule,
    as_count,
    as_fraction,
    as_limit_or_schedule,
    as_norm_type,
    as_positive,
)
from tritonclip.rules.rule import AdaptiveRule, are_counts, bounded, checked, rule

# Added to the deviation, as in ZClip: the deviation of equal norms is 0.
_LEAST_DEVIATION = 1e-6


@rule
class ClipByZScore(AdaptiveRule):
    """Clips by global norm where the norm is far above its moving average (ZClip).

    With the norm of all gradients together::

        z = (norm - mean) / (std + 1e-6)
        if z > threshold:
            limit = mean + threshold * std * threshold / z

    The larger the spike, the closer the limit is to the mean. Mean and variance are those of the
    first `warmup` norms, then exponential moving averages. A spike enters them as the norm that it
    was clipped to.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> inner = torch.optim.SGD([weight], lr=0.1)
        >>> optimizer = tritonclip.ClippedOptimizer(inner, tritonclip.ClipByZScore(warmup=2))
        >>> for size in (1.0, 1.2, 50.0):
        ...     optimizer.zero_grad()
        ...     (size * weight[0]).backward()
        ...     optimizer.step()
        >>> optimizer.stats.last_norm, optimizer.stats.last_limit
        (tensor(50.), tensor(1.1013))

    Args:
        threshold: the largest z-score that is not clipped, in standard deviations; positive.
        decay: the weight of mean and variance so far against a new norm, between 0 and 1: with 0.97
            they reach back some 33 norms.
        warmup: the number of norms before the first spike can be found; 2 or more. NaN, inf and 0
            do not count.
        max_norm: the largest limit, also during the warm-up; 0 or more. ZClip uses 1.
            Or a function of the step; :class:`ClipState` has an example.
        norm_type: the order of the norm, as for :class:`ClipByGlobalNorm`.

    Raises:
        ValueError, TypeError: an argument that is out of range, or no number.

    Notes:
        In :func:`clip_` it needs a :class:`ClipState`; a :class:`ClippedOptimizer` keeps one.
        In ZClip a single NaN turns the rule off for ever.

    References:
        Kumar, Owen, Chowdhury, Güra, `ZClip: Adaptive Spike Mitigation for LLM Pre-Training
        <https://arxiv.org/abs/2504.02507>`_, 2025
    """

    threshold: float = checked(as_positive, default=2.5)
    decay: float = checked(as_fraction, default=0.97)
    warmup: int = checked(partial(as_count, least=2), default=25)
    max_norm: float | Schedule = checked(as_limit_or_schedule, default=math.inf)
    norm_type: float = checked(as_norm_type, default=2.0)

    schedules: ClassVar[tuple[str, ...]] = ("max_norm",)

    def start(self) -> Sequence[float]:
        """Mean, variance, and number of norms."""
        return (0.0, 0.0, 0.0)

    def advance(self, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The limit of a spike, inf for other norms; the moments, with the norm after clipping."""
        mean, variance, n = state.unbind()
        warm = n >= self.warmup
        deviation, excess = variance.sqrt(), norm - mean
        z = excess / (deviation + _LEAST_DEVIATION)
        reduced = mean.addcdiv(deviation, z, value=self.threshold**2)
        limit = torch.where(warm & (z > self.threshold), reduced, math.inf)

        value, n = torch.minimum(norm, limit), n + 1
        # During the warm-up, the update is Welford's.
        weight = n.reciprocal().masked_fill(warm, 1 - self.decay)
        mean = mean.lerp(value, weight)
        rest = value - mean
        variance = variance.lerp(rest * torch.where(warm, rest, excess), weight)
        return bounded(limit, self.max_norm), torch.stack([mean, variance, n])

    def accepts(self, state: Tensor) -> bool:
        """Finite moments, which are not negative."""
        return bool(((state >= 0) & state.isfinite()).all()) and are_counts(state[-1])
