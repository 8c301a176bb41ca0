"""Recognizes the lists of parameters, or of gradients, that torch's functions are called on."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

# The largest number of lists that are recognized in a run.
MOST_LISTS = 1000
# If more lists begin or end with the same tensor, or are freed after one call, further ones are
# taken for one list whose members change.
_MOST_VARIANTS = 8


@dataclass(eq=False)
class GradientList:
    """One list of a run, numbered from 1 in the order of the first calls."""

    number: int
    n_tensors: int
    n_elements: int
    # Whether members change from call to call.
    changes: bool = False
    n_calls: int = 0
    members: tuple[int, ...] = ()
    # The first tensor's storage: a weak reference to the tensor would keep torch from swapping it.
    storage: StorageWeakRef | None = None

    @property
    def is_freed(self) -> bool:
        """Whether the tensors are gone, or have moved since the last call."""
        return self.storage is not None and bool(self.storage.expired())

    def __str__(self) -> str:
        if self.changes:
            return f"{self.number}: tensors that change"
        plural = "" if self.n_tensors == 1 else "s"
        return f"{self.number}: {self.n_tensors:,} tensor{plural}, {self.n_elements:,} elements"


class GradientLists:
    """Recognizes lists by the identity of their tensors.

    New tensors continue a list of the same number and size whose tensors are freed, such as
    gradients that each step makes, or parameters that `load_state_dict(assign=True)` replaced.
    """

    def __init__(self) -> None:
        self._lists: list[GradientList] = []
        self._known: dict[tuple[int, ...], GradientList] = {}
        # How many lists begin or end with a tensor, by the tensor's identity.
        self._variants: Counter[int] = Counter()
        # Lists whose members change, by the first or last one if it stays, or else by None.
        self._changing: dict[int | None, GradientList] = {}

    def find(self, tensors: Sequence[Tensor]) -> GradientList | None:
        """Finds or makes the list of a call; returns None if that is more than `MOST_LISTS`."""
        members = tuple(map(id, tensors))
        found = self._known.get(members)
        if found is None or found.is_freed:
            # A parameter of a lazy module that was never called has no size.
            size = (len(tensors), sum(x.numel() for x in tensors if not is_lazy(x)))
            # New tensors may have the identities of freed ones.
            if found is None or size != (found.n_tensors, found.n_elements):
                found = self._of_new(members, size)
            if found is not None and not found.changes:
                if self._known.get(found.members) is found:
                    del self._known[found.members]
                self._known[members] = found
                found.members, found.storage = members, _weak_storage(tensors)
        if found is not None:
            found.n_calls += 1
        return found

    def resume(self, names: Iterable[str]) -> None:
        """Continues the lists of an earlier process by their names; their tensors are gone."""
        found: dict[int, tuple[int, int]] = {}
        for name in names:
            if match := re.match(r"(\d+): (?:([\d,]+) tensors?, ([\d,]+) elements|.*)", name):
                number, *size = (int(text.replace(",", "")) for text in match.groups("0"))
                found[number] = (size[0], size[1])
        for number in range(1, min(max(found, default=0), MOST_LISTS) + 1):
            one = self._new(*found.get(number, (0, 0)))
            assert one is not None
            if number in found:
                one.changes = one.n_tensors == 0
                one.storage = _weak_storage([torch.empty(1, device="cpu")])

    def _of_new(self, members: tuple[int, ...], size: tuple[int, int]) -> GradientList | None:
        # Above the bound, a search at each call would take longer than the call.
        known = self._lists if len(self._lists) < MOST_LISTS else []
        for one in known:
            if (one.n_tensors, one.n_elements) == size and one.is_freed and not one.changes:
                return one
        ends = {members[0], members[-1]} if len(members) > 1 else set()
        for end in ends:
            if self._variants[end] >= _MOST_VARIANTS:
                return self._that_changes(end)
        # If many lists are freed after one call, sizes change from call to call.
        if sum(one.n_calls == 1 and one.is_freed for one in known) >= _MOST_VARIANTS:
            return self._that_changes(None)
        found = self._new(*size)
        if found is not None:
            self._variants.update(ends)
        return found

    def _that_changes(self, end: int | None) -> GradientList | None:
        if end not in self._changing:
            known = [*self._changing.values()]
            # A list that an earlier process began is continued first.
            before = (one for one in self._lists if one.changes and one not in known)
            made = next(before, None) or self._new(0, 0)
            if made is None:
                return None
            made.changes = True
            self._changing[end] = made
        return self._changing[end]

    def _new(self, n_tensors: int, n_elements: int) -> GradientList | None:
        if len(self._lists) >= MOST_LISTS:
            return None
        self._lists.append(GradientList(len(self._lists) + 1, n_tensors, n_elements))
        return self._lists[-1]


def _weak_storage(tensors: Sequence[Tensor]) -> StorageWeakRef | None:
    if not tensors:
        return None
    first: Any = tensors[0]
    try:
        return StorageWeakRef(getattr(first, "_local_tensor", first).untyped_storage())
    except (RuntimeError, ValueError):
        # Sparse tensors and parameters of lazy modules have no storage.
        return None
