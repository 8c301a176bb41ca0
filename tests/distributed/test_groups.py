"""Processes that no DTensor names: pipeline stages, Megatron's shards, experts, tied weights."""

import math
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import tritonclip
from helpers import reference
from helpers.cases import assert_norm
from helpers.processes import in_processes
from helpers.spread import (
    assert_same_everywhere,
    check_clip,
    collectives_at,
    collectives_of,
    gathered,
    mesh_of,
    parameter,
    unchanged,
    values,
    whole,
)
from tritonclip import ClipByGlobalNorm

ORDERS = [2.0, 20.0, math.inf]


def _plain(shape: tuple[int, ...], seed: int) -> Any:
    return parameter(shape, None, seed=seed)


def _stage() -> list[Any]:
    """Other parameters in every process, and other numbers of them."""
    rank = dist.get_rank()
    return [_plain((3 + rank, 2), 10 * rank + i) for i in range(1 + rank)]


def _all_norms(grads: list[torch.Tensor], p: float) -> float:
    """The norm of the plain gradients of all processes."""
    gathered_grads: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered_grads, grads)
    return reference.total_norm([g for part in gathered_grads for g in part], p)


@pytest.mark.parametrize("p", ORDERS)
@in_processes(2, 4)
def test_clip_pipeline_stages_by_group(p: float) -> None:
    parameters = _stage()
    expected = _all_norms([one.grad for one in parameters], p)
    group = dist.group.WORLD
    options: Any = {"process_group": group, "collectives": collectives_at(p)}
    check_clip(parameters, ClipByGlobalNorm(0.5, p), expected=expected, **options)


@in_processes(2)
def test_clip_pipeline_stages_without_group_are_apart() -> None:
    """Plain tensors say nothing of other processes: the norm is that of a stage."""
    parameters = _stage()
    norm = tritonclip.clip_(parameters, 0.5)
    assert norm is not None
    assert gathered(norm)[0] != gathered(norm)[1]


