"""Nested structures of tensors: flattened, checked, and rebuilt around new values.

torch.utils._pytree knows dicts, lists, tuples, named tuples, and the classes that are registered
with it. Other dataclasses are flattened here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils import _pytree as pytree

from tritonclip.engine.arguments import PLAIN
from tritonclip.modes import is_traced

_LEAVES = PLAIN | {type(None)}
_Kind = tuple[torch.dtype, torch.layout, bool]


class Tree:
    """The tensors of a nested structure of containers; `name` is that of the argument in messages.

    If it is `ordered`, integers may be among the tensors, and complex ones may not.
    """

    # Known once they were checked.
    tensors: list[Tensor]
    is_sparse = False

    def __init__(self, tree: Any, name: str, *, ordered: bool = False) -> None:
        self._tree, self._name, self._ordered = tree, name, ordered
        self.leaves, self._rebuild = _flatten(tree)

    def check(self) -> list[Tensor]:
        """For each tensor the strided one that has its elements: values at distinct indices."""
        present = [leaf for leaf in self.leaves if leaf is not None]
        # Stand-ins for tensors, while they are traced, are of other classes.
        are_tensors = PLAIN.issuperset(map(type, present)) or (
            is_traced() and all(isinstance(x, Tensor) for x in present)
        )
        kinds = {_kind_of(x) for x in present} if are_tensors else set()
        if not are_tensors or any(_fault_of_kind(*kind, self._ordered) for kind in kinds):
            self._refuse()
        self.tensors = present
        self.is_sparse = any(layout != torch.strided for _, layout, _ in kinds)
        if not self.is_sparse:
            return present
        self._coalesced = [x if x.layout == torch.strided else x.coalesce() for x in present]
        return [x if x.layout == torch.strided else x.values() for x in self._coalesced]

    def _refuse(self) -> None:
        """TypeError for the first leaf that cannot be clipped."""
        for leaf, path in zip(self.leaves, _paths(self._tree), strict=True):
            fault = None if leaf is None else _fault_of(leaf, self._ordered)
            if fault is not None:
                raise TypeError(f"{self._name}{path} {fault}")

    def tensor_paths(self) -> list[str]:
        """How to write each tensor of the structure in Python, from its name on."""
        pairs = zip(self.leaves, _paths(self._tree), strict=True)
        return [path for leaf, path in pairs if leaf is not None]

    def tensor_labels(self) -> list[str]:
        """The names of the tensors in messages."""
        return [self._name + path for path in self.tensor_paths()]

    def rebuild(self, values: Sequence[Tensor]) -> Any:
        """The same structure around other values, one for each tensor or for each leaf."""
        if self.is_sparse:
            options: Any = {"is_coalesced": True, "check_invariants": False}
            values = [
                v
                if x.layout == torch.strided
                else torch.sparse_coo_tensor(x.indices().clone(), v, x.shape, **options)
                for x, v in zip(self._coalesced, values, strict=True)
            ]
        if len(values) == len(self.leaves):
            return self._rebuild(list(values))
        made = iter(values)
        return self._rebuild([None if leaf is None else next(made) for leaf in self.leaves])


def _fault_of(leaf: Any, ordered: bool) -> str | None:
    """Why a leaf cannot be clipped, with a remedy; None where it can."""
    if not isinstance(leaf, Tensor):
        return (
            f"must be a tensor or None, got {type(leaf).__name__}; expected a tensor, or tensors "
            f"in nested dicts, lists, tuples and dataclasses{_remedy(leaf)}"
        )
    if type(leaf) not in PLAIN:
        return (
            f"is a {type(leaf).__name__}, a tensor subclass that tritonclip cannot read; expected "
            "plain tensors: pass those that it is made of, or clip in place with clip_"
        )
    return _fault_of_kind(*_kind_of(leaf), ordered)


def _remedy(leaf: object) -> str:
    """The end of a message about a leaf that is no tensor; "" where it is unknown."""
    if isinstance(leaf, Module):
        return ": pass its parameters, or their gradients"
    if hasattr(leaf, "__array__"):
        return ": make a tensor of an array, by torch.from_numpy"
    if isinstance(leaf, Iterable) and not isinstance(leaf, str):
        return ": make a list of it"
    return ""


def _kind_of(x: Tensor) -> _Kind:
    return x.dtype, x.layout, x.is_nested


def _fault_of_kind(
    dtype: torch.dtype, layout: torch.layout, nested: bool, ordered: bool
) -> str | None:
    """As `_fault_of`, for a plain tensor."""
    if nested or layout not in (torch.strided, torch.sparse_coo):
        return (
            f"has layout {'nested' if nested else layout}; expected strided or sparse_coo: convert "
            "it with to_dense() or unbind()"
        )
    if dtype.is_complex and ordered:
        return f"has dtype {dtype}, which has no order; expected a real one: clip by norm"
    if dtype == torch.bool or not (ordered or dtype.is_floating_point or dtype.is_complex):
        expected = "a floating-point or integer" if ordered else "a floating-point"
        return f"has dtype {dtype}; expected {expected} dtype: convert it with float()"
    return None


def _flatten(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The leaves of a tree, and the function that rebuilds it around others."""
    if isinstance(tree, Tensor):
        return [tree], lambda others: others[0]
    # The usual ones, without the registry: it takes 1 us a tensor.
    if type(tree) in (list, tuple) and _LEAVES.issuperset(map(type, tree)):
        return list(tree), type(tree)
    if type(tree) is dict and _LEAVES.issuperset(map(type, tree.values())):
        return list(tree.values()), lambda others: dict(zip(tree, others, strict=True))
    leaves, spec = pytree.tree_flatten(tree)
    if not any(map(_is_record, leaves)):
        return leaves, lambda others: pytree.tree_unflatten(others, spec)
    records = [_flatten_record(leaf) if _is_record(leaf) else None for leaf in leaves]
    flat: list[Any] = []
    for leaf, record in zip(leaves, records, strict=True):
        flat += [leaf] if record is None else record[0]

    def rebuild(others: list[Any]) -> Any:
        rest = list(others)
        made = []
        for record in records:
            n = 1 if record is None else len(record[0])
            values, rest = rest[:n], rest[n:]
            made.append(values[0] if record is None else record[1](values))
        return pytree.tree_unflatten(made, spec)

    return flat, rebuild


def _is_record(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def _flatten_record(record: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """`_flatten` for a dataclass; fields without a tensor stay as they are."""
    leaves, rebuild = _flatten(_fields_of(record))
    return leaves, lambda others: dataclasses.replace(record, **rebuild(others))


def _fields_of(record: Any) -> dict[str, Any]:
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {
        name: value
        for name, value in fields.items()
        if any(isinstance(leaf, Tensor) for leaf in _flatten(value)[0])
    }


def _paths(tree: Any) -> Iterator[str]:
    """How to write each leaf of a tree in Python, in order."""
    if isinstance(tree, Tensor):
        yield ""
        return
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        key = pytree.keystr(path)
        if not _is_record(leaf):
            yield key
            continue
        for name, value in _fields_of(leaf).items():
            for inner in _paths(value):
                yield f"{key}.{name}{inner}"
