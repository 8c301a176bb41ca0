"""Norms of the pieces in one process, and of the sums whose parts are gradients."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tritonclip.backends.batch import Batch
from tritonclip.backends.choose import layout_of
from tritonclip.backends.torch_backend import wide_dtype
from tritonclip.distributed.parts import Part, may_be_parts, sums_of, zeros_for
from tritonclip.distributed.places import Places, Share
from tritonclip.distributed.rows import Measured
from tritonclip.engine.gradients import Gradients


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
    device = tensors[0].device
    out = torch.empty(batch.count_norms(per_gradient=each), dtype=wide_dtype(device), device=device)
    norms: Tensor = batch.norm(norm_type, out, per_gradient=each)
    if not each:
        return norms
    norms = batch.norms_each(norms, norm_type)
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
