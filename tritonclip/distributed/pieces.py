"""The piece of one gradient that a process holds, and the weight with which it counts.

Shard and _StridedShard split a gradient, Replicate copies it. Of a Partial one the sum is measured,
see `parts.py`; the parts are scaled, which scales the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tritonclip.distributed.domain import Domain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Reductions of Partial gradients that are linear: scaled parts make a scaled gradient.
_LINEAR = ("sum", "avg")


class Piece(NamedTuple):
    """The piece of a gradient that a process holds.

    Attributes:
        weight: 1 / the processes of the domain that hold this very piece; 0: counted elsewhere.
        sums_over: groups whose pieces are parts of a sum.
        divisor: of that sum, to make it a mean.
    """

    weight: float
    sums_over: tuple[ProcessGroup, ...] = ()
    divisor: int = 1

    def is_everywhere(self, domain: Domain) -> bool:
        """Whether a sum over all processes of the meshes makes it whole on each of them."""
        n_summed = math.prod(group.size() for group in self.sums_over)
        return n_summed == domain.inner and self.weight == 1 / domain.inner


def piece_of_spec(
    spec: Any,
    copies: int | None,
    domain: Domain,
    label: Callable[[], str],
    *,
    placements: Sequence[Any] | None = None,
    mesh: Any = None,
) -> Piece:
    """The local piece of a gradient.

    Args:
        spec: its own; None for a plain one.
        copies: the user's number of holders.
        domain: of the list.
        label: names the parameter.
        placements: in place of those of the spec.
        mesh: the parameter's. Of meshes that are equal but not one, each has its own groups, and a
            process without the gradient knows those of the parameter.
    """
    if spec is None:
        return Piece(_weight(copies, 1, domain))
    if spec.mesh.get_coordinate() is None:
        # A piece without elements, on a mesh of other processes.
        return Piece(0.0)
    mesh = mesh if mesh == spec.mesh else spec.mesh
    n_pieces, sums_over, divisor = 1, [], 1
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
            n_pieces *= mesh.size(dim)
    return Piece(_weight(copies, n_pieces, domain), tuple(sums_over), divisor)


def where(spec: Any) -> tuple[int, ...]:
    """The coordinates of this process in the dimensions of the mesh that a gradient is split by."""
    if spec is None:
        return ()
    coordinates = spec.mesh.get_coordinate() or [-1] * spec.mesh.ndim
    return tuple(
        -1 if placement.is_replicate() or placement.is_partial() else coordinate
        for coordinate, placement in zip(coordinates, spec.placements, strict=True)
    )


def check_copies(copies: object, domain: Domain, label: str) -> None:
    """Refuses a number of holders that no process can have."""
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


def _weight(copies: int | None, n_pieces: int, domain: Domain) -> float:
    if copies is not None:
        return 1.0 / copies if copies else 0.0
    return n_pieces / domain.inner
