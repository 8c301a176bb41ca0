"""Averages, quantiles and moments of norms on the host, in C where `has_extension`."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

try:
    from tritonclip.backends._native import (
        advance_averages,
        advance_quantiles,
        mean_and_deviation,
    )

    has_extension = True
except ImportError:
    has_extension = False


def are_counts(numbers: Tensor) -> bool:
    """Whether all numbers may be counts of norms."""
    return bool(((numbers >= 0) & numbers.isfinite() & (numbers == numbers.floor())).all())


def are_windows(rows: Tensor, least: float = 0.0) -> bool:
    """Whether each row is a window, and the count of what entered it: as many slots are filled.

    Rows are float64[..., window + 1]; `least` is below everything that may have entered.
    """
    slots, n = rows[..., :-1], rows[..., -1:]
    filled = torch.arange(slots.shape[-1]) < n
    fits = torch.where(filled, slots.isfinite() & (slots > least), slots.isnan())
    return bool(fits.all()) and are_counts(n)


def averages_after(
    rows: array[float], norms: list[float], share: float, *numbers: float
) -> tuple[list[float], array[float]]:
    """The limits of :class:`ClipByOwnHistory`, and the rows after these norms.

    `share` is max_norm over the norm of all, for gradients in their warm-up; then come the numbers
    of the rule. A row is the moving average of a gradient, and the number of norms in it.
    """
    after = rows[:]
    address, _ = after.buffer_info()
    return advance_averages(address, norms, share, *numbers), after


def quantiles_after(
    rows: array[float], norms: list[float], q: float, window: int, max_norm: float
) -> tuple[list[float], array[float]]:
    """The limits of :class:`ClipByOwnQuantile`, and the rows after these norms.

    A row is a window, and the number of norms that entered it.
    """
    after = rows[:]
    address, _ = after.buffer_info()
    return advance_quantiles(address, norms, q, window, max_norm), after


def moments_of(numbers: array[float], n: int) -> tuple[float, float]:
    """Mean and sample deviation of the first n numbers, 2 or more."""
    address, _ = numbers.buffer_info()
    return mean_and_deviation(address, n)
