"""Counts of steps, of those clipped and of those skipped, and the share that was clipped."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.clip_stats import COUNTS
from helpers.training import give_grads, sgd, wrapped
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, ClippedOptimizer


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(1.0, id="global"),
        pytest.param(ClipByNorm(1.0), id="each"),
    ],
)
def test_steps_are_counted_by_what_became_of_them(rule):
    """Three clipped, two unclipped, one skipped."""
    params, optimizer = wrapped(sgd, rule, nonfinite="skip")
    for size in (10.0, 1e-3, math.nan, 10.0, 1e-3, 10.0):
        give_grads(params, size=size)
        optimizer.step()
    summary = optimizer.stats.summary()
    expected = {"steps": 5, "clipped_steps": 3, "skipped_steps": 1}
    assert {name: summary[name] for name in COUNTS} == dict.fromkeys(COUNTS, 0) | expected
    assert summary["clipped_share"] == 0.6


def test_summary_has_the_skips_in_a_row():
    params, optimizer = wrapped(sgd, nonfinite="skip")
    for size, expected in ((math.nan, 1), (math.nan, 2), (1.0, 0)):
        give_grads(params, size=size)
        optimizer.step()
        assert optimizer.stats.summary()["consecutive_skips"] == expected


def test_steps_clipped_to_zero_count_as_clipped():
    params, optimizer = wrapped(sgd, nonfinite="zero")
    give_grads(params, size=math.nan)
    optimizer.step()
    summary = optimizer.stats.summary()
    assert (summary["coefficient"], summary["clipped_steps"]) == (0.0, 1)


def test_steps_with_a_nan_norm_count_as_steps():
    params, optimizer = wrapped(sgd)
    give_grads(params, size=math.nan)
    optimizer.step()
    summary = optimizer.stats.summary()
    assert math.isnan(summary["norm"])
    assert (summary["steps"], summary["clipped_steps"]) == (1, 0)


def test_steps_at_the_limit_exactly_are_not_clipped():
    """With eps=0, a norm of 5 under a limit of 5 has the coefficient 1."""
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = ClippedOptimizer(sgd([param]), ClipByGlobalNorm(5.0, eps=0.0))
    param.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert int(optimizer.stats.clipped_steps) == 0
    assert float(optimizer.stats.last_coefficient) == 1


def test_step_without_gradients_is_a_step_of_norm_zero():
    _, optimizer = wrapped(sgd)
    optimizer.step()
    summary = optimizer.stats.summary()
    assert (summary["norm"], summary["coefficient"]) == (0.0, 1.0)
    assert (summary["steps"], summary["clipped_steps"]) == (1, 0)


def test_by_norm_counts_a_step_at_which_one_gradient_was_clipped():
    params, optimizer = wrapped(sgd, ClipByNorm(1.0))
    give_grads(params, size=1e-3)
    params[1].grad = torch.full((4, 5), 9.0)
    optimizer.step()
    assert int(optimizer.stats.clipped_steps) == 1


def test_share_is_of_the_steps_that_measured_a_norm():
    params, optimizer = wrapped(sgd)
    for rule in (1.0, 1e9, ClipByValue(0.1), ClipByValue(0.1)):
        optimizer.clip = rule
        give_grads(params, size=100.0)
        optimizer.step()
    _, loaded = wrapped(sgd, ClipByValue(0.1))
    loaded.load_state_dict(optimizer.state_dict())
    for stats in (optimizer.stats, loaded.stats):
        assert (int(stats.steps), int(stats.measured_steps), int(stats.clipped_steps)) == (4, 2, 1)
        assert stats.summary()["clipped_share"] == 0.5


def test_counts_that_were_read_stay_what_they_were():
    params, optimizer = wrapped(sgd)
    counts = []
    for _ in range(3):
        give_grads(params)
        optimizer.step()
        counts.append(optimizer.stats.steps)
    assert [int(count) for count in counts] == [1, 2, 3]


@pytest.mark.parametrize("rule", [1.0, ClipByNorm(1.0)], ids=["global", "each"])
def test_counts_stay_where_the_last_coefficient_is_written_to(rule):
    """As by an all-reduce that logs it; over 1,000 gradients it is a tensor on a CPU too."""
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(1000)]
    optimizer = ClippedOptimizer(sgd(params), rule)
    for _ in range(3):
        give_grads(params, size=9.0)
        optimizer.step()
        optimizer.stats.last_coefficient.fill_(1.0)
    assert int(optimizer.stats.clipped_steps) == 3
    assert float(optimizer.stats.last_coefficient) < 1
