"""Warm-up, drift and tail of the norms of a run, by medians and quartiles of their logarithms.

Norms are positive and their spread is relative, so that logarithms are about as symmetric as norms
get. Medians and quartiles are not moved by the spikes that are looked for.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# The warm-up ends within this part of a run; a later change is drift.
_MOST_WARMUP = 0.2
# Blocks of a warm-up; a median of fewer than 5 norms is that of a spike too often.
_BLOCKS, _LEAST_BLOCK = 20, 5
# Below it, a fifth of the run holds two blocks: too few to see an end.
_LEAST_STEPS = 50
# Thirds whose medians differ by less share a limit: it stands as well with either.
_LEAST_DRIFT = 1.5
# Parts of a run, whose medians follow it as it drifts. A part of fewer steps, or one of very many
# parts, could be all spike.
_PARTS, _LEAST_PART = 12, 20
# The 95% quantile of a normal distribution lies so many interquartile ranges over its median.
_TAIL = 1.645 / 1.349


class Trend(NamedTuple):
    """How norms change over a run, and how they spread around the median of their part of it.

    Attributes:
        medians: of the thirds of the run, in order.
        spread: interquartile range of the logarithms of norms over their part's median: twice that
            from the lower quartile to the median, which many spikes do not widen.
        outside: share of these beyond Tukey's fence, 1.5 interquartile ranges over the upper
            quartile: 0.35% of normal logarithms.
        largest: the largest norm over its part's median.
    """

    medians: tuple[float, float, float]
    spread: float
    outside: float
    largest: float

    @property
    def drifts(self) -> bool:
        """Whether no one limit clips the tail of all thirds.

        At such a distance, the median of one third lies where the 5% tail of another begins.
        """
        distance = math.log(max(self.medians) / min(self.medians))
        return distance >= max(math.log(_LEAST_DRIFT), _TAIL * self.spread)


def trend_of(norms: Tensor) -> Trend:
    """The trend of at least 3 finite, positive norms; 1-d float64."""
    logs = norms.log()
    a, b, c = (float(third.quantile(0.5).exp()) for third in logs.tensor_split(3))
    parts = logs.tensor_split(min(_PARTS, max(1, len(logs) // _LEAST_PART)))
    relative = torch.cat([part - part.quantile(0.5) for part in parts])
    low, middle = relative.quantile(relative.new_tensor([0.25, 0.5])).tolist()
    spread = 2 * (middle - low)
    outside = relative > middle + (0.5 + 1.5) * spread
    return Trend((a, b, c), spread, float(outside.double().mean()), float(relative.max().exp()))


def warmup_of(norms: Tensor, usable: Tensor) -> int:
    """Steps at the start whose norms are not yet, or no longer, those of the run.

    The blocks within the first fifth, up to the last whose median is outside of the middle 90% of
    the second fifth.

    Args:
        norms: in order; 1-d float64.
        usable: those that are finite and positive.
    """
    n = len(norms)
    end = int(n * _MOST_WARMUP)
    reference = norms[end : 2 * end][usable[end : 2 * end]]
    if n < _LEAST_STEPS or not len(reference):
        return 0
    low, high = reference.quantile(reference.new_tensor([0.05, 0.95])).tolist()
    size = max(_LEAST_BLOCK, end // _BLOCKS)
    warmup = 0
    for start in range(0, end - size + 1, size):
        block = norms[start : start + size][usable[start : start + size]]
        if len(block) and not low <= float(block.quantile(0.5)) <= high:
            warmup = start + size
    return warmup
