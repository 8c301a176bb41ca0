"""How a gradient list lies over processes: the shard of each gradient that lies here.

Shard and _StridedShard split a gradient, Replicate copies it. The sum of a Partial one is measured,
see `norms.py`; its terms are scaled, which scales the sum.

The norm of all shards is the root of the sum of weight * norm**p over all processes. No process is
elected, and none leaves a reduction out: the domain depends on the parameters alone, never on the
gradients that are there.

    sharding = known_sharding(parameters, grads, processes, label)
    sharding.shards[i].weight    1 / the processes that hold this shard
    sharding.domain.groups       to be reduced over, one after the other
    local_tensors(grads)[0]              plain tensors, which verbs read and write

A `Sharding` is kept for lists alike: DTensors keep their spec from step to step, so a list that was
met before is recognised by the identity of its specs.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from tritonclip.distributed.process_groups import Domain, Processes, domain_of
from tritonclip.engine.arguments import PLAIN
from tritonclip.engine.plan import WIDE

# Reductions of Partial gradients that are linear: scaled terms make a scaled gradient.
_LINEAR = ("sum", "avg")


class LocalShard(NamedTuple):
    """The shard of a gradient that a process holds."""

    # 1 / the processes of the domain that hold this very shard; 0: counted elsewhere.
    weight: float
    # Groups whose shards are terms of a sum, and the divisor that makes it a mean.
    sums_over: tuple[dist.ProcessGroup, ...] = ()
    divisor: int = 1

    def is_everywhere(self, domain: Domain) -> bool:
        """Whether a sum over all processes of the meshes makes it whole on each of them."""
        n_summed = math.prod(group.size() for group in self.sums_over)
        return n_summed == domain.inner and self.weight == 1 / domain.inner


def shard_of_spec(
    spec: Any,
    copies: int | None,
    domain: Domain,
    label: Callable[[], str],
    *,
    placements: Sequence[Any] | None = None,
    mesh: Any = None,
) -> LocalShard:
    """The shard of a gradient with a spec, or other placements, or of a plain one with `copies`."""
    if spec is None:
        return LocalShard(_weight(copies, 1, domain))
    if spec.mesh.get_coordinate() is None:
        # A shard without elements, on a mesh of other processes.
        return LocalShard(0.0)
    # Equal meshes may have groups of their own: a process without the gradient knows those of the
    # parameter's.
    mesh = mesh if mesh == spec.mesh else spec.mesh
    n_shards, sums_over, divisor = 1, [], 1
    for dim, placement in enumerate(spec.placements if placements is None else placements):
        if placement.is_partial():
            if placement.reduce_op not in _LINEAR:
                raise TypeError(
                    f"the gradient of {label()} is a DTensor with the placement {placement}; "
                    "expected parts of a sum or a mean, Partial('sum') or Partial('avg'): "
                    "grad.redistribute() it before clipping"
                )
            if mesh.size(dim) > 1:
                sums_over.append(mesh.get_group(dim))
                divisor *= mesh.size(dim) if placement.reduce_op == "avg" else 1
        elif not placement.is_replicate():
            # Shard, and _StridedShard, which is no subclass of it.
            n_shards *= mesh.size(dim)
    return LocalShard(_weight(copies, n_shards, domain), tuple(sums_over), divisor)


def check_copies(copies: object, domain: Domain, label: str) -> None:
    """Refuses a number of processes that no process can have."""
    if isinstance(copies, bool) or not isinstance(copies, int):
        raise TypeError(
            f"copies must give numbers of processes, got {copies!r} of type "
            f"{type(copies).__name__} for {label}"
        )
    if not 0 <= copies <= domain.size:
        raise ValueError(
            f"copies must be from 0 to {domain.size}, the processes of process_group and of the "
            f"DTensors' meshes, got {copies} for {label}"
        )


def _weight(copies: int | None, n_shards: int, domain: Domain) -> float:
    if copies is not None:
        return 1.0 / copies if copies else 0.0
    return n_shards / domain.inner


@dataclass(slots=True, eq=False)
class Sharding:
    """All that is known of a list over processes, but for its local shards."""

    domain: Domain
    # Of the gradients that are there.
    shards: tuple[LocalShard, ...]
    positions: tuple[int, ...]
    n_parameters: int
    # Positions of the parameters without a gradient.
    absent: tuple[int, ...]
    # Position and mesh dimension where a gradient may be Partial: its parameter is copied along it.
    copied: tuple[tuple[int, int], ...]
    is_partial: tuple[bool, ...]
    # The user's number of processes of each parameter.
    n_copies: tuple[int | None, ...]
    # A parameter is float64.
    wide: bool
    # Every process of the domain has the same parameters, in the same order.
    one_list: bool


def sharding_of(
    specs: list[Any],
    grad_specs: list[Any],
    n_copies: list[int | None],
    user: Processes,
    label: Callable[[int], str],
) -> Sharding:
    """Finds the domain from the parameters, then the weight of each gradient."""
    # Of tensors that are no parameters, the gradient is all there is.
    found = [mesh_of(a) or mesh_of(b) for a, b in zip(specs, grad_specs, strict=True)]
    # Of lists of one step the same domain: of meshes that are alike, the first one's groups.
    meshes = {id(mesh): mesh for mesh in (*user.meshes, *found) if mesh is not None}
    domain = domain_of(list(meshes.values()), user.group)
    positions = tuple(i for i, spec in enumerate(grad_specs) if spec is not False)
    for at, copies in enumerate(n_copies):
        if copies is not None:
            check_copies(copies, domain, label(at))
    shards = tuple(
        shard_of_spec(grad_specs[i], n_copies[i], domain, partial(label, i), mesh=mesh_of(specs[i]))
        for i in positions
    )
    # The same in all processes of a list.
    copied = tuple(
        (at, dim)
        for at, spec in enumerate(specs)
        if (mesh := mesh_of(spec)) is not None
        for dim, placement in enumerate(spec.placements)
        if placement.is_replicate() and mesh.size(dim) > 1
    )
    return Sharding(
        domain=domain,
        shards=shards,
        positions=positions,
        n_parameters=len(specs),
        absent=tuple(i for i, spec in enumerate(grad_specs) if spec is False),
        copied=copied,
        is_partial=tuple(
            mesh_of(grad_specs[i]) is not None and grad_specs[i].placements[dim].is_partial()
            for i, dim in copied
        ),
        n_copies=tuple(n_copies),
        wide=not WIDE.isdisjoint(map(dtype_of, specs)),
        one_list=user.group is None,
    )


def shard_of(
    parameter: Tensor, at: int, sharding: Sharding, sums: Sequence[int] = ()
) -> LocalShard:
    """The shard of a missing gradient: placed as its parameter, but Partial along `sums`."""
    from torch.distributed.tensor import Partial

    spec, copies = getattr(parameter, "_spec", None), sharding.n_copies[at]
    own = () if spec is None else spec.placements
    placements = [Partial() if dim in sums else one for dim, one in enumerate(own)]
    label = partial("parameters[{}]".format, at)
    return shard_of_spec(spec, copies, sharding.domain, label, placements=placements)


def mesh_of(spec: Any) -> Any:
    """The mesh of a spec; None for the marks in its place: a dtype, None or False."""
    return getattr(spec, "mesh", None)


def dtype_of(spec: Any) -> torch.dtype | None:
    """The dtype of a parameter, where it is known."""
    return spec if isinstance(spec, torch.dtype) else getattr(spec.tensor_meta, "dtype", None)


def dtensor_class() -> Any:
    """DTensor; () where nobody imported it, so that nothing is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else module.DTensor


