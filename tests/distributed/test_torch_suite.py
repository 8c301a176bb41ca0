"""The import is swapped, and nothing else: on gloo, with DTensors, as with torch.

torch's own tests of clipping under FSDP2, by behavior: test_clip_grad_norm_1d and _2d. They compare
with a replicated model, count all-reduces, and look at every gradient afterwards. Then the form of
the norm.
"""

import copy
import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tritonclip
from helpers import reference
from helpers.cases import assert_norm
from helpers.processes import in_processes
from helpers.spread import collectives_of, grads_of, local, mesh_of, parameter, whole
from tritonclip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from tritonclip.monitor.history import read


def _check(model: nn.Module, reference_model: nn.Module, half: int, p: float) -> None:
    """Each step is clipped to a hundredth; the reference has the means of all processes."""
    optimizers = [torch.optim.Adam(one.parameters(), lr=1e-2) for one in (model, reference_model)]
    for step in range(2):
        torch.manual_seed(step)
        batch = torch.randn(4, 16)
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(batch.chunk(2)[half]).square().mean().backward()
        reference_model(batch).square().mean().backward()
        expected = reference.total_norm(grads_of(reference_model.parameters()), p)
        max_norm = expected / 100
        total, n = collectives_of(partial(clip_grad_norm_, model.parameters(), max_norm, p))
        assert n == 1
        torch.testing.assert_close(float(total), expected, rtol=1e-5, atol=0)
        clip_grad_norm_(reference_model.parameters(), max_norm, p)
        for one, other in zip(
            grads_of(model.parameters()), grads_of(reference_model.parameters()), strict=True
        ):
            # Every piece is below the limit, and the whole is that of the reference.
            assert reference.norm(local(one), p) <= max_norm * (1 + 1e-5)
            torch.testing.assert_close(whole(one), other, rtol=1e-4, atol=1e-7)
        for optimizer in optimizers:
            optimizer.step()


def _mlps() -> nn.Sequential:
    torch.manual_seed(42)
    layers = [nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(3)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("p", [2, 1, math.inf])
@in_processes(2)
def test_clip_grad_norm_1d(p: float) -> None:
    model = _mlps()
    reference_model = copy.deepcopy(model)
    mesh = mesh_of(-1)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _check(model, reference_model, dist.get_rank(), p)


@pytest.mark.parametrize("p", [2, 1, 3, math.inf])
@in_processes(4)
def test_clip_grad_norm_2d(p: float) -> None:
    model = _mlps()
    reference_model = copy.deepcopy(model)
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    for layer in model:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    _check(model, reference_model, mesh.get_local_rank("dp"), p)


def _measured(parameters: Any, norm_type: float = 2.0, **options: Any) -> Tensor:
    return get_total_norm(grads_of(parameters), norm_type, **options)


CALLS = [
    pytest.param(partial(clip_grad_norm_, max_norm=1.0), id="clip_grad_norm_"),
    pytest.param(_measured, id="get_total_norm"),
]


def _check_form(norm: Tensor, mesh: DeviceMesh, expected: float) -> None:
    """A DTensor that is whole in each process: reading it sends nothing."""
    assert type(norm) is DTensor
    assert norm.device_mesh is mesh
    assert set(norm.placements) == {Replicate()}
    for read_ in (DTensor.full_tensor, DTensor.item, float):
        result, n = collectives_of(partial(read_, norm))
        assert n == 0
        assert_norm(torch.as_tensor(result), expected)


@pytest.mark.covering(2)
@pytest.mark.parametrize("p", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("sizes", [(-1,), (2, -1)], ids=["line", "grid"])
@in_processes(2, 4)
def test_norm_of_distributed_tensors_has_torchs_form(
    call: Callable[..., Tensor], sizes: tuple[int, ...], p: float
) -> None:
    mesh = mesh_of(*sizes)
    placements = [Shard(0), Replicate()][: mesh.ndim]
    parameters = [parameter((8, 3), mesh, placements, seed=i) for i in range(2)]
    theirs: Any = torch.nn.utils.get_total_norm(grads_of(parameters), p)
    expected = reference.total_norm([whole(grad) for grad in grads_of(parameters)], p)
    norm, n = collectives_of(partial(call, parameters, norm_type=p))
    assert n == 1
    # A mesh of torch's cache may be an equal one.
    assert (type(norm), mesh) == (type(theirs), theirs.device_mesh)
    _check_form(norm, mesh, expected)


@pytest.mark.parametrize("call", CALLS)
@in_processes(2)
def test_norm_lies_on_the_mesh_of_the_first_distributed_gradient(
    call: Callable[..., Tensor],
) -> None:
    """torch raises for plain tensors beside DTensors, and for two meshes."""
    line, grid = mesh_of(-1), mesh_of(1, -1)
    plain, one = parameter((3,), None, seed=1), parameter((8, 3), line, [Shard(0)], seed=2)
    other = parameter((8, 3), grid, [Replicate(), Shard(0)], seed=3)
    for parameters, mesh in (([plain, one, other], line), ([other, plain, one], grid)):
        expected = reference.total_norm([whole(grad) for grad in grads_of(parameters)])
        _check_form(call(parameters), mesh, expected)


@pytest.mark.parametrize("call", CALLS)
@in_processes(2)
def test_norm_of_a_group_is_a_distributed_tensor_where_a_gradient_is(
    call: Callable[..., Tensor],
) -> None:
    """The processes of a mesh have the norm of the group; of plain tensors it is plain."""
    group: Any = {"process_group": dist.group.WORLD}
    mesh = DeviceMesh("cpu", [dist.get_rank()])
    one = parameter((8, 3), mesh, [Shard(0)], seed=dist.get_rank())
    whole_model = [parameter((8, 3), None, seed=rank).grad for rank in range(2)]
    _check_form(call([one], **group), mesh, reference.total_norm(whole_model))
    assert type(call([parameter((3,), None)], **group)) is Tensor


@in_processes(4)
def test_norm_lies_on_a_mesh_that_has_the_process() -> None:
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    parameters = [parameter((8, 3), mesh, [Shard(0)], seed=i) for i, mesh in enumerate(meshes)]
    norm = clip_grad_norm_(parameters, math.inf, process_group=dist.group.WORLD)
    wholes = [parameter((8, 3), None, seed=i).grad for i in range(2)]
    _check_form(norm, meshes[dist.get_rank() // 2], reference.total_norm(wholes))


@in_processes(2)
def test_norm_of_no_gradients_is_plain_as_torchs() -> None:
    one = parameter((8, 3), mesh_of(-1), [Shard(0)])
    one.grad = None
    for call in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        norm = call([one], 1.0)
        assert type(norm) is Tensor
        assert norm == 0.0


@in_processes(2)
def test_clip_by_a_norm_that_is_a_distributed_tensor() -> None:
    parameters = [parameter((8, 3), mesh_of(-1), [Shard(0)], seed=i) for i in range(2)]
    _, n = collectives_of(partial(clip_grads_with_norm_, parameters, 0.5, _measured(parameters)))
    assert n == 0
    assert float(_measured(parameters)) == pytest.approx(0.5, rel=1e-5)


@in_processes(2)
def test_recorder_takes_the_norm_of_distributed_tensors() -> None:
    """In one process only, as trainers log."""
    norm = clip_grad_norm_([parameter((8, 3), mesh_of(-1), [Shard(0)])], 1.0)
    path = Path(tempfile.mkdtemp(), "run.csv")
    if dist.get_rank() == 0:
        with tritonclip.record(path, write=True) as recorder:
            recorder.add_(norm)
        assert read(path).norms.tolist() == [norm.item()]
    dist.barrier()
