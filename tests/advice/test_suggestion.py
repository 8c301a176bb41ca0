"""A limit from norms: it clips the tail; warm-up and drift are considered;
norms come from histories of every kind.
"""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import tritonclip
from advice.norm_series import norms_of
from tritonclip.monitor.history import History

# What an answer says that is not certain.
FIND = "run python -m tritonclip find train.py:train, or find_max_norm"
# As the docstring says.
LEAST_SHARE, MOST_SHARE, LEAST_STEPS = 0.01, 0.10, 20
# By which two digits of a limit may be off: norms may lie close together there.
ROUNDING = 1.06


def suggest(history: Any) -> Any:
    """A suggestion from all steps."""
    return tritonclip.suggest_max_norm(history, warmup=0)


def share_over(norms: Any, limit: float) -> float:
    return float(np.mean(np.asarray(norms) > limit))


@pytest.mark.parametrize("spikes", [0.02, 0.05, 0.08])
def test_suggestion_clips_the_spikes_and_little_else(spikes):
    norms = norms_of(spikes=spikes)
    suggestion = suggest(norms)
    assert suggestion.verdict == "clip"
    # Over the median and under the spikes, which start at 10 e^-0.6.
    assert 1.2 < suggestion.max_norm < 5.4
    assert share_over(norms, suggestion.max_norm) == pytest.approx(spikes, abs=0.01)
    assert suggestion.reason.startswith(f"Clip at {suggestion.max_norm:g}, which clips ")


def test_suggestion_keeps_to_ten_percent():
    norms = norms_of(5000, spikes=0.45)
    suggestion = suggest(norms)
    share = share_over(norms, suggestion.max_norm)
    assert share == pytest.approx(MOST_SHARE, rel=0.5)
    assert share <= MOST_SHARE
    assert "part of the learning rate" in suggestion.reason


@pytest.mark.parametrize(("spikes", "is_said"), [(0.05, False), (0.4, True)])
def test_more_than_a_third_of_outliers_are_said_to_be_a_second_kind_of_steps(spikes, is_said):
    """The limit lies among them, not below them."""
    suggestion = suggest(norms_of(600, spikes=spikes, height=50.0))
    assert (suggestion.max_norm > 10) is is_said
    assert ("lets most of them pass, and a limit below them" in suggestion.reason) is is_said
    assert FIND in suggestion.reason


@pytest.mark.parametrize("spikes", [0.0, 0.003], ids=["none", "few"])
def test_norms_without_outliers_name_a_range_and_refer_to_trying(spikes):
    suggestion = suggest(norms_of(spikes=spikes))
    assert (suggestion.verdict, suggestion.max_norm) == ("no outliers", None)
    assert suggestion.reason.startswith(f"The norms name no limit: {100 * spikes:g}% of 1000 steps")
    assert "A limit may help all the same: norms show single steps" in suggestion.reason
    assert FIND in suggestion.reason
    low, high = suggestion.range
    assert 0.1 < low < 0.5 < 1.0 < high < 3.0
    assert f"Limits to try lie between {low:g} and {high:g}." in suggestion.reason
    assert len(suggestion.candidates) > 3


NOISE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "lognormal, 0.4": ("no outliers", lambda random: random.lognormal(0.0, 0.4, 1000)),
    "lognormal, 1": ("no outliers", lambda random: random.lognormal(0.0, 1.0, 1000)),
    "half-normal": ("no outliers", lambda random: abs(random.standard_normal(1000))),
    "gamma": ("no outliers", lambda random: random.gamma(2.0, 1.0, 1000)),
    "Pareto, 2": ("clip", lambda random: 1 + random.pareto(2.0, 1000)),
    "lognormal, drift": (
        "no outliers",
        lambda random: random.lognormal(0.0, 0.4, 1000) * 4 ** np.linspace(0, 1, 1000),
    ),
    "bursts": (
        "clip",
        lambda random: (
            random.lognormal(0.0, 0.2, 1000) * np.where(np.arange(1000) % 250 < 10, 9, 1)
        ),
    ),
}


