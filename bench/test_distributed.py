"""Clipping over several processes; needs no GPU.

Layouts: four gloo processes hold the same gradients in several layouts, and each provider clips
them. A row has the number of collectives (which torch's CommDebugMode counts) and the error of the
norm against the float64 norm of the full gradients, or else the outcome, such as a norm that
differs by process. A provider that is known to wait for ever is not run. Nothing is timed.

Shards: the time of a call on shards of 64 elements, in turn with torch's on the same tensors. It is
measured over two gloo processes on one machine, in the first of them, and on the host alone, in one
process of a group of eight whose collectives do nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.multiprocessing.spawn import spawn

import tritonclip
from bench.accuracy import OURS
from bench.comparison import AllSamples, Comparison, Effort, beside_torch, hand_over
from bench.samples import Samples, Timed
from helpers import reference
from helpers.spread import collectives_of, mesh_of, parameter, whole, with_partial

N_PROCESSES, N_OF_FAKE_GROUP = 4, 8
SIZES, ELEMENTS = (10, 100, 1000, 3000), 64
OF_TWO = (300, 1000)
# The goal: a share of torch's host time on as many DTensors.
SHARE = 0.25
MAX_NORM = 1e-3


def _shards(mesh: DeviceMesh, *placements: Placement, **options: Any) -> list[Any]:
    return [parameter((64, 32), mesh, placements, seed=seed, **options) for seed in range(3)]


def _fsdp2(**options: Any) -> list[Any]:
    return _shards(mesh_of(4), Shard(0), **options)


def _partial(mesh: DeviceMesh) -> Any:
    return with_partial(parameter((32,), mesh, [Replicate()], seed=9), [Partial()])


def _two_meshes() -> list[Any]:
    """Matrices on both dimensions, norms on one: tensor parallelism with FSDP2."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    return [*_shards(mesh, Shard(0), Shard(1)), parameter((32,), mesh["dp"], [Shard(0)], seed=8)]


def _experts() -> Any:
    """The experts of a layer, sharded on both dimensions of a mesh."""
    return parameter((4, 16, 8), mesh_of(2, 2), [Shard(0), Shard(1)], seed=8)


# Functions that make the parameters of this process.
LAYOUTS: dict[str, Callable[[], list[Any]]] = {
    "FSDP2": _fsdp2,
    "HSDP 2x2": lambda: _shards(mesh_of(2, 2), Replicate(), Shard(0)),
    "TP 2 x FSDP2 2, norms on one mesh": _two_meshes,
    "experts on (2, 2), dense on (4)": lambda: [*_fsdp2(), _experts()],
    "FSDP2 beside a plain tensor": lambda: [*_fsdp2(), parameter((32,), None, seed=8)],
    "FSDP2 beside a Partial gradient": lambda: [*_fsdp2(), _partial(mesh_of(4))],
    "FSDP2, elements of 1e30": lambda: _fsdp2(size=1e30),
    "FSDP2, elements of 1e-30": lambda: _fsdp2(size=1e-30),
    "FSDP2, bfloat16": lambda: _fsdp2(dtype=torch.bfloat16),
    "FSDP2, order inf": _fsdp2,
    "an empty shard, order inf": lambda: [parameter((9,), mesh_of(4), [Shard(0)])],
}
# Providers that wait for ever.
HANGS = {("an empty shard, order inf", "torch"), ("an empty shard, order inf", "accelerate")}
NOT_RUN = {"outcome": "hangs: not run"}


def _accelerate(parameters, max_norm, norm_type):
    """Calls Accelerate's method for FSDP2, which reads no attribute of the object."""
    from accelerate import Accelerator

    return Accelerator._clip_grad_norm_dtensor_aware(None, parameters, max_norm, norm_type)


CLIPS: dict[str, Any] = {
    "torch": torch.nn.utils.clip_grad_norm_,
    "accelerate": _accelerate,
    "tritonclip": tritonclip.clip_grad_norm_,
}


def _order(layout: str) -> float:
    return math.inf if layout.endswith("order inf") else 2.0


def figures_of(name: str, provider: str) -> dict[str, Any]:
    """Figures of one call; the error is given only if every process has the same norm."""
    if (name, provider) in HANGS:
        return NOT_RUN
    parameters, order = LAYOUTS[name](), _order(name)
    truth = reference.total_norm([whole(one.grad) for one in parameters], order)
    try:
        clip = partial(CLIPS[provider], parameters, MAX_NORM * truth, order)
        total, n_collectives = collectives_of(clip)
    except (RuntimeError, ValueError) as raised:
        dist.barrier()
        return {"outcome": f"raises {type(raised).__name__}"}
    norm = float(total)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, norm)
    values: dict[str, Any] = {"collectives": n_collectives}
    if len(set(everywhere)) > 1:
        return values | {"outcome": "differs by process"}
    if norm == 0 or not math.isfinite(norm):
        return values | {"outcome": f"norm {norm:g}"}
    return values | {"norm_error": abs(norm - truth) / truth}


