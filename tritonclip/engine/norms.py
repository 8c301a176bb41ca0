"""Norms of a gradient list before clipping: partial ones by group, and put together.

Measures a gradient list: by group, or as pieces of which other processes have more.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonclip.backends.choose import layout_of, torch_layout
from tritonclip.backends.interface import Batch, PartialNorms
from tritonclip.backends.operators import as_tensor, unscaled, wide_dtype
from tritonclip.distributed.partial_sums import Part, measure_sums, moduli_of, norms_of
from tritonclip.distributed.reduction import Exchange, together
from tritonclip.distributed.refusals import ask_others, raise_refusal, reduced_norm
from tritonclip.distributed.verify import Agreement
from tritonclip.engine.checks import refuse_uncovered
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.plan import refuse_
from tritonclip.engine.units import Units
from tritonclip.modes import outside_inference, without_grad
from tritonclip.rules import Rule


class Norms(NamedTuple):
    """Partial norms of all groups.

    Attributes:
        batches: the gradients of each group, in the hands of its backend.
        partials: for each group those of all groups, on its device; with `per_gradient`, its own
            alone, in the form of its backend.
        norm_type: p of the p-norm.
        per_gradient: partials give the norm of each gradient.
        grad_scale: the loss scale that gradients and partials still carry.
        gradients: the list that was measured.
        reduced: where pieces lie over several processes, the norm of all, or with `per_gradient` of
            each parameter's gradient; float64, 1-d.
    """

    batches: list[Batch]
    partials: list[PartialNorms]
    norm_type: float
    per_gradient: bool
    grad_scale: float | Tensor
    gradients: Gradients
    reduced: Tensor | None = None

    def norm(self) -> Tensor:
        """The norm before clipping, or one for each gradient, of other processes too."""
        plan = self.gradients.plan
        if self.reduced is not None and self.per_gradient and plan is not None:
            return unscaled(self.reduced, self.norm_type, self.grad_scale).to(plan.dtype)
        return total(self)

    def sizes(self) -> Tensor:
        """The number of elements of each of these gradients; uploaded once for a plan."""
        gradients, plan = self.gradients, self.gradients.plan
        assert plan is not None
        if plan.sizes is None:
            whole = gradients.tensors
            if self.reduced is not None and gradients.sources is not None:
                whole = [p for p in gradients.sources if getattr(p, "need_clip", True)]
            sizes = [tensor.numel() for tensor in whole]
            uploaded = outside_inference(torch.tensor)
            plan.sizes = uploaded(sizes, dtype=wide_dtype(plan.device), device=plan.device)
        return plan.sizes

    def positions(self) -> tuple[Sequence[int] | None, int]:
        """Where the gradients stand among the parameters, and how many parameters there are."""
        gradients = self.gradients
        if self.reduced is not None and gradients.sources is not None:
            wanted = [getattr(p, "need_clip", True) for p in gradients.sources]
            there = None if all(wanted) else [i for i, own in enumerate(wanted) if own]
            return there, len(wanted)
        return gradients.places(), gradients.n_parameters


def total(norms: Norms) -> Tensor:
    """The norm before clipping, divided by the loss scale: 0-d, or 1-d in order per gradient."""
    if norms.reduced is not None:
        return _total_of_pieces(norms)
    gradients, results = norms.gradients, []
    for batch, partials in zip(norms.batches, norms.partials, strict=True):
        if not norms.per_gradient:
            assert gradients.plan is not None
            norm = batch.total(partials, norms.norm_type, norms.grad_scale)
            return norm.to(gradients.plan.device)
        results.append(batch.total_each(partials, norms.norm_type, norms.grad_scale))
    return in_order(gradients, results)


def _total_of_pieces(norms: Norms) -> Tensor:
    """As `total`, from norms that are reduced already."""
    plan = norms.gradients.plan
    assert plan is not None
    assert plan.reduction is not None
    assert norms.reduced is not None
    reduced = unscaled(norms.reduced, norms.norm_type, norms.grad_scale).to(plan.dtype)
    if norms.per_gradient:
        return reduced[plan.reduction.places.on(plan.device)]
    return reduced.reshape(())


def is_finite(norms: Norms) -> Tensor:
    """Whether every norm is finite, also those of gradients that only other processes have; 0-d."""
    return torch.isfinite(norms.norm()).all()


def in_order(gradients: Gradients, results: list[Tensor]) -> Tensor:
    """Norms by group as one tensor in the order of the gradient list."""
    if len(results) == 1:
        return results[0]
    plan = gradients.plan
    assert plan is not None
    joined = torch.cat([result.to(plan.device) for result in results])
    indices = [index for group in plan.groups for index in group.indices or ()]
    order = sorted(range(len(indices)), key=indices.__getitem__)
    # By slices, not by an index tensor: that would be an upload, which no graph can capture.
    pieces = joined.split(1)
    return torch.cat([pieces[i] for i in order])


@without_grad
def measure_units(
    gradients: Gradients, rule: Rule, grad_scale: float | Tensor, *, names_culprits: bool = False
) -> Norms:
    """Measures the units of a list that is not empty, and of its weights."""
    exchange = units_exchange(gradients, rule, grad_scale)
    norms = together([exchange])[0]
    raise_refusal(gradients, names_culprits=names_culprits)
    return norms


def units_exchange(gradients: Gradients, rule: Rule, grad_scale: float | Tensor) -> Exchange[Norms]:
    """As `measure_units`, beside other exchanges; the caller looks for a refusal."""
    try:
        units = Units(gradients, rule)
    except (TypeError, ValueError, RuntimeError) as error:
        if not refuse_(gradients, error):
            raise
        units = Units(gradients, rule)
    partials, reduced = yield from units.measure()
    # Batches of units have the verbs for norms by gradient, and no others.
    batches: list[Any] = [*units.batches]
    return Norms(batches, partials, 2.0, True, grad_scale, gradients, reduced)


def measure_groups(
    gradients: Gradients, norm_type: float, per_gradient: bool, grad_scale: float | Tensor
) -> Norms:
    """Measures several groups, complex gradients, or no elements at all."""
    plan = gradients.plan
    assert plan is not None
    batches: list[Batch] = []
    partials: list[PartialNorms] = []
    for group in plan.groups:
        tensors, addresses = gradients.of(group.indices)
        batch = group.layout.bind(tensors, addresses)
        moduli = batch
        if group.pairs and norm_type != 2.0:
            # Kernels find the norm of a gradient by the chunks that they write to, and moduli have
            # others.
            layout = torch_layout(group.device) if per_gradient else group.layout
            layout.dtype = plan.dtype
            batch = layout.bind(tensors, addresses)
            own = [moduli_of(tensor) for tensor in tensors]
            measuring = torch_layout(group.device) if per_gradient else layout_of(own, flat=True)
            moduli = measuring.bind(own, None)
        batches.append(batch)
        measured = moduli.norm(norm_type, per_gradient=per_gradient)
        if plan.empty:
            # The least of no elements would be inf.
            measured = [0.0] * len(measured) if isinstance(measured, list) else measured.zero_()
        partials.append(measured)
    if not per_gradient:
        partials = _join(partials, [group.device for group in plan.groups])
    return Norms(batches, partials, norm_type, per_gradient, grad_scale, gradients)


def measure_pieces(
    gradients: Gradients, norm_type: float, per_gradient: bool, grad_scale: float | Tensor
) -> Norms:
    """Measures pieces of gradients: by one all-reduce in the usual case."""
    return together([pieces_exchange(gradients, norm_type, per_gradient, grad_scale)])[0]


def norms_exchange(gradients: Gradients, rule: Rule, grad_scale: float | Tensor) -> Exchange[Norms]:
    """The norms of pieces that a rule asks for, beside other exchanges."""
    if rule.per_unit:
        return units_exchange(gradients, rule, grad_scale)
    return pieces_exchange(gradients, rule.norm_type, rule.per_gradient, grad_scale)


def pieces_exchange(
    gradients: Gradients, norm_type: float, per_gradient: bool, grad_scale: float | Tensor
) -> Exchange[Norms]:
    """As `measure_pieces`, beside other exchanges."""
    plan = gradients.plan
    assert plan is not None
    assert plan.reduction is not None
    reduction = plan.reduction
    if not per_gradient:
        refuse_uncovered(reduction)
    agreement = None
    if plan.verifying:
        ask_others(gradients)
        agreement = Agreement(gradients, norm_type)
    batches, own, parts = [], [], []
    for group, share in zip(plan.groups, reduction.shares, strict=True):
        tensors, addresses = gradients.of(group.indices)
        batch = group.layout.bind(tensors, addresses)
        batches.append(batch)
        if share.piece.sums_over:
            places = share.places.positions
            parts += [
                Part(at, one, group.pairs, share.piece)
                for at, one in zip(places, tensors, strict=True)
            ]
            continue
        norms = norms_of(tensors, batch, norm_type, pairs=group.pairs, each=per_gradient)
        own.append((norms, share))
    sums = None
    if reduction.sharding.copied or parts:
        sums = partial(measure_sums, gradients, parts, norm_type, per_gradient)
    reduced = yield from reduced_norm(
        gradients, partial(reduction.norm, own, norm_type, each=per_gradient, sums=sums)
    )
    if agreement is not None:
        agreement.check(reduced, each=per_gradient)
    partials = []
    for group, share, batch in zip(plan.groups, reduction.shares, batches, strict=True):
        norms = reduced
        if per_gradient:
            norms = batch.partials_each(reduced[share.places.on(plan.device)], norm_type)
        partials.append(norms.to(group.device))
    return Norms(batches, partials, norm_type, per_gradient, grad_scale, gradients, reduced)


def _join(partials: list[PartialNorms], devices: list[torch.device]) -> list[PartialNorms]:
    """Gives every group the partial norms of all groups, in one order everywhere."""
    if all(isinstance(own, list) for own in partials):
        return [list(chain.from_iterable(partials))] * len(partials)
    tensors = [as_tensor(own) for own in partials]
    joined = {
        device: torch.cat([own.to(device).to(wide_dtype(device)) for own in tensors])
        for device in set(devices)
    }
    return [joined[device] for device in devices]
