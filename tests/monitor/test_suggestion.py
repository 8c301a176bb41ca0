"""A limit from norms: the tail is clipped, and a run that needs none, or another, is told so."""

from __future__ import annotations

import copy
import math
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import tritonclip
from tritonclip.monitor.candidates import LEAST_SHARE, MOST_SHARE
from tritonclip.monitor.suggestion import LEAST_STEPS
from tritonclip.monitor.trend import warmup_of


def norms_of(
    n: int = 1000,
    *,
    spread: float = 0.2,
    spikes: float = 0.0,
    height: float = 10.0,
    drift: float = 1.0,
    seed: int = 0,
) -> np.ndarray[Any, Any]:
    """Log-normal norms around 1, some of them spikes, that change by a factor over the run."""
    random = np.random.default_rng(seed)
    norms = np.exp(spread * random.standard_normal(n).clip(-3, 3))
    norms[random.permutation(n)[: round(spikes * n)]] *= height
    return norms * drift ** np.linspace(0, 1, n)


def share_over(norms: Any, limit: float) -> float:
    return float(np.mean(np.asarray(norms) > limit))


@pytest.mark.parametrize("spikes", [0.02, 0.05, 0.08])
def test_suggestion_clips_the_spikes_and_little_else(spikes):
    norms = norms_of(spikes=spikes)
    suggestion = tritonclip.suggest_max_norm(norms, warmup=0)
    assert suggestion.verdict == "clip"
    assert suggestion.max_norm is not None
    # Over the median and under the spikes, which start at 10 e^-0.6.
    assert 1.2 < suggestion.max_norm < 5.4
    assert share_over(norms, suggestion.max_norm) == pytest.approx(spikes, abs=0.01)
    assert f"{suggestion.max_norm:g} clips" in suggestion.reason


@pytest.mark.parametrize("spikes", [0.002, 0.3], ids=["few", "many"])
def test_suggestion_keeps_to_one_to_ten_percent(spikes):
    norms = norms_of(5000, spikes=spikes)
    suggestion = tritonclip.suggest_max_norm(norms, warmup=0)
    assert suggestion.max_norm is not None
    share = share_over(norms, suggestion.max_norm)
    assert share == pytest.approx(LEAST_SHARE if spikes < 0.01 else MOST_SHARE, rel=0.5)
    assert LEAST_SHARE <= share <= MOST_SHARE
    part = "hang on single steps" if spikes < 0.01 else "part of the learning rate"
    assert part in suggestion.reason


def test_nothing_to_clip_where_no_norm_stands_out():
    suggestion = tritonclip.suggest_max_norm(norms_of(), warmup=0)
    assert suggestion.verdict == "nothing to clip"
    assert suggestion.max_norm is None
    assert "No step needs clipping" in suggestion.reason
    assert len(suggestion.candidates) > 3


@pytest.mark.parametrize("drift", [0.05, 20.0], ids=["falling", "rising"])
@pytest.mark.parametrize("spikes", [0.0, 0.03], ids=["calm", "spikes"])
def test_drift_is_told(drift, spikes):
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
    assert suggestion.reason.startswith(f"All 300 norms equal {norm:g}, which tells no limit.")


@pytest.mark.parametrize("height", [1.0, 0.5], ids=["all", "most"])
def test_norms_at_the_limit_in_use_are_told_as_measured_after_clipping(tmp_path, height):
    path = tmp_path / "run.csv"
    with tritonclip.record(path) as recorder:
        for step in range(100):
            recorder.add_(1.0 - 1e-6 if step % 4 else height, limit=1.0)
    reason = tritonclip.suggest_max_norm(path).reason
    assert "that of the limit in use, 1: record the norm that clip_ returns" in reason


def test_norms_are_not_said_to_repeat_in_an_exponent():
    norms = norms_of()
    norms[500] = 100 * norms.mean()
    assert "reach 1e+02 times" not in tritonclip.suggest_max_norm(norms).reason


def test_shares_of_less_than_a_step_are_no_candidates():
    origins = {c.origin for c in tritonclip.suggest_max_norm(norms_of(40)).candidates}
    assert "about 5%" in origins
    assert not origins & {"about 1%", "about 2%"}


def test_a_run_that_was_appended_without_a_checkpoint_is_told(tmp_path):
    """Rows of two runs count on, and nothing else tells them apart."""
    path = tmp_path / "run.csv"
    for seed in (0, 1):
        with tritonclip.record(path, append=True) as recorder:
            for norm in norms_of(300, spikes=0.03, seed=seed):
                recorder.add_(float(norm))
    reason = tritonclip.suggest_max_norm(path).reason
    assert "A recorder went on in this file at step 301, without a checkpoint" in reason
    assert "warmup=300, or --warmup 300" in reason
    second = tritonclip.suggest_max_norm(path, warmup=300)
    assert "went on" not in second.reason
    alone = tritonclip.suggest_max_norm(norms_of(300, spikes=0.03, seed=1), warmup=0)
    assert second.max_norm == alone.max_norm


