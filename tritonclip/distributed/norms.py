"""Norms of a gradient list that lies over several processes: measured here, reduced over all.

Every process of a list measures the same norms, whichever gradients it has, and enters the same
collectives.

When one process rejects its gradients, all processes raise and none hangs: it enters the reduction
as if it had none, and marks its numbers. On a CPU, where numbers are read at once, all raise before
anything is written. On an accelerator the others have the norm NaN, as for a NaN of that process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tritonclip.backends.operators import unscaled
from tritonclip.distributed.agreement import agree
from tritonclip.distributed.partial_sums import PartialSum, measure_sums, norms_of
from tritonclip.distributed.process_groups import ERRORS
from tritonclip.distributed.reduction import (
    CachedIntegers,
    Exchange,
    MeasuredShards,
    NormReduction,
    Reduction,
    Rejected,
    ShardGroup,
    Sums,
)
from tritonclip.distributed.shards import shard_of
from tritonclip.engine.arguments import needs_clip
from tritonclip.engine.norms import Norms
from tritonclip.engine.units import batches_of, weight_of
from tritonclip.modes import refuse_tracer
from tritonclip.rules import Norm, Rule

if TYPE_CHECKING:
    from tritonclip.distributed.gradients import ShardedGradients


@dataclass(slots=True)
class ReducedNorms(Norms):
    """The norms of gradients whose shards lie over several processes."""

    # The norm of all gradients, or with `per_gradient` of each parameter's; float64, 1-d.
    reduced: Tensor

    def norm(self) -> Tensor:
        norm = unscaled(self.reduced, self.norm_type, self.grad_scale).to(self.plan.dtype)
        return norm if self.per_gradient else norm.reshape(())

    def _parts(self) -> None:
        """None: a state has the same bits in processes without gradients."""

    def in_order(self, results: list[Tensor]) -> Tensor:
        """The norm of each gradient here."""
        return self.norm_here()

    @property
    def n_norms(self) -> int:
        return len(self.reduced)

    def here(self, values: Tensor) -> Tensor:
        """Of one value for each parameter, those of the gradients here."""
        return values[self.plan.reduction.positions.on(values.device)]

    def whole(self) -> Sequence[Tensor]:
        """The parameters that are to be clipped, or the tensors; DTensors have the whole shape."""
        return self.gradients.wanted  # type: ignore[attr-defined,no-any-return]  # of shards

    def positions(self) -> tuple[Sequence[int] | None, int]:
        """The positions of parameters to be clipped among all, and the number of all."""
        sources = self.gradients.sources
        if sources is None:
            return self.gradients.positions(), self.gradients.n_parameters
        wanted = [i for i, parameter in enumerate(sources) if needs_clip(parameter)]
        return None if len(wanted) == len(sources) else wanted, len(sources)


def exchange(
    gradients: ShardedGradients, norm: Norm, grad_scale: float | Tensor
) -> Exchange[ReducedNorms]:
    """Measures shards and reduces their norms; the caller raises the error of a rejected list."""
    norm_type, per_gradient, rule = norm
    if rule is not None and rule.per_unit:
        return (yield from _exchange_of_units(gradients, rule, grad_scale))
    if per_gradient:
        refuse_tracer()
    plan = gradients.plan
    assert plan is not None
    reduction = plan.reduction
    if not per_gradient and (uncovered := reduction.sharding.domain.uncovered):
        raise ValueError(uncovered)
    batches, shard_norms, sums = [], [], []
    for group, shards in zip(plan.groups, reduction.shard_groups, strict=True):
        tensors, addresses = gradients.of_group(group.indices)
        batch = group.layout.bind(tensors, addresses)
        batches.append(batch)
        if shards.shard.sums_over:
            sums += [
                PartialSum(at, tensor, group.pairs, shards.shard)
                for at, tensor in zip(shards.positions.numbers, tensors, strict=True)
            ]
        else:
            measured = norms_of(tensors, batch, norm_type, pairs=group.pairs, each=per_gradient)
            shard_norms.append((measured, shards))
    measure_own_sums = None
    if reduction.sharding.copied or sums:
        absent = gradients.absent
        measure_own_sums = partial(
            measure_sums, reduction.sharding, absent, sums, norm_type, per_gradient
        )
    reduced = yield from _reduced_norm(
        gradients, reduction, shard_norms, norm_type, each=per_gradient, sums=measure_own_sums
    )
    partials = []
    for group, shards, batch in zip(plan.groups, reduction.shard_groups, batches, strict=True):
        whole = reduced
        if per_gradient:
            whole = batch.partials_each(reduced[shards.positions.on(plan.device)], norm_type)
        partials.append(whole.to(group.device))
    return ReducedNorms(
        batches, partials, norm_type, per_gradient, grad_scale, gradients, plan, reduced
    )


def _exchange_of_units(
    gradients: ShardedGradients, rule: Rule, grad_scale: float | Tensor
) -> Exchange[ReducedNorms]:
    """As `exchange`, of units: one all-reduce serves norms of gradients and of weights."""
    try:
        batches = batches_of(gradients, rule)
    except ERRORS as error:
        gradients.reject_(error)
        batches = batches_of(gradients, rule)
    plan = gradients.plan
    assert plan is not None
    reduction, device = plan.reduction, plan.device
    n = reduction.sharding.n_parameters
    units = [batch.measure() for batch in batches]
    groups = list(zip(batches, units, reduction.shard_groups, strict=True))
    measured = [(batch.norms_each(norms), shards) for batch, norms, shards in groups]
    # Weights stand below the n gradients.
    for batch, norms, shards in groups:
        below = CachedIntegers([n + position for position in shards.positions.numbers])
        measured.append((batch.norms_each(norms.flip(0)), ShardGroup(shards.shard, below)))
    measured += _absent_weights(gradients, n, device)
    doubled = replace(reduction, sharding=replace(reduction.sharding, n_parameters=2 * n))
    reduced = yield from _reduced_norm(gradients, doubled, measured, 2.0, each=True)
    partials = []
    for batch, norms, shards in groups:
        positions = shards.positions.on(device)
        norms_each, limits = (half[positions].to(norms.device) for half in reduced.split(n))
        partials.append(batch.with_whole(norms, norms_each, limits))
    as_batches: list[Any] = [*batches]
    return ReducedNorms(as_batches, partials, 2.0, True, grad_scale, gradients, plan, reduced[:n])


def _absent_weights(
    gradients: ShardedGradients, n: int, device: torch.device
) -> list[MeasuredShards]:
    """Weights that are one unit with those of other processes, and have no gradient here."""
    sharding, measured = gradients.sharding, []
    for at, parameter in zip(sharding.absent, gradients.absent, strict=True):
        if parameter.dim() < 2 and parameter.requires_grad:
            shards = ShardGroup(shard_of(parameter, at, sharding), CachedIntegers([n + at]))
            weight = weight_of(parameter).detach()
            wide = weight.to(torch.complex128 if weight.is_complex() else torch.float64)
            norm: Tensor = torch.linalg.vector_norm(wide)
            measured.append((norm.reshape(1).to(device), shards))
    return measured


def _reduced_norm(
    gradients: ShardedGradients,
    reduction: Reduction,
    measured: Sequence[MeasuredShards],
    norm_type: float,
    *,
    each: bool,
    sums: Sums | None = None,
) -> Exchange[Tensor]:
    """Runs a reduction of norms; raises the error of a process that entered a rejected list."""
    plan, rejected = gradients.plan, gradients.error is not None
    assert plan is not None
    norm = NormReduction(reduction, norm_type, plan.device, gradients.device, each, sums, rejected)
    try:
        return (yield from norm.run(measured))
    except Rejected:
        # Of which one process has the reason.
        pass
    agree({}, gradients.error, gradients.sharding.domain)
    raise AssertionError("a process reported an error but sent no message")