def meshes_of(parameters: Iterable[Tensor]) -> tuple[Any, ...]:
    """The meshes of the DTensors among parameters, in order."""
    dtensor = dtensor_class()
    meshes = [p._spec.mesh for p in parameters if isinstance(p, dtensor)]
    return tuple({id(mesh): mesh for mesh in meshes}.values())


CAPACITY = 32


class _CachedSharding(NamedTuple):
    """A sharding, and the list that it was made for: specs of parameters and gradients."""

    specs: list[Any]
    grad_specs: list[Any]
    n_copies: list[int | None]
    # Kept alive for the key, which has their ids.
    group: object
    meshes: tuple[Any, ...]
    sharding: Sharding

    def serves(self, specs: list[Any], grad_specs: list[Any], n_copies: list[int | None]) -> bool:
        """Whether a list of as many parameters is laid out alike."""
        return (
            n_copies == self.n_copies
            and all(map(_alike, specs, self.specs))
            and all(map(_alike, grad_specs, self.grad_specs))
        )


_cache: OrderedDict[tuple[object, ...], _CachedSharding] = OrderedDict()


def are_sharded(tensors: Iterable[Tensor | None]) -> bool:
    """Whether DTensors are among tensors."""
    dtensor = dtensor_class()
    return any(issubclass(cls, dtensor) for cls in set(map(type, tensors)))


