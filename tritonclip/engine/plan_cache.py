"""Finds the plan of a gradient list of the same form as an earlier one.

Two lists have the same form if their gradients agree, one by one, in type, dtype, device, shape,
strides, layout and flags. The guards of torch.compile compare all of this in one C++ call and keep
no tensor alive. They are not a public part of PyTorch: where they are missing, a comparison in
plain Python takes their place.

Threads share plans, and signal handlers and forked processes may use them as well. Nothing here
takes a lock, therefore: every change is one operation on a dict or a list.
"""

from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from tritonclip.distributed.shards import Sharding
from tritonclip.engine.memory import OFFSETS, are_apart, is_freed
from tritonclip.engine.plan import Plan
from tritonclip.settings import Settings

try:
    from torch._C._dynamo import guards as _dynamo_guards

    TensorGuards: Any = _dynamo_guards.TensorGuards
except (ImportError, AttributeError):
    TensorGuards = None

# The most plans of a cache, and the most bytes of all of them. The least recently used plans are
# dropped first, and the last one stays whatever its size.
CAPACITY = 32
BUDGET = 32 * 2**20

_get_is_nested = attrgetter("is_nested")
_get_form = attrgetter("__class__", "dtype", "device", "shape", "layout", "requires_grad")


class PlainGuards:
    """Compares the form of a gradient list in Python."""

    def __init__(self, *grads: Tensor) -> None:
        self._forms = list(map(_form, grads))

    def check(self, *grads: Tensor) -> bool:
        """Whether these gradients have the same form as the first ones, and none comes twice."""
        return len(set(map(id, grads))) == len(self._forms) and all(
            _form(grad) == expected for grad, expected in zip(grads, self._forms, strict=True)
        )


def _form(grad: Tensor) -> tuple[object, ...]:
    metadata = _get_form(grad)
    if metadata[4] != torch.strided:
        return metadata
    return (*metadata, grad.stride(), grad.is_conj(), grad.is_neg(), grad.is_inference())


class PlanCache:
    """The plans of the most recent gradient lists."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._plans: OrderedDict[tuple[object, ...], Plan] = OrderedDict()
        # The plan found or kept last, as most calls repeat the list of the call before; with the
        # length of its list, the settings, whether its first gradient was made in inference mode,
        # and its sharding.
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
        """The plan of a list of distinct gradients, at least one; None if its form is new."""
        # The guards crash on nested tensors.
        if any(map(_get_is_nested, grads)):
            return None
        # The guards compare dispatch keys, too. In a user's torch.library.custom_op every tensor
        # has the key of inference tensors, so that the first one stands for all.
        inference, last = grads[0].is_inference(), self._last
        quick_key = len(grads), setting, inference, sharding
        plan = last[0] if last is not None and last[1] == quick_key else None
        if plan is None or not plan.guards.check(*grads):
            last, key = None, _key(grads, inference, setting, sharding)
            plan = self._plans.get(key)
            if plan is None or not plan.guards.check(*grads):
                return None
            # It becomes the most recently used plan.
            self._plans.pop(key, None)
            self._plans[key] = plan
        if addresses != plan.addresses and not _accepts(plan, grads, addresses):
            return None
        if last is None or sharding is not None:
            # From now on, this very sharding is recognised by identity.
            self._last = plan, quick_key
        return plan

    def keep(
        self,
        plan: Plan,
        grads: list[Tensor],
        addresses: list[int],
        setting: Settings,
        sharding: Sharding | None = None,
    ) -> None:
        """Keeps a plan for lists of this form; `grads` are distinct and none is nested."""
        plan.addresses, plan.guards = addresses, guards_of(grads)
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
    """A cheap key, after which the guards verify the match."""
    first = grads[0]
    sizes = first.numel(), grads[-1].numel()
    return len(grads), first.dtype, first.device, *sizes, inference, setting, sharding


def _accepts(plan: Plan, grads: list[Tensor], addresses: list[int]) -> bool:
    """Whether a plan may serve gradients at new addresses; it then remembers these."""
    # Low addresses are those of empty gradients, and of freed ones.
    if min(addresses) < OFFSETS and any(map(is_freed, grads, addresses)):
        return False
    if not are_apart(addresses, plan.spans):
        return False
    plan.addresses = addresses
    return True


def guards_of(grads: Sequence[Tensor]) -> Any:
    """Guards that compare the form of lists with this one, which has no nested tensor."""
    if TensorGuards is None:
        return PlainGuards(*grads)
    # Without dynamic sizes, the guards compare every size and stride.
    return TensorGuards(*grads, dynamic_dims_sizes=None, dynamic_dims_strides=None)


plans = PlanCache()
