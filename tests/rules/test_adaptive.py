"""Limits that follow the norms of earlier calls: beside references, and at bad norms."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tritonclip
from helpers import histories
from helpers.cases import (
    INTERPRETED,
    NoHostRead,
    assert_bits,
    copies,
    grad_of,
    no_sync,
    normal,
    parameters,
    same_parameters,
)
from helpers.histories import ADAPTIVE, of_norm
from helpers.workers import python
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByOwnHistory,
    ClipByOwnQuantile,
    ClipByQuantile,
    ClipByRMS,
    ClipByValue,
    ClipByZScore,
    ClipState,
    Outlier,
)
from tritonclip.rules import LossOutlier
from tritonclip.rules.rule import advanced

# 15 digits of float64, and sums of some hundred norms.
RELATIVE = 1e-12
# As many take the interpreter up to 20 s, 80 of them 3 s.
STEPS = 80 if INTERPRETED else 400
SLOW = [pytest.mark.exhaustive] * INTERPRETED
HISTORY = (1.05, 0.98, 30, 1.0)
# Rule, reference, their numbers, and whether norms are also NaN, inf and 0.
FOLLOWING: list[Any] = [
    pytest.param(ClipByQuantile, histories.quantile, (0.9, 50), True, id="quantile"),
    pytest.param(ClipByQuantile, histories.quantile, (0.5, 7, 0.8), True, id="median", marks=SLOW),
    pytest.param(ClipByZScore, histories.zscore, (2.0, 0.9, 10, 1.0), True, id="zscore-bounded"),
    pytest.param(ClipByZScore, histories.zscore, (2.5, 0.97, 25), True, id="zscore", marks=SLOW),
    *(
        pytest.param(ClipByOwnHistory, histories.own_history, HISTORY, bad, id=name, marks=marks)
        for name, bad, marks in (("own-history", True, []), ("own-history-finite", False, SLOW))
    ),
    *(
        pytest.param(ClipByOwnQuantile, histories.own_quantile, numbers, True, id=name, marks=SLOW)
        for name, numbers in (("own-quantile", (0.9, 50)), ("own-quantile-low", (0.05, 8, 0.7)))
    ),
]


@pytest.mark.parametrize(("kind", "make", "numbers", "bad"), FOLLOWING)
def test_clip_follows_the_reference_over_400_steps(device, kind, make, numbers, bad):
    """One gradient, or three with a limit each, the second of which some steps do not have."""
    rule, reference, state, seen = kind(*numbers), make(*numbers), ClipState(), 0
    series = [histories.norms(seed=n, bad=bad) for n in ((1, 2, 3) if rule.per_gradient else (0,))]
    # A gradient that is 0 throughout a warm-up must not stay 0 for ever.
    series[-1][:40] = series[-1][:40] if len(series) == 1 else [0.0] * 40
    for step, row in enumerate(list(zip(*series, strict=True))[:STEPS]):
        weights = same_parameters([of_norm(norm).to(device) for norm in row])
        if len(row) == 3 and step % 7 == 3:
            weights[1].grad = None
        places = [i for i, weight in enumerate(weights) if weight.grad is not None]
        norms, before = [row[i] for i in places], copies(grad_of(weights[i]) for i in places)
        found = tritonclip.clip_(weights, rule, state=state)
        assert found.reshape(-1).isfinite().tolist() == [*map(math.isfinite, norms)]
        limits = reference(norms, places) if rule.per_gradient else [reference(*norms)]
        for i, norm, limit, grad in zip(places, norms, limits, before, strict=True):
            after = grad_of(weights[i]).cpu()
            if math.isfinite(norm) and norm < limit * (1 - RELATIVE):
                assert torch.equal(after, grad)
            elif math.isfinite(norm) and math.isfinite(limit):
                assert float(after.norm()) == pytest.approx(limit, rel=RELATIVE)
                seen += norm > limit * (1 + RELATIVE)
    assert seen >= STEPS // 40


@pytest.mark.parametrize("percentile", [5, 50, 95])
def test_clip_by_own_quantile_is_percentile_clipping_of_bitsandbytes(device, percentile):
    """The (k+1)-th smallest of the last 100 norms, once the window is full."""
    state, rule = ClipState(), ClipByOwnQuantile(percentile / 99, window=100)
    norms = normal(130, torch.float64, "cpu").abs().tolist()
    (param,) = parameters([torch.zeros(2, dtype=torch.float64, device=device)])
    for step, norm in enumerate(norms):
        grad_of(param)[0] = norm
        tritonclip.clip_([param], rule, state=state)
        if step >= 99:
            limit = sorted(norms[step - 99 : step + 1])[percentile]
            assert float(grad_of(param)[0]) == pytest.approx(min(norm, limit), rel=RELATIVE)


def test_clip_by_quantile_with_a_factor_is_the_limit_of_icefall(device):
    """Its ScaledAdam sets the limit at every hundredth step, from the sorted[50] of 100 norms."""
    state, rule = ClipState(), ClipByQuantile(50 / 99, window=100, factor=2.0)
    norms = normal(301, torch.float64, "cpu").abs().square().tolist()
    (param,) = parameters([torch.zeros(2, dtype=torch.float64, device=device)])
    for step, norm in enumerate(norms, 1):
        # Clipped, whatever the limit is by then.
        norms[step - 1] = norm = 50.0 if step % 100 == 0 else norm
        grad_of(param)[0] = norm
        tritonclip.clip_([param], rule, state=state)
        if step % 100 == 0:
            quartiles = [sorted(norms[step - 100 : step])[100 // 4 * n] for n in range(4)]
            assert float(grad_of(param)[0]) == pytest.approx(2.0 * quartiles[2], rel=RELATIVE)


def state_of(rule: Any, n: int = 1) -> Tensor:
    """The state before the first norm; with a row for each of n gradients if it has one."""
    row = torch.tensor(rule.start(), dtype=torch.float64)
    return row.repeat(n, 1) if getattr(rule, "per_gradient", False) else row


def test_outlier_follows_the_reference_over_400_steps():
    rule, reference = Outlier(3.0, 32), histories.outlier(3.0, 32)
    state, found, expected = state_of(rule), [], []
    for norm in histories.norms():
        limit, state = advanced(rule, state, torch.tensor(norm, dtype=torch.float64))
        found.append(float(limit))
        expected.append(reference(norm))
    assert found == pytest.approx(expected, rel=RELATIVE)
    assert sum(map(math.isfinite, found)) > 300


@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_own_history_warms_up_by_norms_whose_squares_do_not_fit(size):
    rule = ClipByOwnHistory(max_norm=size)
    norms = size * torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)
    limits, state = advanced(rule, state_of(rule, 3), norms)
    assert limits.tolist() == pytest.approx([0.6 * size, 0.8 * size, 0.0], rel=RELATIVE)
    assert state.tolist() == [[float(limits[0]), 1.0], [float(limits[1]), 1.0], [math.inf, 0.0]]


def test_own_history_takes_norms_of_0_for_finite():
    """A limit that is NaN would make a step on a device one that is not finite."""
    rule = ClipByOwnHistory()
    limits, _ = advanced(rule, state_of(rule, 2), torch.zeros(2, dtype=torch.float64))
    assert limits.tolist() == [0.0, 0.0]


class CountedOperators(TorchDispatchMode):
    """Counts operators, but for those that return views: each is a launch on a GPU."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += not any(result.alias_info for result in func._schema.returns)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("max_norm", [None, 1.0], ids=["unbounded", "bounded"])
