"""Statistics of ClippedOptimizer where parameter groups have rules, or no gradients."""

from __future__ import annotations

import pytest
import torch

from helpers.param_groups import ABSENT, grouped, three_groups
from tritonclip import ClipByValue


def test_groups_that_all_have_a_rule_leave_the_wrappers_nothing():
    optimizer = grouped(three_groups(), [1.0, 2.0, None])
    optimizer.step()
    assert optimizer.stats.last_norm.isnan()
    assert int(optimizer.stats.clipped_steps) == 1


@pytest.mark.parametrize(
    ("rule", "own", "count"),
    [(1.0, 1e9, 1), (1e9, 1.0, 1), (1.0, 1.0, 1), (1e9, 1e9, 0)],
    ids=["the-wrappers", "its-own", "both", "neither"],
)
def test_step_counts_as_clipped_where_any_rule_clipped(rule, own, count):
    optimizer = grouped(three_groups(), [ABSENT, own, ABSENT], rule)
    optimizer.step()
    assert int(optimizer.stats.clipped_steps) == count


def test_summary_names_the_groups_with_a_rule():
    optimizer = grouped([[torch.tensor([3.0, 4.0])], [torch.tensor([6.0, 8.0])]], [ABSENT, 5.0])
    optimizer.step()
    summary = optimizer.stats.summary()
    assert summary["norm"] == 5.0
    assert summary["group1_norm"] == 10.0
    # float32, and eps=1e-6.
    assert summary["group1_coefficient"] == pytest.approx(0.5, rel=3e-7)
    assert "group0_norm" not in summary


def test_group_that_gave_up_its_rule_leaves_the_statistics():
    optimizer = grouped(three_groups(), [ABSENT, 0.25, ABSENT])
    optimizer.step()
    del optimizer.param_groups[1]["clip"]
    optimizer.step()
    assert optimizer.stats.group_norms == {}
    assert optimizer.stats.group_coefficients == {}


def test_clip_by_value_measures_nothing():
    optimizer = grouped(three_groups(), [ABSENT] * 3, ClipByValue(0.5))
    optimizer.step()
    assert optimizer.stats.last_norm.isnan()
    assert optimizer.stats.last_coefficient.isnan()
    assert int(optimizer.stats.steps) == 1
    assert int(optimizer.stats.clipped_steps) == 0


@pytest.mark.parametrize("zero_size", [False, True], ids=["none", "zero-size"])
@pytest.mark.parametrize("nonfinite", ["propagate", "error", "zero", "skip"])
def test_step_without_any_gradient(nonfinite, zero_size):
    optimizer = grouped([[torch.zeros(0)], [torch.zeros(0)]], [ABSENT, 0.5], nonfinite=nonfinite)
    if not zero_size:
        optimizer.zero_grad()
    optimizer.step()
    summary = optimizer.stats.summary()
    assert summary["norm"] == summary["group1_norm"] == 0.0
    assert summary["coefficient"] == summary["group1_coefficient"] == 1.0
    assert (summary["steps"], summary["clipped_steps"]) == (1, 0)
