"""Steps to skip: norms, or losses, far above the mean of the last ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

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

    def start(self) -> Sequence[float]:
        """An empty window."""
        return [math.nan] * self.window

    def advance(self, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The largest norm that is no outlier among the norms before this one."""
        n = (state == state).sum(dtype=state.dtype)
        mean = state.nansum() / n
        deviation = ((state - mean).square().nansum() / (n - 1)).sqrt()
        limit = mean.add(deviation.maximum(_LEAST_DEVIATION * mean.abs()), alpha=self.sigmas)
        return limit.masked_fill(n < self.window // 2, math.inf), entered(state, norm)

    def advance_numbers(self, state: list[float], norm: float) -> tuple[float, list[float]]:
        """As `advance`, with the norm entered only where it counts, in the numbers of a host.

        All of it takes as long as a few operators.
        """
        after = [norm, *state[:-1]] if self.counts(norm) else state
        # Slots that are still empty are the last ones.
        norms = state if state[-1] == state[-1] else [known for known in state if known == known]
        n = len(norms)
        if n < self.window // 2:
            return math.inf, after
        mean = sum(norms) / n
        deviation = math.dist(norms, [mean] * n) / math.sqrt(n - 1)
        return mean + self.sigmas * max(deviation, _LEAST_DEVIATION * abs(mean)), after

    def accepts(self, state: Tensor) -> bool:
        """A window of norms."""
        return are_windows(state)


@rule
class LossOutlier(Outlier):
    """The test of :class:`Outlier` for losses, which may be negative or 0."""

    def counts(self, norm: Any) -> Any:
        """Whether a loss is finite."""
        return norm - norm == 0

    def accepts(self, state: Tensor) -> bool:
        """A window of losses."""
        return are_windows(state, -math.inf)
