"""The domain of a gradient list: the processes that share its norm, and collectives over them.

The union of the meshes of a list is found from its parameters, so that all processes find the same
whichever gradients they have. `process_group` extends it. Nothing here creates a group: that would
be a collective of all processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from tritonclip.backends.operators import wide_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


# The errors of gradients and arguments that cannot be clipped: all processes raise the same one.
ERRORS = (TypeError, ValueError, NotImplementedError, RuntimeError)

Copies = Mapping[Tensor, int] | Callable[[Tensor], int | None]


class Processes(NamedTuple):
    """The user's part of a domain: the processes that hold a list where DTensors do not say so.

    Attributes:
        group: a ProcessGroup or a DeviceMesh; None for the processes of the DTensors' meshes.
        copies: how many processes hold a parameter's shard; None to go by its placements.
        meshes: of other lists that are clipped in the same step, so that a step has one domain.
    """

    group: Any = None
    copies: Copies | None = None
    meshes: tuple[DeviceMesh, ...] = ()

    def copies_of(self, parameters: Sequence[Tensor]) -> list[Any] | None:
        """The user's number of each parameter, which is not checked yet."""
        find: Any = self.copies.get if isinstance(self.copies, Mapping) else self.copies
        return None if find is None else list(map(find, parameters))


@dataclass(frozen=True, slots=True, eq=False)
class Domain:
    """The processes that norms of a list are reduced over.

    Attributes:
        groups: reduced over one after the other; they meet in this process only.
        size: the number of processes that they reach.
        inner: the number of processes in the meshes of the list.
        mesh_groups: the groups that reach the meshes: the first of `groups`, or none of them where
            the user's group holds the meshes.
        one_list: they all have the same parameters, in the same order.
        uncovered: why shards of the list may lie outside; "" where they do not.
    """

    groups: tuple[ProcessGroup, ...]
    size: int
    inner: int
    mesh_groups: tuple[ProcessGroup, ...]
    one_list: bool = False
    uncovered: str = ""

    @property
    def is_spread(self) -> bool:
        """Whether other processes have shards, or may have."""
        return bool(self.groups or self.uncovered)


def check_processes(process_group: object, copies: object) -> Processes | None:
    """The user's arguments as one object, or None without any; raises for wrong ones."""
    if process_group is None and copies is None:
        return None
    if process_group is None:
        raise ValueError(
            "copies says how many processes of process_group hold a gradient, but no process_group "
            "was given; expected both: pass the processes that hold the model between them"
        )
    from torch.distributed.device_mesh import DeviceMesh

    expected = "process_group must be a ProcessGroup or a DeviceMesh"
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{expected} that this process belongs to, got one that it is not in")
    if not isinstance(process_group, dist.ProcessGroup | DeviceMesh):
        raise TypeError(f"{expected}, got {process_group!r} of type {type(process_group).__name__}")
    if isinstance(process_group, DeviceMesh) and process_group.get_coordinate() is None:
        raise ValueError(f"{expected} that this process belongs to, got {process_group}")
    if copies is not None and not (callable(copies) or isinstance(copies, Mapping)):
        raise TypeError(
            "copies must map parameters to numbers of processes, or be a function that does; got "
            f"{copies!r:.80} of type {type(copies).__name__}"
        )
    return Processes(process_group, copies)


def domain_of(meshes: Sequence[DeviceMesh], process_group: Any) -> Domain:
    """The processes to reduce over, for the meshes of parameters, in order, and a user's group."""
    from torch.distributed.device_mesh import DeviceMesh

    here = [mesh for mesh in meshes if mesh.size() > 1 and mesh.get_coordinate() is not None]
    groups, members, inner = _union(here)
    if process_group is None:
        uncovered = _uncovered(meshes, members, inner)
        return Domain(groups, inner, inner, groups, one_list=True, uncovered=uncovered)
    if isinstance(process_group, DeviceMesh):
        chain, outer, _ = _union([process_group])
    else:
        chain = (process_group,)
        outer = frozenset(dist.get_process_group_ranks(process_group))
    if members <= outer:
        return Domain(chain if len(outer) > 1 else (), len(outer), inner, groups)
    if outer & members == {dist.get_rank()}:
        return Domain((*groups, *chain), inner * len(outer), inner, groups)
    raise ValueError(
        f"process_group holds the processes {sorted(outer)} and cuts through the mesh of the "
        f"gradients, {sorted(members)}; expected a group that holds all of that mesh, or that "
        "shares this process only with it, as a dimension for pipeline stages does"
    )


