"""Steps and closures that one process refuses: every process raises, nobody waits."""

import math
import tempfile
from collections.abc import Callable
from functools import partial
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
    in_first,
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

Named = dict[str, Any]


def _optimizer(how: str, **options: Any) -> tuple[Named, ClippedOptimizer]:
    """Steps of which a plain parameter does not follow the rule of the others, and why."""
    named = named_parameters()
    groups: list[Any] = [{"params": [named["sharded"], named["copied"]]}]
    plain = named["plain"]
    if how == "need-clip":
        plain.need_clip = False
        groups[0]["params"].append(plain)
    else:
        groups.append({"params": [plain], "clip": ClipByNorm(0.5) if how == "rule" else None})
    return named, ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 0.5, **options)


def _closure(named: Named, *, returns: bool) -> Callable[[], Any]:
    """Gives gradients as an evaluation does; forgets the loss in one process."""

    def evaluate() -> Any:
        for one in named.values():
            one.grad = one.grad.clone()
        return torch.ones(()) if returns else None

    return evaluate


def _gradient(named: Named, optimizer: ClippedOptimizer) -> None:
    overlap(named["plain"])


def _scale_by_hand(named: Named, optimizer: ClippedOptimizer) -> None:
    optimizer.grad_scale = 4.0


def _first_rule(named: Named, optimizer: ClippedOptimizer) -> None:
    optimizer.param_groups[0]["clip"] = "0.5"


def _last_rule(named: Named, optimizer: ClippedOptimizer) -> None:
    optimizer.param_groups[-1]["clip"] = "0.5"


def _closed(named: Named, optimizer: ClippedOptimizer) -> None:
    if optimizer.recorder is None:
        optimizer.recorder = tritonclip.record(Path("run.csv"), write=False)
    optimizer.recorder.close()


def _nothing(named: Named, optimizer: ClippedOptimizer) -> None:
    """What is wrong are the arguments of the step."""


# What the first process does before the step, the step of all, and the error.
STEPS: dict[str, tuple[Any, Callable[[Named, Any], object], type[Exception], str]] = {
    "gradient": (_gradient, lambda n, o: o.step(), ValueError, "share memory"),
    "scale": (
        _nothing,
        lambda n, o: o.step(grad_scale=in_first(0.0, 4.0)),
        ValueError,
        "grad_scale must be positive",
    ),
    "scale-by-hand": (
        _scale_by_hand,
        lambda n, o: o.step(),
        RuntimeError,
        "the attribute grad_scale is for",
    ),
    "first-rule": (_first_rule, lambda n, o: o.step(), TypeError, r"param_groups\[0\]\['clip'\]"),
    "last-rule": (_last_rule, lambda n, o: o.step(), TypeError, "None clips nothing"),
    "closure": (
        _nothing,
        lambda n, o: o.step(_closure(n, returns=not is_first())),
        TypeError,
        "return loss",
    ),
    "closed": (_closed, lambda n, o: o.step(), RuntimeError, "closed"),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("accelerator", [False, True], ids=["host", "accelerator"])
@pytest.mark.parametrize("watched", ["alone", "above", "each"])
@pytest.mark.parametrize("policy", ["propagate", "zero", "error", "skip"])
@pytest.mark.parametrize("how", ["group", "need-clip", "rule"])
@pytest.mark.parametrize("what", STEPS)
@in_processes(2)
def test_step_that_one_process_refuses_raises_everywhere(
    what: str, how: str, policy: Any, watched: str, accelerator: bool
) -> None:
    """On an accelerator, the others see NaN, and go by their policy."""
    if what == "scale-by-hand" and accelerator:
        # The others know of no scale, and measure less than the first one, which waits for them.
        return
    spoil, call, error, message = STEPS[what]
    options: dict[str, Any] = {"nonfinite": policy}
    if watched == "above" and policy != "zero":
        options["skip_above"] = 1e6
    with tempfile.TemporaryDirectory() as folder:
        if watched == "each":
            options["recorder"] = tritonclip.record(Path(folder, "run.csv"), each=True, write=False)
        named, optimizer = _optimizer(how, **options)
        grads = {name: one.grad for name, one in named.items()}
        groups = [dict(group) for group in optimizer.param_groups]
        if is_first():
            spoil(named, optimizer)
        step = partial(call, named, optimizer)
        tensors = [*named.values(), *[one.grad for one in named.values()][:2]]
        seen = policy in ("error", "skip") or how == "rule" or (how, watched) == ("group", "each")
        if what == "gradient" and not seen:
            # Nobody looks at what no rule clips and no policy or recorder asks for.
            step()
        elif accelerator:
            check_nobody_waits(step, error, message, policy)
            return
        else:
            check_raises(step, error, message, tensors)
        for name, one in named.items():
            one.grad = grads[name]
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
        if what == "closed":
            optimizer.recorder = None
        optimizer.step()
        assert_same_everywhere(optimizer.stats.last_norm)


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


@pytest.mark.parametrize("accelerator", [False, True])
@in_processes(2)
def test_step_by_several_units_raises_everywhere(accelerator: bool) -> None:
    """Found when units are looked at, beside the norms of another rule."""
    named = named_parameters()
    groups: Any = [
        {"params": [named["sharded"]]},
        {"params": [named["copied"], named["plain"]], "clip": ClipByUnitNorm(0.01)},
    ]
    optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 0.5, nonfinite="error")
    if is_first():
        named["plain"].data = torch.zeros(4)
    if accelerator:
        check_nobody_waits(optimizer.step, ValueError, "has shape", "error")
    else:
        grads = [named["sharded"].grad, named["copied"].grad]
        check_raises(optimizer.step, ValueError, "expected the same: clip before", grads)


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


def _lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, max_iter=3)


@pytest.mark.parametrize("policy", ["propagate", "zero", "error", "skip"])
@pytest.mark.parametrize("inner", ["AdamW", "LBFGS"])
@in_processes(2)
def test_closure_without_a_loss_in_one_process_raises_everywhere(inner: str, policy: Any) -> None:
    if inner == "LBFGS" and policy in ("error", "skip"):
        return
    named = named_parameters()
    # torch has no fused step of DTensors beside plain tensors.
    named.pop("plain")
    make = _lbfgs if inner == "LBFGS" else partial(torch.optim.AdamW, fused=True)
    optimizer = ClippedOptimizer(make(named.values()), 0.5, nonfinite=policy)
    closure = _closure(named, returns=not is_first())
    check_raises(lambda: optimizer.step(closure), TypeError, "return loss", [*named.values()])
    optimizer.step(_closure(named, returns=True))
    assert_same_everywhere(optimizer.stats.last_norm)


@pytest.mark.parametrize("policy", ["propagate", "zero"])
@in_processes(2)
def test_lbfgs_without_a_loss_in_one_process_raises_everywhere(policy: Any) -> None:
    """Where a trainer's closure left the gradients as they were."""
    named = named_parameters()
    optimizer = ClippedOptimizer(_lbfgs(named.values()), 0.5, nonfinite=policy)
    loss = in_first(None, torch.ones(()))
    grads = [one.grad for one in named.values()]
    check_raises(lambda: optimizer.step(lambda: loss), TypeError, "LBFGS needs a closure", grads)


@in_processes(2)
def test_lbfgs_without_a_closure_in_one_process_sends_nothing() -> None:
    """The others evaluate theirs, whose first collective waits until the call is mended."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    fully_shard(model, mesh=mesh_of(-1))
    optimizer = ClippedOptimizer(_lbfgs(model.parameters()), 0.5)

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
