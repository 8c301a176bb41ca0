"""Finds the plan of a gradient list, or makes it.

A plan serves lists of one form: as many gradients, alike in type, dtype, device, shape, strides,
layout and flags. torch.compile's guards compare all of that in one C++ call and keep no tensor
alive. They are no public part of PyTorch: where they are missing, a comparison in plain Python
takes their place.

Plans are shared between threads and may be met by a signal handler or after a fork, so nothing here
takes a lock: every change is one operation on a dict or a list.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from sys import modules
from typing import Any

import torch
from torch import Tensor

from tritonclip import settings
from tritonclip.backends.choose import layout_of
from tritonclip.distributed.reduce import Places, Reduction, Share
from tritonclip.distributed.sharding import Piece, Sharding
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.memory import OFFSETS, Region, are_apart, is_freed, memory_of
from tritonclip.engine.plan import Group, Plan, View
from tritonclip.engine.refusals import (
    FSDP_MARK,
    are_fsdp_shards,
    refuse_freed,
    refuse_kind,
    refuse_overlap,
    refuse_parts_in_common,
)
from tritonclip.grad_mode import without_grad

try:
    from torch._C._dynamo import guards as _dynamo_guards

    TensorGuards: Any = _dynamo_guards.TensorGuards
except (ImportError, AttributeError):
    TensorGuards = None

# Plans of a cache, and bytes that they may take together beside the last one: those not met for
# longest are dropped first.
CAPACITY = 32
BUDGET = 32 * 2**20
# Most that a gradient takes in a plan, beside scratch: 288 bytes where it has one dimension, 368
# where it has four, 488 where it is then read as a view (glibc's mallinfo2, torch 2.13).
GRADIENT_BYTES = 512

# What the gradients of a group have in common: device, dtype, density, whether they are complex,
# and what they are pieces of.
_Kind = tuple[torch.device, torch.dtype, bool, bool, Piece | None]

_get_is_nested = attrgetter("is_nested")
_get_form = attrgetter("__class__", "dtype", "device", "shape", "layout", "requires_grad")
# Modes that see every operator may hand out other tensors than asked for, which no plan may keep.
_n_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


class PlainGuards:
    """Compares the form of a gradient list in Python."""

    def __init__(self, *grads: Tensor) -> None:
        self._forms = list(map(_form, grads))

    def check(self, *grads: Tensor) -> bool:
        """Whether these gradients are of the form of the first, and each is another one."""
        return len(set(map(id, grads))) == len(self._forms) and all(
            _form(grad) == form for grad, form in zip(grads, self._forms, strict=True)
        )


def _form(grad: Tensor) -> tuple[object, ...]:
    form = _get_form(grad)
    if form[4] != torch.strided:
        return form
    return (*form, grad.stride(), grad.is_conj(), grad.is_neg(), grad.is_inference())


class PlanCache:
    """The plans of the last gradient lists."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._plans: OrderedDict[tuple[object, ...], Plan] = OrderedDict()
        # The plan found or kept last, its length and backend, whether its first gradient was made
        # in inference mode, and its sharding: most lists are that of the call before.
        self._last: tuple[Plan, int, str, bool, Sharding | None] | None = None

    def __len__(self) -> int:
        return len(self._plans)

    def find(
        self,
        grads: list[Tensor],
        addresses: list[int],
        backend: str,
        sharding: Sharding | None = None,
    ) -> Plan | None:
        """The plan for distinct gradients of a known form; None for others.

        Args:
            grads: at least one.
            addresses: theirs.
            backend: the one asked for.
            sharding: what they are pieces of.
        """
        # At a nested tensor the guards end the process.
        if any(map(_get_is_nested, grads)):
            return None
        # The guards compare how dispatch sees a tensor, which depends on where it is asked: inside
        # a custom operator a normal tensor looks as one made in inference mode does outside. All
        # tensors of a list are compared in one place, so that the first one tells.
        inference, last = grads[0].is_inference(), self._last
        if (
            last is not None
            and last[1:] == (len(grads), backend, inference, sharding)
            and last[0].guards.check(*grads)
        ):
            plan = last[0]
            return plan if addresses == plan.addresses or _moves(plan, grads, addresses) else None
        key = _key(grads, inference, backend, sharding)
        found = self._plans.get(key)
        if found is None or not found.guards.check(*grads):
            return None
        if addresses != found.addresses and not _moves(found, grads, addresses):
            return None
        try:
            self._plans.move_to_end(key)
        except KeyError:
            # Dropped since, by another thread.
            self._plans[key] = found
        self._last = found, len(grads), backend, inference, sharding
        return found

    def keep(
        self,
        plan: Plan,
        grads: list[Tensor],
        addresses: list[int],
        backend: str,
        sharding: Sharding | None = None,
    ) -> None:
        """Keeps a plan for lists of this form; `grads` are distinct and none is nested."""
        plan.addresses, plan.n_addresses = addresses, len(addresses) - addresses.count(0)
        plan.guards = _guards_of(grads)
        inference = grads[0].is_inference()
        self._plans[_key(grads, inference, backend, sharding)] = plan
        self._last = plan, len(grads), backend, inference, sharding
        while self._is_full():
            try:
                self._plans.popitem(last=False)
            except KeyError:
                break

    def _is_full(self) -> bool:
        plans = list(self._plans.values())
        if len(plans) > self._capacity:
            return True
        # The last one stays, however large it is.
        return len(plans) > 1 and sum(plan.n_bytes for plan in plans) > BUDGET

    def clear(self) -> None:
        """Drops all plans."""
        self._last = None
        self._plans.clear()


