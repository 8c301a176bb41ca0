"""Sums whose parts are gradients: of DTensors whose placement is Partial.

A parameter does not tell whether its gradient is Partial, and a process may have none. Only along a
dimension that the parameter is copied along can it be. So flags for these dimensions travel with
the first numbers of a reduction. A process that has all gradients knows the sums by itself: flags
are read, and the device is waited for, only where a gradient is missing. The process then takes
part with zeros, as the others do with their parts.

Norms of the pieces in one process, and of the sums whose parts are gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.backends.choose import layout_of
from tritonclip.backends.interface import Batch
from tritonclip.backends.operators import as_tensor, wide_dtype
from tritonclip.distributed.process_groups import all_reduce
from tritonclip.distributed.reduction import Measured, Places, Share
from tritonclip.distributed.shards import Piece, Sharding, piece_of
from tritonclip.engine.gradients import Gradients


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


def norms_of(
    tensors: list[Tensor], batch: Batch | None, norm_type: float, *, pairs: bool, each: bool
) -> Tensor:
    """Partial norms of gradients, or the norm of each.

    Args:
        tensors: not empty, of one device and dtype.
        batch: of them, where there is one.
        norm_type: p of the p-norm.
        pairs: they are complex, read as pairs.
        each: measure each by itself.
    """
    if pairs and norm_type != 2.0:
        tensors, batch = [moduli_of(tensor) for tensor in tensors], None
    if batch is None:
        batch = layout_of(tensors, flat=True).bind(tensors, None)
    measured = batch.norm(norm_type, per_gradient=each)
    if not each:
        return as_tensor(measured)
    norms = batch.norms_each(measured, norm_type)
    if norm_type == -math.inf:
        # A piece without elements has the norm 0 here, but is no part of the whole's.
        for i, tensor in enumerate(tensors):
            if not tensor.numel():
                norms[i].fill_(math.inf)
    return norms


def measure_sums(
    gradients: Gradients, parts: Sequence[Part], norm_type: float, each: bool, flags: Tensor
) -> list[Measured]:
    """Measures the sums of gradients that are parts, here or in another process."""
    sharding = gradients.sharding
    assert sharding is not None
    if may_be_parts(gradients.absent, sharding):
        parts = [*parts, *zeros_for(gradients.absent, sharding, flags.tolist())]
    together: dict[tuple[object, ...], list[Part]] = {}
    for part in sums_of(parts, sharding):
        key = part.piece.weight, part.piece.sums_over, part.tensor.dtype, part.pairs
        together.setdefault(key, []).append(part)
    measured = []
    for members in together.values():
        tensors = [part.tensor for part in members]
        norms = norms_of(tensors, None, norm_type, pairs=members[0].pairs, each=each)
        narrow = members[0].tensor.dtype != torch.float64
        share = Share(members[0].piece, Places([part.position for part in members]), narrow)
        measured.append((norms, share))
    return measured


def moduli_of(pairs: Tensor) -> Tensor:
    """The moduli of a complex gradient that is read as pairs, 1-d, in new memory."""
    # Moduli of finite float32 pairs may be over its largest number.
    wide = pairs.to(wide_dtype(pairs.device))
    return torch.view_as_complex(wide.reshape(-1, 2)).abs()
