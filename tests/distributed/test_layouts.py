"""The norm of gradients on meshes: any placement, backend and magnitude, by one collective.

A layout that is remembered serves no list that is laid out otherwise.
"""

import math
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import tritonclip
from helpers import reference
from helpers.cases import assert_norm, parameters
from helpers.processes import in_processes
from helpers.spread import (
    assert_same_everywhere,
    check_clip,
    collectives_at,
    collectives_of,
    grads_of,
    mesh_of,
    parameter,
    values,
    whole,
    with_partial,
)
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByRMS, ClipByValue, Rule
from tritonclip.distributed.shards import Sharding
from tritonclip.engine.plan_cache import CAPACITY, plans
from tritonclip.rules import Measured

NORM_TYPES = [2.0, 1.0, 3.0, 1.5, 8.0, 20.0, 100.0, math.inf]


class _Halving(Rule):
    """A rule of a user: half of the norm of all processes."""

    def limit(self, measured: Measured) -> Tensor:
        return 0.5 * measured.norm()


class _BySize(Rule):
    """Another: a limit for each gradient, by its size on all processes."""

    per_gradient: ClassVar[bool] = True

    def limit(self, measured: Measured) -> Tensor:
        return 0.01 * measured.sizes()


@in_processes(2)
def test_clip_by_own_rules() -> None:
    mesh = mesh_of(-1)
    parameters = [parameter((n, 3), mesh, [Shard(0)], seed=n) for n in (8, 5)]
    norm = tritonclip.clip_(parameters, _Halving())
    assert norm is not None
    halved = tritonclip.clip_(parameters, math.inf)
    torch.testing.assert_close(halved, 0.5 * norm)
    tritonclip.clip_(parameters, _BySize())
    each = tritonclip.clip_(parameters, ClipByNorm(math.inf))
    torch.testing.assert_close(each, torch.tensor([0.24, 0.15]))


def _pieces() -> list[Any]:
    """Longer and shorter than a chunk, empty on one process, copied, of two dtypes."""
    mesh = mesh_of(-1)
    return [
        parameter((34_000,), mesh, [Shard(0)], seed=1),
        parameter((1, 3), mesh, [Shard(0)], seed=2),
        parameter((5, 3), mesh, [Shard(1)], seed=3),
        parameter((7,), mesh, [Replicate()], seed=4),
        parameter((9, 3), mesh, [Shard(0)], seed=5, dtype=torch.bfloat16),
        parameter((3, 3), None, seed=6),
    ]


@pytest.mark.covering(2)
@pytest.mark.parametrize("p", NORM_TYPES)
@in_processes(2, 4)
def test_clip_norm_types(backend: Any, p: float) -> None:
    pieces, collectives = _pieces(), collectives_at(p)
    check_clip(pieces, ClipByGlobalNorm(0.5, p), collectives=collectives)
    check_clip(pieces, ClipByNorm(0.5, p), collectives=collectives)
    check_clip(pieces, ClipByValue(0.1), collectives=0)


@in_processes(4)
def test_clip_two_dimensions() -> None:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    parameters = [
        parameter((8, 4), mesh, [Shard(0), Shard(1)], seed=1),
        parameter((8, 4), mesh, [_StridedShard(0, split_factor=2), Shard(0)], seed=2),
        parameter((8, 4), mesh, [Replicate(), Shard(0)], seed=3),
        parameter((6,), mesh, [Shard(0), Replicate()], seed=4),
        parameter((6,), mesh, [Replicate(), Replicate()], seed=5),
        parameter((6,), mesh["dp"], [Shard(0)], seed=6),
        parameter((6,), mesh["tp"], [Shard(0)], seed=7),
        parameter((5, 3), None, seed=8),
    ]
    check_clip(parameters)
    check_clip(parameters, ClipByNorm(0.5))