@pytest.mark.parametrize(("verdict", "draw"), NOISE.values(), ids=NOISE)
def test_one_distribution_gets_one_verdict(verdict, draw):
    found = [suggest(draw(np.random.default_rng(seed))) for seed in range(20)]
    assert {suggestion.verdict for suggestion in found} == {verdict}


def test_a_verdict_agrees_with_its_figures():
    """As many steps stand out as the limit clips, within its rounding."""
    for seed in range(20):
        norms = 1 + np.random.default_rng(seed).pareto(3.0, 1000)
        suggestion = suggest(norms)
        shares = [float(x) for x in re.findall(r"([\d.]+)% of", suggestion.reason)][:2]
        if suggestion.verdict == "clip":
            assert shares[0] == pytest.approx(shares[1], rel=0.6)
            assert min(shares) >= 100 * LEAST_SHARE
        else:
            assert shares[0] < 100 * LEAST_SHARE


def test_norms_are_not_said_to_repeat_in_an_exponent():
    norms = norms_of()
    norms[500] = 100 * norms.mean()
    assert "reach 1e+02 times" not in tritonclip.suggest_max_norm(norms).reason


def test_shares_of_less_than_a_step_are_no_candidates():
    origins = {c.origin for c in tritonclip.suggest_max_norm(norms_of(40)).candidates}
    assert "about 5%" in origins
    assert not origins & {"about 1%", "about 2%"}


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
    assert suggestion.reason
    assert (suggestion.max_norm is None) == (
        suggestion.verdict in ("no outliers", "clipped before", "constant")
    )
    assert (suggestion.range is None) == (
        suggestion.verdict in ("clip", "drift", "clipped before", "constant")
    )
    if suggestion.range is not None:
        low, high = suggestion.range
        assert 0 < low < high
        assert low <= (suggestion.max_norm or low) <= high
    if suggestion.verdict == "went wrong":
        # Of first steps: the limit and its shares are those of these.
        assert suggestion.steps < n
        assert suggestion.max_norm is not None
        assert 0 < suggestion.max_norm < ROUNDING * norms[: suggestion.steps].max()
        return
    assert suggestion.steps == n
    if suggestion.max_norm is not None:
        # A step more or less, where steps are few.
        assert share_over(norms, suggestion.max_norm * ROUNDING) <= MOST_SHARE + 1 / n
        assert share_over(norms, suggestion.max_norm / ROUNDING) > LEAST_SHARE - 1 / n
    limits = [candidate.max_norm for candidate in suggestion.candidates]
    assert all(b > 1.02 * a for a, b in itertools.pairwise(limits))
    origins = [candidate.origin for candidate in suggestion.candidates]
    assert len(origins) == len({*origins})
    for candidate in suggestion.candidates:
        assert candidate.share == share_over(norms, candidate.max_norm)
        assert candidate.max_norm == float(f"{candidate.max_norm:.2e}")
        if candidate.origin.startswith("about "):
            assert candidate.origin == f"about {candidate.share:.0%}"


def test_candidates_have_coefficients_for_the_largest_spikes():
    norms = norms_of(spikes=0.03)
    norms[[100, 700, 300]] = [100.0, 80.0, 50.0]
    suggestion = tritonclip.suggest_max_norm(norms)
    spikes = [(spike.step, spike.norm) for spike in suggestion.spikes]
    assert spikes == [(101, 100.0), (701, 80.0), (301, 50.0)]
    for candidate in suggestion.candidates:
        expected = [min(1.0, candidate.max_norm / (norm + 1e-6)) for norm in (100.0, 80.0, 50.0)]
        assert candidate.coefficients == pytest.approx(expected, rel=1e-12)
    limits = {candidate.origin: candidate.max_norm for candidate in suggestion.candidates}
    assert limits["recommended"] == suggestion.max_norm
    assert "usual for transformers" in limits


