"""tritonclip in place, beside torch.nn.utils and others, by gradient list, rule and step.

A test fails if our result differs from float64. If another provider's does, it is not timed, and
its test is skipped.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench import workloads
from bench.comparison import Comparison
from bench.providers import IN_PLACE

# In the tests of this library, warnings of a compared library would be errors.
pytestmark = pytest.mark.filterwarnings("default")
PROVIDERS, PLANS = IN_PLACE, workloads.PLANS


def test_clip(benchmark: Any, comparison: Comparison, provider: str) -> None:
    comparison.hand_over(benchmark, provider)
