"""A layout that is remembered serves no list that is laid out otherwise."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import tritonclip
from helpers.processes import in_processes
from helpers.spread import check_clip, mesh_of, parameter, whole, with_partial
from tritonclip import ClipByRMS
from tritonclip.distributed import shards
from tritonclip.engine.plan_cache import plans


def _list(mesh: Any, **options: Any) -> list[Any]:
    return [
        parameter((8, 3), mesh, [Shard(0)], seed=1, **options),
        parameter((5,), None, seed=2, **options),
        parameter((8, 3), mesh, [Shard(0)], seed=3, **options),
    ]


@in_processes(2)
def test_lists_that_differ_in_dtype() -> None:
    """float64 lists send their numbers in another form."""
    mesh = mesh_of(-1)
    for _ in range(2):
        check_clip(_list(mesh))
        check_clip(_list(mesh, dtype=torch.float64, size=1e100))
        check_clip(_list(mesh, dtype=torch.bfloat16))


@in_processes(2)
def test_lists_that_differ_within() -> None:
    mesh = mesh_of(-1)
    ends = parameter((8, 3), mesh, [Shard(0)], seed=1), parameter((8, 3), mesh, [Shard(0)], seed=2)
    middles = [
        parameter((6,), mesh, [Shard(0)], seed=3),
        parameter((6,), mesh, [Replicate()], seed=4),
        with_partial(parameter((6,), mesh, [Replicate()]), [Partial()]),
        parameter((6,), None, seed=5),
    ]
    for _ in range(2):
        for middle in middles:
            check_clip([ends[0], middle, ends[1]], collectives=None)


@pytest.mark.parametrize("how", ["clip", "tensors"])
@in_processes(2)
def test_limits_by_size_are_of_the_whole_shape(how: str) -> None:
    """Shards of 8 rows and of 7 have one shape in the first process."""
    mesh, rule = mesh_of(-1), ClipByRMS(0.1)
    for shape in ((8, 5), (7, 5), (3, 5), (1, 5)):
        one = parameter(shape, mesh, [Shard(0)], seed=1)
        with tritonclip.verify():
            if how == "clip":
                tritonclip.clip_([one], rule)
            else:
                tritonclip.clip_tensors_([one.grad], rule)
        rms = whole(one.grad).square().mean().sqrt()
        assert float(rms) == pytest.approx(0.1, rel=1e-6)


@in_processes(2)
def test_verify_finds_a_limit_by_the_size_of_another_list() -> None:
    one = parameter((7, 5), mesh_of(-1), [Shard(0)], seed=1)
    with tritonclip.verify():
        tritonclip.clip_([one], ClipByRMS(0.1))
        for plan in plans._plans.values():
            if plan.sizes is not None:
                plan.sizes = torch.tensor([40.0])
        one.grad.mul_(10)
        with pytest.raises(tritonclip.VerificationError):
            tritonclip.clip_([one], ClipByRMS(0.1))


@in_processes(2)
def test_placements_that_change() -> None:
    """The same parameter, with a gradient of another placement at each step."""
    mesh = mesh_of(-1)
    one = parameter((6,), mesh, [Replicate()], seed=1)
    copied = one.grad
    for _ in range(2):
        one.grad = copied
        check_clip([one], 0.5)
        with_partial(one, [Partial()])
        check_clip([one], 0.5, collectives=2)
        one.grad = None
        assert tritonclip.clip_([one], 0.5) == 0


@in_processes(4)
def test_meshes_that_are_equal_but_not_the_same() -> None:
    for _ in range(3):
        check_clip(_list(mesh_of(-1)))
        check_clip([parameter((8, 4), mesh_of(2, 2), [Shard(0), Shard(1)])])


@in_processes(2)
def test_groups_and_copies_that_change() -> None:
    one = parameter((6,), None, seed=1)
    world = dist.group.WORLD
    assert world is not None
    length = float(one.grad.norm())
    for _ in range(2):
        apart = tritonclip.clip_([one], math.inf, process_group=world)
        copied = tritonclip.clip_([one], math.inf, process_group=world, copies={one: 2})
        alone = tritonclip.clip_([one], math.inf)
        assert float(apart) == pytest.approx(length * math.sqrt(2), rel=1e-6)
        assert float(copied) == float(alone) == pytest.approx(length, rel=1e-6)


@in_processes(2)
def test_specs_are_recognised_from_the_second_step_on() -> None:
    """New gradients of the same layout need no new layout, and are then known by identity."""
    mesh = mesh_of(-1)
    sharded = [parameter((8, 3), mesh, [Shard(0)], seed=i) for i in range(3)]
    # Beside them a plain one, and one without a gradient.
    parameters = [*sharded, *(parameter((5,), None, seed=i) for i in range(3, 5))]
    parameters[4].grad = None
    with mock.patch.object(shards, "sharding_of", wraps=shards.sharding_of) as made:
        for _ in range(4):
            for one in sharded:
                local = one.grad.to_local().clone()
                one.grad = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            tritonclip.clip_(parameters, 1.0)
    assert made.call_count == 1


@in_processes(2)
def test_layouts_take_bounded_memory() -> None:
    mesh = mesh_of(-1)
    parameters: list[Any] = []
    for _ in range(2 * shards.CAPACITY):
        parameters.append(parameter((2,), mesh, [Shard(0)]))
        tritonclip.clip_(parameters, 1.0)
    assert len(shards._cache) <= shards.CAPACITY
    with pytest.MonkeyPatch.context() as patch:
        # Of the last list it is known.
        patch.delattr(shards, "sharding_of")
        tritonclip.clip_(parameters, 1.0)