def _ranks_of(mesh: DeviceMesh) -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


def _union(meshes: Sequence[DeviceMesh]) -> tuple[tuple[ProcessGroup, ...], frozenset[int], int]:
    """The groups that reach all meshes of this process, the processes known, and their number.

    The group of all processes, or the one-dimensional groups of the meshes, which span a grid.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    # The first mesh of several with the same processes: the same one everywhere.
    by_ranks: dict[frozenset[int], DeviceMesh] = {}
    for mesh in meshes:
        by_ranks.setdefault(_ranks_of(mesh), mesh)
    # In the order of the parameters: an order by ranks would differ between processes, and with it
    # the terms of each sum.
    groups: dict[frozenset[int], ProcessGroup] = {}
    for ranks, mesh in by_ranks.items():
        if not any(ranks < other for other in by_ranks):
            for dim in range(mesh.ndim):
                if mesh.size(dim) > 1:
                    group = mesh.get_group(dim)
                    groups.setdefault(frozenset(dist.get_process_group_ranks(group)), group)
    sets = [ranks for ranks in groups if not any(ranks < other for other in groups)]
    size = math.prod(map(len, sets))
    if size > world or any(a & b != {rank} for i, a in enumerate(sets) for b in sets[:i]):
        raise ValueError(
            f"the gradients lie on meshes that overlap in part ({[sorted(s) for s in sets]}); "
            "expected meshes of which one holds all others, or that meet in one process: pass "
            "process_group= and copies="
        )
    if 1 < size == world:
        return (dist.group.WORLD,), frozenset(range(world)), world  # type: ignore[return-value]
    members = frozenset([rank]).union(*by_ranks)
    return tuple(groups[ranks] for ranks in sets), members, size


def _uncovered(meshes: Sequence[DeviceMesh], members: frozenset[int], size: int) -> str:
    """Why processes that no placement names may hold other shards, with the remedy; else ""."""
    for mesh in meshes:
        if mesh.get_coordinate() is None:
            return (
                f"parameters lie on a mesh of the processes {sorted(_ranks_of(mesh))}, to which "
                "this one does not belong; expected process_group=: the processes that hold the "
                "model between them"
            )
        # No public part of PyTorch; without it, the mesh speaks for itself.
        root = getattr(mesh, "_get_root_mesh", lambda mesh=mesh: mesh)()
        ranks = _ranks_of(root)
        if len(ranks | members) > size:
            names = list(root.mesh_dim_names or ()) or list(root.mesh.shape)
            return (
                f"gradients lie on {len(ranks & members)} of the {len(ranks)} processes of a mesh "
                f"{names}: do the others hold copies of them, or other parameters? Expected "
                "process_group=: the processes that hold the model between them (for copies, the "
                "mesh of the gradients)"
            )
    return ""


def all_reduce(buffer: Tensor, groups: Iterable[ProcessGroup], *, largest: bool = False) -> Tensor:
    """Finds sums, or the largest numbers, over one group after the other; in place if it can."""
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    for group in groups:
        # A device that it has a backend for: with CPU offload, NCCL reduces nothing there.
        config = dist.get_backend_config(group)
        types = [part.split(":")[0] for part in config.split(",") if ":" in part]
        sent = buffer if not types or buffer.device.type in types else buffer.to(types[0])
        dist.all_reduce(sent, op=op, group=group)
        buffer = sent.to(buffer.device)
    return buffer


def mean_of_all(number: float | Tensor, device: torch.device | None) -> float | Tensor:
    """The mean of a number over all processes, which all call this; 0-d on a device, or a float."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        where = number.device if isinstance(number, Tensor) else device or torch.device("cpu")
        sent = torch.as_tensor(number, dtype=wide_dtype(where), device=where).clone()
        world: Any = dist.group.WORLD
        number = all_reduce(sent, [world]) / dist.get_world_size()
    if device is None:
        return float(number)
    return torch.as_tensor(number, dtype=wide_dtype(device), device=device)


def gather_objects(item: Any, domain: Domain) -> dict[int, Any]:
    """Gathers an object of each process, by rank; all of the domain call this, and wait."""
    found = {dist.get_rank(): item}
    for group in domain.groups:
        gathered: list[dict[int, Any]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(gathered, found, group=group)
        found = {rank: other for part in gathered for rank, other in part.items()}
    return dict(sorted(found.items()))
