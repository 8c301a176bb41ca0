"""The norm of gradients on meshes: any placement, backend and magnitude, by one collective."""

from __future__ import annotations

import math
from typing import Any, ClassVar

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
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, Rule
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


def _check_norm_type(p: float) -> None:
    pieces, collectives = _pieces(), collectives_at(p)
    check_clip(pieces, ClipByGlobalNorm(0.5, p), collectives=collectives)
    check_clip(pieces, ClipByNorm(0.5, p), collectives=collectives)
    check_clip(pieces, ClipByValue(0.1), collectives=0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("p", NORM_TYPES)
@in_processes(2, 4)
def test_clip_norm_types(p: float) -> None:
    _check_norm_type(p)


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
def test_clip_uneven_and_empty_shards() -> None:
    mesh = mesh_of(-1)
    parameters = [
        parameter((1, 3), mesh, [Shard(0)], seed=1),
        parameter((5, 3), mesh, [Shard(0)], seed=2),
        parameter((9,), mesh, [Shard(0)], seed=3),
    ]
    for p in (2.0, math.inf):
        check_clip(parameters, ClipByGlobalNorm(0.5, p))
        check_clip(parameters, ClipByNorm(0.5, p))
    check_clip(parameters[:1])


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


@pytest.mark.parametrize("p", [2.0, 1.0, 3.0, 100.0, math.inf])
@in_processes(2)
def test_clip_on_backends(backend: Any, p: float) -> None:
    _check_norm_type(p)


@in_processes(2)
def test_clip_partial_on_backends(backend: Any) -> None:
    pieces = [with_partial(parameter((8, 3), mesh_of(-1), [Replicate()]), [Partial()]), *_pieces()]
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@in_processes(4)
def test_clip_gives_one_norm_in_every_layout(dtype: torch.dtype) -> None:
    one, two = mesh_of(-1), mesh_of(2, 2)
    layouts: list[Any] = [
        (None, []),
        (one, [Shard(0)]),
        (one, [Replicate()]),
        (two, [Shard(0), Shard(1)]),
        (two, [Replicate(), Shard(0)]),
    ]
    norms = []
    for mesh, placements in layouts:
        many = [parameter((32, 8), mesh, placements, seed=i, dtype=dtype) for i in range(5)]
        norms.append(tritonclip.clip_(many, 1.0))
    for norm in norms:
        assert_norm(norm, float(norms[0]))


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
