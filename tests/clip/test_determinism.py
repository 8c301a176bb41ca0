"""Equal inputs give equal bits, on every run, in whatever order calls come and in any thread."""

from __future__ import annotations

import pytest
import torch

import tritonclip
from helpers.cases import (
    CHUNK,
    FLOATS,
    INTERPRETED,
    LARGE,
    assert_bits,
    each_rule,
    normal,
    of_sizes,
    parameter,
    parameters,
    unchanged,
)
from tritonclip import ClipByGlobalNorm, ClipByNorm

RULES = [*each_rule(0.5, 0.1), pytest.param(ClipByGlobalNorm(0.5, norm_type=3.0), id="global-p3")]


def run(rule, dtype, device):
    """One call on fresh copies of the same values."""
    grads = of_sizes((3, LARGE, CHUNK - 1), dtype, device)
    measured = tritonclip.clip_(parameters(grads), rule)
    return grads if measured is None else [*grads, measured]


@pytest.mark.covering(1 if INTERPRETED else 2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rule", RULES)
def test_clip_gives_equal_bits_on_every_run(device, rule, dtype):
    first = run(rule, dtype, device)
    for _ in range(1 if INTERPRETED else 4):
        assert_bits(run(rule, dtype, device), first)


@pytest.mark.covering(2)
@pytest.mark.skipif(INTERPRETED, reason="kernels do not run in the threads of torch")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rule", RULES)
def test_threads_of_torch_change_no_bit(device, set_threads, rule, dtype):
    alone = run(rule, dtype, device)
    for n_threads in (2, 3):
        set_threads(n_threads)
        assert_bits(run(rule, dtype, device), alone)


def test_clip_is_not_disturbed_by_calls_in_between(device):
    """Tables and scratch memory are kept between calls; what they held must not show."""
    rule = ClipByGlobalNorm(0.5)
    first = run(rule, torch.float32, device)
    for value in (torch.nan, torch.inf, 0.0):
        grads = [torch.full((size,), value, device=device) for size in (3, LARGE, CHUNK - 1)]
        tritonclip.clip_(parameters(grads), rule)
        assert_bits(run(rule, torch.float32, device), first)


def test_norms_of_earlier_calls_stay(device):
    """What is returned is not scratch memory that the next call fills again."""
    rules = (ClipByGlobalNorm(1.0), ClipByNorm(1.0))
    first = parameter(normal(CHUNK + 1, device=device))
    other = parameter(torch.full((CHUNK + 1,), 9.0, device=device))
    with unchanged([tritonclip.clip_([first], rule) for rule in rules]):
        for rule in rules:
            tritonclip.clip_([other], rule)
