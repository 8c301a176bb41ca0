"""tritonclip out of place, beside idioms of PyTorch; torch.nn.utils clips in place only."""

from __future__ import annotations

from typing import Any

import pytest

from bench.comparison import Comparison
from bench.providers import OUT_OF_PLACE
from bench.workloads import FUNCTIONAL

pytestmark = pytest.mark.filterwarnings("default")
PROVIDERS, PLANS = OUT_OF_PLACE, FUNCTIONAL


def test_functional(benchmark: Any, comparison: Comparison, provider: str) -> None:
    comparison.hand_over(benchmark, provider)