def test_printing_shows_the_reason_and_a_row_for_each_candidate():
    suggestion = tritonclip.suggest_max_norm(norms_of(spikes=0.03))
    reason, blank, heads, *rows = str(suggestion).splitlines()
    assert reason == suggestion.reason
    assert not blank
    assert heads.split()[:3] == ["max_norm", "origin", "clips"]
    assert [row.split()[0] for row in rows] == [f"{c.max_norm:g}" for c in suggestion.candidates]
    constant = tritonclip.suggest_max_norm([1.0] * 300)
    assert str(constant) == constant.reason


def test_a_short_run_is_remarked_on():
    assert "record some hundred" in tritonclip.suggest_max_norm(norms_of(50)).reason
    assert "record some hundred" not in tritonclip.suggest_max_norm(norms_of(200)).reason


def spike_score_of(norms: Any) -> float:
    """As OLMo-core counts: a full window, and its population deviation."""
    history: list[float] = []
    spikes = 0
    for norm in norms:
        last = history[-128:]
        if len(last) == 128:
            spikes += norm > np.mean(last) + 6.0 * np.std(last)
        history.append(norm)
    return spikes / len(history)


@pytest.mark.parametrize("spikes", [0.0, 0.01, 0.05])
def test_spike_score_is_that_of_olmo(spikes):
    norms = norms_of(2000, spikes=spikes)
    expected = spike_score_of(norms)
    assert tritonclip.suggest_max_norm(norms).spike_score == pytest.approx(expected)
    # Norms that are no norms leave no trace.
    holed = np.insert(norms, [5, 700, 1500], [np.nan, np.inf, 0.0])
    assert tritonclip.suggest_max_norm(holed).spike_score == pytest.approx(expected)
    assert (expected > 0) == (spikes > 0)


@pytest.mark.parametrize(("steps", "score"), [(128, None), (129, 1 / 129)])
def test_spike_score_needs_a_full_window(steps, score):
    norms = np.linspace(1.0, 1.1, steps)
    norms[-1] = 50.0
    found = suggest(norms).spike_score
    assert np.isnan(found) if score is None else found == score


@pytest.mark.parametrize("high", [5.0, 1 / 5], ids=["above", "below"])
def test_warmup_is_found_and_left_out(high):
    norms = norms_of(n=2000, spikes=0.02)
    norms[:200] *= high ** np.linspace(1, 0, 200)
    suggestion = tritonclip.suggest_max_norm(norms)
    # The last quarter of the way is within the spread of the norms.
    assert 100 <= suggestion.warmup <= 220
    assert suggestion.steps == 2000 - suggestion.warmup


def test_warmup_is_at_most_a_fifth():
    assert 150 <= tritonclip.suggest_max_norm(norms_of(drift=1e-4)).warmup <= 200


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


@pytest.mark.parametrize("drift", [0.05, 4.0], ids=["falling", "rising"])
@pytest.mark.parametrize("spikes", [0.0, 0.03], ids=["calm", "spikes"])
def test_drift_is_found(drift, spikes):
    suggestion = suggest(norms_of(spikes=spikes, drift=drift))
    assert "The norm drifts" in suggestion.reason
    a, b, c = suggestion.medians
    assert (a > b > c) if drift < 1 else (a < b < c)
    if spikes:
        assert suggestion.verdict == "drift"
        assert f"such as ClipByQuantile(max_norm={suggestion.max_norm:g})." in suggestion.reason
        assert f"If the limit has to be fixed, take {suggestion.max_norm:g}" in suggestion.reason
    else:
        assert suggestion.verdict == "no outliers"
        assert (
            "A limit that follows it needs a bound: ClipByQuantile(max_norm=...)."
            in suggestion.reason
        )


@pytest.mark.parametrize("drift", [0.8, 1.0, 1.25])
def test_a_run_that_hardly_changes_does_not_drift(drift):
    suggestion = suggest(norms_of(spikes=0.03, drift=drift))
    assert suggestion.verdict == "clip"
    assert "drift" not in suggestion.reason


def test_a_run_that_comes_back_drifts():
    """First and last third are alike, the middle is not."""
    norms = norms_of(spikes=0.03)
    norms[333:666] *= 8
    assert suggest(norms).verdict == "drift"