def test_a_run_that_resumes_from_a_checkpoint_is_one_run(tmp_path):
    path = tmp_path / "run.csv"
    with tritonclip.record(path) as recorder:
        for norm in norms_of(300):
            recorder.add_(float(norm))
        saved = recorder.state_dict()
    with tritonclip.record(path, append=True) as recorder:
        recorder.load_state_dict(saved)
        for norm in norms_of(300, seed=1):
            recorder.add_(float(norm))
    suggestion = tritonclip.suggest_max_norm(path, warmup=0)
    assert suggestion.steps == 600
    assert "went on" not in suggestion.reason


@pytest.mark.parametrize("again", [100, 300])
def test_step_numbers_that_start_again_are_told(tmp_path, again):
    path = tmp_path / "run.csv"
    rows = [*enumerate(norms_of(300), 1), *enumerate(norms_of(again, seed=1), 1)]
    path.write_text("step,norm\n" + "".join(f"{step},{norm}\n" for step, norm in rows))
    suggestion = tritonclip.suggest_max_norm(path, warmup=0)
    assert suggestion.steps == again
    assert "only the later rows count; left out were 300 earlier ones" in suggestion.reason


def test_too_few_steps_after_others_that_were_replaced_are_told(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text("step,norm\n" + "".join(f"{step},1\n" for step in [*range(300), 0, 1, 2]))
    with pytest.raises(ValueError, match=r"got 3 in 3 steps; .*left out were 300 earlier ones"):
        tritonclip.suggest_max_norm(path)


@pytest.mark.parametrize("factor", [1e-20, 1e-3, 1.0, 1e6, 1e30])
def test_suggestion_scales_with_the_norms(factor):
    norms = norms_of(spikes=0.03)
    plain = tritonclip.suggest_max_norm(norms)
    scaled = tritonclip.suggest_max_norm(norms * factor)
    assert scaled.verdict == plain.verdict == "clip"
    assert scaled.warmup == plain.warmup
    assert plain.max_norm is not None
    # Both are rounded to two digits.
    assert scaled.max_norm == pytest.approx(plain.max_norm * factor, rel=0.1)


@hypothesis.given(
    n=st.integers(LEAST_STEPS, 400),
    spread=st.floats(0.0, 2.0),
    spikes=st.floats(0.0, 0.5),
    height=st.floats(1.0, 1e6),
    drift=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**31),
)
def test_suggestion_is_sound(n, spread, spikes, height, drift, seed):
    norms = norms_of(n, spread=spread, spikes=spikes, height=height, drift=drift, seed=seed)
    suggestion = tritonclip.suggest_max_norm(norms, warmup=0)
    assert suggestion.steps == n
    assert suggestion.reason
    assert (suggestion.max_norm is None) == (
        suggestion.verdict in ("nothing to clip", "clipped before", "constant")
    )
    if suggestion.max_norm is not None:
        share = share_over(norms, suggestion.max_norm)
        # A step more or less, where steps are few.
        assert LEAST_SHARE - 1 / n < share <= MOST_SHARE + 1 / n
    limits = [candidate.max_norm for candidate in suggestion.candidates]
    assert limits == sorted(set(limits))
    for candidate in suggestion.candidates:
        assert candidate.share == share_over(norms, candidate.max_norm)


def test_candidates_tell_what_they_do_to_the_largest_spikes():
    norms = norms_of(spikes=0.03)
    norms[[100, 700, 300]] = [100.0, 80.0, 50.0]
    suggestion = tritonclip.suggest_max_norm(norms)
    assert [(spike.step, spike.norm) for spike in suggestion.spikes] == [
        (101, 100.0),
        (701, 80.0),
        (301, 50.0),
    ]
    for candidate in suggestion.candidates:
        expected = [min(1.0, candidate.max_norm / (norm + 1e-6)) for norm in (100.0, 80.0, 50.0)]
        assert candidate.coefficients == pytest.approx(expected, rel=1e-12)
    origins = {candidate.origin for candidate in suggestion.candidates}
    assert {"recommended", "usual for transformers"} <= origins
    (recommended,) = [c for c in suggestion.candidates if c.origin == "recommended"]
    assert recommended.max_norm == suggestion.max_norm


