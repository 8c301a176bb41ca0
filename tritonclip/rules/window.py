"""Limits from a window of the last norms: a quantile of them, or a bound far above their mean."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

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
from tritonclip.rules.rule import Adaptive, AdaptiveRule, bounded, checked, rule

# Relative to the mean: norms are accurate to 1e-6, so a smaller deviation means nothing.
_LEAST_DEVIATION = 1e-6


@rule
class _ByQuantile(AdaptiveRule):
    quantile: float = checked(as_fraction, default=0.9)
    window: int = checked(partial(as_count, least=1), default=1000)
    max_norm: float | Schedule = checked(as_limit_or_schedule, default=math.inf)
    factor: float = checked(as_positive, default=1.0)

    schedules: ClassVar[tuple[str, ...]] = ("max_norm",)

    def start(self) -> Sequence[float]:
        """An empty window."""
        return [math.nan] * self.window

    def advance(self, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Limits a norm to `factor` times the quantile of its window, this norm included."""
        window = torch.where(self.counts(norm)[..., None], _entered(state, norm), state)
        # Empty slots are NaN, and so come last.
        norms, _ = window.sort()
        rank = (
            (window == window).sum(-1, keepdim=True, dtype=window.dtype).sub(1).mul(self.quantile)
        )
        low, high = norms.gather(-1, rank.long()), norms.gather(-1, rank.ceil().long())
        limit = low.lerp(high, rank.frac()).squeeze(-1) * self.factor
        return bounded(limit.nan_to_num(math.inf, math.inf), self.max_norm), window

    def accepts(self, state: Tensor) -> bool:
        """Whether states are windows of norms."""
        return _are_windows(state)


@rule
class ClipByQuantile(_ByQuantile):
    """Clips by global norm to a quantile of the last norms before clipping (AutoClip).

    With the norm of all gradients together::

        limit = min(max_norm, factor * numpy.quantile(last_norms, quantile))
        g = g * min(1, limit / norm)

    The norm of the current step is among the last norms, as in AutoClip. With quantile 0.9 about a
    tenth of the steps is clipped, whatever the scale of the norms.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> inner = torch.optim.SGD([weight], lr=0.1)
        >>> optimizer = tritonclip.ClippedOptimizer(inner, tritonclip.ClipByQuantile(0.5))
        >>> for size in (1.0, 1.0, 50.0):
        ...     optimizer.zero_grad()
        ...     (size * weight[0]).backward()
        ...     optimizer.step()
        >>> optimizer.stats.last_norm, optimizer.stats.last_limit
        (tensor(50.), tensor(1.))

    Args:
        quantile: the share of steps that are not clipped, between 0 and 1.
        window: the number of norms remembered; 1 or more. NaN, inf and 0 are left out.
        max_norm: the largest limit; 0 or more. Or a function of the step; :class:`ClipState` has an
            example.
        factor: multiplies the quantile; positive. 2.0 with the quantile 0.5 is twice the median.
        norm_type: the order of the norm, as for :class:`ClipByGlobalNorm`.

    Raises:
        ValueError, TypeError: an argument that is out of range, or no number.

    Notes:
        In :func:`clip_` this rule needs a :class:`ClipState`; a :class:`ClippedOptimizer` has one.
        AutoClip remembers all norms: it follows a drift slowly, and a single NaN stays for ever.
        ScaledAdam of icefall sets its limit every hundredth step only, from norms that weigh each
        gradient by its parameter.

    References:
        Seetharaman, Wichern, Pardo, Le Roux, `AutoClip: Adaptive Gradient Clipping for Source
        Separation Networks <https://arxiv.org/abs/2007.14469>`_, 2020; icefall, `ScaledAdam`,
        `clipping_scale` (the factor)
    """

    norm_type: float = checked(as_norm_type, default=2.0)


@rule
class ClipByOwnQuantile(_ByQuantile):
    """Clips each gradient to a quantile of its own last norms before clipping.

    For each gradient g::

        limit = min(max_norm, factor * numpy.quantile(last_norms, quantile))  # of this gradient
        g = g * min(1, limit / norm(g))

    The norm of the current step is among the last norms. A gradient is compared with nothing but
    itself, so that layers of any scale are clipped equally often.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> inner = torch.optim.SGD([weight], lr=0.1)
        >>> optimizer = tritonclip.ClippedOptimizer(inner, tritonclip.ClipByOwnQuantile(0.5))
        >>> for size in (1.0, 1.0, 50.0):
        ...     optimizer.zero_grad()
        ...     (size * weight[0]).backward()
        ...     optimizer.step()
        >>> weight.grad
        tensor([1., 0.])

    Args:
        quantile: the share of norms that are not clipped, between 0 and 1: 0.9 clips the largest
            tenth.
        window: the number of norms remembered for each gradient; 1 or more. NaN, inf and 0 are
            left out.
        max_norm: the largest limit; 0 or more. Or a function of the step; :class:`ClipState` has an
            example.
        factor: multiplies the quantile; positive.

    Raises:
        ValueError, TypeError: an argument that is out of range, or no number.

    Notes:
        In :func:`clip_` this rule needs a :class:`ClipState`; a :class:`ClippedOptimizer` has one.
        Pass the same parameters in the same order at every call.

        This rule succeeds `percentile_clipping` of bitsandbytes, which 0.50 no longer has. There, 5
        means the sixth smallest of the last 100 norms, which is `ClipByOwnQuantile(5 / 99)` here;
        and the window starts out full of the first norm.

    References:
        bitsandbytes 0.49, `percentile_clipping`; Seetharaman, Wichern, Pardo, Le Roux, `AutoClip:
        Adaptive Gradient Clipping for Source Separation Networks
        <https://arxiv.org/abs/2007.14469>`_, 2020, for one norm
    """

    window: int = checked(partial(as_count, least=1), default=100)

    per_gradient: ClassVar[bool] = True