def known_sharding(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    processes: Processes | None,
    label: Callable[[int], str],
) -> Sharding:
    """How gradients lie, one or None for each parameter; plain ones count as they are."""
    dtensor, user = dtensor_class(), processes or Processes()
    # Of plain parameters the dtype, which a spec has. `_spec` needs no call, as `placements` does.
    specs = [p._spec if isinstance(p, dtensor) else p.dtype for p in parameters]
    # False where there is no gradient, None where it is plain.
    grad_specs = [
        g._spec if isinstance(g, dtensor) else False if g is None else None for g in grads
    ]
    copies = user.copies
    find: Any = copies.get if isinstance(copies, Mapping) else copies or (lambda _: None)
    n_copies = [find(parameter) for parameter in parameters]
    ends = [_placing_of(spec) for spec in (*specs[:1], *specs[-1:])]
    key = len(specs), *ends, id(user.group), *map(id, user.meshes)
    cached = _cache.get(key)
    if cached is not None and cached.serves(specs, grad_specs, n_copies):
        sharding = cached.sharding
    else:
        sharding = sharding_of(specs, grad_specs, n_copies, user, label)
    # Also where only the specs are others: from now on these are recognised at once.
    _cache.pop(key, None)
    _cache[key] = _CachedSharding(specs, grad_specs, n_copies, user.group, user.meshes, sharding)
    while len(_cache) > CAPACITY:
        # Another thread may have emptied it.
        with suppress(KeyError):
            _cache.popitem(last=False)
    return sharding


def local_tensors(grads: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """The shards that lie here, and the DTensors around them, whose versions count too."""
    dtensor, there = dtensor_class(), [g for g in grads if g is not None]
    wrappers = [g for g in there if isinstance(g, dtensor)]
    # Not by `to_local`, a function of autograd.
    tensors: list[Any] = [g._local_tensor if isinstance(g, dtensor) else g for g in there]
    if not PLAIN.issuperset(map(type, tensors)):
        # Results of collectives that may still run.
        tensors = [t.wait() if hasattr(t, "trigger_wait") else t for t in tensors]
    return tensors, wrappers


def replicated(norm: Tensor, dtensors: Sequence[Tensor]) -> Tensor:
    """The norm of DTensors as torch returns it: a DTensor on the first mesh with this process."""
    for dtensor in dtensors:
        mesh = dtensor.device_mesh  # type: ignore[attr-defined]
        if mesh.get_coordinate() is not None:
            from torch.distributed.tensor import DTensor, Replicate

            placements = [Replicate()] * mesh.ndim
            return DTensor.from_local(norm, mesh, placements, run_check=False)
    return norm


def _alike(a: Any, b: Any) -> bool:
    """Whether two specs place a tensor alike; meshes are compared by identity, for their groups."""
    if a is b:
        return True
    mesh = mesh_of(a)
    return mesh is not None and mesh is mesh_of(b) and _placing_of(a) == _placing_of(b)


def _placing_of(spec: Any) -> Any:
    # With the shape of the whole: shards of other wholes may look alike here.
    return spec if mesh_of(spec) is None else (spec.placements, spec.tensor_meta)
