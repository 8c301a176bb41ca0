"""Processes that lack gradients, parts of a sum or parameters take part: nobody waits in vain."""

import math
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import tritonclip
from helpers import reference
from helpers.cases import assert_norm
from helpers.processes import in_processes
from helpers.spread import (
    assert_same_everywhere,
    collectives_at,
    collectives_of,
    local,
    mesh_of,
    parameter,
    values,
    whole,
)
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByUnitNorm, ClipByValue
from tritonclip.distributed import reduction
from tritonclip.rules import Rule

ORDERS = [2.0, 20.0, 100.0, math.inf]


def _without(parameters, rank: int, places: list[int]) -> list[torch.Tensor]:
    """Takes gradients away in one process; the full gradients that count."""
    wholes = []
    for i, one in enumerate(parameters):
        full = whole(one.grad).double()
        if i in places:
            # Only this process's piece is missing.
            there = torch.ones_like(one.grad)
            local(there).mul_(dist.get_rank() != rank)
            full = full[whole(there).bool()]
        wholes.append(full)
    if dist.get_rank() == rank:
        for i in places:
            parameters[i].grad = None
    return wholes


# The process without gradients, and the shards whose gradients it lacks.
MISSING = {"one": (1, [1]), "all": (0, [0, 1, 2])}


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("beside", ["shards", "plain"])
@pytest.mark.parametrize("p", ORDERS)
@in_processes(2, 4)
def test_clip_gradients_missing_in_one_process(p: float, beside: str, missing: str) -> None:
    mesh = mesh_of(-1)
    parameters = [parameter((8, 3), mesh, [Shard(0)], seed=i) for i in range(3)]
    if beside == "plain":
        # All that a process may have.
        parameters.append(parameter((5,), None, seed=3))
    wholes = _without(parameters, *MISSING[missing])
    norm, n = collectives_of(lambda: tritonclip.clip_(parameters, ClipByGlobalNorm(0.5, p)))
    assert n == collectives_at(p)
    assert_norm(norm, reference.total_norm(wholes, p))
    assert_same_everywhere(norm)


@pytest.mark.parametrize("p", ORDERS)
@in_processes(2)
def test_clip_each_gradient_missing_in_one_process(p: float) -> None:
    mesh = mesh_of(-1)
    parameters = [parameter((8, 3), mesh, [Shard(0)], seed=i) for i in range(3)]
    wholes = _without(parameters, 1, [1])
    norms = tritonclip.clip_(parameters, ClipByNorm(0.5, p))
    expected = reference.norms(wholes, p)
    if dist.get_rank() == 1:
        del expected[1]
    assert_norm(norms, expected)


@in_processes(2)
def test_clip_by_value_process_without_gradients() -> None:
    """It has none that are complex, which this rule would refuse."""
    parameters = [parameter((8, 3), mesh_of(-1), [Shard(0)], seed=i) for i in range(2)]
    wholes = _without(parameters, 1, [0, 1])
    tritonclip.clip_(parameters, ClipByValue(0.1))
    if dist.get_rank() == 0:
        for one, full in zip(parameters, wholes, strict=True):
            assert one.grad is not None
            own = one.grad.to_local().double()
            torch.testing.assert_close(
                own.flatten(), full.flatten().clamp(-0.1, 0.1), rtol=1e-6, atol=0
            )


@in_processes(2)
def test_clip_parameters_without_any_gradient() -> None:
    mesh = mesh_of(-1)
    parameters = [parameter((8, 3), mesh, [Shard(0)]), parameter((3,), mesh, [Replicate()])]
    for one in parameters:
        one.grad = None
    for p in (2.0, math.inf):
        assert tritonclip.clip_(parameters, ClipByGlobalNorm(1.0, p)) == 0
        norms = tritonclip.clip_(parameters, ClipByNorm(1.0, p), nonfinite="error")
        assert norms.shape == (0,)


@in_processes(2)
def test_clip_empty_list_within_a_group() -> None:
    """A stage without parameters."""
    one = torch.nn.Parameter(torch.zeros(2))
    one.grad = torch.tensor([3.0, 4.0])
    parameters = [one] if dist.get_rank() else []
    norm = tritonclip.clip_(parameters, 1.0, process_group=dist.group.WORLD)
    assert_norm(norm, 5.0)
    torch.testing.assert_close(one.grad, torch.tensor([0.6, 0.8]) if parameters else one.grad)


