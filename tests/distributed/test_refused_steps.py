"""Steps and closures that one process refuses: every process raises, nobody waits."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import tritonclip
from helpers.processes import in_processes
from helpers.refusing import (
    as_on_accelerator,
    check_nobody_waits,
    check_raises,
    is_first,
    named_parameters,
    overlap,
)
from helpers.spread import (
    assert_same_everywhere,
    collectives_of,
    local,
    mesh_of,
    parameter,
    unchanged,
    values,
    whole,
)
from tritonclip import ClipByNorm, ClipByUnitNorm, ClipByValue, ClippedOptimizer

# Why the rule of the others does not hold for a plain parameter.
LEFT = ("group", "need-clip", "rule")


def _optimizer(how: str, **options: Any) -> tuple[dict[str, Any], ClippedOptimizer]:
    named = named_parameters()
    groups: list[Any] = [{"params": [named["sharded"], named["copied"]]}]
    plain = named["plain"]
    if how == "need-clip":
        plain.need_clip = False
        groups[0]["params"].append(plain)
    else:
        groups.append({"params": [plain], "clip": ClipByNorm(0.5) if how == "rule" else None})
    return named, ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 0.5, **options)


@pytest.mark.parametrize("policy", ["skip", "error"])
@pytest.mark.parametrize("how", LEFT)
@in_processes(2)
def test_step_raises_everywhere(how: str, policy: Any) -> None:
    named, optimizer = _optimizer(how, nonfinite=policy)
    if is_first():
        overlap(named["plain"])
    tensors = [named["sharded"].grad, named["copied"].grad, *named.values()]
    check_raises(optimizer.step, ValueError, "share memory", tensors)
    named["plain"].grad = torch.ones(5)
    optimizer.step()
    assert_same_everywhere(optimizer.stats.last_norm)


@pytest.mark.parametrize("by_hand", [False, True], ids=["argument", "by-hand"])
@pytest.mark.parametrize("policy", ["propagate", "skip"])
@pytest.mark.parametrize("how", LEFT)
@in_processes(2)
def test_step_with_a_wrong_loss_scale_of_one_process_raises_everywhere(
    how: str, policy: Any, by_hand: bool
) -> None:
    named, optimizer = _optimizer(how, nonfinite=policy)
    grads = [one.grad for one in named.values()]
    if by_hand:
        if is_first():
            optimizer.grad_scale = 4.0
        check_raises(optimizer.step, RuntimeError, "the attribute grad_scale is for", grads)
    else:
        step = partial(optimizer.step, grad_scale=0.0 if is_first() else 4.0)
        check_raises(step, ValueError, "grad_scale must be positive", grads)
    optimizer.step(grad_scale=4.0)
    assert_same_everywhere(optimizer.stats.last_norm)


@pytest.mark.parametrize("skip_above", [None, 1e6])
@pytest.mark.parametrize("policy", ["propagate", "error", "skip"])
@pytest.mark.parametrize("how", LEFT)
@in_processes(2)
def test_step_leaves_nobody_waiting_on_an_accelerator(
    how: str, policy: Any, skip_above: Any
) -> None:
    """The others go by their policy for NaN; those with "error" ask for names."""
    named, optimizer = _optimizer(how, nonfinite=policy, skip_above=skip_above)
    if is_first():
        overlap(named["plain"])
    with as_on_accelerator():
        if is_first() and (how == "rule" or policy != "propagate"):
            with pytest.raises(ValueError, match="share memory"):
                optimizer.step()
        elif policy == "error":
            with pytest.raises(RuntimeError, match=r"non-finite|refuses"):
                optimizer.step()
        else:
            # Without a policy nobody looks at gradients that no rule clips.
            optimizer.step()
    dist.barrier()


@in_processes(2)
def test_step_makes_the_norms_of_all_groups_nan_on_an_accelerator() -> None:
    """Else the others would update some parameters, by gradients that this process never used."""
    named, optimizer = _optimizer("rule")
    if is_first():
        overlap(named["plain"])
    check_nobody_waits(optimizer.step, ValueError, "share memory")
    if not is_first():
        assert all(local(one.detach()).isnan().all() for one in named.values())


@in_processes(2)
def test_step_without_any_rule_says_that_another_process_refuses() -> None:
    """As on an accelerator, where the others see NaN and no gradient that has it."""
    named = named_parameters()
    groups: list[Any] = [{"params": list(named.values()), "clip": None}]
    optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 0.5, nonfinite="error")
    error: type[Exception] = RuntimeError
    message = "Another process refuses its gradients. Neither gradients"
    if is_first():
        overlap(named["plain"])
        error, message = ValueError, "share memory"
    with unchanged(named.values()), as_on_accelerator(), pytest.raises(error, match=message):
        optimizer.step()
    dist.barrier()


@in_processes(2)
def test_step_by_several_units_raises_everywhere() -> None:
    """Found when units are looked at, beside the norms of another rule."""
    for accelerator in (False, True):
        named = named_parameters()
        groups: Any = [
            {"params": [named["sharded"]]},
            {"params": [named["copied"], named["plain"]], "clip": ClipByUnitNorm(0.01)},
        ]
        optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 0.5, nonfinite="error")
        if is_first():
            named["plain"].data = torch.zeros(4)
        grads = [named["sharded"].grad, named["copied"].grad]
        if not accelerator:
            check_raises(optimizer.step, ValueError, "expected the same: clip before", grads)
            continue
        error = ValueError if is_first() else RuntimeError
        with as_on_accelerator(), pytest.raises(error, match=r"has shape|non-finite"):
            optimizer.step()
        dist.barrier()


@pytest.mark.parametrize("accelerator", [False, True])
@in_processes(2)
def test_step_with_norms_by_name_leaves_nobody_waiting(accelerator: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recorder = tritonclip.record(Path(folder, "run.csv"), each=True, write=False)
        named, optimizer = _optimizer("group", recorder=recorder)
        grads = [named["sharded"].grad, named["copied"].grad]
        if is_first():
            overlap(named["plain"])
        if accelerator:
            check_nobody_waits(optimizer.step, ValueError, "share memory")
        else:
            check_raises(optimizer.step, ValueError, "share memory", grads)


@in_processes(2)
def test_step_with_a_closed_recorder_of_one_process_raises_everywhere() -> None:
    with tempfile.TemporaryDirectory() as folder:
        recorder = tritonclip.record(Path(folder, "run.csv"), write=False)
        named, optimizer = _optimizer("rule", recorder=recorder)
        if is_first():
            recorder.close()
        grads = [one.grad for one in named.values()]
        check_raises(optimizer.step, RuntimeError, "closed", grads)


@in_processes(2)
def test_step_after_a_group_got_no_rule_on_one_stage_waits_for_nobody() -> None:
    """One stage has a parameter that is not clipped, and the other has none such."""
    own = parameter((5,), None, seed=dist.get_rank())
    groups: list[Any] = [{"params": [own]}]
    if is_first():
        groups.append({"params": [parameter((5,), None, seed=7)], "clip": None})
    inner, world = torch.optim.SGD(groups, lr=0.1), dist.group.WORLD
    optimizer = ClippedOptimizer(inner, 0.5, nonfinite="skip", process_group=world)
    _, n = collectives_of(optimizer.step)
    assert n == 2
    assert_same_everywhere(optimizer.stats.last_norm)
    if is_first():
        groups[1]["params"][0].grad.fill_(math.nan)
    optimizer.step()
    assert int(optimizer.stats.skipped_steps) == 1


@in_processes(2)
def test_step_with_a_recorder_of_each_norm_raises_everywhere() -> None:
    params: list[Any] = [parameter((5,), None, seed=1), parameter((3,), None, seed=2)]
    with tempfile.TemporaryDirectory() as folder:
        optimizer = ClippedOptimizer(
            torch.optim.SGD(params, lr=0.1),
            ClipByValue(1.0),
            recorder=tritonclip.record(Path(folder) / "run.csv", each=True),
            process_group=dist.group.WORLD,
        )
        grads = [one.grad for one in params]
        if is_first():
            overlap(params[0])
        check_raises(optimizer.step, ValueError, "share memory", grads)


@pytest.mark.parametrize("index", [0, 1], ids=["had-none", "had-one"])
@pytest.mark.parametrize("policy", ["propagate", "error", "skip"])
@pytest.mark.parametrize("how", LEFT)
@in_processes(2)
def test_step_with_a_rule_that_is_none_in_one_process_raises_everywhere(
    how: str, policy: Any, index: int
) -> None:
    """The others have the rules of the step before."""
    named, optimizer = _optimizer(how, nonfinite=policy)
    index = min(index, len(optimizer.param_groups) - 1)
    before = dict(optimizer.param_groups[index])
    if is_first():
        optimizer.param_groups[index]["clip"] = "0.5"
    grads = [one.grad for one in named.values()]
    check_raises(optimizer.step, TypeError, rf"param_groups\[{index}\]\['clip'\]", grads)
    optimizer.param_groups[index].clear()
    optimizer.param_groups[index].update(before)
    optimizer.step()
    assert_same_everywhere(optimizer.stats.last_norm)


@pytest.mark.parametrize("policy", ["propagate", "error", "skip"])
@in_processes(2)
def test_step_with_a_rule_that_is_none_leaves_nobody_waiting_on_an_accelerator(policy: Any) -> None:
    _, optimizer = _optimizer("rule", nonfinite=policy)
    if is_first():
        optimizer.param_groups[1]["clip"] = "0.5"
    check_nobody_waits(optimizer.step, TypeError, "None clips nothing", policy)


INNERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "AdamW-fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "LBFGS": lambda params: torch.optim.LBFGS(params, max_iter=3),
}


def _closure(named: dict[str, Any], *, returns: bool) -> Callable[[], Any]:
    """Gives gradients as an evaluation does; forgets the loss in one process."""

    def evaluate() -> Any:
        for one in named.values():
            one.grad = one.grad.clone()
        return torch.ones(()) if returns else None

    return evaluate


@pytest.mark.parametrize(
    ("inner", "policy"),
    [
        *product(("SGD", "AdamW-fused"), ("propagate", "zero", "error", "skip")),
        *product(("LBFGS",), ("propagate", "zero")),
    ],
)
@in_processes(2)
def test_closure_without_a_loss_in_one_process_raises_everywhere(inner: str, policy: Any) -> None:
    named = named_parameters()
    # torch has no fused step of DTensors beside plain tensors.
    named.pop("plain")
    optimizer = ClippedOptimizer(INNERS[inner](named.values()), 0.5, nonfinite=policy)
    closure = _closure(named, returns=not is_first())
    check_raises(lambda: optimizer.step(closure), TypeError, "return loss", [*named.values()])
    optimizer.step(_closure(named, returns=True))
    assert_same_everywhere(optimizer.stats.last_norm)


@pytest.mark.parametrize("policy", ["propagate", "zero"])
@in_processes(2)
def test_lbfgs_without_a_loss_in_one_process_raises_everywhere(policy: Any) -> None:
    """Where a trainer's closure left the gradients as they were."""
    named = named_parameters()
    optimizer = ClippedOptimizer(INNERS["LBFGS"](named.values()), 0.5, nonfinite=policy)
    loss = None if is_first() else torch.ones(())
    grads = [one.grad for one in named.values()]
    check_raises(lambda: optimizer.step(lambda: loss), TypeError, "LBFGS needs a closure", grads)


@pytest.mark.parametrize("policy", ["error", "skip"])
@in_processes(2)
def test_closure_without_a_loss_leaves_nobody_waiting_on_an_accelerator(policy: Any) -> None:
    named = named_parameters()
    optimizer = ClippedOptimizer(INNERS["SGD"](named.values()), 0.5, nonfinite=policy)
    closure = _closure(named, returns=not is_first())
    check_nobody_waits(lambda: optimizer.step(closure), TypeError, "return loss", policy)


@in_processes(2)
def test_lbfgs_without_a_closure_in_one_process_sends_nothing() -> None:
    """The others evaluate theirs, whose first collective waits until the call is mended."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    fully_shard(model, mesh=mesh_of(-1))
    optimizer = ClippedOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=3), 0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(values((4, 6), dist.get_rank())).square().mean()
        loss.backward()
        return loss

    def refused() -> None:
        with pytest.raises(TypeError, match=r"expected step\(closure\)"):
            optimizer.step()

    if is_first():
        _, n = collectives_of(refused)
        assert n == 0
    optimizer.step(closure)
    assert_same_everywhere(optimizer.stats.last_norm)
    for one in model.parameters():
        assert_same_everywhere(whole(one.detach()))
