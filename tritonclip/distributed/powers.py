"""Norms as numbers that can be added up, or compared, over processes: float64, a row for each norm.

p > 0      weight * norm**p; a vector of bins where that might not fit
0          weighted counts
inf, -inf  the norm or its negative, beside a flag: maxima may lose NaN
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

# Orders whose powers of norms narrower than float64 fit it: (3.4e38)**6 = 1.6e231 and
# (1.4e-45)**6 = 7.5e-270.
UNBINNED = 6.0
# Orders up to which bins are few: 77 at 64. Beyond, the largest norm is found first.
BINNED = 64.0
# Binary exponents of the powers in a bin: from 2**-950 to 2**950, so that sums of 2**70 fit.
_SPAN = 1900.0
# Norms in float64, denormal ones and sums of 2**70 too, lie within this binary exponent of 1.
_EXPONENTS = 1100.0
# A flag beside maxima; 1 and 2 are for inf and NaN.
REFUSED = 3.0


def count_bins(norm_type: float, *, wide: bool) -> int:
    """How many bins hold power sums; `wide` where norms may be of float64 gradients."""
    if norm_type == 0 or (norm_type <= UNBINNED and not wide):
        return 1
    return 2 * round(_EXPONENTS / _bin_width(norm_type)) + 1


def _bin_width(norm_type: float) -> float:
    """Binary exponents of the norms in a bin."""
    return min(_SPAN / norm_type, _SPAN)


def powers_of(
    norms: Tensor, norm_type: float, bins: int, *, narrow: bool, together: bool
) -> Tensor:
    """norm**p, a row each of one number a bin: by magnitude, so that every power fits."""
    if bins == 1 or (narrow and norm_type <= UNBINNED):
        if norm_type == 2 and together:
            powers = torch.dot(norms, norms).reshape(1, 1)
        else:
            powers = (norms if norm_type == 0 else norms.pow(norm_type)).reshape(-1, 1)
        half = bins // 2
        rows = pad(powers, (half, half)) if half else powers
    else:
        width, half = _bin_width(norm_type), bins // 2
        exponents = torch.frexp(norms).exponent.to(norms.dtype)
        at = torch.round(exponents / width).clamp(-half, half)
        # In two factors: one may not fit.
        shift = torch.exp2(-at * (width / 2))
        powers = (norms * shift * shift).pow(norm_type)
        columns = torch.arange(-half, half + 1, device=norms.device)
        rows = torch.where(at[:, None] == columns, powers[:, None], 0.0)
    return rows.sum(0, keepdim=True) if together and rows.shape[0] != 1 else rows


def positive(sums: Tensor) -> Tensor:
    """Sums, NaN where a process refused its gradients."""
    return torch.where(sums < 0, math.nan, sums)


def roots_of(sums: Tensor, norm_type: float) -> Tensor:
    """The norm of each row of power sums, 1-d."""
    bins = sums.shape[1]
    if norm_type == 0:
        return positive(sums)[:, 0].round()
    roots = sums.sqrt() if norm_type == 2 else positive(sums).pow(1 / norm_type)
    if bins == 1:
        return roots[:, 0]
    columns = torch.arange(-(bins // 2), bins // 2 + 1, dtype=sums.dtype, device=sums.device)
    shift = torch.exp2(columns * (_bin_width(norm_type) / 2))
    roots = roots * shift * shift
    largest = roots.amax(1, keepdim=True)
    # Dividing by 1 instead of 0, inf and NaN gives just these.
    scale = torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
    return (scale * (roots / scale).pow(norm_type).sum(1, keepdim=True).pow(1 / norm_type))[:, 0]


def extreme_of(rows: Tensor, sign: float) -> Tensor:
    """The norm of each row of extremes, 1-d."""
    value, flag = rows.unbind(1)
    # Nobody has such a gradient, or an element of it.
    value = torch.where((flag == 0) & value.isinf(), 0.0, sign * value)
    return torch.where(flag >= 2, math.nan, value)