# Rows that each of two processes has of three parameters, and the dtypes of these. The last one is
# a vector, which is one unit over both.
EMPTY = {
    "one": ([(2, 2), (6, 0), (2, 3)], [torch.float32] * 3),
    "several": ([(0, 4), (6, 0), (0, 5)], [torch.float32] * 3),
    "one process": ([(4, 0), (6, 0), (5, 0)], [torch.float32] * 3),
    "all processes": ([(2, 2), (0, 0), (5, 0)], [torch.float32] * 3),
    "float64": ([(2, 2), (0, 0), (2, 3)], [torch.float32, torch.float64, torch.float32]),
    "float16 and float64": (
        [(4, 0), (0, 6), (5, 0)],
        [torch.float16, torch.float64, torch.float32],
    ),
}
WAYS = {
    "clip_": lambda params, rule, **group: tritonclip.clip_(params, rule, **group),
    "clip_grad_norm_": lambda params, rule, **group: tritonclip.clip_grad_norm_(
        params, rule.max_norm, rule.norm_type, **group
    ),
    "step": lambda params, rule, **group: stepped(params, rule, **group),
}


def stepped(params, rule, **group):
    optimizer = tritonclip.ClippedOptimizer(torch.optim.SGD(params, lr=0.1), rule, **group)
    optimizer.step()
    return optimizer.stats.last_norm


BY_GLOBAL_NORM: list[Rule] = [ClipByGlobalNorm(0.5, p) for p in (2.0, 20.0, math.inf)]
BY_EACH: list[Rule] = [ClipByNorm(0.5), ClipByNorm(0.5, 20.0), ClipByUnitNorm(0.05)]
CALLS = [
    (how, rule, way) for how in ("plain", "DTensors") for rule in BY_GLOBAL_NORM for way in WAYS
]
# Of plain lists no process knows which of the others' tensors belong to its own.
CALLS += [("DTensors", rule, way) for rule in BY_EACH for way in ("clip_", "step")]


@pytest.mark.parametrize(("how", "rule", "way"), CALLS)
@pytest.mark.parametrize("empty", EMPTY)
@in_processes(2)
def test_clip_empty_gradient_gives_the_norm_of_one_process(empty, how, rule, way) -> None:
    (rows, dtypes), clip = EMPTY[empty], WAYS[way]
    mesh, rank = mesh_of(-1), dist.get_rank()
    alone, own = [], []
    for i, (of_ranks, dtype) in enumerate(zip(rows, dtypes, strict=True)):
        shape = (sum(of_ranks), *(3, 2)[i:][:1])
        made = parameter(shape, None, seed=i, dtype=dtype)
        with torch.no_grad():
            made.copy_(values(shape, 9 + i, dtype))
        shard, grad = (one.split(of_ranks)[rank] for one in (made.detach(), made.grad))
        if how == "DTensors":
            shard, grad = (
                DTensor.from_local(
                    one, mesh, [Shard(0)], run_check=False, shape=made.shape, stride=made.stride()
                )
                for one in (shard, grad.clone())
            )
        alone.append(made)
        own.append(torch.nn.Parameter(shard.clone()))
        own[-1].grad = grad.clone()
    expected = clip(alone, rule)
    norm = clip(own, rule, **({"process_group": dist.group.WORLD} if how == "plain" else {}))
    torch.testing.assert_close(whole(norm), expected, rtol=1e-6, atol=0)
    for one, made, of_ranks in zip(own, alone, rows, strict=True):
        for found, right in ((one.grad, made.grad), (one.detach(), made.detach())):
            assert found is not None
            torch.testing.assert_close(local(found), right.split(of_ranks)[rank])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("beside", ["empty", "without gradient", "nothing"])
@in_processes(2)
def test_norm_has_the_dtype_of_the_parameters_here(beside, p, way) -> None:
    """Known without a wait: a process alone with float64 parameters has a float64 norm."""
    is_first = dist.get_rank() == 0
    dtype = torch.float64 if is_first == (beside == "nothing") else torch.float32
    # An optimizer has parameters.
    nothing = [torch.nn.Parameter(torch.zeros(2))] if way == "step" else []
    own = nothing if beside == "nothing" else [parameter((0,), None, dtype=dtype)]
    if beside == "without gradient":
        own[0].grad = None
    if is_first:
        own = [parameter((2,), None, dtype=dtype)]
        own[0].grad = torch.tensor([3.0, 4.0], dtype=dtype)
    norm = WAYS[way](own, ClipByGlobalNorm(1.0, p), process_group=dist.group.WORLD)
    assert_norm(norm, reference.total_norm([torch.tensor([3.0, 4.0])], p))
    assert norm.dtype == dtype


