"""What a wrapper does at a step that is not finite: propagate, error, zero, skip."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from helpers.cases import assert_bits, copies, grad_of, normal
from helpers.training import (
    INNERS,
    PLAIN_AND_FUSED,
    RULES,
    RULES_OF_EVERY_TYPE,
    give_grads,
    grads_of,
    new_params,
    state_of,
    wrapped,
)
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByUnitNorm, ClippedOptimizer

VALUES = [math.nan, math.inf, -math.inf]


EVERY_RULE = [*RULES_OF_EVERY_TYPE, pytest.param(ClipByUnitNorm(0.1), id="unit")]


@pytest.mark.covering(2)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("rule", EVERY_RULE)
@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
def test_skip_leaves_everything_as_it_was(backend, make, rule, value):
    """Under every rule and norm type: those of order 0 and -inf do not show what is not finite."""
    params, optimizer = wrapped(make, rule, backend.device, nonfinite="skip")
    give_grads(params, 1)
    optimizer.step()
    before, state = copies(params), state_of(optimizer, params)
    give_grads(params, 2, bad=value)
    optimizer.step()
    assert_bits(params, before)
    assert_bits(state_of(optimizer, params), state)
    counts = optimizer.stats.summary()
    assert (counts["steps"], counts["skipped_steps"]) == (1, 1)


def regression(make: Callable[..., Optimizer], policy: str, bad: set[int], steps: int) -> Any:
    """Trains a small model; returns parameters and optimizer. Batches at `bad` hold a NaN.

    Good batches come in the same order whatever is bad. The scheduler follows the steps taken.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    inner = make(model.parameters())
    optimizer = ClippedOptimizer(inner, 0.3, nonfinite=policy)  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    good = 0
    for step in range(steps):
        x = normal((8, 4), seed=good)
        if step in bad:
            x = torch.full_like(x, math.nan)
        good += step not in bad
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        taken = int(optimizer.stats.steps)
        optimizer.step()
        if int(optimizer.stats.steps) > taken:
            scheduler.step()
    return list(model.parameters()), optimizer


@pytest.mark.parametrize("offset", [0, 4], ids=["from the first", "from the fifth"])
@pytest.mark.parametrize("make", INNERS)
def test_skip_of_one_step_in_ten_trains_to_the_same_result(make, offset):
    bad = set(range(offset, 40, 10))
    params, optimizer = regression(make, "skip", bad, 40)
    truth, other = regression(make, "propagate", set(), 36)
    assert_bits(params, copies(truth))
    assert_bits(state_of(optimizer, params), state_of(other, truth))
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"] < 0.1
    assert optimizer.stats.summary() == {**other.stats.summary(), "skipped_steps": 4}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
def test_zero_makes_the_step_one_with_zero_gradients(backend, make, rule):
    params, twins = new_params(device=backend.device), new_params(device=backend.device)
    optimizer, bare = ClippedOptimizer(make(params), rule, nonfinite="zero"), make(twins)
    give_grads(params, 1, bad=math.inf)
    optimizer.step()
    for twin in twins:
        twin.grad = torch.zeros_like(twin)
    bare.step()
    assert not any(grad.any() for grad in grads_of(params))
    assert_bits(params, copies(twins))
    assert int(optimizer.stats.steps) == 1


@pytest.mark.parametrize(
    "rule",
    [ClipByGlobalNorm(1.0), ClipByNorm(1.0)],
    ids=["global", "by-norm"],
)
def test_zero_is_a_coefficient_of_zero(backend, rule):
    params = [torch.nn.Parameter(torch.zeros(2, device=backend.device)) for _ in range(2)]
    optimizer = ClippedOptimizer(torch.optim.SGD(params, lr=0.1), rule, nonfinite="zero")
    for size in (1.0, math.inf):
        for param in params:
            param.grad = torch.full_like(param, size)
        optimizer.step()
    assert optimizer.stats.last_coefficient.item() == 0.0


def test_zero_concerns_only_gradients_that_share_a_norm():
    params = new_params()
    groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": [params[2]], "clip": 1e9}]
    optimizer = ClippedOptimizer(SGD(groups, lr=0.1), 1.0, nonfinite="zero")
    give_grads(params, 1, bad=math.nan)
    kept = grads_of(params)[2]
    optimizer.step()
    first, second, third = grads_of(params)
    assert not first.any()
    assert not second.any()
    assert torch.equal(third, kept)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