def test_a_wide_spread_is_no_drift():
    """The medians of thirds differ by a factor that single norms exceed all the time."""
    norms = norms_of(spread=1.0, drift=2.0)
    suggestion = suggest(norms)
    assert suggestion.verdict == "no outliers"
    assert "drift" not in suggestion.reason


@pytest.mark.parametrize("limit", [0.9, 1.5])
def test_norms_that_something_else_clipped_are_noticed(limit):
    norms = norms_of(spikes=0.03)
    norms = norms * np.minimum(1, limit / (norms + 1e-6))
    suggestion = suggest(norms.astype(np.float32))
    assert (suggestion.verdict, suggestion.max_norm) == ("clipped before", None)
    assert suggestion.candidates == ()
    assert "something clips before" in suggestion.reason


@pytest.mark.parametrize("norm", [0.37, 1.0, 2000.0])
def test_norms_that_are_all_equal_are_not_said_to_be_clipped(norm):
    suggestion = tritonclip.suggest_max_norm([norm] * 300)
    assert (suggestion.verdict, suggestion.max_norm) == ("constant", None)
    assert (suggestion.candidates, suggestion.warmup) == ((), 0)
    assert suggestion.reason.startswith(
        f"All 300 norms equal {norm:g}, so that no limit can be suggested."
    )


def recorded(norms: Any, losses: Any = None, limit: Any = math.inf) -> History:
    """The history of a run, by default without a limit."""
    columns = {"norm": norms, "limit": np.full(len(norms), limit)}
    if losses is not None:
        columns["loss"] = losses
    return History({name: torch.as_tensor(column) for name, column in columns.items()})


FALLING = np.linspace(3.0, 1.0, 1000)


def test_a_run_that_goes_well_without_a_limit_loses_its_tail_only():
    norms = norms_of(spikes=0.03)
    suggestion = suggest(recorded(norms, FALLING))
    assert suggestion.verdict == "clip"
    assert share_over(norms, suggestion.max_norm) == pytest.approx(0.03, abs=0.01)


@pytest.mark.parametrize("limit", [math.inf, math.nan, 1.0], ids=["none", "unknown", "in use"])
def test_losses_are_asked_for_once_where_none_were_recorded(limit):
    for norms in (norms_of(), norms_of(spikes=0.03)):
        said = "went well: run --record takes them from a script as it is"
        reason = suggest(recorded(norms, limit=limit)).reason
        assert reason.count(said) == 1
        reason = suggest(recorded(norms, FALLING, limit)).reason
        assert said not in reason


def test_half_of_the_usual_norm_is_named_where_nobody_knows_how_a_run_went():
    norms = norms_of(spikes=0.03)
    suggestion = suggest(recorded(norms))
    assert suggestion.max_norm == float(f"{np.median(norms[:333]) / 2:.2g}")
    low, high = suggestion.range
    assert low < suggestion.max_norm < high
    assert "run --record takes them from a script as it is" in suggestion.reason
    tail = suggest(norms).max_norm
    assert f"If the run went well: clip at {tail:g}" in suggestion.reason


# Norms around 1 that explode from a step on, and are NaN in the last quarter.
DIVERGING = np.concatenate([norms_of(300), np.full(100, math.nan)])
DIVERGING[200:] *= 1.1 ** np.arange(200)
SEEMS = "This run seems to have gone wrong"
WRONG = {
    "NaN": (DIVERGING, None, "This run went wrong: norms are NaN or inf from step 301 on", 150),
    "NaN at once": ([8.0, 90.0, 1e9] + [math.nan] * 97, None, "This run went wrong: norms are", 1),
    "growth": (norms_of(drift=200.0), None, f"{SEEMS}: norms grow, from ", 100),
    "loss": (norms_of(), np.ones(1000), f"{SEEMS}, unless its loss need not fall", 100),
    "rising": (norms_of(spikes=0.03), -FALLING, f"{SEEMS}, unless its loss", 100),
}