# Which processes have a gradient: a function of the rank and of the parameter's position.
LACKING: dict[str, Any] = {
    "first": lambda rank, at: rank == 0,
    "last": lambda rank, at: rank == dist.get_world_size() - 1,
    "all-but-first": lambda rank, at: rank != 0,
    "in-turn": lambda rank, at: rank % 2 == at % 2,
    "everywhere": lambda rank, at: True,
}


def _partial(
    mesh: Any,
    placements: list[Placement],
    own: Sequence[Placement],
    at: int,
    *,
    missing: Any,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, torch.Tensor]:
    """A parameter whose gradient is Partial, or None here; and the whole gradient."""
    made = parameter((8, 3), mesh, placements, seed=at, dtype=dtype)
    # By coordinates: other dimensions hold copies. Sums of these are exact, in any order.
    seed = 100 * at + sum(10**i * one for i, one in enumerate(mesh.get_coordinate()))
    part = values(made.grad.to_local().shape, seed, dtype)
    numbers = torch.view_as_real(part) if dtype.is_complex else part
    numbers.mul_(64).round_().div_(64)
    absent = missing(dist.get_rank(), at)
    if absent:
        part.zero_()
    grad = DTensor.from_local(part, mesh, own, run_check=False)
    full = whole(grad)
    made.grad = None if absent else grad
    return made, full


def _list(mesh: Any, missing: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Sums, means, copies, shards and a plain tensor, and what they are as a whole."""
    found = [
        _partial(mesh, [Replicate()], [Partial()], 1, missing=missing, dtype=dtype),
        _partial(mesh, [Replicate()], [Partial("avg")], 2, missing=missing, dtype=dtype),
    ]
    others = [
        parameter((5, 3), mesh, [Shard(0)], seed=3, dtype=dtype),
        parameter((4,), mesh, [Replicate()], seed=4, dtype=dtype),
        parameter((3,), None, seed=5, dtype=dtype),
    ]
    parameters = [others[0], found[0][0], others[1], found[1][0], others[2]]
    wholes = [whole(others[0].grad), found[0][1], whole(others[1].grad), found[1][1]]
    return parameters, [*wholes, others[2].grad.clone()]


@pytest.mark.covering(2)
@pytest.mark.parametrize("missing", LACKING)
@pytest.mark.parametrize("p", ORDERS)
@in_processes(2, 4)
def test_clip_parts_missing_in_some_processes(p: float, missing: str) -> None:
    parameters, wholes = _list(mesh_of(-1), LACKING[missing])
    if missing == "everywhere":
        # None is what it is as a whole.
        wholes = wholes[::2]
    expected = reference.total_norm(wholes, p)
    there = [(g, local(g).clone()) for one in parameters if (g := one.grad) is not None]
    norm = tritonclip.clip_(parameters, ClipByGlobalNorm(0.5, p))
    assert_norm(norm, expected)
    assert_same_everywhere(norm)
    for grad, before in there:
        coefficient = min(1.0, 0.5 / (expected + 1e-6))
        torch.testing.assert_close(local(grad), before * coefficient)


@pytest.mark.covering(2)
@pytest.mark.parametrize("missing", ["first", "in-turn"])
@pytest.mark.parametrize("p", ORDERS)
@in_processes(2, 4)
def test_clip_each_part_missing_in_some_processes(p: float, missing: str) -> None:
    parameters, wholes = _list(mesh_of(-1), LACKING[missing])
    expected = reference.norms(wholes, p)
    norms = tritonclip.clip_(parameters, ClipByNorm(0.5, p))
    there = [i for i, one in enumerate(parameters) if one.grad is not None]
    assert_norm(norms, [expected[i] for i in there])


@pytest.mark.parametrize("p", [2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
@in_processes(2)
def test_clip_parts_of_a_dtype_missing_in_some_processes(dtype: torch.dtype, p: float) -> None:
    parameters, wholes = _list(mesh_of(-1), LACKING["first"], dtype)
    expected = reference.total_norm(wholes, p)
    norm = tritonclip.clip_(parameters, ClipByGlobalNorm(0.5, p))
    assert_norm(norm, expected)
    assert_same_everywhere(norm)


@in_processes(4)
def test_clip_parts_along_one_of_two_dimensions() -> None:
    """Pieces over one dimension, each a sum over the other; some processes lack theirs."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    found = [
        _partial(mesh, [Shard(0), Replicate()], [Shard(0), Partial()], 1, missing=missing)
        for missing in (LACKING["last"], LACKING["first"])
    ]
    found += [
        _partial(mesh, [Replicate(), Replicate()], own, 3, missing=LACKING["last"])
        for own in ([Partial(), Partial()], [Partial("avg"), Partial()])
    ]
    found.append(
        _partial(mesh["tp"], [Replicate()], [Partial()], 2, missing=lambda r, at: r % 2 == 0)
    )
    for p in (2.0, 100.0, math.inf):
        parameters = [one for one, _ in found]
        grads = [None if one.grad is None else one.grad.to_local().clone() for one in parameters]
        norm = tritonclip.clip_(parameters, ClipByGlobalNorm(0.5, p))
        assert_norm(norm, reference.total_norm([full for _, full in found], p))
        assert_same_everywhere(norm)
        for one, grad in zip(parameters, grads, strict=True):
            if grad is not None:
                one.grad.to_local().copy_(grad)


