"""Limits from a window of the last norms: a quantile, or a distance from their mean."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
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
from tritonclip.rules.moments import are_windows, moments_of
from tritonclip.rules.rule import Adaptive, AdaptiveRule, bounded, counts
from tritonclip.signatures import explains_misfits

# Relative to the mean: norms are right to 1e-6, so a smaller deviation means nothing.
_LEAST_DEVIATION = 1e-6


@explains_misfits
@dataclass(frozen=True, slots=True)
class ClipByQuantile(AdaptiveRule):
    """Clips by global norm to a quantile of the last norms before clipping.

    With the norm of all gradients together::

        limit = min(max_norm, numpy.quantile(last_norms, quantile))
        g = g * min(1, limit / norm)

    The norm of the current step is among the last norms, as in AutoClip. With quantile 0.9 about a
    tenth of the steps is clipped, whatever the scale of the norms.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> inner = torch.optim.SGD([weight], lr=0.1)
        >>> rule = tritonclip.ClipByQuantile(0.5)
        >>> optimizer = tritonclip.ClippedOptimizer(inner, rule)
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
        norm_type: the order of the norm: 2 is the Euclidean norm, inf the largest magnitude. Any
            positive number, -inf, or 0, which counts nonzero elements.

    Raises:
        ValueError, TypeError: an argument that is out of range, or no number.

    Notes:
        In :func:`clip_` it needs a :class:`ClipState`; a :class:`ClippedOptimizer` keeps one.
        AutoClip remembers all norms: it follows a drift slowly, and a single NaN stays for ever.

    References:
        Seetharaman, Wichern, Pardo, Le Roux, `AutoClip: Adaptive Gradient Clipping for Source
        Separation Networks <https://arxiv.org/abs/2007.14469>`_, 2020
    """

    quantile: float = 0.9
    window: int = 1000
    max_norm: float | Schedule = math.inf
    norm_type: float = 2.0

    schedules: ClassVar[tuple[str, ...]] = ("max_norm",)
    eps: ClassVar[float] = 0.0  # type: ignore[misc]  # a constant here

    def __post_init__(self) -> None:
        object.__setattr__(self, "quantile", as_fraction("quantile", self.quantile))
        object.__setattr__(self, "window", as_count("window", self.window, 1))
        object.__setattr__(self, "max_norm", as_limit_or_schedule("max_norm", self.max_norm))
        object.__setattr__(self, "norm_type", as_norm_type(self.norm_type))

    def start(self) -> Sequence[float]:
        """An empty window, and the number of norms, 0."""
        return (*[math.nan] * self.window, 0.0)

    def advance(self, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The quantile of the window, this norm included."""
        return advance_quantile(self.quantile, self.max_norm, state, norm)

    def accepts(self, state: Tensor) -> bool:
        """A window of norms."""
        return are_windows(state)

    def in_kernel(self) -> tuple[str, tuple[float, float, float, float]]:
        """Its numbers."""
        assert isinstance(self.max_norm, float)
        return "quantile", (self.quantile, 0.0, 0.0, self.max_norm)

    def on_host(self, state: array[float]) -> array[float]:
        """The window, and then its norms in ascending order."""
        return state + array("d", sorted(norm for norm in state[:-1] if not math.isnan(norm)))

    def advance_on_host(
        self, state: array[float], norm: float | list[float]
    ) -> tuple[float, array[float]]:
        """As `advance`; the order of the window is kept, where `advance` sorts anew."""
        assert isinstance(norm, float)
        assert isinstance(self.max_norm, float)
        first = self.window + 1
        if 0 < norm < math.inf:
            before, state = state, _entered_on_host(state, norm, self.window)
            if before[self.window] >= self.window:
                oldest = before[int(before[self.window]) % self.window]
                del state[bisect_left(state, oldest, first)]
            insort(state, norm, first)
        limit, last = math.inf, len(state) - 1
        if last >= first:
            # As torch.quantile interpolates.
            rank = self.quantile * (last - first)
            below, weight = first + int(rank), rank - int(rank)
            low, high = state[below], state[min(below + 1, last)]
            rise = high - low
            limit = low + weight * rise if weight < 0.5 else high - rise * (1 - weight)
        return min(limit, self.max_norm), state