def test_propagate_lets_nan_through(make, rule):
    """By norm it reaches all that share the norm; by value it stays where it is."""
    params, optimizer = wrapped(make, rule)
    give_grads(params, 1, bad=math.nan)
    optimizer.step()
    hit = [bool(param.isnan().all()) for param in params]
    assert params[1].view(-1)[-1].isnan()
    everywhere = {"ClipByGlobalNorm": [True] * 3, "ClipByNorm": [False, True, False]}
    assert hit == everywhere.get(type(rule).__name__, [False] * 3)
    assert int(optimizer.stats.steps) == 1


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("rule", EVERY_RULE)
@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
@pytest.mark.covering(2)
def test_error_names_the_parameter_and_changes_nothing(make, rule, value):
    params = new_params()
    named = zip(("alpha", "beta", "gamma"), params, strict=True)
    optimizer = ClippedOptimizer(make(named), rule, nonfinite="error")
    give_grads(params, 1)
    optimizer.step()
    before, state = copies(params), state_of(optimizer, params)
    stats = optimizer.stats.state_dict()
    give_grads(params, 2, bad=value)
    grads = grads_of(params)
    with pytest.raises(RuntimeError, match=r"\bbeta\b") as caught:
        optimizer.step()
    assert "alpha" not in str(caught.value)
    assert "gamma" not in str(caught.value)
    assert "Neither gradients nor parameters were changed" in str(caught.value)
    assert_bits(params, before)
    assert_bits(grads_of(params), grads)
    assert_bits(state_of(optimizer, params), state)
    assert_bits(optimizer.stats.state_dict().values(), stats.values())


def test_error_says_that_a_norm_does_not_fit():
    """Every gradient is finite; four elements of 3e38 have a norm of 6e38."""
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = ClippedOptimizer(SGD([param]), 1.0, nonfinite="error")
    param.grad = torch.full((4,), 3e38)
    with pytest.raises(RuntimeError, match=r"Every gradient is finite, but their norm does not"):
        optimizer.step()
    assert torch.equal(param.grad, torch.full((4,), 3e38))


def test_error_says_that_a_quotient_does_not_fit():
    """Of a gradient that no rule clips: 3e38 / 0.5 is no float32."""
    param = torch.nn.Parameter(torch.zeros(4))
    groups: list[dict[str, Any]] = [{"params": [param], "clip": None}]
    optimizer = ClippedOptimizer(SGD(groups), 1.0, nonfinite="error")
    param.grad = torch.full((4,), 3e38)
    message = "Every gradient is finite, but divided by the loss scale the largest does not fit"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step(grad_scale=torch.tensor(0.5))
    assert torch.equal(param.grad, torch.full((4,), 3e38))
    assert not param.any()


def test_error_lets_finite_steps_be():
    params, twins = new_params(), new_params()
    strict = ClippedOptimizer(AdamW(params), 1.0, nonfinite="error")
    plain = ClippedOptimizer(AdamW(twins), 1.0)
    for seed in range(3):
        give_grads(params, seed)
        give_grads(twins, seed)
        strict.step()
        plain.step()
    assert_bits(params, copies(twins))


def _left_out(params: list[Tensor], how: str) -> list[dict[str, Any]]:
    """Groups in which no rule holds for the last parameter."""
    if how == "clip=None":
        return [{"params": params[:2]}, {"params": [params[2]], "clip": None}]
    setattr(params[2], "need_clip", False)  # noqa: B010
    return [{"params": params}]


LEFT_OUT = pytest.mark.parametrize("how", ["clip=None", "need_clip=False"])


@LEFT_OUT
@pytest.mark.parametrize("make", PLAIN_AND_FUSED)
def test_skip_looks_at_what_is_not_clipped(make, how):
    params = new_params()
    optimizer = ClippedOptimizer(make(_left_out(params, how)), 1.0, nonfinite="skip")
    before = copies(params)
    give_grads(params, 1, bad=math.nan, at=2)
    optimizer.step()
    assert_bits(params, before)
    assert int(optimizer.stats.skipped_steps) == 1


@LEFT_OUT
def test_error_looks_at_what_is_not_clipped(how):
    params = new_params()
    optimizer = ClippedOptimizer(SGD(_left_out(params, how)), 1.0, nonfinite="error")
    before = copies(params)
    give_grads(params, 1, bad=math.nan, at=2)
    grads = grads_of(params)
    expected = (1, 0) if how == "clip=None" else (0, 2)
    place = r"param_groups\[{}\]\['params'\]\[{}\]".format(*expected)
    with pytest.raises(RuntimeError, match=place):
        optimizer.step()
    assert_bits(params, before)
    assert_bits(grads_of(params), grads)


@LEFT_OUT
@pytest.mark.parametrize("policy", ["propagate", "zero"])
def test_other_policies_leave_alone_what_is_not_clipped(how, policy):
    params = new_params()
    optimizer = ClippedOptimizer(SGD(_left_out(params, how)), 1.0, nonfinite=policy)
    give_grads(params, 1, bad=math.nan, at=2)
    grads = grads_of(params)
    optimizer.step()
    assert_bits([grad_of(params[2])], [grads[2]])
    assert torch.isfinite(params[0]).all()
