"""`python -m bench distributed`: clipping over several processes; needs no GPU.

Layouts: four gloo processes hold the same gradients in several layouts. Each provider clips them,
and a row says how many collectives that took (torch's CommDebugMode counts them), how far the norm
is from the float64 norm of the full gradients, and else its outcome: no norm, or another one in
every process. Where a provider is known to wait for ever, it is not run.

Host: one process of a group that does nothing, whose size is eight: time of a call on shards of 64
elements, interleaved with torch's on the same tensors.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement
from torch.multiprocessing.spawn import spawn

import tritonclip
from bench import results
from bench.accuracy import OURS
from bench.host import beside_torch
from bench.results import Row

N_PROCESSES, N_OF_FAKE_GROUP = 4, 8
SIZES, ELEMENTS = (10, 100, 1000, 3000), 64
# Of torch's host time on as many DTensors.
SHARE = 0.25
MAX_NORM = 1e-3


_mesh = partial(init_device_mesh, "cpu")


def _parameter(shape, mesh, placements=(), seed=0, dtype=torch.float32, size=1.0):
    """A parameter and its gradient, placed alike; plain without a mesh."""
    generator = torch.Generator().manual_seed(seed)
    grad = (torch.randn(*shape, generator=generator, dtype=torch.float64) * size).to(dtype)
    if mesh is not None:
        # Every process has all of it: none sends.
        grad = distribute_tensor(grad, mesh, placements, src_data_rank=None)
    made = nn.Parameter(torch.zeros_like(grad))
    made.grad = grad
    return made


def _shards(mesh: DeviceMesh, *placements: Placement, **options: Any) -> list[Any]:
    return [_parameter((64, 32), mesh, placements, seed, **options) for seed in range(3)]


def _fsdp2(**options: Any) -> list[Any]:
    return _shards(_mesh((4,)), Shard(0), **options)


def _partial(mesh: DeviceMesh) -> Any:
    """A gradient that is a sum over processes."""
    one = _parameter((32,), mesh, [Replicate()], 9)
    local = torch.randn(32, generator=torch.Generator().manual_seed(dist.get_rank()))
    one.grad = DTensor.from_local(local, mesh, [Partial()], run_check=False)
    return one


def _two_meshes() -> list[Any]:
    """Matrices on both dimensions, norms on one: tensor parallelism with FSDP2."""
    mesh = _mesh((2, 2), mesh_dim_names=("dp", "tp"))
    return [*_shards(mesh, Shard(0), Shard(1)), _parameter((32,), mesh["dp"], [Shard(0)], 8)]


def _experts() -> Any:
    """Of a layer, on both dimensions of a mesh."""
    return _parameter((4, 16, 8), _mesh((2, 2)), [Shard(0), Shard(1)], 8)


# Each makes the parameters of this process.
LAYOUTS: dict[str, Callable[[], list[Any]]] = {
    "FSDP2": _fsdp2,
    "HSDP 2x2": lambda: _shards(_mesh((2, 2)), Replicate(), Shard(0)),
    "TP 2 x FSDP2 2, norms on one mesh": _two_meshes,
    "experts on (2, 2), dense on (4)": lambda: [*_fsdp2(), _experts()],
    "FSDP2 beside a plain tensor": lambda: [*_fsdp2(), _parameter((32,), None, seed=8)],
    "FSDP2 beside a Partial gradient": lambda: [*_fsdp2(), _partial(_mesh((4,)))],
    "FSDP2, elements of 1e30": lambda: _fsdp2(size=1e30),
    "FSDP2, elements of 1e-30": lambda: _fsdp2(size=1e-30),
    "FSDP2, bfloat16": lambda: _fsdp2(dtype=torch.bfloat16),
    "FSDP2, order inf": _fsdp2,
    "an empty shard, order inf": lambda: [_parameter((9,), _mesh((4,)), [Shard(0)])],
}
# Providers that wait for ever.
HANGS = {("an empty shard, order inf", "torch"), ("an empty shard, order inf", "accelerate")}


def _accelerate(parameters, max_norm, norm_type):
    """The method that it uses for FSDP2, which reads nothing of the object."""
    from accelerate import Accelerator

    return Accelerator._clip_grad_norm_dtensor_aware(None, parameters, max_norm, norm_type)


PROVIDERS: dict[str, Callable[[list[Any], float, float], Any]] = {
    "torch": torch.nn.utils.clip_grad_norm_,
    "accelerate": _accelerate,
    "tritonclip": tritonclip.clip_grad_norm_,
}


def _truth(grads: Sequence[Tensor], p: float) -> float:
    """The float64 norm of full gradients; their elements are made to fit a square."""
    wholes = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    values = torch.cat([whole.double().flatten() for whole in wholes])
    largest = float(values.abs().max())
    return largest * float(torch.linalg.vector_norm(values / largest, p))


def layout_rows(names: Sequence[str], providers: Sequence[str]) -> Iterator[Row]:
    """Rows of layouts, in every process of a group; each has the same ones."""
    for name, provider in itertools.product(names, providers):
        values: dict[str, Any] = {"outcome": "hangs: not run"}
        if (name, provider) not in HANGS:
            values = _figures(name, provider)
        correct = values.get("norm_error", 1.0) <= OURS if provider == "tritonclip" else None
        yield Row("distributed", {"layout": name, "provider": provider}, values, correct)


def _figures(name: str, provider: str) -> dict[str, Any]:
    """Of one call; the error only of a norm that every process has."""
    parameters, order = LAYOUTS[name](), math.inf if name.endswith("order inf") else 2.0
    truth = _truth([one.grad for one in parameters], order)
    with CommDebugMode() as seen:
        try:
            norm = float(PROVIDERS[provider](parameters, MAX_NORM * truth, order))
        except (RuntimeError, ValueError) as raised:
            dist.barrier()
            return {"outcome": f"raises {type(raised).__name__}"}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, norm)
    values: dict[str, Any] = {"collectives": seen.get_total_counts()}
    if len(set(everywhere)) > 1:
        return values | {"outcome": "differs by process"}
    if norm == 0 or not math.isfinite(norm):
        return values | {"outcome": f"norm {norm:g}"}
    return values | {"norm_error": abs(norm - truth) / truth}


def host_rows(n_samples: int = 15) -> Iterator[Row]:
    """Rows of calls on shards of a group that does nothing, in this process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=N_OF_FAKE_GROUP)
    mesh, shape = _mesh((N_OF_FAKE_GROUP,)), (N_OF_FAKE_GROUP * ELEMENTS,)
    for n in SIZES:
        parameters = [_parameter(shape, mesh, [Shard(0)], seed) for seed in range(n)]
        call = partial(tritonclip.clip_, parameters, 1e9)
        values = beside_torch(call, parameters, n_samples)
        if n == 1000:
            values["share_goal"] = SHARE
        case = {"layout": "shards, on the host", "tensors": n, "provider": "tritonclip"}
        yield Row("distributed", case, values)
    dist.destroy_process_group()


def run() -> Iterator[list[Row]]:
    """All rows: of layouts in four processes, then of host time in one."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_serve, (folder,), N_PROCESSES)
        yield results.read(Path(folder) / "rows.json")[1]
    yield list(host_rows())


def _serve(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=N_PROCESSES)
    rows = list(layout_rows(list(LAYOUTS), list(PROVIDERS)))
    if rank == 0:
        results.write(Path(folder) / "rows.json", {}, rows)
    dist.barrier()
    dist.destroy_process_group()