@pytest.mark.parametrize(
    "rule",
    [*ADAPTIVE, pytest.param(Outlier(), id="Outlier")],
)
def test_a_step_takes_at_most_21_operators(rule, max_norm):
    """One more bounds a limit, and three ask whether the norm counts."""
    if max_norm is not None and not isinstance(rule, Outlier):
        rule = dataclasses.replace(rule, max_norm=max_norm)
    # On a device, where each is a launch.
    state = state_of(rule, 3).to("meta")
    norm = torch.ones((3,) if state.dim() == 2 else (), dtype=torch.float64, device="meta")
    with CountedOperators() as alone:
        rule.advance(state, norm)
    assert 0 < alone.n <= 21 + (max_norm is not None)
    with CountedOperators() as whole:
        advanced(rule, state, norm)
    assert whole.n == alone.n + 3


@pytest.mark.parametrize("rule", [Outlier(3.0, 8), LossOutlier(3.0, 8)], ids=["norm", "loss"])
@pytest.mark.parametrize("n", range(10))
def test_outlier_in_numbers_is_outlier_by_operators(rule, n):
    state = state_of(rule)
    for norm in normal(n, torch.float64, seed=n) + (3.0 if type(rule) is Outlier else 0.0):
        _, state = advanced(rule, state, norm)
    for norm in (1.0, math.nan, math.inf, 0.0):
        limit, after = rule.advance_numbers(state.tolist(), norm)
        on_device, after_on_device = advanced(rule, state, torch.tensor(norm, dtype=torch.float64))
        # Each of some 20 roundings is at most 2**-53.
        assert limit == pytest.approx(float(on_device), rel=1e-14)
        assert_bits([torch.tensor(after, dtype=torch.float64)], [after_on_device])


