"""Norms and coefficients of parameter groups with a rule, beside those of the wrapper."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.cases import assert_norm
from helpers.clip_stats import KEYS, grouped, torch_norm
from helpers.training import give_grads, new_params, sgd, wrapped
from tritonclip import ClippedOptimizer


def test_groups_with_a_rule_have_entries_of_their_own():
    params = new_params()
    optimizer = grouped(params)
    grads = give_grads(params)
    optimizer.step()
    stats, summary = optimizer.stats, optimizer.stats.summary()
    own, shared = torch_norm([grads[1]]), torch_norm([grads[0], grads[2]])
    assert set(stats.group_norms) == set(stats.group_coefficients) == {1}
    assert_norm(stats.group_norms[1], own)
    assert_norm(stats.last_norm, shared)
    assert set(summary) == KEYS | {"group1_norm", "group1_coefficient"}
    assert summary["group1_norm"] == pytest.approx(own, rel=1e-6)
    assert summary["group1_coefficient"] == pytest.approx(0.25 / (own + 1e-6), rel=1.2e-6)


def test_groups_that_alone_were_clipped_make_a_clipped_step():
    params = new_params()
    optimizer = grouped(params)
    give_grads(params, size=1e-3)
    params[1].grad = torch.ones(4, 5)
    optimizer.step()
    assert float(optimizer.stats.last_coefficient) == 1
    assert int(optimizer.stats.clipped_steps) == 1


def test_groups_that_all_have_rules_leave_the_wrappers_norm_unknown():
    params = new_params()
    optimizer = ClippedOptimizer(sgd([{"params": params, "clip": 0.25}]), 1.0)
    give_grads(params)
    optimizer.step()
    summary = optimizer.stats.summary()
    assert math.isnan(summary["norm"])
    assert summary["clipped_steps"] == 1


def test_last_norm_is_unknown_without_a_group_under_the_wrappers_rule():
    params, optimizer = wrapped(sgd)
    give_grads(params)
    optimizer.step()
    optimizer.param_groups[0]["clip"] = 2.0
    give_grads(params)
    optimizer.step()
    summary = optimizer.stats.summary()
    assert math.isnan(summary["norm"])
    assert summary["group0_norm"] > 0
