"""tritonclip in place, beside torch.nn.utils and others, by gradient list, rule and step.

A test fails where a result of ours differs from float64; another provider's wrong result is not
timed, and its test is skipped.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench import workloads
from bench.comparison import Comparison
from bench.providers import IN_PLACE

# Warnings of a library that is compared are errors in the tests of this one.
pytestmark = pytest.mark.filterwarnings("default")
PROVIDERS, PLANS = IN_PLACE, workloads.PLANS


def test_clip(benchmark: Any, comparison: Comparison, provider: str) -> None:
    comparison.hand_over(benchmark, provider)
