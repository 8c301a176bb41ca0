"""Finds the plan of a gradient list, or makes it.

A plan serves lists of one form: as many gradients, alike in type, dtype, device, shape, strides,
layout and flags. torch.compile's guards compare all of that in one C++ call and keep no tensor
alive. They are no public part of PyTorch: where they are missing, a comparison in plain Python
takes their place.

Plans are shared between threads and may be met by a signal handler or after a fork, so nothing here
takes a lock: every change is one operation on a dict or a list.
"""

from collections import OrderedDict
from itertools import repeat
from operator import attrgetter
from sys import modules
from typing import Any

import torch
from torch import Tensor

from tritonclip import settings
from tritonclip.distributed.shards import FSDP_MARK, Sharding
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.memory import OFFSETS, are_apart, is_freed
from tritonclip.engine.plan import Plan, build_, plan_of_nothing, refuse_
from tritonclip.modes import n_dispatch_modes, refuse_tracer
from tritonclip.settings import Settings

try:
    from torch._C._dynamo import guards as _dynamo_guards

    TensorGuards: Any = _dynamo_guards.TensorGuards
except (ImportError, AttributeError):
    TensorGuards = None

# Plans of a cache, and bytes that they may take together beside the last one: those not met for
# longest are dropped first.
CAPACITY = 32
BUDGET = 32 * 2**20

_get_is_nested = attrgetter("is_nested")
_FSDP_MARKS = repeat(FSDP_MARK)
_get_form = attrgetter("__class__", "dtype", "device", "shape", "layout", "requires_grad")


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
        # The plan found or kept last, its length and settings, whether its first gradient was made
        # in inference mode, and its sharding: most lists are that of the call before.
        self._last: tuple[Plan, tuple[int, Settings, bool, Sharding | None]] | None = None

    def __len__(self) -> int:
        return len(self._plans)

    def find(
        self,
        grads: list[Tensor],
        addresses: list[int],
        setting: Settings,
        sharding: Sharding | None = None,
    ) -> Plan | None:
        """The plan for distinct gradients of a known form; None for others.

        Args:
            grads: at least one.
            addresses: theirs.
            setting: of the call.
            sharding: how they lie over processes; None for whole gradients.
        """
        # At a nested tensor the guards end the process.
        if any(map(_get_is_nested, grads)):
            return None
        # The guards compare how dispatch sees a tensor, which depends on where it is asked: inside
        # a custom operator a normal tensor looks as one made in inference mode does outside. All
        # tensors of a list are compared in one place, so that the first one tells.
        inference, last = grads[0].is_inference(), self._last
        kind = len(grads), setting, inference, sharding
        if last is not None and last[1] == kind and last[0].guards.check(*grads):
            plan = last[0]
            return plan if addresses == plan.addresses or _moves(plan, grads, addresses) else None
        key = _key(grads, inference, setting, sharding)
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
        self._last = found, kind
        return found

    def keep(
        self,
        plan: Plan,
        grads: list[Tensor],
        addresses: list[int],
        setting: Settings,
        sharding: Sharding | None = None,
    ) -> None:
        """Keeps a plan for lists of this form; `grads` are distinct and none is nested."""
        plan.addresses, plan.n_addresses = addresses, len(addresses) - addresses.count(0)
        plan.guards = _guards_of(grads)
        inference = grads[0].is_inference()
        self._plans[_key(grads, inference, setting, sharding)] = plan
        self._last = plan, (len(grads), setting, inference, sharding)
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
    grads: list[Tensor], inference: bool, setting: Settings, sharding: Sharding | None
) -> tuple[object, ...]:
    """Cheap; the guards then verify the match."""
    first = grads[0]
    sizes = first.numel(), grads[-1].numel()
    return len(grads), first.dtype, first.device, *sizes, inference, setting, sharding


def _moves(plan: Plan, grads: list[Tensor], addresses: list[int]) -> bool:
    """Whether a plan's gradients lie apart at new addresses, and all have memory."""
    if min(addresses) < OFFSETS:
        # Empty gradients, and those freed, have no address.
        if len(addresses) - addresses.count(0) < plan.n_addresses:
            return False
        if any(map(is_freed, grads, addresses)):
            return False
    if not are_apart(addresses, plan.spans):
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
            nothing = plan_of_nothing(gradients)
            # None where no other process has any either, and nothing was refused.
            is_needed = nothing.reduction is not None or gradients.refusal is not None
            gradients.plan = nothing if is_needed else None
        return gradients
    assert isinstance(tensors, list)
    setting = settings.current()
    # A mode may hand out other tensors than asked for, which no plan may keep.
    modes = n_dispatch_modes()
    if modes:
        refuse_tracer()
    addresses: list[int] | None
    try:
        addresses = list(map(Tensor.data_ptr, tensors))
    except (RuntimeError, NotImplementedError, ValueError):
        # Sparse gradients, among others, have no memory that an address could tell.
        addresses = None
    known = addresses is not None and not modes
    sharding = gradients.sharding
    if "torch.distributed.fsdp" in modules and any(map(hasattr, sources or (), _FSDP_MARKS)):
        # A plan of whole gradients says nothing of shards.
        known = False
    plan = cache.find(tensors, addresses, setting, sharding) if known else None  # type: ignore[arg-type]
    if plan is None and sharding is None and (once := _once(tensors)) is not None:
        # Tied parameters: the list without repeats may be known.
        tensors = [tensors[i] for i in once]
        gradients.distinct, gradients.tensors = once, tensors
        addresses = None if addresses is None else [addresses[i] for i in once]
        plan = cache.find(tensors, addresses, setting) if known else None  # type: ignore[arg-type]
    if plan is None:
        try:
            lasting = build_(gradients, addresses, verifying=setting.verifying)
        except (TypeError, ValueError, RuntimeError) as error:
            if not refuse_(gradients, error):
                raise
            return gradients
        if known and lasting:
            assert addresses is not None
            cache.keep(gradients.plan, tensors, addresses, setting, sharding)  # type: ignore[arg-type]
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
