"""tritonclip beside torch.nn.utils and others, in groups by gradient list, rule and step.

`pytest bench --benchmark-only` runs the quick plan. A test fails where a result of ours differs
from float64; another provider's wrong result is not timed, and its test is skipped.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from bench.speed import Measured

# Readings of the clock before and after each round of one provider, in seconds.
readings: deque[float] = deque()


def paired_rounds() -> float:
    """The clock of pytest-benchmark: reads rounds that were timed before."""
    return readings.popleft()


# Warnings of a library that is compared are errors in the tests of this one.
pytestmark = [pytest.mark.benchmark(timer=paired_rounds), pytest.mark.filterwarnings("default")]


def hand_over(measured: Measured, benchmark: Any) -> None:
    """Gives the plugin a row and its samples."""
    row = measured.row
    if measured.fault and row.ours:
        pytest.fail(f"{row}: {measured.fault}")
    if measured.fault:
        pytest.skip(f"wrong result, not timed: {row}: {measured.fault}")
    benchmark.extra_info.update(row.values)
    readings.extend(reading for wall in measured.walls for reading in (0.0, wall / 1e6))
    benchmark.pedantic(lambda: None, rounds=max(1, len(measured.walls)))


def test_clip(measured: Measured, benchmark: Any) -> None:
    """In place."""
    hand_over(measured, benchmark)


def test_functional(measured: Measured, benchmark: Any) -> None:
    """Out of place, beside idioms of PyTorch: torch.nn.utils has none."""
    hand_over(measured, benchmark)