@pytest.mark.parametrize(("norms", "losses", "why", "n"), WRONG.values(), ids=WRONG)
def test_a_run_that_went_wrong_is_judged_by_its_first_steps(norms, losses, why, n):
    suggestion = tritonclip.suggest_max_norm(recorded(norms, losses))
    assert (suggestion.verdict, suggestion.steps) == ("went wrong", n)
    limit = float(f"{np.quantile(norms[:n], 0.25) / 4:.2g}")
    assert suggestion.max_norm == limit
    assert suggestion.range == pytest.approx((limit / 4, limit * 4), rel=0.05)
    assert suggestion.reason.startswith(why)
    assert f"Next, try {limit:g}" in suggestion.reason
    assert suggestion.reason.index(FIND) < suggestion.reason.index("Next, try")
    part = {1: "first step", 100: "steps of the first tenth", 150: "first 150 steps"}[n]
    assert f"by the {part} it lies between " in suggestion.reason


def loss_of(change: Callable[[Any], Any], noise: float, n: int = 600) -> Any:
    """Losses of a trend over the time from 0 to 1, with the same noise every time."""
    return change(np.linspace(0, 1, n)) + noise * np.random.default_rng(0).standard_normal(n)


HEALTHY = {
    "linear": (loss_of(lambda t: 2.25 - 0.5 * t, 0.6), "fell by 2"),
    "exponential": (loss_of(lambda t: 1.5 + np.exp(-5 * t), 0.8), "fell by "),
    "early": (loss_of(lambda t: 1 + 3 * np.exp(-60 * t), 0.3), "fell by "),
    "late": (loss_of(lambda t: 2 - 3 * (t - 0.7).clip(0), 0.4), "fell by "),
    "below 0": (loss_of(lambda t: -1 - t, 0.8), "went from -"),
    "lognormal": (np.exp(loss_of(lambda t: 1 - t, 1.0)), "fell by "),
}


@pytest.mark.parametrize(("losses", "said"), HEALTHY.values(), ids=HEALTHY)
def test_a_loss_that_falls_in_its_noise_is_not_said_to_go_wrong(losses, said):
    norms = norms_of(600)
    suggestion = tritonclip.suggest_max_norm(recorded(norms, losses))
    assert suggestion.verdict == "noisy"
    assert suggestion.reason.startswith(f"The loss is noisy; it {said}")
    assert FIND in suggestion.reason
    assert suggestion.max_norm == float(f"{np.median(norms[:200]) / 2:.2g}")


@pytest.mark.parametrize(
    "losses",
    [
        loss_of(lambda t: 2.0 + 0 * t, 0.3),
        loss_of(lambda t: 2.0 + 0.5 * t, 0.4),
        loss_of(lambda t: 0.5 + 2 * np.exp(-8 * t) + 4 * (t > 0.6), 0.2),
        np.exp(loss_of(lambda t: 0 * t, 1.0)),
    ],
    ids=["flat", "rising", "diverged", "lognormal"],
)
def test_a_loss_without_a_fall_seems_to_go_wrong(losses):
    assert tritonclip.suggest_max_norm(recorded(norms_of(600), losses)).verdict == "went wrong"


@pytest.mark.parametrize(
    ("norms", "losses", "limit"),
    [
        (norms_of(drift=200.0), FALLING, math.inf),
        (norms_of(drift=200.0), None, 1.0),
        (norms_of(), np.ones(1000), 1.0),
        (norms_of(30), np.ones(30), math.inf),
        (np.append(norms_of(200), [math.inf, 1.0]), None, math.inf),
    ],
    ids=["loss falls", "limit", "limit and loss", "few losses", "single inf"],
)
def test_a_run_is_not_said_to_have_gone_wrong_without_a_sign(norms, losses, limit):
    assert tritonclip.suggest_max_norm(recorded(norms, losses, limit)).verdict != "went wrong"


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
    [
        *[3.0, None, ["a"], {"a": 1}, torch.ones(30, dtype=torch.complex64)],
        *[torch.ones(()), torch.ones(3, 30), torch.ones(0, 3)],
    ],
    ids=["number", "none", "text", "dict", "complex", "0-d", "2-d", "empty"],
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