def test_limits_are_short_numbers():
    suggestion = tritonclip.suggest_max_norm(norms_of(spikes=0.04))
    for candidate in suggestion.candidates:
        assert float(f"{candidate.max_norm:.2e}") == candidate.max_norm


@pytest.mark.parametrize("high", [5.0, 1 / 5], ids=["above", "below"])
def test_warmup_is_found_and_left_out(high):
    norms = norms_of(n=2000, spikes=0.02)
    norms[:200] *= high ** np.linspace(1, 0, 200)
    suggestion = tritonclip.suggest_max_norm(norms)
    # The last quarter of the way is within the spread of the norms.
    assert 100 <= suggestion.warmup <= 220
    assert suggestion.steps == 2000 - suggestion.warmup


def test_no_warmup_where_the_run_begins_as_it_goes_on():
    norms = torch.ones(500, dtype=torch.float64)
    assert warmup_of(norms, norms > 0) == 0


def test_warmup_is_at_most_a_fifth():
    norms = torch.tensor(norms_of(drift=1e-4))
    assert 150 <= warmup_of(norms, norms > 0) <= 200


def test_warmup_that_is_given_counts():
    norms = norms_of(spikes=0.03)
    norms[:500] = 1000.0 + norms[:500]
    suggestion = tritonclip.suggest_max_norm(norms, warmup=500)
    assert (suggestion.warmup, suggestion.steps) == (500, 500)
    assert max(spike.norm for spike in suggestion.spikes) < 1000


@pytest.mark.parametrize("warmup", [-1, 1.5, True, "10"])
def test_warmup_that_is_no_number_of_steps_is_refused(warmup):
    with pytest.raises(ValueError, match="warmup must be a number of steps, 0 or more"):
        tritonclip.suggest_max_norm(norms_of(), warmup=warmup)


def test_norms_that_are_zero_or_not_finite_are_counted_and_left_out():
    norms = norms_of(spikes=0.03)
    plain = tritonclip.suggest_max_norm(norms, warmup=0)
    broken = np.insert(norms, [10, 20, 30, 600, 700], [math.nan, math.inf, 0.0, 0.0, math.inf])
    suggestion = tritonclip.suggest_max_norm(broken, warmup=0)
    assert (suggestion.nonfinite, suggestion.zeros, suggestion.steps) == (3, 2, 1000)
    assert suggestion.max_norm == plain.max_norm
    assert "Norms that are NaN or inf: 3" in suggestion.reason


def test_a_short_run_is_told():
    assert "record some hundred" in tritonclip.suggest_max_norm(norms_of(50)).reason
    assert "record some hundred" not in tritonclip.suggest_max_norm(norms_of(200)).reason


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


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (3.5, "The limit in use, 3.5, clips 3.0%, and may stay."),
        (0.9, "and is a part of the learning rate: with another limit, tune both together."),
        (100.0, "The limit in use, 100, clips 0.0%: less than the tail."),
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
    assert "and is fixed, too." in suggestion.reason


def test_limits_that_changed_are_no_candidates(tmp_path):
    path = tmp_path / "run.csv"
    with tritonclip.record(path) as recorder:
        for step, norm in enumerate(norms_of(spikes=0.03)):
            recorder.add_(float(norm), limit=3.5 + step % 2)
    suggestion = tritonclip.suggest_max_norm(path)
    assert "in use" not in [candidate.origin for candidate in suggestion.candidates]
    assert "in use" not in suggestion.reason


def test_steps_of_spikes_are_those_of_the_file(tmp_path):
    path = tmp_path / "run.csv"
    with tritonclip.record(path) as recorder:
        recorder.load_state_dict({"steps": 5000})
        for norm in norms_of(spikes=0.03):
            recorder.add_(float(norm))
        recorder.add_(1000.0)
    assert tritonclip.suggest_max_norm(path).spikes[0].step == 6001


def test_nothing_of_the_extra_is_imported():
    from workers import python

    done = python(
        "-c",
        "import sys, tritonclip\n"
        "before = set(sys.modules)\n"
        "tritonclip.suggest_max_norm([1.0 + i % 7 for i in range(99)])\n"
        "new = {name.split('.')[0] for name in set(sys.modules)}\n"
        "assert not new & {'rich', 'matplotlib', 'click', 'scipy', 'pandas'}, new\n",
    )
    assert done.returncode == 0, done.stderr


def test_suggestion_names_the_attributes_that_there_are():
    suggestion = tritonclip.suggest_max_norm(norms_of())
    with pytest.raises(AttributeError, match=r"'limit'; expected one of .*max_norm, .*reason"):
        _ = suggestion.limit  # type: ignore[attr-defined]
    assert copy.deepcopy(suggestion) == suggestion
