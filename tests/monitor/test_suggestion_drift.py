"""Norms that drift over the run need a limit that follows them; others are not said to drift."""

from __future__ import annotations

import pytest

import tritonclip
from helpers.norm_series import norms_of


@pytest.mark.parametrize("drift", [0.05, 20.0], ids=["falling", "rising"])
@pytest.mark.parametrize("spikes", [0.0, 0.03], ids=["calm", "spikes"])
def test_drift_is_found(drift, spikes):
    suggestion = tritonclip.suggest_max_norm(norms_of(spikes=spikes, drift=drift), warmup=0)
    assert "The norm drifts" in suggestion.reason
    a, b, c = suggestion.medians
    assert (a > b > c) if drift < 1 else (a < b < c)
    if spikes:
        assert suggestion.verdict == "drift"
        assert "Take a limit that follows the norm, such as ClipByQuantile." in suggestion.reason
        assert f"If the limit has to be fixed, take {suggestion.max_norm:g}" in suggestion.reason
    else:
        assert suggestion.verdict == "nothing to clip"
        # No fixed guard beside the drift that it could not follow.
        assert "take a limit that follows it, such as ClipByZScore" in suggestion.reason
        assert "ten times the largest norm" not in suggestion.reason


@pytest.mark.parametrize("drift", [0.8, 1.0, 1.25])
def test_a_run_that_hardly_changes_does_not_drift(drift):
    suggestion = tritonclip.suggest_max_norm(norms_of(spikes=0.03, drift=drift), warmup=0)
    assert suggestion.verdict == "clip"
    assert "drift" not in suggestion.reason


def test_a_run_that_comes_back_drifts():
    """First and last third are alike, the middle is not."""
    norms = norms_of(spikes=0.03)
    norms[333:666] *= 8
    assert tritonclip.suggest_max_norm(norms, warmup=0).verdict == "drift"


def test_a_wide_spread_is_no_drift():
    """The medians of thirds differ by a factor that single norms exceed all the time."""
    norms = norms_of(spread=1.0, drift=2.0)
    assert tritonclip.suggest_max_norm(norms, warmup=0).verdict == "clip"
