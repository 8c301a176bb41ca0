"""The norms that a suggestion reads: histories of every kind."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import tritonclip
from advice.norm_series import norms_of


def test_norms_that_are_zero_or_not_finite_are_counted_and_left_out():
    norms = norms_of(spikes=0.03)
    plain = tritonclip.suggest_max_norm(norms, warmup=0)
    broken = np.insert(norms, [10, 20, 30, 600, 700], [math.nan, math.inf, 0.0, 0.0, math.inf])
    suggestion = tritonclip.suggest_max_norm(broken, warmup=0)
    assert (suggestion.nonfinite, suggestion.zeros, suggestion.steps) == (3, 2, 1000)
    assert suggestion.max_norm == plain.max_norm
    assert "3 norms are NaN or inf" in suggestion.reason


@pytest.mark.parametrize(
    ("norms", "warmup", "message"),
    [
        ([], None, "got 0 in 0 steps; record some hundred"),
        ([1.0] * 19, None, "got 19 in 19 steps; record some hundred"),
        ([0.0] * 50, None, "got 0 in 50 steps; the others are 0: measure after backward"),
        ([math.nan] * 50, None, "got 0 in 50 steps; the others are NaN or inf"),
        ([1.0] * 50, 60, "got 0 in 50 steps; the warm-up leaves none"),
    ],
    ids=["none", "few", "zero", "nan", "warmup"],
)
def test_too_few_norms_are_refused(norms, warmup, message):
    with pytest.raises(ValueError, match=f"expected at least 20 .*{message}"):
        tritonclip.suggest_max_norm(norms, warmup=warmup)


@pytest.mark.parametrize(
    "history",
    [3.0, None, ["a"], torch.ones(3, 30), torch.ones(30, dtype=torch.complex64), {"a": 1}],
    ids=["number", "none", "text", "2-d", "complex", "dict"],
)
def test_histories_of_another_kind_are_refused(history):
    with pytest.raises(TypeError, match="history must be a path, a Recorder, or norms"):
        tritonclip.suggest_max_norm(history)


def test_negative_norms_are_refused():
    with pytest.raises(ValueError, match=r"got a negative one, -1\.0"):
        tritonclip.suggest_max_norm([1.0] * 30 + [-1.0])


def test_all_kinds_of_history_give_the_same_suggestion(tmp_path):
    norms = norms_of(spikes=0.03).tolist()
    expected = tritonclip.suggest_max_norm(norms)
    path = tmp_path / "run.csv"
    recorder = tritonclip.record(path)
    for norm in norms:
        recorder.add_(norm)
    for history in (
        torch.tensor(norms, dtype=torch.float64),
        np.array(norms),
        [torch.tensor(norm, dtype=torch.float64) for norm in norms],
        iter(norms),
        recorder,
        path,
        str(path),
    ):
        assert tritonclip.suggest_max_norm(history) == expected
    recorder.close()
    assert tritonclip.suggest_max_norm(recorder) == expected


def test_steps_of_spikes_are_those_of_the_file(path):
    with tritonclip.record(path) as recorder:
        recorder.load_state_dict({"steps": 5000})
        for norm in norms_of(spikes=0.03):
            recorder.add_(float(norm))
        recorder.add_(1000.0)
    assert tritonclip.suggest_max_norm(path).spikes[0].step == 6001
