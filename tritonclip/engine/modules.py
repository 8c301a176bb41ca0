"""The parameters of a module, collected by one walk that also looks for marks on modules."""

from torch import Tensor
from torch.nn import Module

# A module that overrides one of these may have other parameters than a walk finds.
_METHODS = ("parameters", "named_parameters", "named_modules", "_named_members")


def parameters_of(module: Module) -> list[Tensor]:
    """The same as `list(module.parameters())`, by one walk.

    Raises:
        ValueError: a module in it has `need_clip = False`.
    """
    modules = walk(module)
    kind = type(module)
    if any(getattr(kind, name) is not getattr(Module, name) for name in _METHODS):
        return list(module.parameters())
    found: dict[int, Tensor] = {}
    for one in modules:
        for parameter in one._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), parameter)
    return list(found.values())


def walk(module: Module) -> list[Module]:
    """The modules in a module, as `list(module.modules())`; raises as above."""
    found: dict[int, Module] = {}
    waiting: list[Module | None] = [module]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in found:
            continue
        found[id(one)] = one
        if "need_clip" in one.__dict__ and not one.__dict__["need_clip"]:
            _refuse_mark(module, one)
        waiting.extend(reversed(one._modules.values()))
    return list(found.values())


def _refuse_mark(module: Module, marked: Module) -> None:
    names = [name for name, one in module.named_modules() if one is marked]
    name = f"module.{names[0]}" if names and names[0] else "module"
    raise ValueError(
        f"{name} (a {type(marked).__name__}) has need_clip = False, which nothing reads on a "
        f"module; expected it on parameters: for p in {name}.parameters(): p.need_clip = False"
    )
