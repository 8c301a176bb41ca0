"""`clip_tensors_` on tensors that lie over several processes."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import tritonclip
from helpers import reference
from helpers.processes import in_processes
from helpers.spread import assert_same_everywhere, collectives_of, mesh_of, parameter, values, whole


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
