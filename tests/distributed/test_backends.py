"""Pieces on every backend: measured, reduced and scaled by each of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

from helpers import reference
from helpers.cases import parameters
from helpers.processes import in_processes
from helpers.spread import (
    check_clip,
    collectives_at,
    grads_of,
    mesh_of,
    parameter,
    values,
    with_partial,
)
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue


def _pieces() -> list[Any]:
    """Longer and shorter than a chunk, empty on one process, copied, partial, of two dtypes."""
    mesh = mesh_of(-1)
    return [
        parameter((34_000,), mesh, [Shard(0)], seed=1),
        parameter((1, 3), mesh, [Shard(0)], seed=2),
        parameter((5, 3), mesh, [Shard(1)], seed=3),
        parameter((7,), mesh, [Replicate()], seed=4),
        parameter((9, 3), mesh, [Shard(0)], seed=5, dtype=torch.bfloat16),
        parameter((3, 3), None, seed=6),
    ]


@pytest.mark.parametrize("p", [2.0, 1.0, 3.0, 100.0, math.inf, -math.inf, 0.0])
@in_processes(2)
def test_clip_on_backends(backend: Any, p: float) -> None:
    pieces = _pieces()
    collectives = collectives_at(p)
    check_clip(pieces, ClipByGlobalNorm(0.5, p), collectives=collectives)
    check_clip(pieces, ClipByNorm(0.5, p), collectives=collectives)
    check_clip(pieces, ClipByValue(0.1), collectives=0)


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
    check_clip(
        empty,
        expected=reference.total_norm([values((20_000,), 0)]),
        process_group=dist.group.WORLD,
    )
