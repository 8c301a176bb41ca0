"""How a gradient list lies over processes: the shard of each gradient that lies here.

Shard and _StridedShard split a gradient, Replicate copies it. The sum of a Partial one is measured,
see `norms.py`; its terms are scaled, which scales the sum.

The norm of all shards is the root of the sum of weight * norm**p over all processes. No process is
elected, and none leaves a reduction out: the domain depends on the parameters alone, never on the
gradients that are there.

    specs = Specs(parameters, grads, processes)
    sharding = sharding_of(specs, label)
    sharding.shards[i].weight    1 / the processes that hold this shard
    sharding.domain.groups       to be reduced over, one after the other

DTensors keep their spec from step to step, so a list that was met before is recognised by the
identity of its specs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from tritonclip.backends.operators import WIDE
from tritonclip.distributed.process_groups import Domain, Processes, domain_of
from tritonclip.modes import PLAIN, outside_inference

# Reductions of Partial gradients that are linear: scaled terms make a scaled gradient.
_LINEAR = ("sum", "avg")
_get_spec, _get_local = attrgetter("_spec"), attrgetter("_local_tensor")


class Specs:
    """How a list is laid out, by which a plan of it is found again.

    Attributes:
        parameters: of each the spec of a DTensor, or the dtype of a plain tensor.
        grads: the same of each gradient; None of a missing one.
        copies: the user's number of processes of each parameter; None for no number.
        group: the user's.
        meshes: of other lists that are clipped in the same step.
    """

    __slots__ = ("_key", "copies", "grads", "group", "meshes", "parameters")

    def __init__(
        self,
        parameters: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        processes: Processes | None,
    ) -> None:
        self.parameters, self.grads = _specs_of(parameters), _specs_of(grads)
        self.group, copies, self.meshes = processes or Processes()
        find: Any = copies.get if isinstance(copies, Mapping) else copies
        self.copies = None if find is None else list(map(find, parameters))
        ends = [_placing_of(spec) for spec in (*self.parameters[:1], *self.parameters[-1:])]
        self._key = len(parameters), *ends, id(self.group), *map(id, self.meshes)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        """Whether another list of as many parameters is laid out alike."""
        return (
            isinstance(other, Specs)
            and self._key == other._key
            and self.copies == other.copies
            and _are_alike(self.parameters, other.parameters)
            and _are_alike(self.grads, other.grads)
        )


def _specs_of(tensors: Sequence[Tensor | None]) -> list[Any]:
    try:
        # `_spec` needs no call, as `placements` does.
        return list(map(_get_spec, tensors))
    except AttributeError:
        return [None if t is None else getattr(t, "_spec", t.dtype) for t in tensors]


def _are_alike(specs: list[Any], others: list[Any]) -> bool:
    return all(map(is_, specs, others)) or all(map(_is_alike, specs, others))


def _is_alike(a: Any, b: Any) -> bool:
    """Whether two specs place a tensor alike; meshes are compared by identity, for their groups."""
    if a is b:
        return True
    mesh = mesh_of(a)
    return mesh is not None and mesh is mesh_of(b) and _placing_of(a) == _placing_of(b)


def _placing_of(spec: Any) -> Any:
    # With the shape of the whole: shards of other wholes may look alike here.
    return spec if mesh_of(spec) is None else (spec.placements, spec.tensor_meta)


def mesh_of(spec: Any) -> Any:
    """The mesh of a DTensor's spec; None for a dtype, or None, in its place."""
    return getattr(spec, "mesh", None)


