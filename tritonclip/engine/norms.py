"""Norms of a gradient list before clipping: measured by group, and put together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tritonclip.backends import choose
from tritonclip.backends.choose import layout_of, torch_layout
from tritonclip.backends.interface import Batch, Limit, PartialNorms
from tritonclip.backends.operators import (
    as_tensor,
    combine_numbers,
    results_of,
    wide_dtype,
)
from tritonclip.backends.units import TorchUnits
from tritonclip.engine import units
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
        partials: for each group those of all groups, on its device; with `per_gradient`, its own
            alone, in the form of its backend.
        norm_type: p of the p-norm.
        per_gradient: partials give the norm of each gradient.
        grad_scale: the loss scale that gradients and partials still carry.
        gradients: the list that was measured.
        plan: of the list.
        limit: the rule's for these norms, once it was asked for.
    """

    batches: list[Batch]
    partials: list[PartialNorms]
    norm_type: float
    per_gradient: bool
    grad_scale: float | Tensor
    gradients: Gradients
    plan: Plan
    limit: Limit = field(default=None, init=False)

    def norm(self) -> Tensor:
        """The norm before clipping, divided by the loss scale, of all processes' gradients.

        0-d, or 1-d with that of each gradient.
        """
        plan = self.plan
        if not self.per_gradient:
            norm = self.batches[0].total(self.partials[0], self.norm_type, self.grad_scale)
            return norm.to(plan.device)
        return self.in_order(
            [
                batch.total_each(partials, self.norm_type, self.grad_scale)
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
        """Of which gradients a unit has no limit, because its weights are NaN; None by no unit."""
        batches: Sequence[Any] = self.batches
        if not isinstance(batches[0], TorchUnits):
            return None
        found = zip(batches, self.partials, strict=True)
        return self.in_order([batch.lack_weights(partials) for batch, partials in found])

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
        return len(self.gradients.tensors) if self.per_gradient else 1

    def here(self, values: Tensor) -> Tensor:
        """Of one value for each norm, those of the gradients here."""
        return values

    def sizes(self) -> Tensor:
        """The number of elements of each of these gradients; uploaded once for a plan."""
        plan = self.plan
        if plan.sizes is None:
            sizes = [tensor.numel() for tensor in self.whole()]
            plan.sizes = upload(sizes, wide_dtype(plan.device), plan.device)
        return plan.sizes

    def whole(self) -> Sequence[Tensor]:
        """Tensors of the shapes of all gradients that have norms."""
        return self.gradients.tensors

    def positions(self) -> tuple[Sequence[int] | None, int]:
        return self.gradients.positions(), self.gradients.n_parameters


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
    norm_type, per_gradient, by_unit = norm
    if plan.reduction is not None:
        return plan.reduction.measure(  # type: ignore[no-any-return]
            gradients, norm, grad_scale, names_culprits=names_culprits
        )
    if by_unit:
        return _measure_by_unit(gradients, grad_scale)
    if per_gradient:
        # The host decides by numbers that no operator reads: a trace would not notice.
        refuse_tracer()
    if len(plan.groups) == 1 and not (plan.pairs and norm_type != 2.0):
        batch = plan.groups[0].layout.bind(gradients.readable, gradients.addresses)
        partials = batch.norm(norm_type, per_gradient=per_gradient)
        return Norms([batch], [partials], norm_type, per_gradient, grad_scale, gradients, plan)
    return _measure_groups(gradients, norm_type, per_gradient, grad_scale)


@without_grad
def _measure_by_unit(gradients: Gradients, grad_scale: float | Tensor) -> Norms:
    """Measures a list by unit, with its weights."""
    plan = gradients.plan
    assert plan is not None
    # These batches have the verbs for norms by gradient, and no others.
    batches: list[Any] = [*units.batches_of(gradients)]
    partials = [batch.measure() for batch in batches]
    return Norms(batches, partials, 2.0, True, grad_scale, gradients, plan)


def _measure_groups(
    gradients: Gradients, norm_type: float, per_gradient: bool, grad_scale: float | Tensor
) -> Norms:
    """Measures several groups, or complex gradients."""
    plan = gradients.plan
    assert plan is not None
    batches: list[Batch] = []
    partials: list[PartialNorms] = []
    for group in plan.groups:
        tensors, addresses = gradients.of_group(group.indices)
        moduli = batch = group.layout.bind(tensors, addresses)
        if group.pairs and norm_type != 2.0:
            magnitudes = list(map(moduli_of, tensors))
            if per_gradient:
                # Kernels find the norm of a gradient by the chunks that they write to, and moduli
                # have others.
                layout = torch_layout(group.device)
                layout.dtype = plan.dtype
                batch = layout.bind(tensors, addresses)
            else:
                layout = layout_of(magnitudes)
            moduli = layout.bind(magnitudes, None)
        batches.append(batch)
        measured = moduli.norm(norm_type, per_gradient=per_gradient)
        partials.append(measured)
    if not per_gradient:
        partials = _join(partials, [group.device for group in plan.groups])
    return Norms(batches, partials, norm_type, per_gradient, grad_scale, gradients, plan)


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


def moduli_of(pairs: Tensor) -> Tensor:
    """The moduli of a complex gradient that is read as pairs, 1-d, in new memory."""
    # Moduli of finite float32 pairs may be over its largest number.
    wide = pairs.to(wide_dtype(pairs.device))
    return torch.view_as_complex(wide.reshape(-1, 2)).abs()
