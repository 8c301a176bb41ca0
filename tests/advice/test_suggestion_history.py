"""The norms that a suggestion reads: histories of every kind, and files with several runs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import tritonclip
from helpers.norm_series import norms_of
from tritonclip.monitor.history import read


def test_step_numbers_that_repeat_are_remarked_on(path):
    rows = [*enumerate(norms_of(300), 1), *enumerate(norms_of(300, seed=1), 2)]
    path.write_text("run,step,norm\n" + "".join(f"1,{step},{norm}\n" for step, norm in rows))
    suggestion = tritonclip.suggest_max_norm(path, warmup=0)
    assert (suggestion.steps, suggestion.run) == (301, 1)
    assert "only the later rows count: 299 earlier ones were left out" in suggestion.reason


def test_too_few_steps_name_the_replaced_ones(path):
    path.write_text("run,step,norm\n" + "".join(f"1,{n},1\n" for n in [*range(300), 1, 2]))
    with pytest.raises(ValueError, match=r"got 3 in 3 steps; .*299 earlier ones were left out"):
        tritonclip.suggest_max_norm(path)


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
    path = tmp_path / "run.jsonl"
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


def with_warmup(n=300, scale=1.0):
    """Norms around 1 with 4% spikes of 7, after a warm-up that decays from 30."""
    norms = norms_of(n, spread=0.15, spikes=0.04, height=7.0, seed=2)
    return scale * norms * (1 + 29 * np.exp(-np.arange(n) / 25))


def test_a_repeated_run_has_the_same_suggestion(record_runs):
    once = tritonclip.suggest_max_norm(with_warmup())
    twice = tritonclip.suggest_max_norm(record_runs(with_warmup(), with_warmup()))
    said = " This is run 2 of 2, from step 301 on. The same holds for run 1."
    spikes = tuple(replace(spike, step=spike.step + 300) for spike in once.spikes)
    assert once.max_norm == 4.9
    assert twice == replace(once, reason=once.reason + said, spikes=spikes, run=2)


@pytest.mark.parametrize("number", [1, 2])
def test_a_run_can_be_chosen(record_runs, number):
    runs = {1: with_warmup(), 2: with_warmup(200, scale=5.0)}
    path = record_runs(*runs.values())
    alone = tritonclip.suggest_max_norm(runs[number])
    asked = tritonclip.suggest_max_norm(path, run=number)
    assert (asked.max_norm, asked.steps, asked.run) == (alone.max_norm, alone.steps, number)
    assert f"This is run {number} of 2, " in asked.reason


def test_runs_that_do_not_agree_are_named_with_their_limits(record_runs):
    path = record_runs(with_warmup(), norms_of(200, spread=0.05), with_warmup(scale=5.0))
    reason = tritonclip.suggest_max_norm(path).reason
    assert "This is run 3 of 3, from step 501 on. It does not for runs " in reason
    assert "1 (max_norm 4.9), 2 (no outliers); choose one by run= or --run." in reason


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [((300, 19), 1), ((300, 50), 1), ((300, 100), 2), ((19, 30, 40), 3), ((30, 19), 1)],
    ids=["too short", "short", "enough", "all short", "the only one"],
)
def test_the_last_run_with_enough_steps_is_chosen(record_runs, sizes, chosen):
    path = record_runs(*(norms_of(n, spikes=0.1) for n in sizes))
    suggestion = tritonclip.suggest_max_norm(path)
    assert suggestion.run == chosen
    short = [str(n) for n, size in enumerate(sizes, 1) if size < 20]
    said = f" Run {', '.join(short)} has too few steps to be judged."
    assert (said in suggestion.reason) is bool(short)


def test_runs_that_are_all_too_short_are_refused(record_runs):
    path = record_runs([1.0] * 10, [1.0] * 12)
    with pytest.raises(ValueError, match=r"got 12 in 12 steps of run 2, of 2; record some hundred"):
        tritonclip.suggest_max_norm(path)


def test_runs_agree_on_a_limit_below_a_cluster_of_outliers(record_runs):
    runs = [norms_of(300, spikes=spikes, height=50.0, seed=3) for spikes in (0.16, 0.15)]
    reason = tritonclip.suggest_max_norm(record_runs(*runs), warmup=0).reason
    assert "look at their data" in reason
    assert "The same holds for run 1." in reason


def test_of_many_runs_the_first_are_named(record_runs):
    reason = tritonclip.suggest_max_norm(record_runs(*[norms_of(30)] * 12)).reason
    assert "The same holds for runs 1, 2, 3, 4, 5, 6, 7, 8 and 3 more." in reason


def test_a_warmup_that_is_given_counts_in_each_run(record_runs):
    path = record_runs(with_warmup(), with_warmup())
    given = tritonclip.suggest_max_norm(path, warmup=100)
    assert (given.warmup, given.steps) == (100, 200)
    assert given.max_norm == tritonclip.suggest_max_norm(with_warmup(), warmup=100).max_norm
    with pytest.raises(ValueError, match=r"steps of run 2, of 2; the warm-up leaves none of the"):
        tritonclip.suggest_max_norm(path, warmup=300)


def test_the_limit_in_use_is_that_of_the_run(record_runs):
    for limit in (1.0, 3.0):
        path = record_runs(norms_of(300, spikes=0.05), limit=limit)
    assert "The limit in use, 3, clips" in tritonclip.suggest_max_norm(path).reason
    assert "The limit in use, 1, clips" in tritonclip.suggest_max_norm(path, run=1).reason


def test_a_run_that_resumes_from_a_checkpoint_is_one_run(path):
    with tritonclip.record(path) as recorder:
        for norm in norms_of(300):
            recorder.add_(float(norm))
        saved = recorder.state_dict()
    with tritonclip.record(path, append=True) as recorder:
        recorder.load_state_dict(saved)
        for norm in norms_of(300, seed=1):
            recorder.add_(float(norm))
    suggestion = tritonclip.suggest_max_norm(path, warmup=0)
    assert (suggestion.steps, suggestion.run) == (600, 1)
    assert "This is run" not in suggestion.reason
    assert len(read(path).runs) == 1


@pytest.mark.parametrize("again", [300, 100, 3])
def test_step_numbers_that_start_again_begin_a_run(path, again):
    rows = [*enumerate(norms_of(300), 1), *enumerate(norms_of(again, seed=1), 1)]
    path.write_text("step,norm\n" + "".join(f"{step},{norm}\n" for step, norm in rows))
    suggestion = tritonclip.suggest_max_norm(path, warmup=0)
    assert (suggestion.run, suggestion.steps) == ((2, again) if again >= 100 else (1, 300))
    assert f"This is run {suggestion.run} of 2, from step 1 on." in suggestion.reason


@pytest.mark.parametrize("number", [0, 3, -1, True, 1.0, "2"], ids=repr)
def test_a_run_that_is_not_there_is_refused(record_runs, number):
    path = record_runs([1.0] * 30, [1.0] * 30)
    with pytest.raises(ValueError, match=r"run must be the number of a run, 1 to 2 in this hist"):
        tritonclip.suggest_max_norm(path, run=number)


def test_runs_of_a_history_have_its_rows(record_runs):
    history = read(record_runs([1.0, 2.0], [3.0, 4.0, 5.0]))
    assert [run.norms.tolist() for run in history.runs] == [[1.0, 2.0], [3.0, 4.0, 5.0]]
    assert history.run(2).steps.tolist() == [3, 4, 5]
