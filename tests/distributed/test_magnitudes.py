"""Norms of very large and very small pieces, and the same bits in every layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import tritonclip
from helpers.cases import assert_norm
from helpers.processes import in_processes
from helpers.spread import check_clip, collectives_at, mesh_of, parameter
from tritonclip import ClipByGlobalNorm, ClipByNorm


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


@pytest.mark.parametrize("p", [2.0, 8.0, 65.0, math.inf, -math.inf, 0.0])
@in_processes(2)
def test_clip_zeros(p: float) -> None:
    parameters = [parameter((4, 3), mesh_of(-1), [Shard(0)], seed=i, size=0.0) for i in range(2)]
    for rule in (ClipByGlobalNorm(0.5, p), ClipByNorm(0.5, p)):
        check_clip(parameters, rule, collectives=collectives_at(p))


@pytest.mark.parametrize(
    ("p", "size"),
    [(p, 10.0**e) for p in (0.5, 1.0, 20.0) for e in (300, 0, -307)]
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
    with tritonclip.verify():
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
    from torch import distributed as dist

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
