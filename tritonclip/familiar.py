"""Gradient lists met before: recognised in one call a list instead of five a gradient.

torch.compile asks at every call whether inputs are still such as it compiled for. Its guards
compare type, dtype, device, shape, strides, layout and the conjugate, negative and requires_grad
bits, in C++, and keep no tensor alive. They are no public part of PyTorch: where they are missing,
every list is looked at as if it were new.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import Tensor

from tritonclip.gradient_list import Group

try:
    from torch._C._dynamo import guards as _dynamo_guards

    TensorGuards: Any = _dynamo_guards.TensorGuards
except (ImportError, AttributeError):
    TensorGuards = None
_get_is_nested = attrgetter("is_nested")
# Lists remembered, those not met for longest dropped first; a gradient takes about 300 bytes.
REMEMBERED = 32


@dataclass(slots=True)
class _Kind:
    """One group of a list.

    Attributes:
        places: of its gradients in the list.
        views: which of its gradients are dense in another order of dimensions, and their sizes.
        memo: what backends remember of such a group.
    """

    places: Sequence[int]
    views: list[tuple[int, int]]
    memo: dict[Any, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Form:
    """What a list was found to be, and the addresses last seen: of distinct gradients."""

    guards: Any
    kinds: list[_Kind]
    addresses: list[int]

    def groups(self, grads: list[Tensor], addresses: list[int]) -> list[Group]:
        """The groups of another list of this form."""
        return [_group(kind, grads, addresses) for kind in self.kinds]


def _group(kind: _Kind, grads: list[Tensor], addresses: list[int]) -> Group:
    if len(kind.places) < len(grads):
        grads = [grads[i] for i in kind.places]
        addresses = [addresses[i] for i in kind.places]
    elif kind.views:
        grads = list(grads)
    for i, n in kind.views:
        grads[i] = grads[i].as_strided((n,), (1,))
    return Group(grads, kind.places, flat=True, addresses=addresses, memo=kind.memo)


class Familiar:
    """Forms of the last gradient lists, by what tells most of them apart."""

    def __init__(self) -> None:
        self._forms: OrderedDict[tuple[object, ...], _Form] = OrderedDict()
        self._lock = threading.Lock()

    def groups(self, grads: list[Tensor], addresses: list[int]) -> list[Group] | None:
        """The groups of distinct gradients that are as those of an earlier list; None for others.

        Args:
            grads: at least one.
            addresses: theirs.
        """
        key = _key(grads)
        form = self._forms.get(key)
        # At a nested tensor the guards end the process.
        if form is None or any(map(_get_is_nested, grads)) or not form.guards.check(*grads):
            return None
        if addresses != form.addresses:
            freed = 0 in addresses and 0 not in form.addresses
            if freed or len(set(addresses)) < len(addresses):
                return None
            form.addresses = addresses
        with self._lock:
            if key in self._forms:
                self._forms.move_to_end(key)
        return form.groups(grads, addresses)

    def learn(self, grads: list[Tensor], addresses: list[int], groups: Sequence[Group]) -> None:
        """Remembers gradients, none of them nested, if all are real, dense and at own addresses."""
        if TensorGuards is None or any(group.pairs or not group.flat for group in groups):
            return
        if len(set(addresses)) < len(addresses):
            # Empty ones have none.
            return
        kinds = []
        for group in groups:
            views = [
                (i, tensor.numel())
                for i, (place, tensor) in enumerate(zip(group.places, group.tensors, strict=True))
                if tensor is not grads[place]
            ]
            kinds.append(_Kind(group.places, views))
        # With no dynamic sizes named, every size and stride is compared.
        guards = TensorGuards(*grads, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        with self._lock:
            self._forms[_key(grads)] = _Form(guards, kinds, addresses)
            while len(self._forms) > REMEMBERED:
                self._forms.popitem(last=False)


def _key(grads: list[Tensor]) -> tuple[object, ...]:
    """What is asked for before the guards are.

    They compare what dispatch makes of a tensor, which depends on where it is asked: inside of a
    custom operator a normal tensor looks as one made in inference mode does outside. Of one list
    all are compared in one place, so that of the first tells.
    """
    n, first = len(grads), grads[0]
    return n, first.is_inference(), first.numel(), grads[n // 2].numel(), grads[-1].numel()
