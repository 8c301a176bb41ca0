"""Norms of a gradient list before clipping: measured by group, and put together.

The norms of a list over processes are reduced here and nowhere else; see
`tritonclip.distributed.reduction`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

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
from tritonclip.distributed.domain import ERRORS, Domain, gather_objects
from tritonclip.distributed.reduction import Reduction, Term, norms_of
from tritonclip.engine import units
from tritonclip.engine.arguments import needs_clip
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.plan import Group, Plan
from tritonclip.modes import refuse_tracer, without_grad
from tritonclip.rules import Norm
from tritonclip.rules.state import upload


@dataclass(slots=True)
class Norms:
    """Partial norms of all groups.

    Attributes:
        batches: the gradients of each group, in the hands of its backend.
        partials: for each group those of all groups, on its device; of "each" gradient or of
            "rows" only those of the group, in the form of its backend.
        norm_type: p of the p-norm.
        of: whose norms the partials give.
        grad_scale: the loss scale that gradients and partials still carry.
        gradients: the list that was measured.
        plan: of the list.
        reduced: the norm of all processes' gradients, or, with `per_gradient`, of each parameter's;
            float64, 1-d. None for a list that no other process shares.
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
        """As `norm`: 0-d, or 1-d with the norm of each gradient that is here."""
        return self.here(self.norm()) if self.per_gradient else self.norm()

    def is_finite(self) -> Tensor:
        """Whether every norm is finite, and the limit a number once it was asked for; 0-d.

        It covers gradients that only other processes have.
        """
        # No norm is negative, and NaN is below nothing: one launch where torch.isfinite takes four.
        finite = self.norm() < math.inf
        # This saves a launch on a GPU.
        finite = finite.all() if finite.dim() else finite
        if isinstance(self.limit, Tensor):
            finite = finite & (self.limit >= 0).all().to(finite.device)
        if self.limit is not None and (lacking := self.lack_weights()) is not None:
            finite = finite & ~lacking.any()
        return finite

    def lack_weights(self) -> Tensor | None:
        """For each gradient, whether a unit of it has no limit because its weights are NaN.

        None if the rule is not by unit; and over processes, which have to decide alike and do not
        know this of one another.
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
        """Picks the values of the gradients that are here, from one value for each norm."""
        if self.reduced is None:
            return values
        found = [_of_parameters(self.plan, group, values) for group in self.plan.groups]
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
        """Positions of these gradients among the parameters, None for all; the number of those."""
        gradients, sources = self.gradients, self.gradients.sources
        if sources is None:
            return gradients.positions(), len(gradients.tensors)
        if self.reduced is None:
            return gradients.positions(), len(sources)
        wanted = [i for i, parameter in enumerate(sources) if needs_clip(parameter)]
        return None if len(wanted) == len(sources) else wanted, len(sources)


def _of_parameters(plan: Plan, group: Group, values: Tensor) -> Tensor:
    """The values of a group, from one for each parameter that is to be clipped, 1-d."""
    assert plan.sharding is not None
    return values[plan.sharding.upload(group.positions, values.device)]


def measure(
    gradients: Gradients,
    norm: Norm,
    grad_scale: float | Tensor = 1.0,
    *,
    names_culprits: bool = False,
) -> Norms:
    """Measures a list that is not empty: by one launch for each group on a GPU.

    Over processes it finds the norms of the whole list, and the error of a rejected one is raised
    once the others know. `names_culprits`: names of gradients will be asked for if a norm is NaN.
    """
    plan = gradients.plan
    assert plan is not None
    if plan.domain is not None:
        norms = take_part(gradients, norm, grad_scale)
        if gradients.error is None:
            assert norms is not None
            return norms
        if norms is not None and names_culprits:
            # The others ask for names where a norm is NaN.
            gather_objects([], plan.domain)
        raise gradients.error
    norm_type, each, by_unit = norm
    if by_unit:
        return _measure_without_grad(gradients, norm, grad_scale)
    if len(plan.groups) != 1 or (plan.pairs and norm_type != 2.0):
        return _measure_groups(gradients, norm, grad_scale)
    if each:
        # The host decides by numbers that no operator reads: a trace would not notice.
        refuse_tracer()
    of: Of = "each" if each else "all"
    batch = plan.groups[0].layout.bind(gradients.readable, gradients.addresses)
    partials = batch.norm(norm_type, of)
    return Norms([batch], [partials], norm_type, of, grad_scale, gradients, plan)


def take_part(gradients: Gradients, norm: Norm, grad_scale: float | Tensor) -> Norms | None:
    """As `measure`, but a rejected list raises nothing; None if no process waits for its norms."""
    plan = gradients.plan
    assert plan is not None
    if plan.domain is None:
        return measure(gradients, norm, grad_scale)
    # Where norms are of each tensor, without DTensors, the others find the same error themselves.
    if gradients.error is not None and norm.each and not plan.domain.one_list:
        return None
    return _measure_without_grad(gradients, norm, grad_scale)


def _measure_groups(gradients: Gradients, norm: Norm, grad_scale: float | Tensor) -> Norms:
    """Measures several groups, complex gradients, units with their weights, or shards."""
    norm_type, each, by_unit = norm
    if by_unit:
        try:
            batches = units.batches_of(gradients)
        except ERRORS as error:
            gradients.reject_(error)
            batches = units.batches_of(gradients)
    else:
        batches = gradients.batches()
        if each:
            refuse_tracer()
    plan = gradients.plan
    assert plan is not None
    of: Of = "rows" if by_unit else "each" if each else "all"
    partials: list[PartialNorms] = []
    for group, batch in zip(plan.groups, batches, strict=True):
        if group.shard.sums_over:
            # The sum is measured, and not its terms.
            partials.append(None)
        elif group.pairs and norm_type != 2.0:
            tensors, _ = gradients.of_group(group.indices)
            norms = norms_of(tensors, norm_type, pairs=True, each=each)
            partials.append(batch.partials_each(norms, norm_type) if each else norms)
        else:
            partials.append(batch.norm(norm_type, of))
    measured = Norms(batches, partials, norm_type, of, grad_scale, gradients, plan)
    if plan.domain is not None:
        _reduce_(measured, plan.domain)
    elif of == "all":
        measured.partials = _join(partials, [group.device for group in plan.groups])
    return measured


_measure_without_grad = without_grad(_measure_groups)


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


def _reduce_(norms: Norms, domain: Domain) -> None:
    """Replaces the norms of this process by those of all processes.

    By unit, one all-reduce serves the norms of gradients and those of weights.
    """
    gradients, plan, of, p = norms.gradients, norms.plan, norms.of, norms.norm_type
    sharding, parameters = plan.sharding, gradients.wanted
    assert sharding is not None
    # A shard that lies on a mesh of other processes has a weight of 0.
    is_part = gradients.may_be_part and all(group.shard.weight for group in plan.groups)
    if of == "all" and not is_part and domain.uncovered:
        raise ValueError(domain.uncovered)
    n, found = len(parameters), list(zip(plan.groups, norms.batches, norms.partials, strict=True))
    reduction = Reduction(sharding, parameters, p, of, gradients.device, gradients.error)
    for group, batch, partials in found:
        shard, positions = group.shard, group.positions
        if shard.sums_over:
            tensors, _ = gradients.of_group(group.indices)
            terms = zip(positions, tensors, strict=True)
            reduction.terms += [Term(at, tensor, group.pairs, shard) for at, tensor in terms]
            continue
        own = as_tensor(partials) if of == "all" else batch.combine(partials, p, of, wide=True)
        reduction.add(own, shard, positions)
        if of == "rows":
            # Weights stand below the n gradients.
            weights = batch.combine(partials.flip(0), p, of, wide=True)
            reduction.add(weights, shard, tuple(n + at for at in positions))
    for at, parameter in enumerate(parameters) if of == "rows" else ():
        # Weights that are one unit with those of other processes.
        if sharding.grads[at] is None and parameter.dim() < 2 and parameter.requires_grad:
            weight = norms_of_units(units.weight_of(parameter))
            reduction.add(weight, sharding.shard(at), (n + at,))
    reduced = reduction.run().to(plan.device)
    norms.reduced = reduced[:n] if of == "rows" else reduced
    for i, (group, batch, partials) in enumerate(found):
        if of == "rows":
            norms.partials[i] = _with_whole_units(norms, group, batch, partials, reduced.view(2, n))
            continue
        whole = reduced
        if of == "each":
            whole = batch.partials_each(_of_parameters(plan, group, reduced), p)
        norms.partials[i] = whole.to(group.device)


def _with_whole_units(
    norms: Norms, group: Group, batch: Batch, partials: Tensor, reduced: Tensor
) -> Tensor:
    """Norms by rows; of a parameter that is one unit over all processes, the norm of the whole."""
    rows, grads = [], group.of(norms.gradients.dense())
    for side, half in zip(partials.unbind(), reduced.unbind(), strict=True):
        # By slices, not by an index tensor: that would be an upload.
        wholes = _of_parameters(norms.plan, group, half).to(partials.device).split(1)
        for grad, old, whole in zip(grads, side.split(batch.sizes), wholes, strict=True):
            # The norm of the unit comes first, and the others are 0.
            rows += [whole, torch.zeros_like(old[1:])] if grad.dim() < 2 else [old]
    return torch.cat(rows).view(2, -1)