@rule
class Outlier(Adaptive):
    """Finds norms far above the last mean, whose steps `ClippedOptimizer(skip_above=)` skips.

    A step is skipped if its norm before clipping is too large::

        norm > mean + sigmas * std

    Mean and sample standard deviation are over the norms before clipping of the last `window`
    steps. Skipped steps count, so that norms that stay at a new level are soon accepted. No step is
    skipped before half of the window has norms: by default, none of the first 64. Losses are judged
    in the same way, if they are given: see the attribute `loss` of :class:`ClippedOptimizer`.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> inner = torch.optim.SGD([weight], lr=0.1)
        >>> outlier = tritonclip.Outlier(sigmas=6.0, window=4)
        >>> optimizer = tritonclip.ClippedOptimizer(inner, 1.0, skip_above=outlier)
        >>> for size in (1.0, 1.1, 50.0):
        ...     optimizer.zero_grad()
        ...     (size * weight[0]).backward()
        ...     optimizer.step()
        >>> optimizer.stats.skipped_steps
        tensor(1)

    Args:
        sigmas: the distance from the mean at which a norm is an outlier, in standard deviations;
            positive.
        window: the number of norms remembered; 4 or more. NaN, inf and 0 are left out.

    Raises:
        ValueError, TypeError: an argument that is out of range, or no number.

    References:
        OLMo-core, `SkipStepOptimizer`; Levanter, `skip_bad_steps`.
    """

    sigmas: float = checked(as_positive, default=6.0)
    # At least 4, because a sample deviation needs two norms, which half a window must hold.
    window: int = checked(partial(as_count, least=4), default=128)

    def start(self) -> Sequence[float]:
        """An empty window."""
        return [math.nan] * self.window

    def advance(self, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Limits a norm to the largest one that is no outlier among the norms before it."""
        n = (state == state).sum(dtype=state.dtype)
        mean = state.nansum() / n
        deviation = ((state - mean).square().nansum() / (n - 1)).sqrt()
        limit = mean.add(deviation.maximum(_LEAST_DEVIATION * mean.abs()), alpha=self.sigmas)
        return limit.masked_fill(n < self.window // 2, math.inf), _entered(state, norm)

    def advance_numbers(self, state: list[float], norm: float) -> tuple[float, list[float]]:
        """Does as `advance` with Python numbers, and enters the norm only if it counts.

        All of this takes as long as a few operators.
        """
        after = [norm, *state[:-1]] if self.counts(norm) else state
        # Empty slots are NaN.
        norms = [known for known in state if known == known]
        n = len(norms)
        if n < self.window // 2:
            return math.inf, after
        mean = sum(norms) / n
        deviation = math.dist(norms, [mean] * n) / math.sqrt(n - 1)
        return mean + self.sigmas * max(deviation, _LEAST_DEVIATION * abs(mean)), after

    def accepts(self, state: Tensor) -> bool:
        """Whether a state is a window of norms."""
        return _are_windows(state)


@rule
class LossOutlier(Outlier):
    """The test of :class:`Outlier` for losses, which may be negative or 0."""

    def counts(self, norm: Any) -> Any:
        """Whether a loss is finite."""
        return norm - norm == 0

    def accepts(self, state: Tensor) -> bool:
        """Whether a state is a window of losses."""
        return _are_windows(state, -math.inf)


def _are_windows(windows: Tensor, least: float = 0.0) -> bool:
    """Whether windows hold finite numbers above `least`, followed by empty slots, which are NaN."""
    empty = windows.isnan()
    fits = (empty | (windows.isfinite() & (windows > least))).all()
    return bool(fits) and bool((empty[..., 1:] >= empty[..., :-1]).all())


def _entered(windows: Tensor, norm: Tensor) -> Tensor:
    """Puts a norm [...] first in windows [..., w], out of which the oldest drops."""
    n = windows.shape[-1]
    return torch.cat([norm.unsqueeze(-1), windows.narrow(-1, 0, n - 1)], dim=-1)
