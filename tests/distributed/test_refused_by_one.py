"""Bad gradients in one process only: every process raises, nothing is written, nobody waits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Partial

import tritonclip
from helpers.processes import in_processes
from helpers.refusing import (
    as_on_accelerator,
    check_raises,
    is_first,
    named_parameters,
    overlap,
)
from helpers.spread import (
    assert_same_everywhere,
    grads_of,
    local,
    parameter,
    unchanged,
    with_partial,
)
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByUnitNorm,
    ClipByValue,
    ClippedOptimizer,
)


class _Subclass(torch.Tensor):
    pass


def _foreign(one: Any) -> None:
    one.grad = torch.ones(5).as_subclass(_Subclass)


def _inference(one: Any) -> None:
    with torch.inference_mode():
        grad = torch.ones(5)
    one.grad = grad


BAD: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "overlapping": (overlap, ValueError, "share memory"),
    "freed": (lambda one: one.grad.untyped_storage().resize_(0), ValueError, "freed"),
    "kind": (_foreign, TypeError, "_Subclass"),
    "inference": (_inference, RuntimeError, "inference"),
}
RULES = {
    "2": ClipByGlobalNorm(0.5),
    "20": ClipByGlobalNorm(0.5, 20.0),
    "100": ClipByGlobalNorm(0.5, 100.0),
    "inf": ClipByGlobalNorm(0.5, math.inf),
    "each": ClipByNorm(0.5),
    "each-inf": ClipByNorm(0.5, math.inf),
    "unit": ClipByUnitNorm(0.01),
}


def _check(named: dict[str, Any], call: Callable[[], object], error: Any, message: str) -> None:
    """A call raises everywhere and writes nothing; the next one is right again."""
    check_raises(call, error, message, [named[name].grad for name in ("sharded", "copied")])
    named["plain"].grad = None
    norm = tritonclip.clip_(list(named.values()), 0.1)
    assert_same_everywhere(norm)


@pytest.mark.covering(2)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("rule", RULES)
@in_processes(2, 4)
def test_clip_bad_gradient_of_one_process_raises_everywhere(rule: str, bad: str) -> None:
    named = named_parameters()
    make, error, message = BAD[bad]
    if is_first():
        make(named["plain"])
    _check(named, lambda: tritonclip.clip_(iter(named.items()), RULES[rule]), error, message)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rule", RULES)
@in_processes(2)
def test_clip_bad_gradient_beside_one_that_is_not_finite_raises_everywhere(
    rule: str, value: float
) -> None:
    named = named_parameters()
    if is_first():
        overlap(named["plain"])
    else:
        local(named["sharded"].grad).fill_(value)
    with pytest.raises(ValueError, match="share memory"):
        tritonclip.clip_(named.items(), RULES[rule])


@pytest.mark.parametrize("value", [math.inf, math.nan])
@in_processes(2)
def test_clipped_optimizer_beside_a_gradient_that_is_not_finite_raises_everywhere(
    value: float,
) -> None:
    """Nobody waits for the norm of the second group."""
    named = named_parameters()
    groups: Any = [
        {"params": [named["sharded"], named["plain"]]},
        {"params": [named["copied"]], "clip": 1.0},
    ]
    optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 1.0)
    if is_first():
        overlap(named["plain"])
    else:
        local(named["sharded"].grad).fill_(value)
    with pytest.raises(ValueError, match="share memory"):
        optimizer.step()


CALLS: dict[str, Callable[[dict[str, Any]], object]] = {
    "value-zero": lambda named: tritonclip.clip_(named.items(), ClipByValue(1.0), nonfinite="zero"),
    "value-error": lambda named: tritonclip.clip_(
        named.items(), ClipByValue(1.0), nonfinite="error"
    ),
    "clip_grad_norm_": lambda named: tritonclip.clip_grad_norm_(list(named.values()), 1.0),
    "get_total_norm": lambda named: tritonclip.get_total_norm(grads_of(named.values())),
    "get_total_norm-inf": lambda named: tritonclip.get_total_norm(
        grads_of(named.values()), math.inf
    ),
}


@pytest.mark.parametrize("bad", ["overlapping", "kind"])
@pytest.mark.parametrize("call", CALLS)
@in_processes(2)
def test_call_raises_everywhere(call: str, bad: str) -> None:
    named = named_parameters()
    make, error, message = BAD[bad]
    if is_first():
        make(named["plain"])
    _check(named, lambda: CALLS[call](named), error, message)


# Nothing is sent, so nobody waits.
ALONE: dict[str, Callable[[dict[str, Any]], object]] = {
    "value": lambda named: tritonclip.clip_(named.items(), ClipByValue(0.1)),
    "given": lambda named: tritonclip.clip_grads_with_norm_(named.values(), 1.0, torch.ones(())),
}


@pytest.mark.parametrize("call", ALONE)
@in_processes(2)
def test_call_raises_where_the_gradient_is(call: str) -> None:
    named = named_parameters()
    if is_first():
        overlap(named["plain"])
        with pytest.raises(ValueError, match="share memory"):
            ALONE[call](named)
    else:
        ALONE[call](named)


@pytest.mark.parametrize("kind", ["max", "split-units"])
@in_processes(2)
def test_clip_bad_placement_in_one_process_raises_everywhere(kind: str) -> None:
    named = named_parameters()
    copied = named["copied"]
    before = copied.grad
    rule = ClipByUnitNorm(0.01) if kind == "split-units" else ClipByGlobalNorm(0.5)
    if is_first():
        with_partial(copied, [Partial("max" if kind == "max" else "sum")])
    with pytest.raises(TypeError, match="redistribute" if kind == "max" else "rows that are whole"):
        tritonclip.clip_(named.items(), rule)
    copied.grad = before
    assert_same_everywhere(tritonclip.clip_(named.items(), 0.5))


@in_processes(2)
def test_clip_part_beside_a_bad_gradient_raises_everywhere() -> None:
    """One process has a Partial gradient, and the other one that it refuses."""
    named = named_parameters()
    if is_first():
        overlap(named["plain"])
    else:
        with_partial(named["copied"], [Partial()])
    for rule in (ClipByGlobalNorm(0.5), ClipByGlobalNorm(0.5, 100.0), ClipByNorm(0.5)):
        with pytest.raises(ValueError, match="share memory"):
            tritonclip.clip_(named.items(), rule)


@in_processes(2, 4)
def test_clip_bad_gradient_within_a_group_raises_everywhere() -> None:
    one = parameter((5,), None, seed=dist.get_rank())
    if is_first():
        overlap(one)
    with pytest.raises(ValueError, match="share memory"):
        tritonclip.clip_([one], 1.0, process_group=dist.group.WORLD)


@pytest.mark.parametrize("several", [False, True], ids=["one-rule", "rules"])
@pytest.mark.parametrize("bad", ["overlapping", "inference"])
@in_processes(2)
def test_clipped_optimizer_raises_everywhere(bad: str, several: bool) -> None:
    named = named_parameters()
    make, error, message = BAD[bad]
    groups: Any = [{"params": [named["sharded"], named["copied"]]}, {"params": [named["plain"]]}]
    if several:
        groups[1]["clip"] = ClipByNorm(0.5)
    optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 1.0, nonfinite="skip")
    if is_first():
        make(named["plain"])
    with unchanged([named["sharded"]]):
        _check(named, optimizer.step, error, message)


@pytest.mark.parametrize("policy", ["propagate", "error"])
@pytest.mark.parametrize("rule", RULES)
@in_processes(2)
def test_refusal_makes_the_norm_nan_where_reading_it_would_wait(rule: str, policy: Any) -> None:
    """As on an accelerator, where the others go by their policy."""
    named = named_parameters()
    with as_on_accelerator():
        if is_first():
            overlap(named["plain"])
            with pytest.raises(ValueError, match="share memory"):
                tritonclip.clip_(named.items(), RULES[rule], nonfinite=policy)
        elif policy == "error":
            with pytest.raises(RuntimeError, match="non-finite"):
                tritonclip.clip_(named.items(), RULES[rule], nonfinite=policy)
        else:
            norm = tritonclip.clip_(named.items(), RULES[rule])
            assert norm is not None
            assert norm.isnan().all()


@in_processes(2)
def test_verify_raises_everywhere() -> None:
    named = named_parameters()
    if is_first():
        overlap(named["plain"])
    with tritonclip.verify(), pytest.raises(ValueError, match="share memory"):
        tritonclip.clip_(named.items(), 1.0)
    assert isinstance(named["sharded"].grad, DTensor)
