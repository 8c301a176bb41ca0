"""Our norms beside torch's on lists that are hard to measure.

Squares of their elements overflow or underflow in single precision, norms do not fit a half type,
or sums are long. Twenty calls show whether results have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from time import perf_counter_ns
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonclip
from bench.accuracy import OURS, norm, normal
from bench.comparison import CPU, hand_over
from bench.samples import Samples
from bench.workloads import WORKLOADS, dtype_of

NORMS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "tritonclip": tritonclip.get_total_norm,
    "torch": torch.nn.utils.get_total_norm,
}


def _filled(value: str, dtype: str) -> list[Tensor]:
    return [torch.full((1000,), float(value), dtype=dtype_of(dtype, 1)) for _ in range(4)]


def _normal(dtype: str) -> list[Tensor]:
    return list(normal(LONG, dtype, CPU))


ONES, CALLS = 200_000_000, 20
# Elements of GPT-2 124M.
MANY = 124_439_808
LONG = WORKLOADS["small_1"]._replace(shapes=((MANY,),))
HARD: dict[str, Callable[[], list[Tensor]]] = {
    f"4,000 times {value}, {dtype}": partial(_filled, value, dtype)
    for value, dtype in (*product(("1e20", "1e-25"), ("float32", "bfloat16")), ("6e4", "float16"))
}
HARD[f"{ONES:,} ones, float32"] = lambda: [torch.ones(ONES)]
HARD |= {
    f"{MANY:,} normal, {dtype}": partial(_normal, dtype)
    for dtype in ("float32", "bfloat16", "float16")
}


@pytest.fixture(scope="module")
def gradients(workload: str) -> list[Tensor]:
    return HARD[workload]()


@pytest.mark.parametrize("provider", NORMS)
@pytest.mark.parametrize("workload", HARD, scope="module")
def test_accuracy(benchmark: Any, gradients: list[Tensor], provider: str) -> None:
    """The error of a norm, and how many results of twenty calls differ; ours must not."""
    truth, norms, times = norm(gradients), [], []
    for _ in range(CALLS):
        start = perf_counter_ns()
        norms.append(float(NORMS[provider](gradients)))
        times.append((perf_counter_ns() - start) / 1e3)
    error, distinct = abs(norms[0] / truth - 1), len({one.hex() for one in norms})
    if provider == "tritonclip":
        assert error <= OURS
        assert distinct == 1
    # JSON has no numbers for inf and nan, so they become text.
    found, off = (one if math.isfinite(one) else str(one) for one in (norms[0], error))
    benchmark.extra_info |= {"truth": truth, "norm": found, "norm_error": off}
    benchmark.extra_info["distinct"] = distinct
    hand_over(benchmark, Samples(times, [], 1))
