"""Limits from a window of the last norms: a quantile, or a distance from their mean."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tritonclip.rules.arguments import (
    Schedule,
    as_count,
    as_limit_or_schedule,
    as_norm_type,
    as_positive,
    as_share,
)
from tritonclip.rules.rule import Adaptive, AdaptiveRule, bounded, counts
from tritonclip.signatures import explains_misfits

# Of the mean: norms are right to 1e-6, and nothing closer to it stands out.
_LEAST_DEVIATION = 1e-6


@explains_misfits
@dataclass(frozen=True, slots=True)
class ClipByQuantile(AdaptiveRule):
    r"""Clips by global norm, to a quantile of the last norms.

    .. math::
        g \leftarrow g \cdot \min(1, \min(Q_q(n_{t-w+1}, \dots, n_t), \text{max\_norm}) / n_t)

    The norm :math:`n_t` of the step counts too, as in AutoClip. With quantile 0.9, a tenth of the
    steps is clipped, whatever the scale of the norms is, or becomes.

    Args:
        quantile: q, between 0 and 1.
        window: w, how many norms are remembered; 1 or more. NaN, inf and 0 are not.
        max_norm: largest limit; 0 or more. Or a function of the step; see :class:`ClipState`.
        norm_type: p of the p-norm: positive, inf, -inf, or 0 for the number of nonzero elements.

    Raises:
        ValueError, TypeError: an argument that is out of range, or no number.

    Notes:
        In :func:`clip_` it needs a :class:`ClipState`. AutoClip remembers all norms, of which one
        NaN stays for ever; a window also follows norms that drift.

    Example:
        >>> ClipByQuantile(0.5, window=100)
        ClipByQuantile(quantile=0.5, window=100, max_norm=inf, norm_type=2.0)

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
        object.__setattr__(self, "quantile", as_share("quantile", self.quantile))
        object.__setattr__(self, "window", as_count("window", self.window, 1))
        object.__setattr__(self, "max_norm", as_limit_or_schedule("max_norm", self.max_norm))
        object.__setattr__(self, "norm_type", as_norm_type(self.norm_type))

    def start(self) -> Sequence[float]:
        """A window without norms, and their number."""
        return (*[math.nan] * self.window, 0.0)

    def advance(self, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The quantile of the window with this norm in it."""
        state = _entered(state, norm)
        quantile = torch.nanquantile(state[:-1], self.quantile)
        limit = torch.where(quantile.isnan(), math.inf, quantile)
        return bounded(limit, self.max_norm), state


@explains_misfits
@dataclass(frozen=True, slots=True)
class Outlier(Adaptive):
    r"""Norms that `ClippedOptimizer(skip_above=)` skips: far above the mean of the last ones.

    .. math:: n_t > \text{mean} + \text{sigmas} \cdot \text{std}

    Mean and sample standard deviation are those of the norms before clipping of the last `window`
    steps, skipped ones too: norms that stay at a new level are outliers no longer, once they fill
    enough of the window. Nothing is skipped before half of it is filled.

    Args:
        sigmas: distance from the mean, in standard deviations; positive.
        window: how many norms are remembered; 4 or more. NaN, inf and 0 are not.

    Raises:
        ValueError, TypeError: an argument that is out of range, or no number.

    Example:
        >>> Outlier(sigmas=6.0)
        Outlier(sigmas=6.0, window=128)

    References:
        OLMo-core, `SkipStepOptimizer`; Levanter, `skip_bad_steps`.
    """

    sigmas: float = 6.0
    window: int = 128

    def __post_init__(self) -> None:
        object.__setattr__(self, "sigmas", as_positive("sigmas", self.sigmas))
        # Of fewer norms than two, half a window has no deviation.
        object.__setattr__(self, "window", as_count("window", self.window, 4))

    def start(self) -> Sequence[float]:
        """A window without norms, and their number."""
        return (*[math.nan] * self.window, 0.0)

    def advance(self, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The largest norm that is no outlier, by the norms before this one."""
        known = ~state[:-1].isnan()
        n = known.sum()
        mean = torch.where(known, state[:-1], 0.0).sum() / n
        squares = torch.where(known, state[:-1] - mean, 0.0).square().sum()
        deviation = torch.maximum((squares / (n - 1)).sqrt(), _LEAST_DEVIATION * mean)
        limit = mean + self.sigmas * deviation
        return torch.where(n >= self.window // 2, limit, math.inf), _entered(state, norm)


def _entered(state: Tensor, norm: Tensor) -> Tensor:
    """A window and the number of norms that entered it, after one more; the oldest is dropped."""
    history, n = state[:-1], state[-1]
    place = torch.remainder(n, len(history)).long().reshape(1)
    entered = torch.cat([history.index_copy(0, place, norm.reshape(1)), (n + 1).reshape(1)])
    return torch.where(counts(norm), entered, state)
