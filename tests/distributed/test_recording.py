"""Norms by name and histories of gradients that lie over several processes."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

import tritonclip
from helpers import reference
from helpers.processes import in_processes
from helpers.spread import (
    assert_same_everywhere,
    collectives_of,
    local,
    mesh_of,
    parameter,
    shared_folder,
    whole,
    with_partial,
)
from helpers.transformer import Transformer, loss_of, shard, tokens
from tritonclip.monitor.history import read


@in_processes(2, 4)
def test_norms_by_name_are_of_whole_gradients() -> None:
    model = shard(Transformer(), mesh_of(-1))
    loss_of(model, tokens(dist.get_rank())).backward()
    wholes = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    expected = {name: reference.norms([grad], 2.0)[0] for name, grad in wholes.items()}

    norms, count = collectives_of(lambda: tritonclip.norms_by_name(model))

    assert list(norms) == list(expected)
    assert count == 1
    found = torch.stack(list(norms.values()))
    assert_same_everywhere(found)
    torch.testing.assert_close(found.tolist(), [*expected.values()], rtol=1e-6, atol=0)


@in_processes(2, 4)
def test_statistics_are_of_whole_gradients() -> None:
    """Zeros are counted and magnitudes compared over all shards; padding counts as nothing."""
    mesh = mesh_of(-1)
    parameters: dict[str, Any] = {
        "uneven": parameter((5, 3), mesh, [Shard(0)], seed=1),
        "scarce": parameter((1, 4), mesh, [Shard(0)], seed=2),
        "copied": parameter((6,), mesh, [Replicate()], seed=3),
        "double": parameter((7,), mesh, [Shard(0)], seed=4, dtype=torch.float64),
        "missing": parameter((3,), mesh, [Shard(0)]),
    }
    for own in parameters.values():
        pieces = local(own.grad)
        pieces[pieces.abs() < 0.5] = 0.0
    parameters["missing"].grad = None
    parts = parameters["parts"] = parameter((6,), mesh, [Replicate()])
    with_partial(parts, [Partial()])
    local(parts.grad)[2:4] = 0.0
    wholes = {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None}
    wholes["missing"] = torch.zeros(3)
    expected = [
        (float(grad.double().norm()), float(grad.abs().max()), float((grad == 0).double().mean()))
        for grad in map(wholes.__getitem__, parameters)
    ]

    found = tritonclip.statistics_by_name(parameters.items())
    numbers = [[*map(float, found[name])] for name in parameters]
    torch.testing.assert_close(torch.tensor(numbers), torch.tensor(expected), rtol=1e-6, atol=0)
    assert_same_everywhere(torch.tensor(numbers))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.csv")
        with tritonclip.record(path, each=True, write=True) as recorder:
            sgd = torch.optim.SGD([*parameters.items()], lr=0.1)
            tritonclip.ClippedOptimizer(sgd, 0.1, recorder=recorder).step()
        recorded = read(path).named_norms
    for name, (norm, _, _) in zip(parameters, expected, strict=True):
        assert float(recorded[name]) == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("rank", [None, 1], ids=["by-default", "told-to"])
@in_processes(2)
def test_record_writes_in_one_process(rank: int | None) -> None:
    path = shared_folder() / "run.csv"
    options: Any = {} if rank is None else {"write": dist.get_rank() == rank}
    with tritonclip.record(path, **options) as recorder:
        dist.barrier()
        recorder.add_(torch.tensor(float(dist.get_rank())))
        assert recorder.writes == (dist.get_rank() == (rank or 0))
        assert recorder.steps == 1
    dist.barrier()
    assert read(path).norms.tolist() == [float(rank or 0)]
