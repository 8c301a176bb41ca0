"""How a gradient list lies over processes: the shard of each gradient that lies here.

Shard and _StridedShard split a gradient, Replicate copies it. The sum of a Partial one is measured,
see `reduction.py`; its terms are scaled, which scales the sum.

The norm of all shards is the root of the sum of weight * norm**p over all processes. No process is
elected, and none leaves a reduction out: the domain depends on the parameters alone, never on the
gradients that are there.

    sharding = Sharding(parameters, grads, processes)
    sharding.locate(label_of)
    sharding.shards[position].weight    1 / the processes that hold this shard
    sharding.domain.groups              to be reduced over, one after the other

DTensors keep their spec from step to step, so a list that was met before is recognised by the
identity of its specs, and need not be located again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from tritonclip.backends.operators import WIDE
from tritonclip.distributed.domain import Domain, Processes, domain_of
from tritonclip.modes import PLAIN, outside_inference

# Reductions of Partial gradients that are linear: scaled terms make a scaled gradient.
_LINEAR = ("sum", "avg")
_get_spec, _get_local = attrgetter("_spec"), attrgetter("_local_tensor")


class Shard(NamedTuple):
    """The shard of a gradient that a process holds.

    Attributes:
        weight: 1 / the number of processes that hold this very shard; 0 if it is counted
            elsewhere.
        sums_over: groups whose shards are the terms of a sum.
        divisor: makes a mean of the sum.
    """

    weight: float
    sums_over: tuple[dist.ProcessGroup, ...] = ()
    divisor: int = 1


# The shard of a gradient that no other process has a part of.
WHOLE_SHARD = Shard(1.0)


class Sharding:
    """How a list lies over processes; also the key by which its plan is found again.

    Attributes:
        parameters: of each the spec of a DTensor, or the dtype of a plain tensor.
        grads: the same of each gradient; None of a missing one.
        group: the user's.
        copies: the user's number of processes of each parameter; None for no number.
        meshes: of other lists that are clipped in the same step.
        domain: the processes that hold the list. This and all below are there once it is located.
        shards: of the gradients that are there, by the position of their parameter.
        flags: 1 at a position and mesh dimension where a gradient is Partial, and 0 where one may
            be, as its parameter is copied along it.
    """

    domain: Domain
    shards: dict[int, Shard]
    flags: dict[tuple[int, int], int]

    def __init__(
        self,
        parameters: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        processes: Processes | None,
    ) -> None:
        self.parameters, self.grads = _specs_of(parameters), _specs_of(grads)
        self.group, _, self.meshes = processes or Processes()
        self.copies: list[Any] | None = None
        self._uploaded: dict[Any, Tensor] = {}

    def __hash__(self) -> int:
        return hash((len(self.parameters), id(self.group)))

    def __eq__(self, other: object) -> bool:
        """Whether another list is laid out alike."""
        return (
            isinstance(other, Sharding)
            and self.group is other.group
            and self.copies == other.copies
            and list(map(id, self.meshes)) == list(map(id, other.meshes))
            and _are_alike(self.parameters, other.parameters)
            and _are_alike(self.grads, other.grads)
        )

    @property
    def is_wide(self) -> bool:
        """Whether a parameter is float64."""
        return any(
            (spec if mesh_of(spec) is None else getattr(spec.tensor_meta, "dtype", None)) in WIDE
            for spec in self.parameters
        )

    def locate(self, label_of: Callable[[int], str]) -> None:
        """Finds the domain from the parameters, then the shard of each gradient."""
        # Of tensors that are no parameters, the gradient is all there is.
        found = [mesh_of(a) or mesh_of(b) for a, b in zip(self.parameters, self.grads, strict=True)]
        # Lists of one step have one domain: of meshes that are alike, the groups of the first.
        meshes = {id(mesh): mesh for mesh in (*self.meshes, *found) if mesh is not None}
        self.domain = domain_of(list(meshes.values()), self.group)
        for at, copies in enumerate(self.copies or ()):
            if copies is not None:
                _check_copies(copies, self.domain, label_of(at))
        self.shards = {
            at: self.shard(at, label_of) for at, spec in enumerate(self.grads) if spec is not None
        }
        # The same keys in all processes of a list.
        self.flags = {
            (at, dim): int(mesh_of(grad) is not None and grad.placements[dim].is_partial())
            for at, (spec, grad) in enumerate(zip(self.parameters, self.grads, strict=True))
            if (mesh := mesh_of(spec)) is not None
            for dim, placement in enumerate(spec.placements)
            if placement.is_replicate() and mesh.size(dim) > 1
        }

    def shard(
        self,
        at: int,
        label_of: Callable[[int], str] = "parameters[{}]".format,
        sums: Sequence[int] = (),
    ) -> Shard:
        """The shard of the gradient at a position.

        A missing one is placed as its parameter, but Partial along the mesh dimensions `sums`.
        """
        spec, n_shards, sums_over, divisor = self.grads[at] or self.parameters[at], 1, [], 1
        if mesh_of(spec) is not None:
            if spec.mesh.get_coordinate() is None:
                # A shard without elements, on a mesh of other processes.
                return Shard(0.0)
            # Equal meshes may have groups of their own: a process without the gradient knows those
            # of the parameter's.
            mesh = mesh_of(self.parameters[at])
            mesh = mesh if mesh == spec.mesh else spec.mesh
            for dim, placement in enumerate(spec.placements):
                if dim in sums or placement.is_partial():
                    reduce_op = "sum" if dim in sums else placement.reduce_op
                    if reduce_op not in _LINEAR:
                        raise TypeError(
                            f"the gradient of {label_of(at)} is a DTensor with the placement "
                            f"{placement}; expected parts of a sum or a mean, Partial('sum') or "
                            "Partial('avg'): grad.redistribute() it before clipping"
                        )
                    if mesh.size(dim) > 1:
                        sums_over.append(mesh.get_group(dim))
                        divisor *= mesh.size(dim) if reduce_op == "avg" else 1
                elif not placement.is_replicate():
                    # Shard, and _StridedShard, which is no subclass of it.
                    n_shards *= mesh.size(dim)
        weight = n_shards / self.domain.inner
        if self.copies is not None and (copies := self.copies[at]) is not None:
            weight = 1.0 / copies if copies else 0.0
        return Shard(weight, tuple(sums_over), divisor)

    def upload(
        self, numbers: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """Positions, or flags, on a device, 1-d; uploaded once."""
        key = numbers, device, dtype
        if key not in self._uploaded:
            # Copied before anything goes on, as other streams may read it; never an inference
            # tensor, which belongs to one mode.
            uploaded = outside_inference(torch.tensor)(numbers, dtype=dtype, device=device)
            self._uploaded[key] = uploaded
        return self._uploaded[key]


def _specs_of(tensors: Sequence[Tensor | None]) -> list[Any]:
    try:
        # `_spec` needs no call, as `placements` does.
        return list(map(_get_spec, tensors))
    except AttributeError:
        return [None if t is None else getattr(t, "_spec", t.dtype) for t in tensors]


def _are_alike(specs: list[Any], others: list[Any]) -> bool:
    return len(specs) == len(others) and (
        all(map(is_, specs, others)) or all(map(_is_alike, specs, others))
    )


def _is_alike(a: Any, b: Any) -> bool:
    """Whether two specs place a tensor alike; meshes are compared by identity, for their groups."""
    if a is b or mesh_of(a) is None or mesh_of(a) is not mesh_of(b):
        return a is b
    # With the shape of the whole: shards of other wholes may look alike here.
    return bool((a.placements, a.tensor_meta) == (b.placements, b.tensor_meta))


def mesh_of(spec: Any) -> Any:
    """The mesh of a DTensor's spec; None for a dtype, or None, in its place."""
    return getattr(spec, "mesh", None)


def _check_copies(copies: object, domain: Domain, label: str) -> None:
    """Refuses a number that cannot count processes of the domain."""
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


def dtensor_class() -> Any:
    """The class DTensor; () where nobody imported it, so that no tensor is one."""
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
