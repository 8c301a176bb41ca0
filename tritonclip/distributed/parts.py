"""Sums whose parts are gradients: of DTensors whose placement is Partial.

A parameter does not tell whether its gradient is Partial, and a process may have none. Only along a
dimension that the parameter is copied along can it be. So flags for these dimensions travel with
the first numbers of a reduction. A process that has all gradients knows the sums by itself: flags
are read, and the device is waited for, only where a gradient is missing. The process then takes
part with zeros, as the others do with their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.distributed.collectives import all_reduce
from tritonclip.distributed.pieces import Piece
from tritonclip.distributed.sharding import Sharding, piece_of


class Part(NamedTuple):
    """A part of a gradient, or the sum of all of them.

    Attributes:
        position: of the parameter.
        tensor: real.
        pairs: it is complex, read as pairs.
        piece: says over which groups to sum.
    """

    position: int
    tensor: Tensor
    pairs: bool
    piece: Piece


def zeros_for(absent: Sequence[Tensor], sharding: Sharding, flags: Sequence[float]) -> list[Part]:
    """The parts of parameters without a gradient here, of which others have one.

    Args:
        absent: the parameters.
        sharding: of the list.
        flags: of all processes, for each of the sharding's copied dimensions.
    """
    parameters = dict(zip(sharding.absent, absent, strict=True))
    sums: dict[int, list[int]] = {}
    for (at, dim), flag in zip(sharding.copied, flags, strict=True):
        if flag and at in parameters:
            sums.setdefault(at, []).append(dim)
    parts = []
    for at, dims in sums.items():
        local: Tensor = parameters[at]._local_tensor  # type: ignore[attr-defined]
        zeros = torch.zeros_like(local, requires_grad=False)
        pairs = zeros.is_complex()
        piece = piece_of(parameters[at], at, sharding, dims)
        parts.append(Part(at, torch.view_as_real(zeros) if pairs else zeros, pairs, piece))
    return parts


def may_be_parts(absent: Sequence[Tensor], sharding: Sharding) -> bool:
    """Whether other processes may have a Partial gradient of a parameter that has none here."""
    copied = {at for at, _ in sharding.copied}
    # A parameter that requires no gradient has none anywhere.
    return any(
        at in copied and parameter.requires_grad
        for at, parameter in zip(sharding.absent, absent, strict=True)
    )


def sums_of(parts: Sequence[Part], sharding: Sharding) -> list[Part]:
    """The sums, or means, in new memory: by one all-reduce for each dtype and mesh dimension.

    Args:
        parts: of the same parameters in every process; real, of one device for each dtype.
        sharding: of the list.
    """
    together: dict[tuple[object, ...], list[Part]] = {}
    for part in sorted(parts, key=lambda part: part.position):
        key = part.piece.sums_over, part.tensor.dtype, part.tensor.device
        together.setdefault(key, []).append(part)
    sums = []
    for members in together.values():
        flat = torch.cat(
            [
                (tensor if piece.divisor == 1 else tensor / piece.divisor).reshape(-1)
                for _, tensor, _, piece in members
            ]
        )
        flat = all_reduce(flat, members[0].piece.sums_over, sharding.domain)
        sizes = [part.tensor.numel() for part in members]
        for part, tensor in zip(members, flat.split(sizes), strict=True):
            sums.append(part._replace(tensor=tensor.view(part.tensor.shape)))
    return sums
