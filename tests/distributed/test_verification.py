"""verify() over several processes: right calls pass, wrong lists and copies are found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from cases import assert_norm
from processes import in_processes
from spread import mesh_of, parameter, values, with_partial
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

import tritonclip
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, ClippedOptimizer
from tritonclip.distributed import reduction


def _mixed() -> list[Any]:
    mesh = mesh_of(-1)
    return [
        parameter((9, 3), mesh, [Shard(0)], seed=1),
        parameter((5,), mesh, [Replicate()], seed=2),
        with_partial(parameter((6,), mesh, [Replicate()]), [Partial()]),
        parameter((3, 3), None, seed=4),
        parameter((1,), mesh, [Shard(0)], seed=5, dtype=torch.float64),
    ]


@pytest.mark.parametrize("p", [2.0, 0.5, 20.0, math.inf, -math.inf, 0.0])
@in_processes(2, 4)
def test_verify_passes_right_calls(p: float) -> None:
    with tritonclip.verify():
        for rule in (ClipByGlobalNorm(0.5, p), ClipByNorm(0.5, p)):
            for options in ({}, {"nonfinite": "zero"}, {"grad_scale": 8.0}):
                tritonclip.clip_(_mixed(), rule, **options)
        parameters = _mixed()
        if dist.get_rank():
            parameters[0].grad = None
        tritonclip.clip_(parameters, ClipByGlobalNorm(0.5, p))
        sharded = [parameters[0], parameters[4]]
        for one in sharded:
            if dist.get_rank():
                one.grad = None
        tritonclip.clip_(sharded, ClipByGlobalNorm(0.5, p))
        tritonclip.get_total_norm([_mixed()[0].grad], p)


@in_processes(2)
def test_verify_passes_right_calls_with_policies() -> None:
    with tritonclip.verify():
        for rule in (ClipByValue(0.5), ClipByNorm(0.5), ClipByGlobalNorm(0.5)):
            parameters = _mixed()[:2]
            if dist.get_rank():
                parameters[0].grad.to_local()[0] = math.nan
            tritonclip.clip_(parameters, rule, nonfinite="zero")
            assert not parameters[0].grad.to_local().any()


@in_processes(2)
def test_verify_finds_a_wrong_reduction() -> None:
    module: Any = reduction
    right = module.roots_of

    def wrong(sums: torch.Tensor, norm_type: float) -> torch.Tensor:
        norm: torch.Tensor = right(sums, norm_type) * 1.001
        return norm

    module.roots_of = wrong
    try:
        with tritonclip.verify(), pytest.raises(RuntimeError, match="tritonclip reduced a norm"):
            tritonclip.clip_(_mixed(), 1.0)
    finally:
        module.roots_of = right


@pytest.mark.parametrize("rule", [ClipByGlobalNorm(1.0), ClipByNorm(1.0)])
@in_processes(2)
def test_verify_finds_lists_that_differ(rule: Any) -> None:
    parameters = _mixed()
    if dist.get_rank():
        del parameters[1]
    with (
        tritonclip.verify(),
        pytest.raises(ValueError, match=r"at position 1, rank 0 has .*rank 1"),
    ):
        tritonclip.clip_(parameters, rule)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "none": lambda group: group.update(clip=None),
    "no-key": lambda group: group.pop("clip"),
    "another": lambda group: group.update(clip=ClipByNorm(0.5)),
}


@pytest.mark.parametrize("policy", ["propagate", "skip"])
@pytest.mark.parametrize("all_groups", [False, True], ids=["one-group", "all-groups"])
@pytest.mark.parametrize("change", CHANGES)
@in_processes(2)
def test_verify_finds_rules_of_groups_that_differ(
    change: str, all_groups: bool, policy: Any
) -> None:
    """A rule that is valid, in one process only; each list by itself is alike."""
    parameters = _mixed()[:2]
    groups: list[Any] = [{"params": [one], "clip": 0.5} for one in parameters]
    optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 1.0, nonfinite=policy)
    before = [one.grad.to_local().clone() for one in parameters]
    if dist.get_rank():
        for group in groups if all_groups else groups[1:]:
            CHANGES[change](group)
    with tritonclip.verify(), pytest.raises(ValueError, match="expected the same rules"):
        optimizer.step()
    for one, was in zip(parameters, before, strict=True):
        assert torch.equal(one.grad.to_local(), was)
    dist.barrier()


@in_processes(4)
def test_verify_passes_parameters_on_meshes_of_others() -> None:
    """A process holds no piece of some, and a sharded one lies on two processes."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    parameters = [parameter((8, 3), mesh, [Shard(0)], seed=i) for i, mesh in enumerate(meshes)]
    own = dist.get_rank() // 2
    for p in (2.0, math.inf, -math.inf):
        with tritonclip.verify():
            norms = tritonclip.clip_(parameters, ClipByNorm(math.inf, p))
        expected = [reference.norm(values((8, 3), own), p) if i == own else 0.0 for i in range(2)]
        assert_norm(norms, expected)


@in_processes(2)
def test_verify_finds_copies_that_are_none() -> None:
    """Plain experts beside shards, of which nobody said that they are other pieces."""
    named = {"sharded": _mixed()[0], "expert": parameter((4,), None, seed=dist.get_rank())}
    tritonclip.clip_(named.items(), 1.0)
    with tritonclip.verify(), pytest.raises(ValueError, match=r"expert counts as a copy.*copies="):
        tritonclip.clip_(named.items(), 1.0)
    with tritonclip.verify():
        tritonclip.clip_(
            named.items(), 1.0, process_group=dist.group.WORLD, copies={named["expert"]: 1}
        )


@in_processes(2)
def test_verify_finds_copies_that_are_missing() -> None:
    named = {"sharded": _mixed()[0], "plain": parameter((4,), None)}
    if dist.get_rank():
        named["plain"].grad = None
    with tritonclip.verify(), pytest.raises(ValueError, match="plain counts as copied to 2"):
        tritonclip.clip_(named.items(), 1.0)


@in_processes(2)
def test_verify_finds_numbers_of_copies_that_are_wrong() -> None:
    one = parameter((4,), None, seed=dist.get_rank())
    with tritonclip.verify(), pytest.raises(ValueError, match="counts as held by 2 processes each"):
        tritonclip.clip_([one], 1.0, process_group=dist.group.WORLD, copies={one: 2})
    with tritonclip.verify():
        tritonclip.clip_([one], 1.0, process_group=dist.group.WORLD)