@explains_misfits
@dataclass(frozen=True, slots=True)
class Outlier(Adaptive):
    """The steps that `ClippedOptimizer(skip_above=)` skips: norms far above the last mean.

    A step is skipped if its norm before clipping is too large::

        norm > mean + sigmas * std

    Mean and sample standard deviation are over the norms before clipping of the last `window`
    steps. Skipped steps count, so that norms that stay at a new level are soon accepted. Nothing
    is skipped before half of the window is filled. Losses are judged in the same way, where they
    are given: see the attribute `loss` of :class:`ClippedOptimizer`.

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

    sigmas: float = 6.0
    window: int = 128

    def __post_init__(self) -> None:
        object.__setattr__(self, "sigmas", as_positive("sigmas", self.sigmas))
        # Half a window must have two norms for a sample deviation.
        object.__setattr__(self, "window", as_count("window", self.window, 4))

    def start(self) -> Sequence[float]:
        """An empty window, and the number of norms, 0."""
        return (*[math.nan] * self.window, 0.0)

    def advance(self, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The largest norm that is no outlier among the norms before this one."""
        return self._limit(state), entered(state, norm, counts(norm))

    def _limit(self, state: Tensor) -> Tensor:
        """The largest number that is no outlier."""
        known = ~state[:-1].isnan()
        n = known.sum()
        mean = torch.where(known, state[:-1], 0.0).sum() / n
        squares = torch.where(known, state[:-1] - mean, 0.0).square().sum()
        deviation = torch.maximum((squares / (n - 1)).sqrt(), _LEAST_DEVIATION * mean.abs())
        limit = mean + self.sigmas * deviation
        return torch.where(n >= self.window // 2, limit, math.inf)

    def accepts(self, state: Tensor) -> bool:
        """A window of norms."""
        return are_windows(state)

    def in_kernel(self) -> tuple[str, tuple[float, float, float, float]]:
        """Its numbers."""
        return "outlier", (self.sigmas, 0.0, 0.0, math.inf)

    def advance_on_host(
        self, state: array[float], norm: float | list[float]
    ) -> tuple[float, array[float]]:
        """As `advance`."""
        assert isinstance(norm, float)
        limit = self._limit_on_host(state)
        if 0 < norm < math.inf:
            state = _entered_on_host(state, norm, self.window)
        return limit, state

    def _limit_on_host(self, state: array[float]) -> float:
        """As `_limit`."""
        n = min(int(state[-1]), self.window)
        if n < self.window // 2:
            return math.inf
        mean, deviation = moments_of(state, n)
        return mean + self.sigmas * max(deviation, _LEAST_DEVIATION * abs(mean))


@dataclass(frozen=True, slots=True)
class LossOutlier(Outlier):
    """The test of :class:`Outlier` for losses, which may be negative or 0."""

    def advance(self, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The largest loss that is no outlier among the losses before this one."""
        return self._limit(state), entered(state, norm, norm.isfinite())

    def accepts(self, state: Tensor) -> bool:
        """A window of losses."""
        return are_windows(state, -math.inf)

    def in_kernel(self) -> tuple[str, tuple[float, float, float, float]]:
        """Its numbers."""
        return "loss", (self.sigmas, 0.0, 0.0, math.inf)

    def advance_on_host(
        self, state: array[float], norm: float | list[float]
    ) -> tuple[float, array[float]]:
        """As `advance`."""
        assert isinstance(norm, float)
        limit = self._limit_on_host(state)
        if math.isfinite(norm):
            state = _entered_on_host(state, norm, self.window)
        return limit, state


def advance_quantile(
    q: float, max_norm: float | Schedule, state: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor]:
    """The quantile of a window, or of each row, this norm included; the state after the norm."""
    state = entered(state, norm, counts(norm))
    quantile = torch.nanquantile(state[..., :-1], q, dim=-1)
    limit = torch.where(quantile.isnan(), math.inf, quantile)
    return bounded(limit, max_norm), state


def entered(state: Tensor, norm: Tensor, enters: Tensor) -> Tensor:
    """The state after one more norm, which takes the slot of the oldest, if it enters.

    Args:
        state: float64[..., window + 1].
        norm: float64[...], one for each row; so is `enters`, of bool.
        enters: whether it does.
    """
    history, n = state[..., :-1], state[..., -1:]
    slot = torch.remainder(n, history.shape[-1]).long()
    after = torch.cat([history.scatter(-1, slot, norm[..., None]), n + 1], dim=-1)
    return torch.where(enters[..., None], after, state)


def _entered_on_host(state: array[float], norm: float, window: int) -> array[float]:
    """A copy of the state with one more norm, one that counts."""
    entered, n = state[:], state[window]
    entered[int(n) % window] = norm
    entered[window] = n + 1
    return entered
