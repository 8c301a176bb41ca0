"""Nested structures of tensors, which are flattened, checked, and rebuilt around new values.

torch.utils._pytree knows dicts, lists, tuples, named tuples, and classes registered with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils import _pytree as pytree

from tritonclip.engine.plan import FLOAT8
from tritonclip.modes import PLAIN, is_traced

_LEAVES = PLAIN | {type(None)}


class Tree:
    """The tensors of a nested structure of containers, which messages call `name`.

    If `ordered`, integer tensors are allowed and complex ones are refused.
    """

    def __init__(self, tree: Any, name: str, *, ordered: bool = False) -> None:
        self._tree, self._name, self._ordered = tree, name, ordered
        self.leaves, self._rebuild = _flatten(tree)

    def check(self) -> list[Tensor]:
        """Returns the tensors; TypeError if a leaf cannot be clipped."""
        present = [leaf for leaf in self.leaves if leaf is not None]
        # Traced tensors are stand-ins of other classes.
        are_tensors = PLAIN.issuperset(map(type, present)) or (
            is_traced() and all(isinstance(x, Tensor) for x in present)
        )
        kinds = {(x.dtype, x.layout, x.is_nested) for x in present} if are_tensors else set()
        if not are_tensors or any(_fault_of_kind(*kind, self._ordered) for kind in kinds):
            self._refuse()
        return present

    def _refuse(self) -> None:
        """Raises TypeError for the first leaf that cannot be clipped."""
        for leaf, path in zip(self.leaves, _paths(self._tree), strict=True):
            fault = None if leaf is None else _fault_of(leaf, self._ordered)
            if fault is not None:
                raise TypeError(f"{self._name}{path} {fault}")

    def tensor_labels(self) -> list[str]:
        """The names of the tensors in messages."""
        pairs = zip(self.leaves, _paths(self._tree), strict=True)
        return [self._name + path for leaf, path in pairs if leaf is not None]

    def rebuild(self, values: Sequence[Tensor]) -> Any:
        """The same structure around other values, one for each tensor or for each leaf."""
        if len(values) == len(self.leaves):
            return self._rebuild(list(values))
        made = iter(values)
        return self._rebuild([None if leaf is None else next(made) for leaf in self.leaves])


def _fault_of(leaf: Any, ordered: bool) -> str | None:
    """Why a leaf cannot be clipped, with a remedy; None where it can."""
    if not isinstance(leaf, Tensor):
        return (
            f"must be a tensor or None, got {type(leaf).__name__}; expected a tensor, or tensors "
            f"in nested dicts, lists and tuples{_remedy(leaf)}"
        )
    if type(leaf) not in PLAIN:
        return (
            f"is a {type(leaf).__name__}, a tensor subclass that tritonclip cannot read; expected "
            "plain tensors: pass those that it is made of, or clip in place with clip_"
        )
    return _fault_of_kind(leaf.dtype, leaf.layout, leaf.is_nested, ordered)


def _remedy(leaf: object) -> str:
    """The end of a message about a leaf that is no tensor; "" where it is unknown."""
    if isinstance(leaf, Module):
        return ": pass its parameters, or their gradients"
    if dataclasses.is_dataclass(leaf):
        return ": register its class by torch.utils._pytree.register_dataclass"
    if hasattr(leaf, "__array__"):
        return ": make a tensor of an array, by torch.from_numpy"
    if isinstance(leaf, Iterable) and not isinstance(leaf, str):
        return ": make a list of it"
    return ""


def _fault_of_kind(
    dtype: torch.dtype, layout: torch.layout, nested: bool, ordered: bool
) -> str | None:
    """Like `_fault_of`, for a plain tensor."""
    if nested or layout != torch.strided:
        return (
            f"has layout {'nested' if nested else layout}; expected strided: convert it with "
            "to_dense() or unbind(), or clip a sparse_coo gradient in place with clip_"
        )
    if dtype in FLOAT8:
        return f"has dtype {dtype}; clip in float32 or bfloat16, before it is converted"
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
    # The usual containers do without the registry, which takes 1 us per tensor.
    if type(tree) in (list, tuple) and _LEAVES.issuperset(map(type, tree)):
        return list(tree), type(tree)
    if type(tree) is dict and _LEAVES.issuperset(map(type, tree.values())):
        return list(tree.values()), lambda others: dict(zip(tree, others, strict=True))
    leaves, spec = pytree.tree_flatten(tree)
    return leaves, lambda others: pytree.tree_unflatten(others, spec)


def _paths(tree: Any) -> list[str]:
    """The path to each leaf of a tree as Python writes it, such as "[0]['weight']"."""
    return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]
