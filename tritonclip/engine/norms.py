"""Norms of a gradient list before clipping: measured by group, and put together.

The norms of a list over processes are reduced here and nowhere else; see
`tritonclip.distributed.reduction`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tritonclip.backends import choose
from tritonclip.backends.interface import Batch, Limit, Of, PartialNorms
from tritonclip.backends.operators import (
    as_tensor,
    combine_numbers,
    norms_of_units,
    results_of,
    unscaled,
    wide_dtype,
)
from tritonclip.distributed.process_groups import ERRORS, gather_objects
from tritonclip.distributed.reduction import PartialSum, Reduction, ShardNorms, norms_of
from tritonclip.distributed.shards import Positions, Sharding, absent_shard
from tritonclip.engine import units
from tritonclip.engine.arguments import needs_clip
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.plan import Plan
from tritonclip.modes import refuse_tracer, without_grad
from tritonclip.rules import Norm
from tritonclip.rules.state import upload


@dataclass(slots=True)
class Norms:
    """Partial norms of all groups.

    Attributes:
        batches: the gradients of each group, in the hands of its backend.
        partials: for each group those of all groups, on its device; of "each" gradient or "rows",
            its own alone, in the form of its backend.
        norm_type: p of the p-norm.
        of: whose norms the partials give.
        grad_scale: the loss scale that gradients and partials still carry.
        gradients: the list that was measured.
        plan: of the list.
        reduced: the norm of all processes' gradients, or, with `per_gradient`, of each parameter's;
            float64, 1-d. None of a list that other processes do not share.
        limit: the rule's for these norms, once it was asked for.
    """

    batches: list[Batch]
    partials: list[PartialNorms]
    norm_type: float
    of: Of
    grad_scale: float | Tensor
    gradients: Gradients
    plan: Plan
    reduced: Tensor | None = None
    limit: Limit = field(default=None, init=False)

    @property
    def per_gradient(self) -> bool:
        """Whether each gradient has a norm."""
        return self.of != "all"

    def norm(self) -> Tensor:
        """The norm before clipping, divided by the loss scale, of all processes' gradients.

        0-d, or 1-d with that of each gradient.
        """
        plan = self.plan
        if self.reduced is not None:
            norm = unscaled(self.reduced, self.grad_scale).to(plan.dtype)
            return norm if self.per_gradient else norm.reshape(())
        if not self.per_gradient:
            norm = self.batches[0].combine(self.partials[0], self.norm_type, "all", self.grad_scale)
            return norm.to(plan.device)
        return self.in_order(
            [
                batch.combine(partials, self.norm_type, self.of, self.grad_scale)
                for batch, partials in zip(self.batches, self.partials, strict=True)
            ]
        )

    def numbers(self) -> float | list[float] | None:
        """`norm` in numbers, where the host decides; None where it would wait for the device."""
        plan = self.plan
        if not choose.host_decides(plan.device):
            return None
        partials = self.partials[0] if len(self.partials) == 1 else None
        if not isinstance(partials, list):
            numbers: float | list[float] = self.norm().tolist()
            return numbers
        if self.per_gradient:
            return results_of(partials, self.grad_scale, plan.dtype).tolist()
        total = partials if len(partials) == 1 else [combine_numbers(partials, self.norm_type)]
        return results_of(total, self.grad_scale, plan.dtype)[0]

    def norm_here(self) -> Tensor:
        """As `norm`, 0-d, or 1-d with that of each gradient here."""
        return self.here(self.norm()) if self.per_gradient else self.norm()

    def is_finite(self) -> Tensor:
        """Whether every norm is finite, and once a limit was asked for, it is a number; 0-d.

        Also of gradients that only other processes have.
        """
        # No norm is negative, and NaN is below nothing: one launch where torch.isfinite takes four.
        finite = self.norm() < math.inf
        # A launch less, on a GPU.
        finite = finite.all() if finite.dim() else finite
        if isinstance(self.limit, Tensor):
            finite = finite & (self.limit >= 0).all().to(finite.device)
        if self.limit is not None and (lacking := self.lack_weights()) is not None:
            finite = finite & ~lacking.any()
        return finite

    def lack_weights(self) -> Tensor | None:
        """Of which gradients a unit has no limit, because its weights are NaN; None by no unit.

        Not known of other processes, which have to decide alike.
        """
        if self.reduced is not None or self.of != "rows":
            return None
        found = []
        for batch, (norms, weights) in zip(self.batches, self.partials, strict=True):
            # The norm of a gradient is NaN if a unit of it lacks weights, and 0 otherwise.
            lacking = torch.where(weights.isnan() & (norms != 0), math.nan, 0.0).to(norms.dtype)
            rows = torch.stack([lacking, lacking])
            found.append(batch.combine(rows, 2.0, "rows", wide=True).isnan())
        return self.in_order(found)

    def in_order(self, results: list[Tensor]) -> Tensor:
        """Norms by group as one tensor in the order of the gradient list."""
        if len(results) == 1:
            return results[0]
        plan = self.plan
        joined = torch.cat([result.to(plan.device) for result in results])
        indices = [index for group in plan.groups for index in group.indices or ()]
        order = sorted(range(len(indices)), key=indices.__getitem__)
        # By slices, not by an index tensor: that would be an upload, which no graph can capture.
        slices = joined.split(1)
        return torch.cat([slices[i] for i in order])

    @property
    def n_norms(self) -> int:
        """The number of norms, also of gradients that only other processes have."""
        return len(self.whole()) if self.per_gradient else 1

    def here(self, values: Tensor) -> Tensor:
        """Of one value for each norm, those of the gradients here."""
        if self.reduced is None:
            return values
        found = [group.of_parameters(values) for group in self.plan.groups]
        return self.in_order(found) if found else values[:0]

    def sizes(self) -> Tensor:
        """The number of elements of each of these gradients; uploaded once for a plan."""
        plan = self.plan
        if plan.sizes is None:
            sizes = [tensor.numel() for tensor in self.whole()]
            plan.sizes = upload(sizes, wide_dtype(plan.device), plan.device)
        return plan.sizes

    def whole(self) -> Sequence[Tensor]:
        """Tensors of the shapes of all gradients that have norms; DTensors have the whole shape."""
        return self.gradients.tensors if self.reduced is None else self.gradients.wanted

    def positions(self) -> tuple[Sequence[int] | None, int]:
        """Of these gradients among the parameters, None for all; and how many parameters."""
        gradients, sources = self.gradients, self.gradients.sources
        if sources is None:
            return gradients.positions(), len(gradients.tensors)
        if self.reduced is None:
            return gradients.positions(), len(sources)
        wanted = [i for i, parameter in enumerate(sources) if needs_clip(parameter)]
        return None if len(wanted) == len(sources) else wanted, len(sources)


def measure(
    gradients: Gradients,
    norm: Norm,
    grad_scale: float | Tensor = 1.0,
    *,
    names_culprits: bool = False,
) -> Norms:
    """Measures a list that is not empty: by one launch for each group on a GPU.

    Of a list over processes, the norms of all of it; of a rejected one, raises when others know.
    `names_culprits`: names of gradients will be asked for where a norm is NaN.
    """
    plan = gradients.plan
    assert plan is not None
    if plan.reduction is not None:
        norms = take_part(gradients, norm, grad_scale)
        if gradients.error is None:
            assert norms is not None
            return norms
        if norms is not None and names_culprits:
            # The others ask for names where a norm is NaN.
            gather_objects([], plan.reduction.domain)
        raise gradients.error
    norm_type, per_gradient, by_unit = norm
    if by_unit:
        return _measure_units(gradients, grad_scale)
    of: Of = "each" if per_gradient else "all"
    if per_gradient:
        # The host decides by numbers that no operator reads: a trace would not notice.
        refuse_tracer()
    if len(plan.groups) == 1 and not (plan.pairs and norm_type != 2.0):
        batch = plan.groups[0].layout.bind(gradients.readable, gradients.addresses)
        partials = batch.norm(norm_type, of)
        return Norms([batch], [partials], norm_type, of, grad_scale, gradients, plan)
    return _measure_groups(gradients, norm_type, of, grad_scale)


def take_part(gradients: Gradients, norm: Norm, grad_scale: float | Tensor) -> Norms | None:
    """As `measure`, but raises no error of a rejected list; None if no process waits for it."""
    plan = gradients.plan
    assert plan is not None
    if plan.reduction is None:
        return measure(gradients, norm, grad_scale)
    # Of norms by tensor without DTensors, the others find the same error in their parameters.
    if gradients.error is not None and norm.each and not plan.reduction.one_list:
        return None
    if norm.by_unit:
        return _measure_units(gradients, grad_scale)
    return _measure_everywhere(gradients, norm, grad_scale)


def _measure_groups(
    gradients: Gradients, norm_type: float, of: Of, grad_scale: float | Tensor
) -> Norms:
    """Measures several groups, or complex gradients."""
    plan = gradients.plan
    assert plan is not None
    batches: list[Batch] = []
    partials: list[PartialNorms] = []
    for group in plan.groups:
        tensors, addresses = gradients.of_group(group.indices)
        batch = group.layout.bind(tensors, addresses)
        batches.append(batch)
        if group.pairs and norm_type != 2.0:
            norms = norms_of(tensors, None, norm_type, pairs=True, each=of == "each")
            partials.append(batch.partials_each(norms, norm_type) if of == "each" else norms)
        else:
            partials.append(batch.norm(norm_type, of))
    if of == "all":
        partials = _join(partials, [group.device for group in plan.groups])
    return Norms(batches, partials, norm_type, of, grad_scale, gradients, plan)


def _join(partials: list[PartialNorms], devices: list[torch.device]) -> list[PartialNorms]:
    """Gives every group the partial norms of all groups, in one order everywhere."""
    if all(isinstance(norms, list) for norms in partials):
        return [list(chain.from_iterable(partials))] * len(partials)
    tensors = [as_tensor(norms) for norms in partials]
    joined = {
        device: torch.cat([norms.to(device).to(wide_dtype(device)) for norms in tensors])
        for device in set(devices)
    }
    return [joined[device] for device in devices]


@without_grad
def _measure_everywhere(gradients: Gradients, norm: Norm, grad_scale: float | Tensor) -> Norms:
    """Measures the shards here, and reduces their norms with those of all processes."""
    norm_type, each, _ = norm
    plan = gradients.plan
    assert plan is not None
    assert plan.reduction is not None
    if each:
        refuse_tracer()
    sharding = plan.reduction
    # A weight of 0: on a mesh of other processes.
    is_part = gradients.may_be_part and all(shard.weight for shard in sharding.shards)
    if not (each or is_part) and (uncovered := sharding.domain.uncovered):
        raise ValueError(uncovered)
    batches, measured, terms = [], [], []
    for group in plan.groups:
        tensors, addresses = gradients.of_group(group.indices)
        batch = group.layout.bind(tensors, addresses)
        batches.append(batch)
        shard, positions = group.place()
        if shard.sums_over:
            pairs = zip(positions.numbers, tensors, strict=True)
            terms += [PartialSum(at, tensor, group.pairs, shard) for at, tensor in pairs]
        else:
            norms = norms_of(tensors, batch, norm_type, pairs=group.pairs, each=each)
            measured.append(ShardNorms(norms, shard, positions))
    n_each = sharding.n_parameters if each else None
    reduced = _reduce(gradients, sharding, measured, norm_type, n_each, terms)
    partials: list[Any] = []
    for group, batch in zip(plan.groups, batches, strict=True):
        whole = reduced
        if each:
            whole = batch.partials_each(group.of_parameters(reduced), norm_type)
        partials.append(whole.to(group.device))
    of: Of = "each" if each else "all"
    return Norms(batches, partials, norm_type, of, grad_scale, gradients, plan, reduced)


@without_grad
def _measure_units(gradients: Gradients, grad_scale: float | Tensor) -> Norms:
    """Measures a list by unit, with its weights; over processes by one all-reduce for both."""
    try:
        batches = units.batches_of(gradients)
    except ERRORS as error:
        gradients.reject_(error)
        batches = units.batches_of(gradients)
    plan = gradients.plan
    assert plan is not None
    partials = [batch.norm(2.0, "rows") for batch in batches]
    if plan.reduction is None:
        return Norms(batches, partials, 2.0, "rows", grad_scale, gradients, plan)
    n, measured = plan.reduction.n_parameters, _absent_weights(gradients, plan.reduction)
    found = list(zip(plan.groups, batches, partials, strict=True))
    for group, batch, norms in found:
        shard, positions = group.place()
        each = batch.combine(norms, 2.0, "rows", wide=True)
        measured.append(ShardNorms(each, shard, positions))
        # Weights stand below the n gradients.
        below = Positions([n + position for position in positions.numbers])
        weights = batch.combine(norms.flip(0), 2.0, "rows", wide=True)
        measured.append(ShardNorms(weights, shard, below))
    reduced = _reduce(gradients, plan.reduction, measured, 2.0, 2 * n)
    partials, grads = [], gradients.dense()
    for group, batch, norms in found:
        parts = []
        for side, half in zip(norms.unbind(), reduced.split(n), strict=True):
            # By slices, not by an index tensor: that would be an upload.
            wholes = group.of_parameters(half).to(norms.device).split(1)
            own = zip(group.of(grads), side.split(batch.sizes), wholes, strict=True)
            for grad, old, whole in own:
                # One unit over all processes: its norm comes first, and the others are 0.
                parts += [whole, torch.zeros_like(old[1:])] if grad.dim() < 2 else [old]
        partials.append(torch.cat(parts).view(2, -1))
    return Norms(batches, partials, 2.0, "rows", grad_scale, gradients, plan, reduced[:n])


def _absent_weights(gradients: Gradients, sharding: Sharding) -> list[ShardNorms]:
    """Weights that are one unit with those of other processes, and have no gradient here."""
    measured = []
    for at in sharding.absent:
        parameter = gradients.wanted[at]
        if parameter.dim() < 2 and parameter.requires_grad:
            shard = absent_shard(sharding.specs, at, sharding.domain)
            # One unit, whose norm is that of the weight.
            norm = norms_of_units(units.weight_of(parameter))
            below = Positions([sharding.n_parameters + at])
            measured.append(ShardNorms(norm, shard, below))
    return measured


def _reduce(
    gradients: Gradients,
    sharding: Sharding,
    measured: Sequence[ShardNorms],
    norm_type: float,
    n_each: int | None,
    terms: Sequence[PartialSum] | None = None,
) -> Tensor:
    """The norm of all processes' gradients, or `n_each`; float64, 1-d."""
    plan = gradients.plan
    assert plan is not None
    absent = {at: gradients.wanted[at] for at in sharding.absent}
    reduction = Reduction(
        *(sharding, norm_type, plan.device, gradients.device, gradients.error, n_each),
        *(terms, absent),
    )
    return reduction.run(measured)