def test_a_loss_that_is_not_finite_is_not_remembered():
    rule = LossOutlier(3.0, 4)
    state = state_of(rule)
    for loss in (-1.0, math.nan, 0.0, math.inf, 2.0, -math.inf):
        _, state = advanced(rule, state, torch.tensor(loss, dtype=torch.float64))
    assert state.tolist()[:3] == [2.0, 0.0, -1.0]


@pytest.mark.parametrize("rule", ADAPTIVE)
def test_clip_waits_for_no_device(backend, rule):
    if backend.host_decides or INTERPRETED:
        pytest.skip("a CPU decides on the host, and so does the interpreter")
    state = ClipState()
    for step in range(15):
        grads = [of_norm(2.0 + step), of_norm(1.0)]
        weights = same_parameters([grad.to(backend.device) for grad in grads])
        with no_sync() if backend.device.type == "cuda" else NoHostRead():
            tritonclip.clip_(weights, rule, state=state)


SCHEDULED: list[Any] = [
    pytest.param(ClipByGlobalNorm, lambda g, by: g * (by / (g.norm() + 1e-6)), id="global"),
    pytest.param(ClipByNorm, lambda g, by: g * (by / (g.norm() + 1e-6)), id="by-norm"),
    pytest.param(ClipByValue, lambda g, by: g.clamp(-by, by), id="by-value"),
    pytest.param(ClipByRMS, lambda g, by: g * (by / g.square().mean().sqrt()), id="rms"),
]


