"""Units of gradients that lie over processes: whole rows here, or one unit of several processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tritonclip.distributed.gradients import ShardedGradients
from tritonclip.distributed.reduction import Exchange, MeasuredShards, ShardGroup, Slots
from tritonclip.distributed.refusals import reduced_norm
from tritonclip.distributed.shards import shard_of
from tritonclip.engine.units import Units, weights_of


def whole_units(gradients: ShardedGradients, units: Units) -> Exchange[tuple[list[Tensor], Tensor]]:
    """Partial norms of each group, of whole units, and the norm of each parameter's gradient.

    Slices along the first dimension are whole here; a gradient that is one unit may not be. One
    all-reduce serves the norms of gradients and of weights.
    """
    plan = gradients.plan
    assert plan is not None
    partials, reduction = units.measure(), plan.reduction
    n, device = reduction.sharding.n_parameters, plan.device
    groups = list(zip(units.batches, partials, reduction.shard_groups, strict=True))
    measured = [(batch.norms_each(norms), shards) for batch, norms, shards in groups]
    measured += [
        (batch.weight_norms_each(norms), _of_weights(shards, n)) for batch, norms, shards in groups
    ]
    measured += _absent_weights(gradients, n, device)
    doubled = replace(reduction, sharding=replace(reduction.sharding, n_parameters=2 * n))
    reduced = yield from reduced_norm(
        gradients, partial(doubled.norm, measured, norm_type=2.0, each=True)
    )
    whole = []
    for batch, norms, shards in groups:
        slots = shards.slots.on(device)
        own, limits = (half[slots].to(norms.device) for half in reduced.split(n))
        whole.append(batch.with_whole(norms, own, limits))
    return whole, reduced[:n]


def refuse_split(gradients: ShardedGradients, parameters: Sequence[Tensor]) -> None:
    """Refuses DTensors whose units lie on several processes, unless they are one unit."""
    for index, parameter in enumerate(parameters):
        own = getattr(parameter, "placements", ())
        found = getattr(parameter.grad, "placements", ())
        if own != found or not all(
            placement.is_replicate() or _splits_rows(placement) or n_processes == 1
            for placement, n_processes in zip(found, _sizes(parameter), strict=True)
        ):
            raise TypeError(
                f"{gradients.label(index)} has the placements {own} and its gradient {found}; a "
                "rule by unit expects the same for both, and rows that are whole on their process: "
                "Replicate or Shard(0), as fully_shard makes them. Clip such a model by norm, or "
                "set need_clip = False on these parameters"
            )


def _absent_weights(
    gradients: ShardedGradients, n: int, device: torch.device
) -> list[MeasuredShards]:
    """Weights that are one unit with those of other processes, and have no gradient here."""
    sharding, measured = gradients.sharding, []
    for at, parameter in zip(sharding.absent, gradients.absent, strict=True):
        if parameter.dim() < 2 and parameter.requires_grad:
            shards = ShardGroup(shard_of(parameter, at, sharding), Slots([n + at]), narrow=False)
            measured.append((_norm_of(weights_of([parameter])[0], device), shards))
    return measured


def _norm_of(weight: Tensor, device: torch.device) -> Tensor:
    """The 2-norm of a small weight, float64[1]."""
    wide = weight.to(torch.complex128 if weight.is_complex() else torch.float64)
    norm: Tensor = torch.linalg.vector_norm(wide)
    return norm.reshape(1).to(device)


def _of_weights(shards: ShardGroup, n: int) -> ShardGroup:
    """The shards of weights, whose norms stand below those of n gradients."""
    slots = Slots([n + position for position in shards.slots.positions])
    return ShardGroup(shards.shard, slots, narrow=False)


def _sizes(parameter: Tensor) -> tuple[int, ...]:
    """The processes along each dimension of a DTensor's mesh; () for a plain tensor."""
    mesh = getattr(parameter, "device_mesh", None)
    return () if mesh is None else tuple(mesh.shape)


def _splits_rows(placement: object) -> bool:
    """Whether a placement gives each process some of the rows; of _StridedShard too."""
    return getattr(placement, "dim", None) == 0
