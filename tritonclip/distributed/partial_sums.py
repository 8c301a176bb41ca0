"""DTensors whose placement is Partial: the gradient is a sum, of which each process has a term.

A parameter does not say whether its gradient is Partial, and a process may have none. Only along a
dimension that the parameter is copied along can it be. So flags for these dimensions travel with
the first numbers of a reduction. A process that has all gradients knows the sums by itself: flags
are read, and the device is waited for, only where a gradient is missing. The process then takes
part with zeros, as the others do with their terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.backends.choose import layout_of
from tritonclip.backends.interface import Batch
from tritonclip.backends.operators import as_tensor
from tritonclip.distributed.process_groups import all_reduce
from tritonclip.distributed.reduction import CachedIntegers, MeasuredShards, ShardGroup
from tritonclip.distributed.shards import LocalShard, Sharding, shard_of
from tritonclip.engine.norms import moduli_of


class PartialSum(NamedTuple):
    """A term of a gradient's sum, or the sum: real, or with `pairs` complex numbers as pairs."""

    position: int
    tensor: Tensor
    pairs: bool
    shard: LocalShard


def zeros_for(
    absent: Sequence[Tensor], sharding: Sharding, flags: Sequence[float]
) -> list[PartialSum]:
    """The terms of `absent` parameters that others have gradients of, by the flags of everyone."""
    parameters = dict(zip(sharding.absent, absent, strict=True))
    sums: dict[int, list[int]] = {}
    for (at, dim), flag in zip(sharding.copied, flags, strict=True):
        if flag and at in parameters:
            sums.setdefault(at, []).append(dim)
    terms = []
    for at, dims in sums.items():
        local: Tensor = parameters[at]._local_tensor  # type: ignore[attr-defined]
        zeros = torch.zeros_like(local, requires_grad=False)
        pairs = zeros.is_complex()
        shard = shard_of(parameters[at], at, sharding, dims)
        terms.append(PartialSum(at, torch.view_as_real(zeros) if pairs else zeros, pairs, shard))
    return terms


def sums_of(terms: Sequence[PartialSum], sharding: Sharding) -> list[PartialSum]:
    """The sums, or means, in new memory: by one all-reduce for each dtype and mesh dimension."""
    alike: dict[tuple[object, ...], list[PartialSum]] = {}
    for term in sorted(terms, key=lambda term: term.position):
        key = term.shard.sums_over, term.tensor.dtype, term.tensor.device
        alike.setdefault(key, []).append(term)
    sums = []
    for members in alike.values():
        flat = torch.cat(
            [
                (tensor if shard.divisor == 1 else tensor / shard.divisor).reshape(-1)
                for _, tensor, _, shard in members
            ]
        )
        flat = all_reduce(flat, members[0].shard.sums_over, sharding.domain)
        sizes = [term.tensor.numel() for term in members]
        for term, tensor in zip(members, flat.split(sizes), strict=True):
            sums.append(term._replace(tensor=tensor.view(term.tensor.shape)))
    return sums


def norms_of(
    tensors: list[Tensor], batch: Batch | None, norm_type: float, *, pairs: bool, each: bool
) -> Tensor:
    """Partial norms of like gradients, which a batch may have, or, with `each`, their norms."""
    if pairs and norm_type != 2.0:
        tensors, batch = [moduli_of(tensor) for tensor in tensors], None
    if batch is None:
        batch = layout_of(tensors).bind(tensors, None)
    measured = batch.norm(norm_type, per_gradient=each)
    if not each:
        return as_tensor(measured)
    norms = batch.norms_each(measured, norm_type)
    if norm_type == -math.inf:
        # A shard without elements has the norm 0 here, but does not count for the whole.
        for i, tensor in enumerate(tensors):
            if not tensor.numel():
                norms[i].fill_(math.inf)
    return norms


def measure_sums(
    sharding: Sharding,
    absent: Sequence[Tensor],
    terms: Sequence[PartialSum],
    norm_type: float,
    each: bool,
    flags: Tensor,
) -> list[MeasuredShards]:
    """Measures the sums of which gradients are terms, here or in another process."""
    copied = {at for at, _ in sharding.copied}
    # A parameter that requires no gradient has none anywhere.
    if any(
        at in copied and parameter.requires_grad
        for at, parameter in zip(sharding.absent, absent, strict=True)
    ):
        terms = [*terms, *zeros_for(absent, sharding, flags.tolist())]
    alike: dict[tuple[object, ...], list[PartialSum]] = {}
    for term in sums_of(terms, sharding):
        key = term.shard.weight, term.shard.sums_over, term.tensor.dtype, term.pairs
        alike.setdefault(key, []).append(term)
    measured = []
    for members in alike.values():
        tensors = [term.tensor for term in members]
        norms = norms_of(tensors, None, norm_type, pairs=members[0].pairs, each=each)
        group = ShardGroup(members[0].shard, CachedIntegers([term.position for term in members]))
        measured.append((norms, group))
    return measured
