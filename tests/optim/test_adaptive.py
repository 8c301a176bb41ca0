"""Rules that follow the norms of earlier steps under a wrapper: in its memory and checkpoints."""

import copy
import math
import pickle
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from helpers.cases import assert_bits, copies
from helpers.training import closure_of, sgd, step_on, wrapped
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByOwnHistory,
    ClipByQuantile,
    ClipByRMS,
    ClipByUnitNorm,
    ClipByValue,
    ClipByZScore,
    ClippedOptimizer,
    Outlier,
)
from tritonclip.rules import Measured, Rule

RULES: list[Any] = [
    pytest.param(ClipByQuantile(0.5, 9), id="quantile"),
    pytest.param(ClipByZScore(warmup=4), id="zscore"),
    pytest.param(ClipByOwnHistory(warmup=4), id="own-history"),
    pytest.param(ClipByGlobalNorm(_halving := (lambda step: 4.0 * 0.5**step)), id="schedule"),
]
SIZES = [1.0, 2.0, 0.5, 1.5, 40.0, 1.0, 3.0, 1.0, 0.25, 60.0, 1.0, 2.0]


def steps(optimizer: ClippedOptimizer, params: list[Tensor], numbers: range) -> None:
    for number in numbers:
        step_on(params, optimizer, number, size=SIZES[number])


def memory_of(optimizer: ClippedOptimizer) -> dict[str, Any]:
    """The states of rules, as a checkpoint has them."""
    memory: dict[str, Any] = optimizer.state_dict()["tritonclip"]["memory"]
    return memory


def n_norms(saved: dict[str, Any]) -> int:
    """How many norms a window in a checkpoint has."""
    return sum(not math.isnan(value) for value in saved["values"])


def test_a_checkpoint_of_another_rule_is_refused():
    params, optimizer = wrapped(sgd, ClipByQuantile(0.5, 9))
    steps(optimizer, params, range(2))
    saved = optimizer.state_dict()
    _, other = wrapped(sgd, ClipByZScore())
    before = other.state_dict()
    with pytest.raises(ValueError, match=r"ClipByQuantile.*the program has ClipByZScore.*delete"):
        other.load_state_dict(saved)
    assert repr(other.state_dict()) == repr(before)
    del saved["tritonclip"]["memory"]["rule"]
    other.load_state_dict(saved)


@pytest.mark.parametrize(
    ("rule", "skip_above"),
    [(ClipByQuantile(0.5, 9), None), (1.0, Outlier(6.0, 8))],
    ids=["rule", "outliers"],
)
def test_a_checkpoint_without_a_memory_begins_anew(rule, skip_above):
    params, optimizer = wrapped(sgd, 1.0)
    steps(optimizer, params, range(2))
    twins, other = wrapped(sgd, rule, skip_above=skip_above)
    other.load_state_dict(optimizer.state_dict())
    assert int(other.stats.steps) == 2
    steps(other, twins, range(1))
    assert int(other.stats.steps) == 3


class _FailsOnce(SGD):
    """Raises in its first step, before it updates anything."""

    failed = False

    def step(self, closure: Any = None) -> Any:
        if not self.failed:
            self.failed = True
            raise OSError("once")
        return super().step(closure)


@pytest.mark.parametrize("rule", RULES)
def test_a_step_that_failed_is_not_remembered(rule):
    params, optimizer = wrapped(sgd, rule, skip_above=Outlier(1e6, 4))
    twins, other = wrapped(lambda p: _FailsOnce(p, lr=0.1), rule, skip_above=Outlier(1e6, 4))
    with pytest.raises(OSError, match="once"):
        steps(other, twins, range(7, 8))
    for own, its in ((params, optimizer), (twins, other)):
        steps(its, own, range(6))
    assert_bits(params, copies(twins))
    assert repr(memory_of(other)) == repr(memory_of(optimizer))


def test_a_new_rule_begins_anew():
    params, optimizer = wrapped(sgd, ClipByQuantile(0.5, 9))
    steps(optimizer, params, range(4))
    optimizer.clip = ClipByZScore(warmup=4)
    steps(optimizer, params, range(4))
    twins, other = wrapped(sgd, ClipByZScore(warmup=4))
    steps(other, twins, range(4))
    assert float(optimizer.stats.last_limit) == float(other.stats.last_limit)


def test_a_closure_counts_one_norm_a_step():
    params, optimizer = wrapped(lambda p: torch.optim.LBFGS(p, max_iter=4), ClipByQuantile(0.5, 9))
    closure = closure_of(params, optimizer, [1.0] * 30)
    for _ in range(3):
        optimizer.step(closure)
    assert n_norms(memory_of(optimizer)["rule"]) == 3


def test_a_copy_leaves_out_the_norms_of_parameters_that_no_group_has():
    large = torch.nn.Parameter(torch.ones(1000, 1000))
    params: list[Tensor] = [large, *(torch.nn.Parameter(torch.zeros(2)) for _ in range(2))]
    optimizer = ClippedOptimizer(SGD(params, lr=0.1), ClipByOwnHistory(warmup=1))
    steps(optimizer, params, range(3))
    optimizer.param_groups[0]["params"].pop(0)
    twin = copy.deepcopy(optimizer)
    assert len(pickle.dumps(optimizer)) < 100_000
    moved = twin.param_groups[0]["params"]
    steps(twin, moved, range(3, 6))
    steps(optimizer, params[1:], range(3, 6))
    assert_bits(moved, params[1:])
    assert repr(memory_of(twin)) == repr(memory_of(optimizer))


def test_last_limit_of_each_gradient_is_nan():
    params, optimizer = wrapped(sgd, ClipByRMS(0.1))
    steps(optimizer, params, range(2))
    assert math.isnan(float(optimizer.stats.last_limit))
    assert float(optimizer.stats.last_coefficient) < 1


def test_a_schedule_counts_the_steps_under_every_rule():
    params, optimizer = wrapped(sgd, 1.0)
    steps(optimizer, params, range(3))
    seen: list[int] = []
    optimizer.clip = ClipByGlobalNorm(lambda step: seen.append(step) or 1.0)  # type: ignore[func-returns-value]
    steps(optimizer, params, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    twins, other = wrapped(sgd, optimizer.clip)
    other.load_state_dict(saved)
    steps(other, twins, range(1))
    assert seen == [3, 4]


@pytest.mark.parametrize(
    "kind",
    [
        ClipByGlobalNorm,
        ClipByNorm,
        ClipByRMS,
        ClipByUnitNorm,
        ClipByValue,
        partial(ClipByValue, -1),
    ],
)
def test_a_schedule_is_that_of_the_step_under_every_rule(kind):
    params, optimizer = wrapped(sgd, kind(lambda step: 0.01 / (1 + step)))
    twins, other = wrapped(sgd, 1.0)
    for step in range(3):
        other.clip = kind(0.01 / (1 + step))
        for one, tensors in ((optimizer, params), (other, twins)):
            steps(one, tensors, range(step, step + 1))
    assert_bits(params, twins)


def test_a_rule_may_hold_a_function_that_is_no_schedule():
    @dataclass(frozen=True)
    class Half(Rule):
        of: Any
        norm_type: float = 2.0
        eps: float = 0.0

        def limit(self, measured: Measured) -> Tensor:
            half: Tensor = self.of(measured.norm())
            return half

    params, optimizer = wrapped(sgd, Half(lambda norm: norm / 2))
    step_on(params, optimizer)
    assert float(optimizer.stats.last_coefficient) == 0.5
