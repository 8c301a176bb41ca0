"""Closures with a loss that is not finite, at the first or a later evaluation of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, AdamW

from helpers.cases import assert_bits, copies
from helpers.training import INNERS, grads_of, new_params, state_of, wrapped
from tritonclip import ClipByGlobalNorm, ClippedOptimizer


def closure_for(params: list[Tensor], bad: set[int]) -> tuple[Callable[[], Tensor], list[float]]:
    """A closure of a sum of fourth powers, and the losses it gave; NaN at the calls in `bad`."""
    losses: list[float] = []

    def closure() -> Tensor:
        for param in params:
            param.grad = None
        loss = torch.stack([((param - 1) ** 4).sum() for param in params]).sum()
        if len(losses) in bad:
            loss = loss * math.nan
        loss.backward()
        losses.append(float(loss.detach()))
        return loss

    return closure, losses


@pytest.mark.parametrize(
    "make",
    [*INNERS, pytest.param(lambda params: LBFGS(params, max_iter=3), id="LBFGS")],
)
def test_skip_of_a_first_evaluation_leaves_everything_as_it_was(make):
    params, optimizer = wrapped(make, 1.0, nonfinite="skip")
    closure, losses = closure_for(params, set())
    optimizer.step(closure)
    before, state, calls = copies(params), state_of(optimizer, params), len(losses)
    closure, losses = closure_for(params, {0})
    assert optimizer.step(closure).isnan()
    assert calls >= 1
    assert len(losses) == 1
    assert_bits(params, before)
    assert_bits(state_of(optimizer, params), state)
    assert int(optimizer.stats.steps) == 1
    assert int(optimizer.stats.skipped_steps) == 1


def test_error_at_a_first_evaluation_changes_nothing():
    params, optimizer = wrapped(AdamW, 1.0, nonfinite="error")
    closure, _ = closure_for(params, {0})
    before = copies(params)
    with pytest.raises(RuntimeError, match=r"param_groups\[0\]\['params'\]\[0\]"):
        optimizer.step(closure)
    assert_bits(params, before)
    assert not state_of(optimizer, params)
    assert int(optimizer.stats.steps) == 0


def lbfgs(params: list[Tensor], search: str | None, policy: str) -> ClippedOptimizer:
    inner = LBFGS(params, lr=0.1, max_iter=4, history_size=3, line_search_fn=search)
    return ClippedOptimizer(inner, ClipByGlobalNorm(5.0), nonfinite=policy)  # type: ignore[arg-type]


def everything(optimizer: ClippedOptimizer, params: list[Tensor]) -> list[Any]:
    """Parameters and LBFGS's state, its lists and counts included, for a comparison by bits."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(one) for one in value]
        # Through float64, which tells -0.0 from 0.0 in repr and holds float32 exactly.
        return repr(value.detach().double().tolist()) if isinstance(value, Tensor) else value

    state = optimizer.state.get(params[0], {})
    return [plain(list(params)), {key: plain(value) for key, value in state.items()}]


@pytest.mark.parametrize("first", [True, False], ids=["first step", "third step"])
@pytest.mark.parametrize("bad", [1, 2])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("policy", ["skip", "error"])
def test_lbfgs_undoes_a_step_whose_later_evaluation_is_not_finite(policy, search, bad, first):
    params = new_params()
    optimizer = lbfgs(params, search, policy)
    if not first:
        for _ in range(2):
            optimizer.step(closure_for(params, set())[0])
    before = everything(optimizer, params)
    stats = optimizer.stats.state_dict()
    closure, losses = closure_for(params, {bad})
    if policy == "error":
        with pytest.raises(RuntimeError, match=r"param_groups\[0\]\['params'\]\[0\]"):
            optimizer.step(closure)
    else:
        optimizer.step(closure)
        stats["skipped_steps"] += 1
        stats["consecutive_skips"] += 1
    assert len(losses) == bad + 1
    assert everything(optimizer, params) == before
    assert_bits(optimizer.stats.state_dict().values(), stats.values())


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_goes_on_after_a_skip_as_if_it_had_not_been(search):
    params, twins = new_params(), new_params()
    optimizer, other = lbfgs(params, search, "skip"), lbfgs(twins, search, "skip")
    for bad in (2, None, 1, None, None):
        optimizer.step(closure_for(params, set() if bad is None else {bad})[0])
        if bad is None:
            other.step(closure_for(twins, set())[0])
    assert everything(optimizer, params) == everything(other, twins)


class Twice(SGD):
    """Evaluates its closure twice in a step, moving the parameters in between."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        super().step()
        closure()
        super().step()
        return loss


def test_skip_says_that_an_optimizer_that_evaluates_twice_cannot_be_undone():
    params = new_params()
    optimizer = ClippedOptimizer(Twice(params, lr=0.1), 1.0, nonfinite="skip")
    closure, _ = closure_for(params, {1})
    with pytest.raises(RuntimeError, match=r"Twice evaluated its closure more than once.*'zero'"):
        optimizer.step(closure)


def test_error_of_an_optimizer_that_evaluates_twice_does_not_claim_that_nothing_changed():
    params = new_params()
    optimizer = ClippedOptimizer(Twice(params, lr=0.1), 1.0, nonfinite="error")
    before = copies(params)
    closure, _ = closure_for(params, {1})
    with pytest.raises(RuntimeError, match=r"param_groups\[0\]") as caught:
        optimizer.step(closure)
    assert not torch.equal(params[0], before[0])
    assert "nor parameters were changed" not in str(caught.value)


def test_zero_holds_for_every_evaluation_of_a_closure():
    params = new_params()
    optimizer = ClippedOptimizer(Twice(params, lr=0.1), 1.0, nonfinite="zero")
    closure, _ = closure_for(params, {1})
    optimizer.step(closure)
    assert all(bool(torch.isfinite(param).all()) for param in params)
    assert not any(grad.any() for grad in grads_of(params))
