"""Beside the gradients, a call on a CPU takes 8 MiB at most, whatever the list.

What it takes is summed up from every allocation and release that torch's CPU allocator reports to
the profiler: also inside operators, which a dispatch mode would not see, and to the byte, which
the resident size of a process is not.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tritonclip
from helpers.cases import FLOATS, each_rule, normal, of_sizes, parameters
from tritonclip import ClipByGlobalNorm, ClipByValue

LIMIT = 8 * 2**20
# 16 MiB or more of every dtype: a copy would show, and a mask of one byte an element too.
SIZE = 2**23 + 5


def peak(call: Callable[[], object]) -> int:
    """The most bytes that a call held at one time."""
    with torch.autograd.profiler.profile(profile_memory=True) as profiled:
        call()
    events = [e for e in profiled.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def uniform(dtype: torch.dtype, size: int = SIZE) -> torch.Tensor:
    """Numbers between -1 and 1, made in place."""
    return torch.empty(size, dtype=dtype).uniform_(
        -1, 1, generator=torch.Generator().manual_seed(0)
    )


GRADIENTS = {
    # In another order of its dimensions, and with gaps.
    "transposed": lambda dtype: uniform(dtype, 2048 * 4100).view(2048, 4100).t(),
    "spread": lambda dtype: uniform(dtype, 2 * 2048 * 4100).view(2048, -1)[:, ::2],
    # What has to be measured again: nothing but zeros, and squares that underflow or overflow.
    "zeros": lambda dtype: torch.zeros(SIZE, dtype=dtype),
    "tiny": lambda dtype: uniform(dtype).mul_(2.0**-20 if dtype == torch.float16 else 2.0**-100),
    "huge": lambda dtype: uniform(dtype).mul_(2.0**15 if dtype == torch.float16 else 2.0**100),
    "nan": lambda dtype: torch.full((SIZE,), torch.nan, dtype=dtype),
}
RULES = pytest.mark.parametrize("rule", each_rule(0.5, 0.25))
BY_ORDER = [pytest.param(ClipByGlobalNorm(0.5, p), id=f"p={p}") for p in (1.0, 3.0, torch.inf)]
OPTIONS: list[dict[str, Any]] = [{}, {"grad_scale": 2.0}, {"nonfinite": "error"}]
OPTIONS += [{"nonfinite": "zero"}]


def test_peak_counts_what_an_operator_takes():
    """The measurement itself: a product is held until it is summed."""
    x = torch.ones(2**20)
    assert 2**22 <= peak(lambda: (x * x).sum()) < 2**22 + 2**16
    assert peak(lambda: x.mul_(2.0)) < 2**16
    assert peak(lambda: [x.clone().sum() for _ in range(4)]) < 2**22 + 2**16


def test_a_longer_gradient_takes_no_more_memory():
    grad = torch.ones(2**26 + 5, dtype=torch.bfloat16)
    norms = []
    with tritonclip.use_backend("torch"):
        most = peak(lambda: norms.append(tritonclip.clip_tensors_(grad, 1e9)))
    assert most <= LIMIT
    assert float(norms[0]) == pytest.approx((2**26 + 5) ** 0.5, rel=1e-6)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rule", [*each_rule(0.5, 0.25), *BY_ORDER])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_clip_takes_little_memory(dtype, rule, options):
    given = parameters([uniform(dtype), normal(7, dtype)])
    assert peak(lambda: tritonclip.clip_(given, rule, **options)) <= LIMIT


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize(
    "rule", [ClipByGlobalNorm(0.5), ClipByValue(0.25)], ids=["global", "by-value"]
)
def test_clip_of_unusual_gradients_takes_little_memory(dtype, kind, rule):
    given = parameters([GRADIENTS[kind](dtype)])
    copied = given[0].numel() * dtype.itemsize if kind == "spread" else 0
    assert peak(lambda: tritonclip.clip_(given, rule)) <= copied + LIMIT


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", ["native", "torch"])
@RULES
def test_clip_of_many_small_gradients_takes_little_memory(rule, backend):
    """8,000 gradients that are gathered, 64 MiB of them."""
    given = parameters(of_sizes([2100] * 8000, torch.float32))
    with tritonclip.use_backend(backend):
        assert peak(lambda: tritonclip.clip_(given, rule)) <= LIMIT


@RULES
def test_clip_takes_no_more_for_a_gradient_four_times_as_large(rule):
    given = parameters([uniform(torch.float32, 4 * SIZE)])
    assert peak(lambda: tritonclip.clip_(given, rule)) <= LIMIT


@pytest.mark.covering(1)
@RULES
@pytest.mark.parametrize("sizes", [[2**25 + 5, 2**25 + 7], [2**18] * 300], ids=["two", "many"])
def test_clip_of_large_bfloat16_lists_takes_little_memory(rule, sizes):
    """Large enough for several slabs, and to be converted in order to be written."""
    given = parameters([uniform(torch.bfloat16, size) for size in sizes])
    assert peak(lambda: tritonclip.clip_(given, rule)) <= LIMIT


def test_get_total_norm_takes_little_memory():
    grads = [uniform(torch.bfloat16)]
    assert peak(lambda: tritonclip.get_total_norm(grads)) <= LIMIT
