"""The limit that a run had: judged where it was recorded, noticed where norms come after it."""

from __future__ import annotations

import numpy as np
import pytest

import tritonclip
from helpers.norm_series import norms_of


@pytest.mark.parametrize("limit", [0.9, 1.5])
def test_norms_that_something_else_clipped_are_noticed(limit):
    norms = norms_of(spikes=0.03)
    norms = norms * np.minimum(1, limit / (norms + 1e-6))
    suggestion = tritonclip.suggest_max_norm(norms.astype(np.float32), warmup=0)
    assert suggestion.verdict == "clipped before"
    assert suggestion.max_norm is None
    assert suggestion.candidates == ()
    assert "something clips before" in suggestion.reason


@pytest.mark.parametrize("norm", [0.37, 1.0, 2000.0])
def test_norms_that_are_all_equal_are_not_said_to_be_clipped(norm):
    suggestion = tritonclip.suggest_max_norm([norm] * 300)
    assert (suggestion.verdict, suggestion.max_norm) == ("constant", None)
    assert suggestion.candidates == ()
    assert suggestion.reason.startswith(
        f"All 300 norms equal {norm:g}, so that no limit can be suggested."
    )


@pytest.mark.parametrize("height", [1.0, 0.5], ids=["all", "most"])
def test_norms_at_the_limit_in_use_are_said_to_be_measured_after_clipping(tmp_path, height):
    path = tmp_path / "run.csv"
    with tritonclip.record(path) as recorder:
        for step in range(100):
            recorder.add_(1.0 - 1e-6 if step % 4 else height, limit=1.0)
    reason = tritonclip.suggest_max_norm(path).reason
    assert "equals the limit in use, 1: record the norm that clip_ returns" in reason


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (3.5, "The limit in use, 3.5, clips 3.0%, and may stay."),
        (0.9, "and acts as a part of the learning rate: tune both if you change it."),
        (100.0, "The limit in use, 100, clips 0.0%, less than the tail."),
    ],
    ids=["right", "low", "high"],
)
def test_the_limit_in_use_is_a_candidate_and_judged(tmp_path, limit, said):
    path = tmp_path / "run.csv"
    with tritonclip.record(path) as recorder:
        for norm in norms_of(spikes=0.03):
            recorder.add_(float(norm), limit=limit)
    suggestion = tritonclip.suggest_max_norm(path)
    assert (limit, "in use") in [(c.max_norm, c.origin) for c in suggestion.candidates]
    assert said in suggestion.reason


def test_a_limit_in_use_is_not_to_stay_where_the_norm_drifts(tmp_path):
    path = tmp_path / "run.csv"
    with tritonclip.record(path) as recorder:
        for norm in norms_of(spikes=0.03, drift=0.05):
            recorder.add_(float(norm), limit=1.0)
    suggestion = tritonclip.suggest_max_norm(path)
    assert suggestion.verdict == "drift"
    assert "but does not follow the norm." in suggestion.reason


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (float("inf"), "No limit was in use: try also "),
        (None, "If no limit was in use, try also "),
    ],
    ids=["inf", "unknown"],
)
def test_lower_limits_are_named_where_none_is_known(tmp_path, limit, said):
    path = tmp_path / "run.csv"
    with tritonclip.record(path) as recorder:
        for norm in norms_of(spikes=0.03):
            recorder.add_(float(norm), limit=limit)
    suggestion = tritonclip.suggest_max_norm(path)
    max_norm = suggestion.max_norm
    assert max_norm is not None
    assert suggestion.reason.endswith(f" {said}{max_norm / 2:.2g} and {max_norm / 5:.2g}.")


def test_limits_that_changed_are_no_candidates(tmp_path):
    path = tmp_path / "run.csv"
    with tritonclip.record(path) as recorder:
        for step, norm in enumerate(norms_of(spikes=0.03)):
            recorder.add_(float(norm), limit=3.5 + step % 2)
    suggestion = tritonclip.suggest_max_norm(path)
    assert "in use" not in [candidate.origin for candidate in suggestion.candidates]
    assert "in use" not in suggestion.reason