def measure(layout: str) -> dict[str, Any]:
    """Measures all providers on a layout; every process of a group calls it."""
    providers = [one for one in CLIPS if one != "accelerate" or find_spec(one)]
    return {one: figures_of(layout, one) for one in providers}


def times_of(tensors: int, n_samples: int) -> dict[str, Any]:
    """Microseconds of calls on some shards, in turn; every process of a group calls it."""
    parameters = _rows(mesh_of(dist.get_world_size()), tensors)
    found: dict[str, Any] = {one: [] for one in ("torch", "tritonclip")}
    # The first calls warm up.
    for number in range(n_samples + 3):
        for one, times in found.items():
            dist.barrier()
            start = perf_counter_ns()
            CLIPS[one](parameters, MAX_NORM)
            if number >= 3:
                times.append((perf_counter_ns() - start) / 1e3)
    return found


def _rows(mesh: DeviceMesh, tensors: int) -> list[Any]:
    shape = (mesh.size() * ELEMENTS,)
    return [parameter(shape, mesh, [Shard(0)], seed=seed) for seed in range(tensors)]


def _serve(
    rank: int, folder: str, n_processes: int, measure: Callable[..., Any], *case: Any
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=n_processes)
    found = measure(*case)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(layout: str, tmp_path_factory: Any) -> Any:
    """The figures of a layout, which four processes measure."""
    return spawned(tmp_path_factory.mktemp("layout"), N_PROCESSES, measure, layout)


def spawned(folder: Path, n_processes: int, measure: Callable[..., Any], *case: Any) -> Any:
    """Measures in several processes, and returns the result of the first one."""
    spawn(_serve, (str(folder), n_processes, measure, *case), n_processes)
    return json.loads(Path(folder, "found.json").read_text())


@pytest.mark.parametrize("provider", CLIPS)
@pytest.mark.parametrize("layout", LAYOUTS, scope="module")
def test_layout(
    add_untimed: Callable[[Any], None], found: dict[str, Any], layout: str, provider: str
) -> None:
    """The error and the collectives of one call, or its outcome."""
    if provider not in found:
        pytest.skip(f"{provider} is not installed")
    if provider == "tritonclip":
        assert found[provider]["norm_error"] <= OURS
    add_untimed(found[provider])


@pytest.fixture(scope="module")
def group() -> Iterator[DeviceMesh]:
    """The mesh of a fake group, whose collectives do nothing; it has this process only."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=N_OF_FAKE_GROUP)
    yield mesh_of(N_OF_FAKE_GROUP)
    dist.destroy_process_group()


def share_of(tensors: int, provider: str, samples: AllSamples) -> dict[str, float]:
    """Torch's host time and our share of it; on a list of 1,000, also the goal."""
    goal = {"share_goal": SHARE} if tensors == 1000 else {}
    return beside_torch(provider, samples) | goal


@pytest.mark.parametrize("provider", ["tritonclip"])
@pytest.mark.parametrize("tensors", SIZES)
@pytest.mark.parametrize("layout", ["shards, on the host"])
def test_shards(benchmark: Any, group: DeviceMesh, effort: Effort, tensors, layout, provider):
    """Host time of a call on shards, beside torch's."""
    parameters = _rows(group, tensors)
    clips: dict[str, Any] = {"tritonclip": tritonclip.clip_, "torch": CLIPS["torch"]}
    calls = {name: Timed(partial(clip, parameters, 1e9)) for name, clip in clips.items()}
    Comparison(calls, effort, partial(share_of, tensors)).hand_over(benchmark, provider)


@pytest.mark.parametrize("provider", ["tritonclip"])
@pytest.mark.parametrize("tensors", OF_TWO)
@pytest.mark.parametrize("layout", ["FSDP2, two processes"])
def test_two_processes(
    benchmark: Any, effort: Effort, tmp_path: Path, tensors: int, layout: str, provider: str
) -> None:
    """Time of a call over two processes, beside torch's."""
    times = spawned(tmp_path, 2, times_of, tensors, 10 * effort.samples)
    samples = {name: Samples(one, [], 1) for name, one in times.items()}
    benchmark.extra_info |= beside_torch(provider, samples)
    hand_over(benchmark, samples[provider])
