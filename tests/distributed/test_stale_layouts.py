"""A layout that is remembered serves no list that is laid out otherwise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from processes import in_processes
from spread import check_clip, mesh_of, parameter, with_partial
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import tritonclip
from tritonclip.distributed import shards


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
        check_clip(_list(mesh, dtype=torch.float64, size=1e200))
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
    made: list[int] = []
    module: Any = shards
    make = module.sharding_of

    def count(*args: Any) -> Any:
        made.append(1)
        return make(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "sharding_of", count)
        for _ in range(4):
            for one in sharded:
                local = one.grad.to_local().clone()
                one.grad = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            tritonclip.clip_(parameters, 1.0)
    assert len(made) == 1


@in_processes(2)
def test_layouts_take_bounded_memory() -> None:
    mesh = mesh_of(-1)
    for n in range(1, 2 * shards.CAPACITY):
        parameters = [parameter((2,), mesh, [Shard(0)]) for _ in range(n)]
        tritonclip.clip_(parameters, 1.0)
    assert len(shards._known) <= shards.CAPACITY
    with pytest.MonkeyPatch.context() as patch:
        # Of the last list it is known.
        patch.delattr(shards, "sharding_of")
        tritonclip.clip_(parameters, 1.0)