class Positions:
    """Positions among the parameters, or flags of them; on a device from the first use on."""

    __slots__ = ("_on", "numbers")

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self._on: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def on(self, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
        """The numbers, 1-d."""
        if (device, dtype) not in self._on:
            # Copied before anything goes on, as other streams may read it; never an inference
            # tensor, which belongs to one mode.
            uploaded = outside_inference(torch.tensor)
            self._on[device, dtype] = uploaded(self.numbers, dtype=dtype, device=device)
        return self._on[device, dtype]


class LocalShard(NamedTuple):
    """The shard of a gradient that a process holds.

    Attributes:
        weight: 1 / the processes of the domain that hold this very shard; 0 if it is counted
            elsewhere.
        sums_over: groups whose shards are the terms of a sum.
        divisor: makes a mean of the sum.
    """

    weight: float
    sums_over: tuple[dist.ProcessGroup, ...] = ()
    divisor: int = 1

    def is_everywhere(self, domain: Domain) -> bool:
        """Whether a sum over all processes of the meshes makes it whole on each of them."""
        n_summed = math.prod(group.size() for group in self.sums_over)
        return n_summed == domain.inner and self.weight == 1 / domain.inner


def shard_of(
    specs: Specs,
    at: int,
    domain: Domain,
    spec: Any,
    label: Callable[[], str],
    *,
    placements: Sequence[Any] | None = None,
) -> LocalShard:
    """The shard of the gradient at a position, which has a spec, or other placements."""
    copies = None if specs.copies is None else specs.copies[at]
    if mesh_of(spec) is None:
        return LocalShard(_weight(copies, 1, domain))
    if spec.mesh.get_coordinate() is None:
        # A shard without elements, on a mesh of other processes.
        return LocalShard(0.0)
    # Equal meshes may have groups of their own: a process without the gradient knows those of the
    # parameter's.
    mesh = mesh_of(specs.parameters[at])
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
    """How a list lies over processes: its domain, and the shard of each gradient that is here.

    Attributes:
        domain: the processes that hold it.
        specs: of the list.
        positions: among the parameters, of the gradients that are there.
        shards: of these gradients.
        absent: positions of the parameters without a gradient.
        copied: position and mesh dimension where a gradient may be Partial: its parameter is copied
            along it.
        is_partial: flags for these.
        wide: a parameter is float64.
        one_list: every process of the domain has the same parameters, in the same order.
    """

    domain: Domain
    specs: Specs
    positions: tuple[int, ...]
    shards: tuple[LocalShard, ...]
    absent: tuple[int, ...]
    copied: tuple[tuple[int, int], ...]
    is_partial: Positions
    wide: bool
    one_list: bool

    @property
    def is_spread(self) -> bool:
        """Whether other processes have shards, or may have."""
        return bool(self.domain.groups or self.domain.uncovered)

    @property
    def n_parameters(self) -> int:
        """The parameters, with or without a gradient here."""
        return len(self.specs.parameters)

    def of(self, indices: Sequence[int]) -> Sharding:
        """How some of the gradients lie that are there."""
        positions = tuple(self.positions[i] for i in indices)
        return replace(self, positions=positions, shards=tuple(self.shards[i] for i in indices))


def sharding_of(specs: Specs, label: Callable[[int], str]) -> Sharding:
    """Finds the domain from the parameters, then the weight of each gradient."""
    grad_specs = specs.grads
    # Of tensors that are no parameters, the gradient is all there is.
    found = [mesh_of(a) or mesh_of(b) for a, b in zip(specs.parameters, grad_specs, strict=True)]
    # Of lists of one step the same domain: of meshes that are alike, the first one's groups.
    meshes = {id(mesh): mesh for mesh in (*specs.meshes, *found) if mesh is not None}
    domain = domain_of(list(meshes.values()), specs.group)
    for at, copies in enumerate(specs.copies or ()):
        if copies is not None:
            check_copies(copies, domain, label(at))
    positions = tuple(i for i, spec in enumerate(grad_specs) if spec is not None)
    # The same in all processes of a list.
    copied = tuple(
        (at, dim)
        for at, spec in enumerate(specs.parameters)
        if (mesh := mesh_of(spec)) is not None
        for dim, placement in enumerate(spec.placements)
        if placement.is_replicate() and mesh.size(dim) > 1
    )
    return Sharding(
        domain=domain,
        specs=specs,
        positions=positions,
        shards=tuple(
            shard_of(specs, i, domain, grad_specs[i], partial(label, i)) for i in positions
        ),
        absent=tuple(i for i, spec in enumerate(grad_specs) if spec is None),
        copied=copied,
        is_partial=Positions(
            [
                mesh_of(grad_specs[i]) is not None and grad_specs[i].placements[dim].is_partial()
                for i, dim in copied
            ]
        ),
        wide=not WIDE.isdisjoint(map(dtype_of, specs.parameters)),
        one_list=specs.group is None,
    )


def absent_shard(specs: Specs, at: int, domain: Domain, sums: Sequence[int] = ()) -> LocalShard:
    """The shard of a missing gradient: placed as its parameter, but Partial along `sums`."""
    from torch.distributed.tensor import Partial

    spec = specs.parameters[at]
    own = () if mesh_of(spec) is None else spec.placements
    placements = [Partial() if dim in sums else one for dim, one in enumerate(own)]
    label = "parameters[{}]".format
    return shard_of(specs, at, domain, spec, partial(label, at), placements=placements)


def dtype_of(spec: Any) -> torch.dtype | None:
    """The dtype of a parameter, where it is known."""
    return spec if mesh_of(spec) is None else getattr(spec.tensor_meta, "dtype", None)


def dtensor_class() -> Any:
    """DTensor; () where nobody imported it, so that nothing is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else module.DTensor


def meshes_of(parameters: Iterable[Tensor]) -> tuple[Any, ...]:
    """The meshes of the DTensors among parameters, in order."""
    dtensor = dtensor_class()
    meshes = [p._spec.mesh for p in parameters if isinstance(p, dtensor)]
    return tuple({id(mesh): mesh for mesh in meshes}.values())


def are_sharded(tensors: Iterable[Tensor | None]) -> bool:
    """Whether DTensors are among tensors."""
    dtensor = dtensor_class()
    return any(issubclass(cls, dtensor) for cls in set(map(type, tensors)))


def local_tensors(
    grads: Sequence[Tensor | None],
) -> tuple[list[Tensor], Sequence[Tensor]]:
    """The shards that lie here, and the DTensors around them, whose versions count too."""
    tensors: list[Any]
    wrappers: Sequence[Any] = grads
    try:
        # Not by `to_local`, a function of autograd.
        tensors = list(map(_get_local, grads))
    except AttributeError:
        there = [g for g in grads if g is not None]
        wrappers = [g for g in there if hasattr(g, "_local_tensor")]
        tensors = [getattr(g, "_local_tensor", g) for g in there]
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