@pytest.mark.parametrize("p", [2.0, 100.0, math.inf])
@in_processes(4)
def test_clip_copies_of_a_sum_that_round_otherwise(p: float) -> None:
    """Copies are summed up by other processes each; all find the same bits nevertheless."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    made = parameter((8, 3), mesh, [Replicate(), Replicate()])
    part = values((8, 3), seed=dist.get_rank() % 2) * (1 + 1e-6 * (dist.get_rank() // 2))
    made.grad = DTensor.from_local(part, mesh, [Replicate(), Partial()], run_check=False)
    norm = tritonclip.clip_([made], ClipByGlobalNorm(0.5, p))
    assert_same_everywhere(norm)
    full = values((8, 3), seed=0) + values((8, 3), seed=1)
    assert float(norm) == pytest.approx(reference.total_norm([full], p), rel=2e-6)


@in_processes(4)
def test_clip_parts_of_a_stage_missing_in_some_processes() -> None:
    """Processes of other stages know nothing of them."""
    mesh = mesh_of(2, 2, names=("pp", "tp"))
    stage = dist.get_rank() // 2
    missing = LACKING["last"] if stage else LACKING["everywhere"]
    one, full = _partial(mesh["tp"], [Replicate()], [Partial()], 1, missing=missing)
    other = parameter((4, 3), mesh["tp"], [Shard(0)], seed=stage)
    wholes: list[Any] = [None] * 4
    dist.all_gather_object(wholes, full)
    expected = reference.total_norm([wholes[2], values((4, 3), 0), values((4, 3), 1)])
    for group in (mesh["pp"], mesh):
        before = whole(other.grad).clone()
        norm = tritonclip.clip_([one, other], 100.0, process_group=group)
        assert_norm(norm, expected)
        assert_same_everywhere(norm)
        assert torch.equal(whole(other.grad), before)


@pytest.mark.parametrize("p", [2.0, math.inf])
@in_processes(2, 4)
def test_clip_copies_without_gradient_take_one_collective(p: float) -> None:
    parameters = [
        parameter((8, 3), mesh_of(-1), [place], seed=1) for place in (Replicate(), Shard(0))
    ]
    if dist.get_rank() == 0:
        parameters[0].grad = None
    _, n = collectives_of(lambda: tritonclip.clip_(parameters, ClipByGlobalNorm(0.5, p)))
    assert n == 1


@pytest.mark.parametrize("absent", [False, True], ids=["there", "missing"])
@in_processes(2)
def test_clip_reads_flags_only_where_a_copied_gradient_is_missing(absent: bool) -> None:
    """Reading them waits for the device."""
    parameters, _ = _list(mesh_of(-1), lambda rank, at: absent and rank == 0)
    parameters.append(parameter((4, 3), mesh_of(-1), [Shard(0)], seed=9))
    parameters.append(parameter((4,), mesh_of(-1), [Replicate()], seed=9).requires_grad_(False))
    parameters[-1].grad = parameters[-2].grad = None
    with patch.object(reduction, "zeros_for", wraps=reduction.zeros_for) as reads:
        tritonclip.clip_(parameters, 0.5)
    assert reads.call_count == (absent and dist.get_rank() == 0)


@in_processes(2)
def test_verify_passes_parts_missing_in_some_processes() -> None:
    for missing in ("first", "in-turn"):
        parameters, _ = _list(mesh_of(-1), LACKING[missing])
        with tritonclip.verify():
            tritonclip.clip_(parameters, 0.5)
            tritonclip.clip_(parameters, ClipByNorm(0.5))
