"""What public trainers do around a call on gloo, with the functions of torch or with ours."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import tritonclip
from helpers.processes import in_processes
from helpers.refusing import is_first
from helpers.spread import grads_of, local, loss_of, mesh_of, parameter, sharded_network, unchanged


def _torchtune(utils: Any, model: nn.Module) -> float:
    """The norm is gathered in the same expression; "inf" only measures it."""
    utils.clip_grad_norm_(model.parameters(), max_norm=float("inf")).full_tensor()
    norm = utils.clip_grad_norm_(model.parameters(), max_norm=float("0.05")).full_tensor()
    return float(norm)


def _torchtune_of_any_model(utils: Any, model: nn.Module) -> float:
    norm = utils.clip_grad_norm_(model.parameters(), max_norm=0.05)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _total(utils: Any, parameters: list[Any], p: float) -> Tensor:
    norm: Tensor = utils.get_total_norm(grads_of(parameters), p, False, True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _torchtitan(utils: Any, model: nn.Module) -> float:
    """Measured, reduced over stages in place, clipped; of an order that is no 2."""
    p, parameters = 3.0, list(model.parameters())
    total = _total(utils, parameters, p)
    total **= p
    total **= 1.0 / p
    utils.clip_grads_with_norm_(parameters, 0.05, total, True)
    assert torch.isfinite(total).all()
    return float(total.item())


def _torchtitan_of_experts(utils: Any, model: nn.Module) -> float:
    """Two lists by mesh, of which one may be empty."""
    lists: dict[bool, list[Any]] = {True: [], False: []}
    parameters: Any = model.parameters()
    for one in parameters:
        lists[one.device_mesh.ndim == 2].append(one)
    total = math.hypot(*[_total(utils, parameters, 2.0) for parameters in lists.values()])
    for parameters in lists.values():
        utils.clip_grads_with_norm_(parameters, 0.05, torch.tensor(total), True)
    return total


@contextmanager
def _imported_from(utils: Any) -> Iterator[None]:
    """Real trainers get the functions of a module."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_"):
            patch.setattr(torch.nn.utils, name, getattr(utils, name))
        yield


def _accelerate(utils: Any, model: nn.Module) -> float:
    """The method reads nothing of its object. Axolotl calls it, too."""
    accelerate = pytest.importorskip("accelerate", reason="needs tritonclip[integrations]")
    clip = accelerate.Accelerator._clip_grad_norm_dtensor_aware
    with _imported_from(utils):
        norm = clip(None, list(model.parameters()), 0.05)
    # As transformers logs it, and TRL.
    assert norm.item() == norm.detach().item()
    return float(norm.item())


def _transformers(utils: Any, model: nn.Module) -> float:
    transformers = pytest.importorskip("transformers", reason="needs tritonclip[integrations]")
    with _imported_from(utils):
        return float(transformers.Trainer._mixed_mesh_grad_norm(None, model, 0.05).item())


def _lightning(utils: Any, model: nn.Module) -> float:
    """Fabric returns the norm; the Trainer drops it."""
    lightning = pytest.importorskip("lightning", reason="needs tritonclip[integrations]")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = lightning.fabric.strategies.SingleDeviceStrategy()
    with _imported_from(utils):
        norm = strategy.clip_gradients_norm(model, optimizer, 0.05)
        lightning.pytorch.plugins.precision.Precision().clip_grad_by_norm(optimizer, 0.04)
    return float(norm)


def _timm(utils: Any, model: nn.Module) -> float:
    """Of a generator, by keyword; the norm is dropped."""
    utils.clip_grad_norm_((p for p in model.parameters()), 0.05, norm_type=2.0)
    utils.clip_grad_value_(model.parameters(), 0.01)
    return 0.0