@in_processes(2, 4)
def test_clip_partial() -> None:
    mesh = mesh_of(-1)
    sums = with_partial(parameter((8, 3), mesh, [Replicate()]), [Partial()])
    means = with_partial(parameter((5,), mesh, [Replicate()]), [Partial("avg")])
    parameters = [parameter((8, 3), mesh, [Shard(0)], seed=1), sums, means]
    check_clip(parameters[:2], collectives=2)
    check_clip(parameters, collectives=2)
    check_clip(parameters, ClipByNorm(0.5), collectives=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@in_processes(2)
def test_clip_dtypes(dtype: torch.dtype) -> None:
    mesh = mesh_of(-1)
    parameters = [
        parameter((8, 3), mesh, [Shard(0)], seed=1, dtype=dtype),
        parameter((8, 3), mesh, [Shard(0)], seed=2),
        parameter((7,), mesh, [Replicate()], seed=3, dtype=dtype),
    ]
    check_clip(parameters)
    check_clip(parameters[::2])
    check_clip(parameters, ClipByNorm(0.5))


@in_processes(2)
def test_clip_partial_on_backends(backend: Any) -> None:
    pieces = [with_partial(parameter((8, 3), mesh_of(-1), [Replicate()]), [Partial()]), *_pieces()]
    if dist.get_rank() == 0:
        # Terms of a sum may be dense in another order of their dimensions in each process.
        term = pieces[0].grad
        turned = term.to_local().t().contiguous().t()
        pieces[0].grad = DTensor.from_local(turned, term.device_mesh, term.placements)
    check_clip(pieces, 0.5, collectives=2)
    check_clip(pieces, ClipByNorm(0.5), collectives=2)


@pytest.mark.parametrize("p", [2.0, 1.0, math.inf])
@in_processes(2)
def test_clip_complex_on_backends(backend: Any, p: float) -> None:
    mesh = mesh_of(-1)
    pieces = [
        parameter((9, 3), mesh, [Shard(0)], seed=1, dtype=torch.complex64),
        parameter((1, 3), mesh, [Shard(0)], seed=2, dtype=torch.complex64),
        with_partial(parameter((8, 3), mesh, [Replicate()], dtype=torch.complex64), [Partial()]),
    ]
    check_clip(pieces, ClipByGlobalNorm(0.5, p), collectives=2)
    check_clip(pieces, ClipByNorm(0.5, p), collectives=2)


@in_processes(2, on_gpu=True)
def test_clip_group_on_backends(backend: Any) -> None:
    (grad,) = grads_of([parameter((20_000,), None, seed=dist.get_rank())])
    pieces = parameters([grad.to(backend.device)])
    expected = reference.total_norm([values((20_000,), rank) for rank in range(2)])
    check_clip(pieces, expected=expected, process_group=dist.group.WORLD)
    empty = [] if dist.get_rank() else pieces
    expected = reference.total_norm([values((20_000,), 0)])
    check_clip(empty, expected=expected, process_group=dist.group.WORLD)


@pytest.mark.parametrize("size", [1e30, 1e19, 1e-30, 1e-44])
@pytest.mark.parametrize("p", [2.0, 1.0, 6.0, 8.0, 65.0])
@in_processes(2)
def test_clip_float32_of_any_size(size: float, p: float) -> None:
    mesh = mesh_of(-1)
    parameters = [
        parameter((4, 3), mesh, [Shard(0)], seed=1, size=size),
        parameter((4, 3), mesh, [Shard(0)], seed=2),
    ]
    collectives = collectives_at(p)
    check_clip(parameters[:1], ClipByGlobalNorm(size, p, eps=0.0), collectives=collectives)
    check_clip(parameters, ClipByGlobalNorm(size, p, eps=0.0), collectives=collectives)


@pytest.mark.parametrize("p", [2.0, 8.0, 65.0])
@in_processes(2)
def test_clip_equal_elements(p: float) -> None:
    """None outweighs the others, as the largest of random ones does under a high order."""
    one = parameter((8, 3), mesh_of(-1), [Shard(0)])
    one.grad.to_local().fill_(2.0)
    norm = check_clip([one], ClipByGlobalNorm(0.5, p), collectives=collectives_at(p))
    assert norm is not None
    assert_norm(norm, 2.0 * 24 ** (1 / p))


@pytest.mark.parametrize("p", [2.0, 8.0, 65.0, math.inf])
@in_processes(2)
def test_clip_zeros(p: float) -> None:
    parameters = [parameter((4, 3), mesh_of(-1), [Shard(0)], seed=i, size=0.0) for i in range(2)]
    for rule in (ClipByGlobalNorm(0.5, p), ClipByNorm(0.5, p)):
        check_clip(parameters, rule, collectives=collectives_at(p))


@pytest.mark.parametrize(
    ("p", "size"),
    [(p, 10.0**e) for p in (1.0, 20.0) for e in (300, 0, -307)]
    + [(2.0, 1e152), (2.0, 1.0), (2.0, 1e-140), (3.0, 1e101), (6.0, 1e-45)],
)
@in_processes(2)
def test_clip_float64_of_any_size(p: float, size: float) -> None:
    mesh = mesh_of(-1)
    parameters = [
        parameter((4, 3), mesh, [Shard(0)], seed=1, dtype=torch.float64, size=size),
        parameter((4, 3), mesh, [Shard(0)], seed=2, dtype=torch.float64, size=size * 1e-3),
    ]
    check_clip(parameters, ClipByGlobalNorm(size, p, eps=0.0), collectives=collectives_at(p))


@pytest.mark.parametrize(("size", "norm"), [(1e155, math.inf), (1e-170, 0.0)])
@in_processes(2)
def test_float64_norm_whose_square_does_not_fit_is_inf_or_0(size: float, norm: float) -> None:
    one = parameter((4, 3), mesh_of(-1), [Shard(0)], dtype=torch.float64, size=size)
    assert tritonclip.clip_([one], math.inf) == norm


@in_processes(2, 4)
def test_clip_float16_norm_over_65504() -> None:
    mesh = mesh_of(-1)
    many = [parameter((64, 8), mesh, [Shard(0)], dtype=torch.float16, size=1e4) for _ in range(4)]
    norm = check_clip(many, 1e6)
    assert norm is not None
    assert norm > 65504


@in_processes(2)
def test_clip_float64_beside_float32_over_a_group() -> None:
    """Stages of several dtypes agree on one form of the numbers that they send."""
    dtype = torch.float64 if dist.get_rank() else torch.float32
    one = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    one.grad = torch.full((2,), 3e100 if dist.get_rank() else 3.0, dtype=dtype)
    norm = tritonclip.clip_([one], math.inf, process_group=dist.group.WORLD)
    expected = 3e100 * math.sqrt(2)
    if dist.get_rank():
        assert_norm(norm, expected)
    else:
        # Of the dtype of this process's gradients.
        assert norm == math.inf


@in_processes(2)
def test_clip_tensors_clips_dtensors_by_their_norm() -> None:
    mesh, shapes = mesh_of(-1), ((5, 3), (1, 2))
    tensors = [
        parameter(shape, mesh, [Shard(0)], seed=seed).grad for seed, shape in enumerate(shapes)
    ]
    tensors.append(parameter((4,), mesh, [Replicate()], seed=2).grad)
    wholes = [values(shape, seed) for seed, shape in enumerate((*shapes, (4,)))]
    expected = reference.total_norm(wholes)

    norm, count = collectives_of(lambda: tritonclip.clip_tensors_(tensors, 0.5))

    assert count == 1
    assert_same_everywhere(norm)
    torch.testing.assert_close(float(norm), expected, rtol=1e-6, atol=0)
    for tensor, before in zip(tensors, wholes, strict=True):
        expected_values = before * (0.5 / expected)
        torch.testing.assert_close(whole(tensor).double(), expected_values.double())


@in_processes(2)
def test_clip_tensors_takes_a_process_group() -> None:
    rank = dist.get_rank()
    tensor = values((6,), rank).clone()
    norm = tritonclip.clip_tensors_([tensor], 0.5, process_group=dist.group.WORLD)
    expected = reference.total_norm([values((6,), 0), values((6,), 1)])
    torch.testing.assert_close(float(norm), expected, rtol=1e-6, atol=0)


@in_processes(2)
def test_clip_tensors_refuses_parameters_that_are_dtensors() -> None:
    weight = parameter((4, 2), mesh_of(-1), [Shard(0)])
    with pytest.raises(TypeError, match=r"tensors\[0\] is a parameter"):
        tritonclip.clip_tensors_([weight], 0.5)
    assert isinstance(weight, DTensor)


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
    locate = Sharding.locate
    with mock.patch.object(Sharding, "locate", autospec=True, side_effect=locate) as made:
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
    for _ in range(2 * CAPACITY):
        parameters.append(parameter((2,), mesh, [Shard(0)]))
        tritonclip.clip_(parameters, 1.0)
    assert len(plans) <= CAPACITY
    with pytest.MonkeyPatch.context() as patch:
        # Of the last list it is known.
        patch.delattr(Sharding, "locate")
        tritonclip.clip_(parameters, 1.0)
