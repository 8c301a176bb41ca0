"""The bounds of elements, as each dtype holds them."""

import math
from functools import lru_cache

import torch


class Bounds(dict[torch.dtype, tuple[float, float]]):
    """Two bounds by dtype, rounded where it is first asked for; a finite bound stays finite.

    As items, those that were asked for cost no call of a function.
    """

    def __init__(self, low: float, high: float) -> None:
        self._low, self._high = low, high

    def __missing__(self, dtype: torch.dtype) -> tuple[float, float]:
        low, high = self._low, self._high
        if low and high:
            rounded = _rounded_bounds(low, high, dtype)
        else:
            # lru_cache finds 0.0 for -0.0.
            rounded = _rounded(low, dtype) if low else low, _rounded(high, dtype) if high else high
        self[dtype] = rounded
        return rounded


@lru_cache
def _rounded(bound: float, dtype: torch.dtype) -> float:
    largest = torch.finfo(dtype).max
    if math.isinf(bound):
        # Also for a dtype without inf: no limit.
        return bound
    bound = min(max(bound, -largest), largest)
    return float(torch.tensor(bound, dtype=torch.float64, device="cpu").to(dtype))


@lru_cache
def _rounded_bounds(low: float, high: float, dtype: torch.dtype) -> tuple[float, float]:
    return _rounded(low, dtype), _rounded(high, dtype)