def _compare_with_torch(lines: Callable[[Any, nn.Module], float], make: Any) -> None:
    ours, theirs = make(), make()
    norm = lines(tritonclip, ours)
    assert norm == pytest.approx(lines(torch.nn.utils, theirs), rel=1e-5)
    found, expected = ([*map(local, grads_of(one.parameters()))] for one in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


TRAINERS = [_torchtune, _torchtune_of_any_model, _torchtitan, _torchtitan_of_experts]
TRAINERS += [_accelerate, _transformers, _lightning, _timm]


@pytest.mark.parametrize("lines", TRAINERS)
@in_processes(2)
def test_trainer_clips_as_with_torch(lines: Callable[[Any, nn.Module], float]) -> None:
    def make() -> nn.Module:
        model = sharded_network()
        loss_of(model, 0).backward()
        return model

    _compare_with_torch(lines, make)


@pytest.mark.parametrize("lines", [_torchtitan_of_experts, _accelerate, _transformers])
@in_processes(4)
def test_trainer_clips_two_meshes_as_with_torch(lines: Callable[[Any, nn.Module], float]) -> None:
    def make() -> nn.Module:
        grid = mesh_of(2, -1)
        dense = [parameter((8, 3), mesh_of(-1), [Shard(0)], seed=i) for i in range(2)]
        experts = [parameter((4, 6), grid, [Shard(0), Shard(1)], seed=i) for i in range(2, 4)]
        return nn.ParameterList([*dense, *experts])

    _compare_with_torch(lines, make)


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "FSDP2": ((-1,), (Shard(0),)),
    "HSDP": ((2, -1), (Replicate(), Shard(0))),
    "TP": ((-1,), (Shard(1),)),
    "FSDP2 and TP": ((2, -1), (Shard(0), Shard(1))),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", [2.0, math.inf, 8.0])
@in_processes(4)
def test_patched_call_raises_everywhere_for_a_norm_that_is_not_finite(
    layout: str, order: float
) -> None:
    """Also where NaN is in one replica alone; torch raises there alone, or nowhere."""
    sizes, placements = LAYOUTS[layout]
    named = [parameter((8, 8), mesh_of(*sizes), placements, seed=i) for i in range(2)]
    if is_first():
        named[1].grad.to_local()[0, 0] = math.nan
    said = r"non-finite.*parameters\[1\] \(on rank 0\)"
    with tritonclip.patch_torch() as patch, unchanged(grads_of(named)):
        with pytest.raises(RuntimeError, match=said):
            torch.nn.utils.clip_grad_norm_(named, 1.0, order, error_if_nonfinite=True)
        with pytest.raises(RuntimeError, match="non-finite"):
            torch.nn.utils.get_total_norm(grads_of(named), order, error_if_nonfinite=True)
    assert not patch.served_by_torch
    dist.barrier()


@pytest.mark.parametrize("order", [2.0, math.inf])
@in_processes(4)
def test_patched_total_norm_of_a_stage_is_that_of_its_mesh(order: float) -> None:
    """As torchtitan measures the stages of a pipeline, whose norms it then puts together."""
    mesh = mesh_of(2, 2, names=("pp", "dp"))["dp"]
    parameters = [
        parameter((8, 3), mesh, [Shard(0)], seed=dist.get_rank() // 2 + i) for i in (0, 5)
    ]
    expected = _total(torch.nn.utils, parameters, order)
    with tritonclip.patch_torch() as patch:
        found = _total(torch.nn.utils, parameters, order)
        torch.nn.utils.clip_grads_with_norm_(parameters, 0.05, found)
    torch.testing.assert_close(found, expected)
    assert not patch.served_by_torch


@in_processes(2)
def test_torch_serves_all_processes_where_one_refuses_its_gradients() -> None:
    """Its shard cannot be written, for its elements share memory."""
    mesh = mesh_of(-1)
    shard = torch.ones(1).expand(5) if is_first() else torch.ones(5)
    grads = [DTensor.from_local(shard, mesh, [Shard(0)])]
    expected = torch.nn.utils.get_total_norm(grads)
    with tritonclip.patch_torch() as patch, pytest.warns(tritonclip.ClippingWarning):
        found = torch.nn.utils.get_total_norm(grads)
    assert torch.equal(found.full_tensor(), expected.full_tensor())  # type: ignore[attr-defined]
    assert patch.served_by_torch.total() == 1
