"""Measures a gradient list: by group, or as pieces of which other processes have more."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tritonclip.backends.batch import Batch
from tritonclip.backends.choose import layout_of, torch_layout
from tritonclip.backends.torch_backend import wide_dtype
from tritonclip.distributed.exchanges import Exchange, together
from tritonclip.distributed.parts import Part
from tritonclip.engine.agreement import Agreement
from tritonclip.engine.building import refuse_
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.norms import Norms
from tritonclip.engine.piece_norms import measure_sums, moduli_of, norms_of
from tritonclip.engine.refusals import refuse_uncovered
from tritonclip.engine.together import ask_others, raise_refusal, reduced_norm
from tritonclip.engine.units import Units
from tritonclip.grad_mode import without_grad
from tritonclip.rules import Rule


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
    starts = [0] * len(batches)
    return Norms(batches, partials, starts, 2.0, True, grad_scale, gradients, reduced)


def measure_groups(
    gradients: Gradients, norm_type: float, per_gradient: bool, grad_scale: float | Tensor
) -> Norms:
    """Measures several groups, complex gradients, or no elements at all."""
    plan = gradients.plan
    assert plan is not None
    batches: list[Batch] = []
    measured: list[Batch] = []
    for group in plan.groups:
        tensors, addresses = gradients.of(group.indices)
        batch = group.layout.bind(tensors, addresses)
        moduli = batch
        if group.pairs and norm_type != 2.0:
            # Kernels find the norm of a gradient by the chunks that they write to, and moduli have
            # others.
            layout = torch_layout(tensors, flat=group.flat) if per_gradient else group.layout
            layout.dtype = plan.dtype
            batch = layout.bind(tensors, addresses)
            own = [moduli_of(tensor) for tensor in tensors]
            make = torch_layout if per_gradient else layout_of
            moduli = make(own, flat=True).bind(own, None)
        batches.append(batch)
        measured.append(moduli)
    # As tensors in forward mode, where norms have tangents.
    if forward_ad._current_level < 0 and all(batch.on_host for batch in measured):
        numbers: list[float] = []
        starts = []
        for batch in measured:
            starts.append(len(numbers))
            own = batch.norm(norm_type, None, per_gradient=per_gradient)
            numbers += own.flatten().tolist() if isinstance(own, Tensor) else own
        if plan.empty:
            # The least of no elements would be inf.
            numbers = [0.0] * len(numbers)
        alike = [numbers] * len(batches)
        return Norms(batches, alike, starts, norm_type, per_gradient, grad_scale, gradients)
    devices = [group.device for group in plan.groups]
    counts = [batch.count_norms(per_gradient=per_gradient) for batch in measured]
    starts, sizes = [], dict.fromkeys(devices, 0)
    for device, count in zip(devices, counts, strict=True):
        starts.append(sizes[device])
        sizes[device] += count
    own_norms = {
        device: torch.empty(n, dtype=wide_dtype(device), device=device)
        for device, n in sizes.items()
    }
    for batch, device, start, count in zip(measured, devices, starts, counts, strict=True):
        out = own_norms[device][start : start + count]
        batch.norm(norm_type, out, per_gradient=per_gradient)
        if plan.empty:
            out.zero_()
    everywhere = _exchange(own_norms, own_first=per_gradient)
    partials = [everywhere[device] for device in devices]
    return Norms(batches, partials, starts, norm_type, per_gradient, grad_scale, gradients)


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
    starts = [0] * len(batches)
    return Norms(batches, partials, starts, norm_type, per_gradient, grad_scale, gradients, reduced)


def _exchange(own: dict[torch.device, Tensor], *, own_first: bool) -> dict[torch.device, Tensor]:
    """Gives every device the norms of all devices."""
    if len(own) == 1:
        return own
    everywhere = {}
    for device, norms in own.items():
        others = [n.to(device).to(norms.dtype) for d, n in own.items() if d != device]
        # In one order everywhere, so that every device finds the same bits.
        in_order = [n.to(device).to(norms.dtype) for n in own.values()]
        everywhere[device] = torch.cat([norms, *others] if own_first else in_order)
    return everywhere
