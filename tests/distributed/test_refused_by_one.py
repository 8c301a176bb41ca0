"""Bad gradients in one process only: every process raises, nothing is written, nobody waits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import tritonclip
from helpers.processes import in_processes
from helpers.refusing import as_on_accelerator
from helpers.spread import assert_same_everywhere, local, mesh_of, parameter, with_partial
from tritonclip import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByUnitNorm,
    ClipByValue,
    ClippedOptimizer,
)


def _overlapping(one: Any) -> None:
    one.grad = torch.ones(1).expand(5)


def _freed(one: Any) -> None:
    one.grad.untyped_storage().resize_(0)


class _Subclass(torch.Tensor):
    pass


def _foreign(one: Any) -> None:
    one.grad = torch.ones(5).as_subclass(_Subclass)


def _inference(one: Any) -> None:
    with torch.inference_mode():
        grad = torch.ones(5)
    one.grad = grad


BAD: dict[str, tuple[Callable[[Any], None], type[Exception], str]] = {
    "overlapping": (_overlapping, ValueError, "share memory"),
    "freed": (_freed, ValueError, "freed"),
    "kind": (_foreign, TypeError, "_Subclass"),
    "inference": (_inference, RuntimeError, "inference"),
}
RULES = {
    "2": ClipByGlobalNorm(0.5),
    "20": ClipByGlobalNorm(0.5, 20.0),
    "100": ClipByGlobalNorm(0.5, 100.0),
    "inf": ClipByGlobalNorm(0.5, math.inf),
    "0": ClipByGlobalNorm(0.5, 0.0),
    "each": ClipByNorm(0.5),
    "each-inf": ClipByNorm(0.5, math.inf),
    "unit": ClipByUnitNorm(0.01),
}


def _named() -> dict[str, Any]:
    mesh = mesh_of(-1)
    return {
        "sharded": parameter((8, 3), mesh, [Shard(0)], seed=1),
        "bad": parameter((5,), None, seed=2),
        "copied": parameter((4,), mesh, [Replicate()], seed=3),
    }


def _check(named: dict[str, Any], call: Callable[[], object], error: Any, message: str) -> None:
    """A call raises everywhere and writes nothing; the next one is right again."""
    before = [local(named[name].grad).clone() for name in ("sharded", "copied")]
    if dist.get_rank():
        message = f"rank 0 raised, so no gradient .*{message}"
    with pytest.raises(error, match=message):
        call()
    for name, was in zip(("sharded", "copied"), before, strict=True):
        assert torch.equal(local(named[name].grad), was)
    named["bad"].grad = None
    norm = tritonclip.clip_(list(named.values()), 0.1)
    assert_same_everywhere(norm)


@pytest.mark.covering(2)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("rule", RULES)
@in_processes(2, 4)
def test_clip_bad_gradient_of_one_process_raises_everywhere(rule: str, bad: str) -> None:
    named = _named()
    make, error, message = BAD[bad]
    if dist.get_rank() == 0:
        make(named["bad"])
    _check(named, lambda: tritonclip.clip_(iter(named.items()), RULES[rule]), error, message)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rule", RULES)
@in_processes(2)
def test_clip_bad_gradient_beside_one_that_is_not_finite_raises_everywhere(
    rule: str, value: float
) -> None:
    named = _named()
    if dist.get_rank() == 0:
        _overlapping(named["bad"])
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
    named = _named()
    groups: Any = [
        {"params": [named["sharded"], named["bad"]]},
        {"params": [named["copied"]], "clip": 1.0},
    ]
    optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 1.0)
    if dist.get_rank() == 0:
        _overlapping(named["bad"])
    else:
        local(named["sharded"].grad).fill_(value)
    with pytest.raises(ValueError, match="share memory"):
        optimizer.step()


@pytest.mark.parametrize("policy", ["zero", "error"])
@in_processes(2)
def test_clip_by_value_with_policy_raises_everywhere(policy: Any) -> None:
    named = _named()
    if dist.get_rank() == 0:
        _overlapping(named["bad"])
    rule = ClipByValue(0.1)
    _check(
        named,
        lambda: tritonclip.clip_(named.items(), rule, nonfinite=policy),
        ValueError,
        "share memory",
    )


@in_processes(2)
def test_clip_by_value_raises_where_the_gradient_is() -> None:
    """Nothing is sent, so nobody waits."""
    named = _named()
    if dist.get_rank() == 0:
        _overlapping(named["bad"])
        with pytest.raises(ValueError, match="share memory"):
            tritonclip.clip_(named.items(), ClipByValue(0.1))
    else:
        tritonclip.clip_(named.items(), ClipByValue(0.1))


@pytest.mark.parametrize("kind", ["max", "split-units"])
@in_processes(2)
def test_clip_bad_placement_in_one_process_raises_everywhere(kind: str) -> None:
    named = _named()
    copied = named["copied"]
    before = copied.grad
    rule = ClipByUnitNorm(0.01) if kind == "split-units" else ClipByGlobalNorm(0.5)
    if dist.get_rank() == 0:
        with_partial(copied, [Partial("max" if kind == "max" else "sum")])
    with pytest.raises(TypeError, match="redistribute" if kind == "max" else "rows that are whole"):
        tritonclip.clip_(named.items(), rule)
    copied.grad = before
    assert_same_everywhere(tritonclip.clip_(named.items(), 0.5))


@in_processes(2)
def test_clip_part_beside_a_bad_gradient_raises_everywhere() -> None:
    """One process has a Partial gradient, and the other one that it refuses."""
    named = _named()
    if dist.get_rank() == 0:
        _overlapping(named["bad"])
    else:
        with_partial(named["copied"], [Partial()])
    for rule in (ClipByGlobalNorm(0.5), ClipByGlobalNorm(0.5, 100.0), ClipByNorm(0.5)):
        with pytest.raises(ValueError, match="share memory"):
            tritonclip.clip_(named.items(), rule)


@in_processes(2, 4)
def test_clip_bad_gradient_within_a_group_raises_everywhere() -> None:
    one = parameter((5,), None, seed=dist.get_rank())
    if dist.get_rank() == 0:
        _overlapping(one)
    with pytest.raises(ValueError, match="share memory"):
        tritonclip.clip_([one], 1.0, process_group=dist.group.WORLD)


@in_processes(2)
def test_clip_grad_norm_raises_everywhere() -> None:
    named = _named()
    if dist.get_rank() == 0:
        _overlapping(named["bad"])
    call = partial(tritonclip.clip_grad_norm_, list(named.values()), 1.0)
    _check(named, call, ValueError, "share memory")


@pytest.mark.parametrize("p", [2.0, math.inf])
@in_processes(2)
def test_get_total_norm_raises_everywhere(p: float) -> None:
    named = _named()
    if dist.get_rank() == 0:
        _foreign(named["bad"])
    grads = [one.grad for one in named.values()]
    _check(named, lambda: tritonclip.get_total_norm(grads, p), TypeError, "_Subclass")


@in_processes(2)
def test_clip_grads_with_norm_raises_where_the_gradient_is() -> None:
    named = _named()
    norm = torch.tensor(1.0)
    if dist.get_rank() == 0:
        _overlapping(named["bad"])
        with pytest.raises(ValueError, match="share memory"):
            tritonclip.clip_grads_with_norm_(named.values(), 1.0, norm)
    else:
        tritonclip.clip_grads_with_norm_(named.values(), 1.0, norm)


@pytest.mark.parametrize("several", [False, True], ids=["one-rule", "rules"])
@pytest.mark.parametrize("bad", ["overlapping", "inference"])
@in_processes(2)
def test_clipped_optimizer_raises_everywhere(bad: str, several: bool) -> None:
    named = _named()
    make, error, message = BAD[bad]
    groups: Any = [{"params": [named["sharded"], named["copied"]]}, {"params": [named["bad"]]}]
    if several:
        groups[1]["clip"] = ClipByNorm(0.5)
    optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 1.0, nonfinite="skip")
    before = named["sharded"].detach().to_local().clone()
    if dist.get_rank() == 0:
        make(named["bad"])
    _check(named, optimizer.step, error, message)
    assert torch.equal(named["sharded"].detach().to_local(), before)


@pytest.mark.parametrize("policy", ["propagate", "error"])
@pytest.mark.parametrize("rule", RULES)
@in_processes(2)
def test_refusal_makes_the_norm_nan_where_reading_it_would_wait(rule: str, policy: Any) -> None:
    """As on an accelerator, where the others go by their policy."""
    named = _named()
    with as_on_accelerator():
        if dist.get_rank() == 0:
            _overlapping(named["bad"])
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
    named = _named()
    if dist.get_rank() == 0:
        _overlapping(named["bad"])
    with tritonclip.verify(), pytest.raises(ValueError, match="share memory"):
        tritonclip.clip_(named.items(), 1.0)
    assert isinstance(named["sharded"].grad, DTensor)
