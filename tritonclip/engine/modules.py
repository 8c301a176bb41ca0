"""The parameters of a module, collected by one walk that also looks at marks of need_clip.

`copy.deepcopy` makes parameters without attributes. A note in the module, which is copied with it,
marks the copies of parameters that had `need_clip = False`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

# A module that overrides one of these may have other parameters than a walk finds.
_METHODS = ("parameters", "named_parameters", "named_modules", "_named_members")
# The attribute of modules that keeps the note.
_NOTE = "_tritonclip_unclipped"


class Unclipped:
    """Parameters with `need_clip = False`: marks their copies when it is copied with them."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [ref(parameter) for parameter in parameters]

    def __deepcopy__(self, memo: dict[int, Any]) -> Unclipped:
        there = [p for weak in self._parameters if (p := weak()) is not None]
        # Those that are to be clipped by now are left out.
        copies = [copy.deepcopy(p, memo) for p in there if not getattr(p, "need_clip", True)]
        for parameter in copies:
            parameter.need_clip = False  # type: ignore[attr-defined]
        return Unclipped(copies)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled parameters keep their attributes; who loads a model may lack tritonclip.
        return list, ()


def parameters_of(module: Module) -> list[Tensor]:
    """The same as `list(module.parameters())`, by one walk.

    Raises:
        ValueError: a module in it has `need_clip = False`.
    """
    found = _walk(module)
    kind = type(module)
    if any(getattr(kind, name) is not getattr(Module, name) for name in _METHODS):
        return list(module.parameters())
    return found


def check_marks(module: Module) -> None:
    """Refuses marks on modules, and notes those on parameters; raises as above."""
    _walk(module)


def _walk(module: Module) -> list[Tensor]:
    """The parameters in the order of `module.parameters()`."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting: list[Module | None] = [module]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        attributes = one.__dict__
        if "need_clip" in attributes and not attributes["need_clip"]:
            _refuse_mark(module, one)
        unclipped = []
        for parameter in one._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), parameter)
                if not getattr(parameter, "need_clip", True):
                    unclipped.append(parameter)
        if unclipped and not torch.compiler.is_compiling():
            attributes[_NOTE] = Unclipped(unclipped)
        waiting.extend(reversed(one._modules.values()))
    return list(found.values())


def _refuse_mark(module: Module, marked: Module) -> None:
    names = [name for name, one in module.named_modules() if one is marked]
    name = f"module.{names[0]}" if names and names[0] else "module"
    raise ValueError(
        f"{name} (a {type(marked).__name__}) has need_clip = False, which nothing reads on a "
        f"module; expected it on parameters: for p in {name}.parameters(): p.need_clip = False"
    )
