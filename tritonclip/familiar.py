"""Gradient lists met before: recognised in one call a list instead of five a gradient.

torch.compile asks at every call whether inputs are still such as it compiled for. Its guards
compare type, dtype, device, shape, strides, layout and the conjugate, negative, inference and
requires_grad bits, in C++, and keep no tensor alive. They are no public part of PyTorch: where they
are missing, every list is looked at as if it were new.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import Tensor

from tritonclip.gradient_list import Group

try:
    from torch._C._dynamo import guards

    TensorGuards: Any = guards.TensorGuards
except (ImportError, AttributeError):
    TensorGuards = None
_get_is_nested = attrgetter("is_nested")
# Lists remembered, oldest dropped first; a gradient takes about 200 bytes.
REMEMBERED = 16


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
    """Forms of the last gradient lists, by their lengths and the sizes of their first gradients."""

    def __init__(self) -> None:
        self._forms: dict[tuple[int, int], _Form] = {}
        self._lock = threading.Lock()

    def groups(self, grads: list[Tensor], addresses: list[int]) -> list[Group] | None:
        """The groups of distinct gradients that are as those of an earlier list; None for others.

        Args:
            grads: at least one.
            addresses: theirs.
        """
        form = self._forms.get((len(grads), grads[0].numel()))
        if form is None:
            return None
        moved = addresses != form.addresses
        # At a nested tensor the guards end the process.
        if moved and (len(set(addresses)) < len(addresses) or any(map(_get_is_nested, grads))):
            return None
        if not form.guards.check(*grads):
            return None
        form.addresses = addresses
        return form.groups(grads, addresses)

    def learn(self, grads: list[Tensor], addresses: list[int], groups: Sequence[Group]) -> None:
        """Remembers distinct gradients that are not nested, if all are real and dense in memory."""
        if TensorGuards is None or any(group.pairs or not group.flat for group in groups):
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
            self._forms[len(grads), grads[0].numel()] = _Form(guards, kinds, addresses)
            while len(self._forms) > REMEMBERED:
                del self._forms[next(iter(self._forms))]
