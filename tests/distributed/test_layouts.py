"""The norm of gradients on meshes, whatever their placements: one collective, exact, the same."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import tritonclip
from helpers.processes import in_processes
from helpers.spread import check_clip, collectives_at, mesh_of, parameter, with_partial
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, Rule
from tritonclip.rules import Measured

NORM_TYPES = [2.0, 1.0, 3.0, 0.5, 8.0, 20.0, 100.0, math.inf, -math.inf, 0.0]


@in_processes(2, 4)
def test_clip_shards() -> None:
    mesh = mesh_of(-1)
    check_clip([parameter((8, 3), mesh, [Shard(0)], seed=i) for i in range(3)])


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


@pytest.mark.parametrize("p", NORM_TYPES)
@in_processes(2, 4)
def test_clip_norm_types(p: float) -> None:
    mesh = mesh_of(-1)
    parameters = [
        parameter((8, 3), mesh, [Shard(0)], seed=1),
        parameter((5, 8), mesh, [Shard(1)], seed=2),
        parameter((7,), mesh, [Replicate()], seed=3),
        parameter((3, 3), None, seed=4),
    ]
    collectives = collectives_at(p)
    check_clip(parameters, ClipByGlobalNorm(0.5, p), collectives=collectives)
    check_clip(parameters, ClipByNorm(0.5, p), collectives=collectives)
    check_clip(parameters, ClipByValue(0.1), collectives=0)


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
    for p in (2.0, math.inf, -math.inf, 0.0):
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
