"""A group of one process clips as no group does: scripts are tried out on one."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tritonclip
from helpers.cases import assert_bits, copies, grad_of, parameters
from helpers.workers import python
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, ClippedOptimizer

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)
POLICIES = ("propagate", "error", "skip", "zero")


@pytest.fixture
def group() -> Iterator[Any]:
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def both() -> tuple[list[Any], list[Any]]:
    """The same parameters twice, with gradients of norm 6."""
    grads = [torch.full((4,), 2.0), torch.full((5,), 2.0)]
    return parameters(copies(grads)), parameters(copies(grads))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scale", [None, 2.0])
def test_step_of_a_lone_process(group, policy, scale):
    ours, others = both()
    for params, options in ((ours, {"process_group": group}), (others, {})):
        optimizer = ClippedOptimizer(
            torch.optim.SGD(params, lr=0.1), 1.0, nonfinite=policy, **options
        )
        if scale is None:
            optimizer.step()
        else:
            scaler = tritonclip.GradScaler("cpu", init_scale=scale)
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
        assert optimizer.stats.last_norm == pytest.approx(6.0 / (scale or 1.0))
    for one, other in zip(ours, others, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rule", [ClipByGlobalNorm(1.0), ClipByNorm(1.0)])
def test_no_gradient_in_a_lone_process(group, rule):
    params = [torch.nn.Parameter(torch.ones(3))]
    options: Any = {} if rule.per_gradient else {"process_group": group}
    norm = tritonclip.clip_(params, rule, **options)
    assert norm.tolist() == ([] if rule.per_gradient else 0.0)


def test_group_without_gradients_in_a_lone_process(group):
    ours, _ = both()
    groups: list[Any] = [
        {"params": ours},
        {"params": [torch.nn.Parameter(torch.ones(3))], "clip": 1.0},
    ]
    optimizer = ClippedOptimizer(
        torch.optim.SGD(groups, lr=0.1), math.inf, nonfinite="error", process_group=group
    )
    optimizer.step()
    assert optimizer.stats.last_norm == pytest.approx(6.0)


CALLS: dict[str, Any] = {
    "clip_": tritonclip.clip_,
    "clip_-value": lambda params, _, **options: tritonclip.clip_(
        params, ClipByValue(1.0), **options
    ),
    "clip_grad_norm_": tritonclip.clip_grad_norm_,
    "get_total_norm": lambda params, _, **options: tritonclip.get_total_norm(params, **options),
    "clip_grads_with_norm_": lambda params, max_norm, **options: tritonclip.clip_grads_with_norm_(
        params, max_norm, torch.tensor(6.0), **options
    ),
    "step": lambda params, max_norm, **options: ClippedOptimizer(
        torch.optim.SGD(params, lr=0.1), max_norm, **options
    ).step(),
}


@pytest.mark.parametrize("call", CALLS)
def test_wrong_number_of_copies_is_refused_in_a_lone_process(group, call):
    ours, _ = both()
    before = copies([*ours, *map(grad_of, ours)])
    with pytest.raises(ValueError, match="copies must be from 0 to 1"):
        CALLS[call](ours, 1.0, process_group=group, copies=lambda one: 2)
    assert_bits([*ours, *map(grad_of, ours)], before)


def test_group_counts_where_nobody_imported_dtensors():
    program = """
import sys
import torch
from torch import distributed
import tritonclip

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
one = torch.nn.Parameter(torch.zeros(3))
one.grad = torch.ones(3)
try:
    tritonclip.clip_([one], 1.0, process_group=distributed.group.WORLD, copies={one: 2})
except ValueError as error:
    print(error)
print("torch.distributed.tensor" in sys.modules)
"""
    done = python("-c", program)
    assert done.stdout.startswith("copies must be from 0 to 1"), done.stderr
    assert done.stdout.endswith("False\n")


def test_part_of_no_sum_is_refused_in_a_lone_process(group):
    """On a mesh of one process too, or the script fails on the first machine with two."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh("cpu", (1,))
    whole = DTensor.from_local(torch.zeros(3), mesh, [Replicate()])
    one = torch.nn.Parameter(whole)
    one.grad = DTensor.from_local(torch.full((3,), 2.0), mesh, [Partial("max")])
    with pytest.raises(TypeError, match="redistribute"):
        tritonclip.clip_([one], 1.0)


@pytest.mark.parametrize("call", ["clip_", "clip_-value", "clip_grad_norm_", "get_total_norm"])
def test_simulated_distributed_gradients_are_refused(group, call):
    """torch simulates them, too: its norm has a form, and no error."""
    from torch._subclasses import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = init_device_mesh("cpu", (1,))
    with FakeTensorMode():
        params = [torch.nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Replicate()]))]
        params[0].grad = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
        measured = [p.grad for p in params] if call == "get_total_norm" else params
        with pytest.raises(RuntimeError, match=r"FakeTensorMode.*other calls outside"):
            CALLS[call](measured, 1.0)
        assert torch.nn.utils.clip_grad_norm_(params, 1.0).shape == ()
