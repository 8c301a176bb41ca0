"""How a gradient list lies over processes: the domain to reduce over, and a piece of each gradient.

The norm of all pieces is the root of the sum of weight * norm**p over all processes. No process is
elected, and none leaves a reduction out: the domain depends on the parameters alone, never on the
gradients that are there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tritonclip.distributed.domain import Domain, Holders, domain_of
from tritonclip.distributed.pieces import Piece, check_copies, piece_of_spec, where

_WIDE = frozenset({torch.float64, torch.complex128})


@dataclass(slots=True, eq=False)
class Sharding:
    """All that is known of a list over processes, but for its local pieces.

    Attributes:
        domain: the processes to reduce over.
        pieces: of the gradients that are there, in order.
        where: the mesh coordinates of each piece; other pieces of its gradient have others.
        positions: theirs among the parameters.
        n_parameters: with and without a gradient.
        absent: the parameters without one, by position.
        copied: dimensions of meshes that parameters are copied along, of which a gradient may be
            Partial: (position, dimension).
        parts: of which of these dimensions a gradient here is Partial.
        said: the user's number of holders of each parameter.
        wide: a parameter is float64.
        one_list: every process of the domain has the same parameters, in the same order.
        sums: some gradients are Partial.
        mixed: some gradients are plain.
    """

    domain: Domain
    pieces: tuple[Piece, ...]
    where: tuple[tuple[int, ...], ...]
    positions: tuple[int, ...]
    n_parameters: int
    absent: tuple[int, ...]
    copied: tuple[tuple[int, int], ...]
    parts: tuple[bool, ...]
    said: tuple[int | None, ...]
    wide: bool
    one_list: bool
    sums: bool
    mixed: bool


def sharding_of(
    specs: list[Any],
    forms: list[Any],
    said: list[int | None],
    user: Holders,
    label: Callable[[int], str],
) -> Sharding:
    """Finds the domain from the parameters, then the weight of each gradient."""
    # Of tensors that are no parameters, the gradient is all there is.
    found = [mesh_of(a) or mesh_of(b) for a, b in zip(specs, forms, strict=True)]
    # Of lists of one step the same domain: of meshes that are alike, the first one's groups.
    meshes = {id(mesh): mesh for mesh in (*user.meshes, *found) if mesh is not None}
    domain = domain_of(list(meshes.values()), user.group)
    positions = tuple(i for i, form in enumerate(forms) if form is not False)
    for at, copies in enumerate(said):
        if copies is not None:
            check_copies(copies, domain, label(at))
    pieces = tuple(
        piece_of_spec(forms[i], said[i], domain, partial(label, i), mesh=mesh_of(specs[i]))
        for i in positions
    )
    copied = _copied(specs)
    return Sharding(
        domain=domain,
        pieces=pieces,
        where=tuple(where(forms[i]) for i in positions),
        positions=positions,
        n_parameters=len(specs),
        absent=tuple(i for i, form in enumerate(forms) if form is False),
        copied=copied,
        parts=tuple(_is_partial(forms[i], dim) for i, dim in copied),
        said=tuple(said),
        wide=not _WIDE.isdisjoint(map(dtype_of, specs)),
        one_list=user.group is None,
        sums=any(piece.sums_over for piece in pieces),
        mixed=any(forms[i] is None for i in positions),
    )


def _copied(specs: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """The dimensions that parameters are copied along; the same in all processes of a list."""
    return tuple(
        (at, dim)
        for at, spec in enumerate(specs)
        if (mesh := mesh_of(spec)) is not None
        for dim, placement in enumerate(spec.placements)
        if placement.is_replicate() and mesh.size(dim) > 1
    )


def _is_partial(form: Any, dim: int) -> bool:
    """Whether a gradient is there, and Partial along a dimension of its mesh."""
    return mesh_of(form) is not None and bool(form.placements[dim].is_partial())


def piece_of(parameter: Tensor, at: int, sharding: Sharding, sums: Sequence[int] = ()) -> Piece:
    """The local piece of a gradient that is placed as its parameter is.

    Args:
        parameter: without a gradient here.
        at: its position.
        sharding: of the list.
        sums: dimensions of the mesh along which the gradient is Partial.
    """
    from torch.distributed.tensor import Partial

    spec, placements = getattr(parameter, "_spec", None), None
    if spec is not None:
        placements = tuple(
            Partial() if dim in sums else placement for dim, placement in enumerate(spec.placements)
        )
    copies = sharding.said[at]
    return piece_of_spec(
        spec, copies, sharding.domain, lambda: f"parameters[{at}]", placements=placements
    )


def mesh_of(spec: Any) -> Any:
    """The mesh of a spec; None for the marks in its place: a dtype, None or False."""
    return getattr(spec, "mesh", None)


def dtype_of(spec: Any) -> torch.dtype | None:
    """The dtype of a parameter, where it is known."""
    if isinstance(spec, torch.dtype):
        return spec
    return getattr(getattr(spec, "tensor_meta", None), "dtype", None)


def meshes_of(parameters: Iterable[Tensor]) -> tuple[Any, ...]:
    """The meshes of the DTensors among parameters, in order."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return ()
    return tuple(
        {
            id(p._spec.mesh): p._spec.mesh for p in parameters if isinstance(p, module.DTensor)
        }.values()
    )
