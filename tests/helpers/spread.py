"""Gradients over several processes: models, the truth about them, and the checks of every test."""

import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import tritonclip
from helpers import cases, reference
from helpers.cases import assert_norm
from tritonclip import ClipByGlobalNorm
from tritonclip.rules import Rule


def mesh_of(*sizes: int, names: Sequence[str] | None = None) -> DeviceMesh:
    """A mesh of all processes; -1 for what is left."""
    world = dist.get_world_size()
    rest = world // max(1, math.prod(s for s in sizes if s > 0))
    shape = tuple(rest if size < 0 else size for size in sizes)
    return init_device_mesh("cpu", shape, mesh_dim_names=None if names is None else tuple(names))


def as_torchrun(environment: pytest.MonkeyPatch) -> None:
    """What torchrun tells its processes, of the group that is there already."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    more = {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**names, **more, "TORCHELASTIC_RUN_ID": "tests"}.items():
        environment.setenv(name, value)


def values(
    shape: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32, size: float = 1.0
) -> Tensor:
    """Random normal values, the same in every process."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(tuple(shape), generator=generator, dtype=wide) * size).to(dtype)


def parameter(
    shape: Sequence[int],
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] = (),
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    size: float = 1.0,
) -> Any:
    """A parameter with a gradient, placed alike; plain without a mesh."""
    grad = values(shape, seed, dtype, size)
    if mesh is None:
        made = nn.Parameter(torch.zeros_like(grad))
        made.grad = grad
        return made
    # Every process has all of it: none sends.
    zeros, grad = (
        distribute_tensor(one, mesh, placements, src_data_rank=None)
        for one in (torch.zeros_like(grad), grad)
    )
    made = nn.Parameter(zeros)
    made.grad = grad
    return made


def with_partial(parameter: Any, placements: Sequence[Placement]) -> Any:
    """Gives a parameter a gradient of parts: other ones in every process."""
    local = parameter.grad.to_local()
    own = values(local.shape, 100 + dist.get_rank(), local.dtype)
    parameter.grad = DTensor.from_local(
        own,
        parameter.device_mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return parameter


def whole(grad: Tensor) -> Tensor:
    """All of a gradient, a plain tensor."""
    return grad.full_tensor() if isinstance(grad, DTensor) else grad.detach().clone()


def weights_of(model: nn.Module) -> list[Tensor]:
    """All of each weight."""
    return [whole(one.detach()) for one in model.parameters()]


def local(grad: Tensor) -> Tensor:
    """The piece of a gradient that lies here."""
    return grad.to_local() if isinstance(grad, DTensor) else grad


def unchanged(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Checks that a block leaves the pieces of tensors that lie here as they are."""
    return cases.unchanged(local(tensor.detach()) for tensor in tensors)


def shared_folder() -> Path:
    """A new folder, the same in every process."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return Path(str(made[0]))


def gathered(tensor: Tensor) -> list[Tensor]:
    """A tensor of every process."""
    all_of_them = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, tensor.contiguous())
    return all_of_them


def assert_same_everywhere(tensor: Tensor) -> None:
    """A result has the same bits in every process."""
    for other in gathered(tensor.detach()):
        torch.testing.assert_close(other, tensor.detach(), rtol=0, atol=0, equal_nan=True)


def network() -> nn.Module:
    """A model that is the same in every process, for batches of 3 columns."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def norm_alone(batches: Iterable[Tensor], model: nn.Module, max_norm: float) -> Tensor:
    """The last norm of one process, whose weights are compared with those of several."""
    alone = network()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        alone(batch).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
        optimizer.step()
    torch.testing.assert_close(weights_of(model), weights_of(alone), rtol=1e-5, atol=1e-7)
    return norm


def sharded_network(*, sharded: bool = True) -> nn.Module:
    """A model over all processes by FSDP2, for batches of 6 columns; or that of one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    if sharded:
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh_of(-1))
        fully_shard(model, mesh=mesh_of(-1))
    return model


def loss_of(model: nn.Module, step: int, *, sharded: bool = True) -> Tensor:
    """The loss of the batch of a step, or of the part of this process."""
    batch = values((8, 6), step)
    if sharded:
        batch = batch.chunk(dist.get_world_size())[dist.get_rank()]
    loss: Tensor = model(batch).square().mean()
    return loss


def grads_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def collectives_of(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a call, and how many collectives it took."""
    with CommDebugMode() as seen:
        result = call()
    return result, seen.get_total_counts()


def collectives_at(order: float) -> int:
    """How many collectives a norm of an order takes: above 6 the largest comes before the sum."""
    return 2 if 6 < order < math.inf else 1


def check_clip(
    parameters: Sequence[Tensor],
    rule: Rule | float = 1.0,
    *,
    expected: float | Sequence[float] | None = None,
    collectives: int | None = 1,
    tolerance: float | None = None,
    **options: Any,
) -> Tensor | None:
    """Clips, and compares norm, gradients and number of collectives with the truth.

    Twice, because the second call has a plan: with the gradients as they were.
    """
    rule = rule if isinstance(rule, Rule) else ClipByGlobalNorm(rule)
    grads = grads_of(parameters)
    if expected is None:
        wholes = [whole(grad) for grad in grads]
        own = reference.norms(wholes, rule.norm_type)
        expected = own if rule.per_gradient else reference.total_norm(wholes, rule.norm_type)
    before = [local(grad).clone() for grad in grads]
    for _ in range(2):
        norm, count = collectives_of(lambda: tritonclip.clip_(parameters, rule, **options))
        if rule.clamps:
            assert norm is None
        else:
            assert type(norm) is Tensor
            assert norm.shape == ((len(grads),) if rule.per_gradient else ())
            assert_norm(norm, expected)
            if not rule.per_gradient:
                assert_same_everywhere(norm)
        assert collectives is None or count == collectives
        scaled = reference.clipped(before, rule, norm)
        for grad, right, was in zip(grads, scaled, before, strict=True):
            now = local(grad).cpu()
            torch.testing.assert_close(now, right.cpu(), rtol=0, atol=0, equal_nan=True)
            local(grad).copy_(was)
    assert norm is None or isinstance(norm, Tensor)
    return norm
