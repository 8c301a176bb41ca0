"""Steps to skip: norms, or losses, far above the mean of the last ones."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from tritonclip.rules import host_loops
from tritonclip.rules.arguments import as_count, as_positive
from tritonclip.rules.quantile import are_windows, entered
from tritonclip.rules.rule import Adaptive, checked, rule

# Relative to the mean: norms are right to 1e-6, so a smaller deviation means nothing.
_LEAST_DEVIATION = 1e-6


@rule
class Outlier(Adaptive):
    """The steps that `ClippedOptimizer(skip_above=)` skips: norms far above the last mean.

    A step is skipped if its norm before clipping is too large::

        norm > mean + sigmas * std

    Mean and sample standard deviation are over the norms before clipping of the last `window`
    steps. Skipped steps count, so that norms that stay at a new level are soon accepted. No step is
    skipped before half of the window has norms: by default, none of the first 64. Losses are judged
    in the same way, where they are given: see the attribute `loss` of :class:`ClippedOptimizer`.

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
    # Half a window must have two norms for a sample deviation.
    window: int = checked(partial(as_count, least=4), default=128)

    # What enters a window is finite, and greater than this.
    _below: ClassVar[float] = 0.0
    in_kernel: ClassVar[tuple[str, ...]] = ("outlier", "sigmas")

    def start(self) -> Sequence[float]:
        """An empty window, and the number of norms, 0."""
        return (*[math.nan] * self.window, 0.0)

    def advance(self, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The largest norm that is no outlier among the norms before this one."""
        is_filled = ~state[:-1].isnan()
        n = is_filled.sum()
        mean = torch.where(is_filled, state[:-1], 0.0).sum() / n
        squares = torch.where(is_filled, state[:-1] - mean, 0.0).square().sum()
        deviation = torch.maximum((squares / (n - 1)).sqrt(), _LEAST_DEVIATION * mean.abs())
        limit = mean + self.sigmas * deviation
        limit = torch.where(n >= self.window // 2, limit, math.inf)
        return limit, entered(state, norm, norm.isfinite() & (norm > self._below))

    def accepts(self, state: Tensor) -> bool:
        """A window of numbers that may enter it."""
        return are_windows(state, self._below)

    def advance_on_host(
        self, state: array[float], norm: float | list[float]
    ) -> tuple[float | list[float], array[float]]:
        assert isinstance(norm, float)
        if not host_loops.has_extension:
            return Adaptive.advance_on_host(self, state, norm)
        limit, n = math.inf, int(state[-1])
        if n >= self.window // 2:
            address, _ = state.buffer_info()
            mean, deviation = host_loops.mean_and_deviation(address, min(n, self.window))
            limit = mean + self.sigmas * max(deviation, _LEAST_DEVIATION * abs(mean))
        if self._below < norm < math.inf:
            state = state[:]
            state[n % self.window] = norm
            state[-1] = n + 1
        return limit, state


@rule
class LossOutlier(Outlier):
    """The test of :class:`Outlier` for losses, which may be negative or 0."""

    _below: ClassVar[float] = -math.inf
    in_kernel: ClassVar[tuple[str, ...]] = ("loss", "sigmas")