def _sharded_stage() -> tuple[list[Any], float, Any]:
    """A pipeline of two stages, each on two processes, as fully_shard places it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = dist.get_rank() // 2
    parameters = [
        parameter((4, 3), mesh["dp"], [Shard(0)], seed=stage * 10 + i) for i in range(stage + 1)
    ]
    other = [values((4, 3), s * 10 + i) for s in range(2) for i in range(s + 1)]
    return parameters, reference.total_norm(other), mesh


@pytest.mark.parametrize("p", ORDERS)
@in_processes(2, 4)
def test_torch_functions_take_a_group_and_copies(p: float) -> None:
    """A piece of its own in every process, and one that all hold."""
    own, copied = _plain((3, 2), dist.get_rank()), _plain((5,), 9)
    wholes = [values((3, 2), rank) for rank in range(dist.get_world_size())]
    expected = reference.total_norm([*wholes, values((5,), 9)], p)
    holders: Any = {
        "process_group": dist.group.WORLD,
        "copies": lambda one: dist.get_world_size() if one.shape == (5,) else 1,
    }
    norm = tritonclip.get_total_norm([own.grad, copied.grad], p, **holders)
    assert_norm(norm, expected)
    tritonclip.clip_grads_with_norm_([own, copied], 0.5, norm, **holders)
    clipped = [own.grad.clone(), copied.grad.clone()]
    own.grad, copied.grad = values((3, 2), dist.get_rank()), values((5,), 9)
    again = tritonclip.clip_grad_norm_([own, copied], 0.5, p, **holders)
    assert_same_everywhere(again)
    found = [norm, own.grad, copied.grad]
    torch.testing.assert_close(found, [again, *clipped], rtol=0, atol=0)


@in_processes(4)
def test_clip_sharded_stages_by_a_group() -> None:
    parameters, expected, mesh = _sharded_stage()
    for group, n in (
        (mesh["pp"].get_group(), 2),
        (mesh["pp"], 2),
        (mesh, 1),
        (dist.group.WORLD, 1),
    ):
        check_clip(parameters, expected=expected, collectives=n, process_group=group)


@in_processes(4)
def test_clip_weight_tied_over_sharded_stages() -> None:
    """Of the four holders two are reached by the mesh, and the others by the group."""
    parameters, expected, mesh = _sharded_stage()
    tied = _plain((5,), seed=99)
    check_clip(
        [*parameters, tied],
        expected=math.hypot(expected, float(tied.grad.norm())),
        collectives=2,
        process_group=mesh["pp"],
        copies={tied: 4},
    )


@in_processes(4)
def test_clip_sharded_stages_without_group_are_refused() -> None:
    parameters, _, mesh = _sharded_stage()
    message = r"2 of the 4 processes of a mesh \['pp', 'dp'\].*process_group="
    with unchanged([parameters[0].grad]), pytest.raises(ValueError, match=message):
        tritonclip.clip_(parameters, 1.0)
    # Copies over the other dimension.
    own = [whole(one.grad) for one in parameters]
    norm = tritonclip.clip_(parameters, 1.0, process_group=mesh["dp"])
    assert_norm(norm, reference.total_norm(own))


@in_processes(4)
def test_clip_group_that_cuts_a_mesh_is_refused() -> None:
    one = parameter((8, 3), mesh_of(-1), [Shard(0)])
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    optimizer = tritonclip.ClippedOptimizer(torch.optim.SGD([one]), 1.0, process_group=half)

    def refused() -> None:
        for call in (lambda: tritonclip.clip_([one], 1.0, process_group=half), optimizer.step):
            with pytest.raises(ValueError, match="cuts through"):
                call()

    with unchanged([one.grad]):
        _, n = collectives_of(refused)
    assert n == 0


@in_processes(2, 4)
def test_clip_megatron_shards() -> None:
    """Attributes say which tensors are pieces; the others are copies, tied ones count elsewhere."""
    world, rank = dist.get_world_size(), dist.get_rank()
    split, copied, tied = _plain((4, 3), 50 + rank), _plain((5,), 1), _plain((2, 2), 2)
    split.tensor_model_parallel = True
    tied.shared = rank == world - 1
    tied.first = rank == 0
    parameters = [split, copied, tied]

    def copies(p: Any) -> int:
        if hasattr(p, "shared"):
            return 0 if not p.first else 1
        return 1 if getattr(p, "tensor_model_parallel", False) else world

    parts = [values((4, 3), 50 + r) for r in range(world)]
    for p in ORDERS:
        expected = reference.total_norm([*parts, copied.grad, tied.grad], p)
        check_clip(
            parameters,
            ClipByGlobalNorm(0.5, p),
            expected=expected,
            process_group=dist.group.WORLD,
            copies=copies,
            collectives=collectives_at(p),
        )
    numbers = {split: 1, copied: world, tied: world}
    expected = reference.total_norm([*parts, copied.grad, tied.grad])
    check_clip(parameters, expected=expected, process_group=dist.group.WORLD, copies=numbers)


@in_processes(2)
def test_clip_weight_tied_over_stages() -> None:
    """Embedding and output of a pipeline: the same gradient in both stages."""
    tied, own = _plain((4, 3), 1), _plain((5,), 10 + dist.get_rank())
    expected = reference.total_norm([tied.grad, values((5,), 10), values((5,), 11)])
    group = dist.group.WORLD
    check_clip([tied, own], expected=expected, process_group=group, copies={tied: 2})


@in_processes(4)
def test_clip_experts_on_another_mesh() -> None:
    dense, experts = mesh_of(-1), mesh_of(2, 2, names=("ep", "ep_shard"))
    parameters = [
        parameter((8, 3), dense, [Shard(0)], seed=1),
        parameter((4, 4, 3), experts, [Shard(0), Shard(1)], seed=2),
        parameter((5,), dense, [Shard(0)], seed=3),
        parameter((4, 6, 3), experts, [Shard(1), Shard(0)], seed=4),
    ]
    check_clip(parameters)
    check_clip(parameters[::-1])


@in_processes(4)
def test_clip_plain_experts_beside_shards() -> None:
    """Other experts in every process, which no DTensor says."""
    dense = mesh_of(-1)
    experts = [_plain((3, 3), 70 + dist.get_rank())]
    sharded = [parameter((8, 3), dense, [Shard(0)], seed=1)]
    expected = reference.total_norm(
        [whole(sharded[0].grad), *[values((3, 3), 70 + r) for r in range(4)]]
    )
    numbers = dict.fromkeys(experts, 1)
    group = dist.group.WORLD
    check_clip(experts + sharded, expected=expected, process_group=group, copies=numbers)
    check_clip(sharded + experts, expected=expected, process_group=dense, copies=numbers)


@in_processes(4)
def test_clip_meshes_of_one_dimension_each() -> None:
    """Rows and columns of a grid, none of which holds the other."""
    grid = mesh_of(2, 2, names=("a", "b"))
    # Each row its columns, the same in all rows; and the other way round.
    parameters = [
        parameter((4, 3), grid["a"], [Shard(0)], seed=1),
        parameter((4, 3), grid["b"], [Shard(0)], seed=2),
    ]
    check_clip(parameters)
    check_clip(parameters[::-1])


@in_processes(4)
def test_clip_mesh_across_another() -> None:
    """Two processes of a grid that are in no row or column together."""
    grid = mesh_of(2, 2)
    diagonals = [DeviceMesh("cpu", [0, 3]), DeviceMesh("cpu", [1, 2])]
    diagonal = diagonals[dist.get_rank() in (1, 2)]
    parameters = [
        parameter((8, 4), grid, [Shard(0), Shard(1)], seed=1),
        parameter((4, 3), diagonal, [Shard(0)], seed=2),
    ]
    check_clip(parameters)
    check_clip(parameters[::-1])


@in_processes(2)
def test_clip_nothing_changes_for_data_parallel() -> None:
    """The same gradients everywhere, as DistributedDataParallel leaves them: nothing is sent."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
    model(values((2, 4), dist.get_rank())).sum().backward()
    parameters = list(model.parameters())
    norm = check_clip(parameters, 0.1, collectives=0)
    assert norm is not None
    assert_same_everywhere(norm)
