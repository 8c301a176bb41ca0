"""Limits from moving averages of the global norm, or of the norm of each gradient."""

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
    as_number,
    as_positive,
)
from tritonclip.rules.rule import AdaptiveRule, are_counts, bounded, checked, rule

# Added to the deviation as in ZClip, because the deviation of equal norms is 0.
_LEAST_DEVIATION = 1e-6


@rule
class ClipByZScore(AdaptiveRule):
    """Clips by global norm where the norm is far above its moving average (ZClip).

    With the norm of all gradients together::

        z = (norm - mean) / (std + 1e-6)
        if z > threshold:
            limit = mean + threshold * std * threshold / z

    The larger the spike, the closer the limit is to the mean. Mean and variance are those of the
    first `warmup` norms, and from then on exponential moving averages. A spike enters them as the
    norm that it was clipped to.

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
        In :func:`clip_` this rule needs a :class:`ClipState`; a :class:`ClippedOptimizer` has one.
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
        """Limits a spike, and no other norm; the norm after clipping enters the moments."""
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
        """Whether the moments are finite and not negative."""
        return bool(((state >= 0) & state.isfinite()).all()) and are_counts(state[-1])


@rule
class ClipByOwnHistory(AdaptiveRule):
    """Clips each gradient by the moving average of its own earlier norms (AdaGC).

    For each gradient g, with its average::

        g = g * min(1, ratio * average / norm(g))
        average = decay * average + (1 - decay) * norm(g)  # after clipping

    During its first `warmup` norms a gradient is clipped by global norm to `max_norm` instead, and
    the average is the least of its norms after clipping.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> inner = torch.optim.SGD([weight], lr=0.1)
        >>> rule = tritonclip.ClipByOwnHistory(warmup=1, max_norm=10.0)
        >>> optimizer = tritonclip.ClippedOptimizer(inner, rule)
        >>> for size in (1.0, 1.0, 50.0):
        ...     optimizer.zero_grad()
        ...     (size * weight[0]).backward()
        ...     optimizer.step()
        >>> weight.grad
        tensor([1.0500, 0.0000])

    Args:
        ratio: the largest norm of a gradient, as a multiple of its average; positive.
        decay: the weight of the average so far against a new norm, between 0 and 1: with 0.98 the
            average reaches back some 50 norms.
        warmup: the number of norms of a gradient before it is clipped by its average; 1 or more.
            Norms that are NaN, inf or 0 do not count, so that an idle expert, or a LoRA matrix
            whose first gradient is 0, has its warm-up once it has norms. AdaGC counts steps, and a
            gradient that was 0 once stays 0 for ever.
        max_norm: the largest global norm during the warm-up, and the largest limit of a gradient
            after it; 0 or more. AdaGC has no such limit after the warm-up. Or a function of the
            step; :class:`ClipState` has an example.

    Raises:
        ValueError, TypeError: an argument that is out of range, or no number.

    Notes:
        In :func:`clip_` this rule needs a :class:`ClipState`; a :class:`ClippedOptimizer` has one.
        Pass the same parameters in the same order at every call.

    References:
        Wang, Xu, Jia et al., `AdaGC: Improving Training Stability for Large Language Model
        Pretraining <https://arxiv.org/abs/2502.11034>`_, 2025
    """

    ratio: float = checked(as_positive, default=1.05)
    decay: float = checked(as_fraction, default=0.98)
    warmup: int = checked(partial(as_count, least=1), default=100)
    max_norm: float | Schedule = checked(as_limit_or_schedule, default=1.0)

    schedules: ClassVar[tuple[str, ...]] = ("max_norm",)
    per_gradient: ClassVar[bool] = True

    def start(self) -> Sequence[float]:
        """The average, inf before the first norm, and the number of norms."""
        return (math.inf, 0.0)

    def advance(self, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Limits norms by the averages or, during the warm-up, by the global norm."""
        average, n = state.unbind(-1)
        warm = n >= self.warmup
        max_norm = as_number("max_norm", self.max_norm)
        # The norms are divided by the largest one, whose square may overflow.
        info = torch.finfo(norm.dtype)
        shares = norm / norm.amax().clamp(info.tiny, info.max)
        # If all norms are 0, the limit is 0, too. It is NaN only if a norm is not finite.
        by_global_norm = shares / torch.linalg.vector_norm(shares).clamp(info.tiny) * max_norm
        # For a norm of inf, any finite limit gives the coefficient 0.
        by_global_norm = by_global_norm.masked_fill(norm == math.inf, max_norm)
        limit = torch.where(warm, (self.ratio * average).clamp(max=max_norm), by_global_norm)

        clipped = torch.minimum(norm, limit)
        moving = clipped.lerp(average, self.decay)
        average = torch.where(warm, moving, torch.minimum(average, clipped))
        after = torch.stack([average, n + 1], dim=-1)
        # Beside a norm that is NaN or inf, the others are clipped to NaN or 0 and do not count.
        return limit, torch.where((clipped > 0)[..., None], after, state)

    def accepts(self, state: Tensor) -> bool:
        """Whether all averages are positive."""
        return bool((state[..., 0] > 0).all()) and are_counts(state[..., 1])