@pytest.mark.parametrize(("kind", "formula"), SCHEDULED)
def test_a_limit_may_be_a_function_of_the_step(kind, formula):
    rule, state = kind(lambda step: 0.5 / (1 + step)), ClipState()
    for step in range(4):
        (weight,) = same_parameters([of_norm(100.0)])
        expected = formula(grad_of(weight).clone(), 0.5 / (1 + step))
        tritonclip.clip_(weight, rule, state=state)
        torch.testing.assert_close(grad_of(weight), expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(
    "rule",
    [*ADAPTIVE, *(p.values[0](lambda t: 1.0) for p in SCHEDULED)],
    ids=lambda r: type(r).__name__,
)
def test_a_rule_that_changes_needs_a_state(rule):
    (weight,) = parameters([of_norm(100.0)])
    before = grad_of(weight).clone()
    with pytest.raises(ValueError, match=r"ClipState\(\)"):
        tritonclip.clip_(weight, rule)
    assert torch.equal(grad_of(weight), before)


BETWEEN = "quantile must lie between 0 and 1"
WRONG: list[Any] = [
    (ClipByQuantile, {"quantile": 0.0}, ValueError, BETWEEN),
    (ClipByQuantile, {"quantile": 1}, ValueError, BETWEEN),
    (ClipByQuantile, {"quantile": math.nan}, ValueError, "quantile"),
    (ClipByQuantile, {"window": 0}, ValueError, "window must be 1 or more"),
    (ClipByQuantile, {"window": 2.5}, TypeError, "window must be an integer"),
    (ClipByQuantile, {"max_norm": -1.0}, ValueError, "max_norm"),
    (ClipByQuantile, {"norm_type": -1.0}, ValueError, "norm_type"),
    (ClipByZScore, {"threshold": 0.0}, ValueError, "threshold must be positive"),
    (ClipByZScore, {"decay": 1.0}, ValueError, "decay must lie between"),
    (ClipByZScore, {"warmup": 1}, ValueError, "warmup must be 2 or more"),
    (ClipByOwnHistory, {"ratio": math.inf}, ValueError, "ratio must be positive and finite"),
    (ClipByOwnHistory, {"warmup": True}, TypeError, "warmup must be an integer"),
    (ClipByOwnHistory, {"max_norm": "1"}, TypeError, "max_norm"),
    (ClipByOwnQuantile, {"quantile": 5}, ValueError, f"{BETWEEN}.* write 0.05 for 5%"),
    (ClipByOwnQuantile, {"window": 0}, ValueError, "window must be 1 or more"),
    (ClipByRMS, {"max_rms": math.nan}, ValueError, "max_rms"),
    (Outlier, {"sigmas": -1.0}, ValueError, "sigmas must be positive"),
    (Outlier, {"window": 0}, ValueError, "window must be 4 or more"),
]


@pytest.mark.parametrize(("kind", "arguments", "error", "message"), WRONG)
def test_rule_refuses(kind, arguments, error, message):
    with pytest.raises(error, match=message):
        kind(**arguments)


def test_a_schedule_of_one_bound_is_asked_once_for_both():
    (weight,) = parameters([torch.tensor([3.0, -3.0])])
    bounds = iter([0.5, 0.25])
    tritonclip.clip_(weight, ClipByValue(lambda step: next(bounds)), state=ClipState())
    assert grad_of(weight).tolist() == [0.5, -0.5]


def test_a_schedule_that_gives_no_limit_is_refused():
    with pytest.raises(ValueError, match="max_norm must be 0 or more, got -1"):
        tritonclip.clip_([], ClipByGlobalNorm(lambda step: -1.0), state=ClipState())
    with pytest.raises(TypeError, match="max must be a number, got None"):
        tritonclip.clip_([], ClipByValue(lambda step: None), state=ClipState())  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("rule", [*ADAPTIVE, pytest.param(ClipByRMS(0.1), id="rms")])
def test_verify_accepts_every_rule(device, rule):
    state = ClipState()
    with tritonclip.verify():
        for step in range(14):
            grads = [normal(40, device=device, seed=step) * step, normal((3, 5), device=device)]
            if step == 3:
                grads[0][7] = math.inf
            tritonclip.clip_(same_parameters(grads), rule, state=state)


def test_clip_with_a_state_breaks_the_graph_and_clips_the_same():
    rule, state, compiled_state = ClipByQuantile(0.5, 9), ClipState(), ClipState()
    ours, theirs = parameters([of_norm(1.0)] * 2)

    @torch.compile(backend="eager")
    def step() -> Tensor | None:
        return tritonclip.clip_([ours], rule, state=compiled_state)

    for size in (1.0, 2.0, 30.0, 4.0):
        ours.grad, theirs.grad = of_norm(size), of_norm(size)
        torch.testing.assert_close(step(), tritonclip.clip_([theirs], rule, state=state))
        assert torch.equal(grad_of(ours), grad_of(theirs))


def test_outlier_takes_norms_that_differ_by_their_accuracy_for_equal():
    rule = Outlier(6.0, 8)
    state = torch.ones(8, dtype=torch.float64)
    limit, _ = rule.advance(state, torch.tensor(1.0, dtype=torch.float64))
    assert 1.0000001 < float(limit) < 1.0001


def test_own_history_of_an_inf_zeroes_the_others_as_a_global_norm_does():
    ours, theirs = [parameters([torch.tensor([math.inf, 1.0]), torch.ones(2)]) for _ in range(2)]
    tritonclip.clip_(ours, ClipByOwnHistory(max_norm=1.0), state=ClipState())
    tritonclip.clip_(theirs, 1.0)
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(grad_of(one), grad_of(two), equal_nan=True)


def test_rules_follow_norms_where_the_extension_is_missing():
    """As on Windows: limits, and the norms and gradients that they clip."""
    code = """
import sys
sys.modules["tritonclip.backends._native"] = None
import torch, tritonclip
from tritonclip.backends import native
assert native.loops is None
by_history = tritonclip.ClipByOwnHistory(ratio=1.5, warmup=1, max_norm=9.0)
for rule in [tritonclip.ClipByQuantile(0.5), by_history]:
    weight, state = torch.nn.Parameter(torch.zeros(3)), tritonclip.ClipState()
    for size in (1.0, 1.0, 9.0):
        weight.grad = torch.tensor([0.0, size, 0.0])
        tritonclip.clip_([weight], rule, state=state)
    print(round(float(weight.grad.norm()), 4))
"""
    result = python("-c", code)
    # Their limits: the median of the norms, and 1.5 times their average.
    assert result.stdout.split() == ["1.0", "1.5"], result
