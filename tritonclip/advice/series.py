"""Statistics of the norms and losses of a run in order: warm-up, trend, spikes, falling losses.

We find warm-up, drift and tail by medians and quartiles of the logarithms of norms. Norms are
positive and spread in proportion to their size, so their logarithms are nearly symmetric. Spikes
move neither medians nor quartiles.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

# torch adds this to the norm that it divides by.
EPS = 1e-6
# Norms are real numbers, so it is no chance if at least three, and this share, equal the largest.
_CUT_SHARE, _CUT_STEPS = 0.01, 3
# The warm-up ends within this fraction of a run; a later change is drift.
_MOST_WARMUP = 0.2
# The blocks of a possible warm-up. Spikes too often set the median of fewer than 5 norms.
_BLOCKS, _LEAST_BLOCK = 20, 5
# In a shorter run, a fifth holds less than two blocks, which is too few to find an end.
_LEAST_STEPS_OF_WARMUP = 50
# If the medians of thirds differ by less, one limit serves them all.
_LEAST_DRIFT = 1.5
# The medians of these sections follow the drift of a run. A spike could fill a shorter section.
_SECTIONS, _LEAST_SECTION = 12, 20
# A step three times as long is like one at the next learning rate of a usual grid (1e-4, 3e-4).
_ORDINARY = 3.0
# A loss falls clearly if it falls in this share of the pairs of an early and a late loss; by
# chance, it falls in half of them.
FALLS = 0.9
# SpikeScore compares a norm with the mean of this many norms before it, in standard deviations.
_SPIKE_WINDOW, _SPIKE_SIGMAS = 128, 6.0
# The 95% quantile of a normal distribution is this many interquartile ranges above its median.
_TAIL = 1.645 / 1.349


class Trend(NamedTuple):
    """How norms change over a run, and how they spread around the median of their section.

    Attributes:
        medians: the medians of the thirds of the run, in order.
        spread: the interquartile range of the logarithms of norms over their section's median. It
            is twice the lower half of the range, which many spikes do not widen.
        outside: the share of norms that stand out: they are over three times the median, and two
            interquartile ranges above the upper quartile. Of normal logarithms 0.04% do; with
            Tukey's 1.5 ranges a verdict would depend on chance.
        largest: the largest norm over its section's median.
    """

    medians: tuple[float, float, float]
    spread: float
    outside: float
    largest: float

    @property
    def drifts(self) -> bool:
        """Whether the median of one third lies where the 5% tail of another begins."""
        distance = math.log(max(self.medians) / min(self.medians))
        return distance >= max(math.log(_LEAST_DRIFT), _TAIL * self.spread)


def trend_of(norms: Tensor) -> Trend:
    """The trend of finite, positive norms, 1-d float64."""
    logs = norms.log()
    # With one or two norms, some thirds are empty.
    thirds = (third if len(third) else logs for third in logs.tensor_split(3))
    a, b, c = (float(third.quantile(0.5).exp()) for third in thirds)
    sections = logs.tensor_split(min(_SECTIONS, max(1, len(logs) // _LEAST_SECTION)))
    relative = torch.cat([section - section.quantile(0.5) for section in sections])
    low, middle = relative.quantile(relative.new_tensor([0.25, 0.5])).tolist()
    spread = 2 * (middle - low)
    outside = relative > max(middle + (0.5 + 2.0) * spread, math.log(_ORDINARY))
    return Trend((a, b, c), spread, float(outside.double().mean()), float(relative.max().exp()))


def warmup_of(norms: Tensor, usable: Tensor) -> int:
    """The number of steps at the start whose `usable` norms are unlike those that follow."""
    n = len(norms)
    end = int(n * _MOST_WARMUP)
    reference = norms[end : 2 * end][usable[end : 2 * end]]
    if n < _LEAST_STEPS_OF_WARMUP or not len(reference):
        return 0
    low, high = reference.quantile(reference.new_tensor([0.05, 0.95])).tolist()
    size = max(_LEAST_BLOCK, end // _BLOCKS)
    warmup = 0
    for start in range(0, end - size + 1, size):
        block = norms[start : start + size][usable[start : start + size]]
        if len(block) and not low <= float(block.quantile(0.5)) <= high:
            warmup = start + size
    return warmup


def spike_score_of(norms: Tensor) -> float:
    """The share of spikes among finite norms over 0; NaN for short runs.

    As in OLMo-core, `StabilityMonitorCallback`, whose total also counts spikes of the loss.
    """
    if len(norms) <= _SPIKE_WINDOW:
        return math.nan
    before = norms.unfold(0, _SPIKE_WINDOW, 1)[:-1]
    mean = before.mean(1)
    # Norms are exact only to 1e-6.
    deviation = torch.maximum(before.std(1, correction=0), 1e-6 * mean)
    is_spike = norms[_SPIKE_WINDOW:] > mean + _SPIKE_SIGMAS * deviation
    return int(is_spike.sum()) / len(norms)


def two_digits(limit: float | Tensor) -> float:
    """Rounds a limit to two digits."""
    return float(f"{float(limit):.2g}")


def n_cut_off(norms: Tensor) -> int:
    """The number of norms that equal the largest; 0 if they are so few that it may be chance."""
    n = int((norms >= least_equal(float(norms.max()))).sum())
    return n if n >= max(_CUT_STEPS, _CUT_SHARE * len(norms)) else 0


def least_equal(limit: float) -> float:
    """The least norm that clipping to a limit can leave, since eps and rounding lower norms."""
    return limit - 1e-5 * limit - min(EPS, 1e-3 * limit)


def fall_of(losses: Tensor) -> tuple[float, float]:
    """The share of pairs of an early and a late loss in which the late one is lower, and its error.

    Ties count as half. Chance alone gives a share of one half, and the error is the standard error
    of this half (Mann and Whitney, 1947). On synthetic losses of 19 kinds, the test of Mann and
    Kendall for a trend over the whole run missed most of those that fall early and then stay.
    """
    early, late = ends(losses)
    changes = late - early[:, None]
    share = float((changes < 0).double().mean() + (changes == 0).double().mean() / 2)
    n, m = len(early), len(late)
    return share, math.sqrt((n + m + 1) / (12 * n * m))


def ends(losses: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of the first tenth and of the last quarter."""
    return losses[: max(5, len(losses) // 10)], losses[-max(1, len(losses) // 4) :]
