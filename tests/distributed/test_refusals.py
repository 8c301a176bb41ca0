"""Bad input of lists over several processes: an error that says what to do, before any write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import tritonclip
from helpers import reference
from helpers.cases import assert_norm
from helpers.processes import in_processes
from helpers.spread import mesh_of, parameter, values, with_partial
from tritonclip import ClipByNorm, ClipByValue


def _one() -> Any:
    return parameter((8, 3), mesh_of(-1), [Shard(0)])


def test_copies_without_group_are_refused() -> None:
    one = parameter((3,), None)
    with pytest.raises(ValueError, match="no process_group was given; expected both"):
        tritonclip.clip_([one], 1.0, copies={one: 1})


def test_process_group_of_another_kind_is_refused() -> None:
    one: Any = parameter((3,), None)
    with pytest.raises(TypeError, match="ProcessGroup or a DeviceMesh, got 3 of type int"):
        tritonclip.clip_([one], 1.0, process_group=3)  # type: ignore[call-overload]


@in_processes(2)
def test_copies_of_another_kind_are_refused() -> None:
    one = parameter((3,), None)
    world = dist.group.WORLD
    cases: list[tuple[Any, type[Exception], str]] = [
        (3, TypeError, "copies must map parameters"),
        ({one: -1}, ValueError, "copies must be from 0 to 2"),
        ({one: 3}, ValueError, "copies must be from 0 to 2"),
        ({one: 1.5}, TypeError, "numbers of processes, got 1.5"),
        (lambda p: True, TypeError, "numbers of processes, got True"),
    ]
    for copies, error, message in cases:
        with pytest.raises(error, match=message):
            tritonclip.clip_([("weight", one)], 1.0, process_group=world, copies=copies)
    with pytest.raises(ValueError, match="got 3 for weight"):
        tritonclip.clip_([("weight", one)], 1.0, process_group=world, copies={one: 3})


@in_processes(2)
def test_group_without_this_process_is_refused() -> None:
    one = parameter((3,), None)
    groups = [dist.new_group([0]), dist.new_group([1])]
    other = groups[1 - dist.get_rank()]
    with pytest.raises(ValueError, match="this process belongs to"):
        tritonclip.clip_([one], 1.0, process_group=other)


@in_processes(2)
def test_partial_of_another_kind_is_refused() -> None:
    named = {"weight": with_partial(parameter((4,), mesh_of(-1), [Replicate()]), [Partial("max")])}
    with pytest.raises(TypeError, match=r"gradient of weight is a DTensor .*redistribute"):
        tritonclip.clip_(named.items(), 1.0)


@in_processes(2)
def test_clip_by_value_of_partial_is_refused() -> None:
    one = with_partial(parameter((4,), mesh_of(-1), [Replicate()]), [Partial()])
    before = one.grad.to_local().clone()
    for policy in ("propagate", "zero", "error"):
        with pytest.raises(TypeError, match=r"parts of a sum.*weight.*redistribute"):
            tritonclip.clip_([("weight", one)], ClipByValue(0.1), nonfinite=policy)
    assert torch.equal(one.grad.to_local(), before)


@in_processes(2)
def test_clip_by_norm_over_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="ClipByNorm measures each gradient"):
        tritonclip.clip_([_one()], ClipByNorm(1.0), process_group=dist.group.WORLD)


@in_processes(2)
def test_clip_by_norm_needs_no_cover() -> None:
    """The norm of each gradient is that of its mesh, whoever else there is."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    one: Any = parameter((8, 3), mesh["dp"], [Shard(0)])
    assert tritonclip.clip_([one], ClipByNorm(1.0)).shape == (1,)
    tritonclip.clip_([one], ClipByValue(1.0))


@in_processes(2, 4)
def test_parameters_on_meshes_of_others_need_a_group() -> None:
    """Every process has all parameters, but of some no piece."""
    world = dist.get_world_size()
    halves = [range(world // 2), range(world // 2, world)]
    meshes = [DeviceMesh("cpu", list(half)) for half in halves]
    parameters = [parameter((8, 3), mesh, [Shard(0)], seed=i) for i, mesh in enumerate(meshes)]
    with pytest.raises(ValueError, match=r"to which this one does not belong.*process_group="):
        tritonclip.clip_(parameters, 1.0)
    expected = reference.total_norm([values((8, 3), i) for i in range(2)])
    norm = tritonclip.clip_(parameters, 1.0, process_group=dist.group.WORLD)
    assert_norm(norm, expected)


@in_processes(2)
def test_flat_gradients_of_distributed_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match="DTensor"):
        tritonclip.FlatGradients([_one()])