def _key(
    grads: list[Tensor], inference: bool, backend: str, sharding: Sharding | None
) -> tuple[object, ...]:
    """Cheap; the guards then verify the match."""
    first = grads[0]
    sizes = first.numel(), grads[-1].numel()
    return len(grads), first.dtype, first.device, *sizes, inference, backend, sharding


def _moves(plan: Plan, grads: list[Tensor], addresses: list[int]) -> bool:
    """Whether a plan's gradients lie apart at new addresses, and all have memory."""
    if not are_apart(addresses, plan.spans):
        return False
    # Empty gradients, and those freed, have no address.
    there = list(filter(None, addresses))
    if len(there) < plan.n_addresses:
        return False
    if there and min(there) < OFFSETS and any(map(is_freed, grads, addresses)):
        return False
    plan.addresses = addresses
    return True


def _guards_of(grads: list[Tensor]) -> Any:
    if TensorGuards is None:
        return PlainGuards(*grads)
    # With no dynamic sizes named, every size and stride is compared.
    return TensorGuards(*grads, dynamic_dims_sizes=None, dynamic_dims_strides=None)


plans = PlanCache()


def plan_(gradients: Gradients, cache: PlanCache = plans) -> Gradients:
    """Gives a gradient list its plan; returns the same list.

    Raises, unless the list tells its refusals:
        TypeError: gradients that are no plain floating-point or complex tensors.
        ValueError: gradients whose elements overlap, or that have no memory.
        RuntimeError: the backend asked for cannot serve them.
    """
    tensors, sources = gradients.tensors, gradients.sources
    if not tensors:
        if gradients.sharding is not None:
            gradients.plan = _plan_of_nothing(gradients)
        return gradients
    assert isinstance(tensors, list)
    backend = settings.backend()
    addresses: list[int] | None
    try:
        addresses = list(map(Tensor.data_ptr, tensors))
    except (RuntimeError, NotImplementedError, ValueError):
        # Sparse gradients, among others, have no memory that an address could tell.
        addresses = None
    # No plan fills scratch or tables with tensors that a mode hands out.
    known = addresses is not None and not _n_dispatch_modes()
    sharding = gradients.sharding
    if "torch.distributed.fsdp" in modules and sources and hasattr(sources[0], FSDP_MARK):
        # A plan of whole gradients says nothing of shards.
        known = False
    plan = cache.find(tensors, addresses, backend, sharding) if known else None  # type: ignore[arg-type]
    if plan is None and sharding is None and (once := _once(tensors)) is not None:
        # Tied parameters: the list without repeats may be known.
        tensors = [tensors[i] for i in once]
        gradients.distinct, gradients.tensors = once, tensors
        addresses = None if addresses is None else [addresses[i] for i in once]
        plan = cache.find(tensors, addresses, backend) if known else None  # type: ignore[arg-type]
    if plan is None:
        try:
            _build_(gradients, addresses, cache if known else None, backend)
        except (TypeError, ValueError, RuntimeError) as error:
            if not refuse_(gradients, error):
                raise
        return gradients
    gradients.plan, gradients.addresses = plan, addresses
    gradients.readable = plan.readable(tensors) if plan.views else tensors
    return gradients


def _once(tensors: list[Tensor]) -> list[int] | None:
    """Indices of tensors that are not an earlier one again; None for all."""
    first: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        first.setdefault(id(tensor), index)
    return list(first.values()) if len(first) < len(tensors) else None


@without_grad
def _build_(
    gradients: Gradients, addresses: list[int] | None, cache: PlanCache | None, backend: str
) -> None:
    """Drops repeated gradients, refuses those that cannot be clipped, and makes a plan.

    Args:
        gradients: at least one.
        addresses: theirs where they are known.
        cache: keeps the plan; None for a plan that serves one call.
        backend: the one asked for.
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
        spans=array("q", [0 if r is None else r.end - r.start for r in regions]),
    )
    plan.reduction = _reduction(gradients, shares)
    split = sharding is not None or are_fsdp_shards(gradients.sources or ())
    plan.ordinary = not (sparse or plan.pairs or plan.inference or split)
    plan.n_bytes = GRADIENT_BYTES * n + sum(group.layout.n_bytes for group in groups)
    for group in groups:
        group.layout.dtype = group.clamping.dtype = plan.dtype
    gradients.plan, gradients.readable = plan, readable
    if addresses is not None and not sparse:
        gradients.addresses = addresses
        if distinct is None and cache is not None:
            cache.keep(plan, grads, addresses, backend, sharding)


def refuse_(gradients: Gradients, error: Exception) -> bool:
    """Makes an error the refusal of a list that others are told of; False for other lists."""
    if not gradients.refuse_(error):
        return False
    gradients.plan = _plan_of_nothing(gradients)
    return True


def _plan_of_nothing(gradients: Gradients) -> Plan:
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
    gradients.coalesced.append((grad, coalesced))
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
