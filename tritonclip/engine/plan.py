"""Plans: everything derived from a gradient list that does not change between calls.

Makes the plan of a gradient list that has none, and refuses gradients that cannot be clipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tritonclip import settings
from tritonclip.backends.choose import layout_of
from tritonclip.backends.interface import Layout, UnitLayout
from tritonclip.distributed.reduction import Places, Reduction, Share
from tritonclip.distributed.shards import Piece, Sharding, are_fsdp_shards
from tritonclip.engine.checks import (
    refuse_freed,
    refuse_kind,
    refuse_overlap,
    refuse_parts_in_common,
)
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.memory import OFFSETS, Region, memory_of
from tritonclip.modes import without_grad


@dataclass(frozen=True, slots=True)
class View:
    """How a gradient is read by verbs, where not as it is.

    Attributes:
        index: of the gradient in the list.
        pairs: a complex gradient is read as pairs of reals.
        size: elements of a flat view, for a gradient dense in another order of its dimensions
            whose verbs want it contiguous; None to keep the shape.
    """

    index: int
    pairs: bool
    size: int | None

    def of(self, grad: Tensor) -> Tensor:
        """The view of a gradient."""
        if self.pairs:
            grad = torch.view_as_real(grad.conj() if grad.is_conj() else grad)
        return grad if self.size is None else grad.as_strided((self.size,), (1,))


@dataclass(slots=True)
class Group:
    """Gradients that one launch serves: of one device, dtype and density.

    Attributes:
        indices: in the list; None for all of it.
        device: of the gradients.
        dtype: of the gradients; real, also where they are complex.
        flat: each is dense in memory.
        pairs: they are complex.
        layout: for norms and scaling.
        clamping: for clamping, where the sign of an element counts: another layout where the first
            reads lazily negated gradients without their sign.
        units: for a rule by unit, made where one is first met.
    """

    indices: Sequence[int] | None
    device: torch.device
    dtype: torch.dtype
    flat: bool
    pairs: bool
    layout: Layout
    clamping: Layout
    units: UnitLayout | None = None


@dataclass(slots=True)
class Plan:
    """All that is known of a gradient list.

    Attributes:
        groups: of all gradients; none where only other processes have any.
        views: gradients that verbs do not read as they are.
        device: of results: the first gradient's.
        dtype: of results: float64 where any gradient is, else float32.
        sparse: indices of sparse gradients, of which the values are clipped.
        pairs: complex gradients are among them.
        empty: no gradient has an element.
        inference: gradients made in inference mode are among them.
        requires_grad: gradients that autograd can differentiate are among them.
        ordinary: none of them is complex, sparse, made in inference mode, a piece, or a shard of
            FullyShardedDataParallel: every rule takes them.
        verifying: the calls that it serves are to be checked.
        only_group: the one group of an ordinary list that has elements; None for other lists, and
            where calls are checked.
        addresses: those last seen, of distinct gradients.
        n_addresses: how many of them are not 0, the address of gradients without elements.
        spans: bytes from the first to the last of each gradient; 0 for those without elements.
        n_bytes: of memory that it takes on the host, at most.
        guards: compare the form of a list; None for a plan that serves one call.
        reduction: of norms, over the processes that hold the other pieces; None without any.
        sizes: elements of each gradient, on the device of results; None before a rule asks.
    """

    groups: tuple[Group, ...]
    views: tuple[View, ...]
    device: torch.device
    dtype: torch.dtype
    sparse: tuple[int, ...]
    pairs: bool
    empty: bool
    inference: bool
    requires_grad: bool
    ordinary: bool = False
    verifying: bool = False
    only_group: Group | None = None
    addresses: list[int] | None = None
    n_addresses: int = 0
    spans: list[int] = field(default_factory=list)
    n_bytes: int = 0
    guards: Any = None
    reduction: Reduction | None = None
    sizes: Tensor | None = None

    def readable(self, grads: list[Tensor]) -> list[Tensor]:
        """The tensors of a list of this form that verbs read and write."""
        if self.views:
            grads = list(grads)
            for view in self.views:
                grads[view.index] = view.of(grads[view.index])
        return grads


# Most that a gradient takes in a plan, beside scratch: 288 bytes where it has one dimension, 368
# where it has four, 488 where it is then read as a view (glibc's mallinfo2, torch 2.13).
GRADIENT_BYTES = 512

# The gradients of a group share their device, their dtype, whether they are flat, whether they are
# complex, and the weight and sums of their pieces.
_Kind = tuple[torch.device, torch.dtype, bool, bool, Piece | None]


@without_grad
def build_(gradients: Gradients, addresses: list[int] | None, *, verifying: bool) -> bool:
    """Drops repeated gradients, refuses those that cannot be clipped, and makes a plan.

    Args:
        gradients: at least one.
        addresses: theirs where they are known.
        verifying: calls are to be checked.

    Returns:
        Whether the plan may serve another list: none of these was dropped, and all have addresses.
    """
    grads = list(gradients.tensors)
    for index, grad in enumerate(grads):
        label = partial(gradients.label, index)
        refuse_kind(grad, label)
        if addresses is None or addresses[index] < OFFSETS:
            refuse_freed(grad, label)
    regions = list(map(memory_of, grads))
    distinct = _distinct(grads, regions)
    if distinct is not None:
        grads, regions = [grads[i] for i in distinct], [regions[i] for i in distinct]
        once = gradients.distinct
        gradients.distinct = distinct if once is None else [once[i] for i in distinct]
        gradients.tensors = grads
        addresses = None if addresses is None else [addresses[i] for i in distinct]
    views: list[View] = []
    sparse: list[int] = []
    members: dict[_Kind, list[int]] = {}
    readable: list[Tensor] = []
    sharding = gradients.sharding
    for index, grad in enumerate(grads):
        if grad.layout == torch.sparse_coo:
            sparse.append(index)
            values = _values(grad, gradients)
        else:
            values = grad
        view, flat = _view(index, values)
        tensor = values if view is None else view.of(values)
        if not flat:
            refuse_overlap(tensor, partial(gradients.label, index))
        if view is not None:
            views.append(view)
        readable.append(tensor)
        piece = None if sharding is None else gradients.piece(index)
        key = (tensor.device, tensor.dtype, flat, grad.is_complex(), piece)
        members.setdefault(key, []).append(index)
    refuse_parts_in_common([(i, r) for i, r in enumerate(regions) if r is not None], gradients)
    n = len(readable)
    groups, shares = [], []
    for (device, dtype, flat, pairs, piece), indices in members.items():
        tensors = readable if len(indices) == n else [readable[i] for i in indices]
        layout = layout_of(tensors, flat=flat)
        negated = any(map(Tensor.is_neg, tensors))
        clamping = layout_of(tensors, flat=flat, negated=True) if negated else layout
        whole = None if len(indices) == n else indices
        groups.append(Group(whole, device, dtype, flat, pairs, layout, clamping))
        if views and layout.by_address and not (negated or pairs or sparse or sharding):
            # Addresses are enough here. Complex pairs need views, as negated gradients do to be
            # clamped; pieces are sent to other processes as contiguous tensors.
            own = set(indices)
            views = [view for view in views if view.index not in own]
            for index in indices:
                readable[index] = grads[index]
        if piece is not None:
            narrow = dtype != torch.float64
            places = Places([gradients.position(i) for i in indices])
            shares.append(Share(piece, places, narrow))
    plan = Plan(
        groups=tuple(groups),
        views=tuple(views),
        device=grads[0].device,
        dtype=_result_dtype([group.dtype for group in groups], sharding),
        sparse=tuple(sparse),
        pairs=any(group.pairs for group in groups),
        empty=not any(map(Tensor.numel, readable)),
        inference=any(map(Tensor.is_inference, readable)),
        requires_grad=any(grad.requires_grad for grad in readable),
        # No array: these numbers are added to addresses in every step of a training loop.
        spans=[0 if r is None else r.end - r.start for r in regions],
    )
    plan.reduction = _reduction(gradients, shares)
    split = sharding is not None or are_fsdp_shards(gradients.sources or ())
    plan.ordinary = not (sparse or plan.pairs or plan.inference or split)
    plan.verifying = verifying
    if plan.ordinary and len(groups) == 1 and not (plan.empty or verifying):
        plan.only_group = groups[0]
    plan.n_bytes = GRADIENT_BYTES * n + sum(group.layout.n_bytes for group in groups)
    for group in groups:
        group.layout.dtype = group.clamping.dtype = plan.dtype
    gradients.plan, gradients.readable = plan, readable
    if addresses is None or sparse:
        return False
    gradients.addresses = addresses
    return distinct is None


def refuse_(gradients: Gradients, error: Exception) -> bool:
    """Makes an error the refusal of a list that others are told of; False for other lists."""
    if not gradients.refuse_(error):
        return False
    gradients.plan = plan_of_nothing(gradients)
    return True


def plan_of_nothing(gradients: Gradients) -> Plan:
    """The plan of a process that has no gradient, where others may have."""
    return Plan(
        groups=(),
        views=(),
        device=gradients.device,
        dtype=_result_dtype((), gradients.sharding),
        sparse=(),
        pairs=False,
        empty=True,
        inference=False,
        requires_grad=False,
        # As the other processes do, which it answers.
        verifying=settings.current().verifying,
        reduction=_reduction(gradients, ()),
    )


def _result_dtype(dtypes: Sequence[torch.dtype], sharding: Sharding | None) -> torch.dtype:
    """float64 where any gradient is; over processes also where any parameter is."""
    wide = torch.float64 in dtypes or (sharding is not None and sharding.wide)
    return torch.float64 if wide else torch.float32


def _reduction(gradients: Gradients, shares: Sequence[Share]) -> Reduction | None:
    """How norms are reduced; None where no other process has a piece."""
    sharding = gradients.sharding
    if sharding is None or not (sharding.domain.groups or sharding.domain.uncovered):
        return None
    places = Places([gradients.position(i) for i in range(len(gradients.tensors))])
    return Reduction(sharding, shares, places, Places(sharding.parts))


def _distinct(grads: list[Tensor], regions: list[Region | None]) -> list[int] | None:
    """Indices of gradients that are not the very memory of an earlier one; None for all."""
    first: dict[object, int] = {}
    for index, (grad, region) in enumerate(zip(grads, regions, strict=True)):
        first.setdefault(id(grad) if region is None else (grad.dtype, region), index)
    return list(first.values()) if len(first) < len(grads) else None


def _values(grad: Tensor, gradients: Gradients) -> Tensor:
    """The values of a sparse gradient, or of its coalesced copy."""
    if grad.is_coalesced():
        return grad._values()
    coalesced = grad.coalesce()
    gradients.coalesced = [*gradients.coalesced, (grad, coalesced)]
    return coalesced._values()


def _view(index: int, grad: Tensor) -> tuple[View | None, bool]:
    """How verbs read a strided gradient, None for as it is; and whether that is flat."""
    real = View(index, grad.is_complex(), None)
    grad = real.of(grad)
    size = None if grad.is_contiguous() else flat_size(grad)
    flat = size is not None or grad.is_contiguous()
    return (View(index, real.pairs, size) if real.pairs or size is not None else None), flat


def flat_size(grad: Tensor) -> int | None:
    """Elements of a gradient dense in any order of its dimensions, as channels_last is; or None."""
    order = sorted(range(grad.dim()), key=grad.stride, reverse=True)
    return grad.numel() if grad.permute(order).is_contiguous() else None
