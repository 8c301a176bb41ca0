"""Reads the user's argument: tensors, a module, or (name, parameter) pairs.

A module is walked once for its parameters and for `need_clip` set on modules by mistake.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from tritonclip.modes import PLAIN

# If a module overrides one of these, a walk over its children may miss parameters.
_METHODS = ("parameters", "named_parameters", "named_modules", "_named_members")


# FullyShardedDataParallel, the first version, marks the parameters that it manages by this
# attribute. They are plain tensors that look whole but hold a shard.
FSDP_MARK = "_fsdp_flattened"
FSDP_MARKS = repeat(FSDP_MARK)


def refuse_fsdp_shards(parameters: Sequence[Tensor]) -> None:
    """Raises TypeError if FullyShardedDataParallel may have split the parameters."""
    if are_fsdp_shards(parameters):
        raise TypeError(
            "the parameters are shards of FullyShardedDataParallel, and their gradients have the "
            "norm of one process only; expected process_group=: that of the "
            "FullyShardedDataParallel module, its attribute process_group"
        )


def are_fsdp_shards(parameters: Sequence[Tensor]) -> bool:
    """Whether FullyShardedDataParallel manages one of the parameters over several processes."""
    if "torch.distributed.fsdp" not in sys.modules or not any(map(hasattr, parameters, FSDP_MARKS)):
        return False
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


class GradientSource:
    """An argument of `clip_` that collects its gradients itself, such as `FlatGradients`.

    `gradients(rule, state, processes)` gets arguments of the call and returns the `Gradients` to
    clip.
    """

    gradients: Callable[..., Any]


def needs_clip(parameter: Tensor) -> bool:
    """Whether a parameter is to be clipped, which `need_clip = False` forbids."""
    return bool(getattr(parameter, "need_clip", True))


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter, or None if it is not to be clipped."""
    return parameter.grad if needs_clip(parameter) else None


def checked_parameters(module: Module) -> list[Tensor]:
    """Lists `module.parameters()`; raises ValueError where a module has `need_clip = False`."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting: list[Module | None] = [module]
    while waiting:
        child = waiting.pop()
        if child is None or id(child) in seen:
            continue
        seen.add(id(child))
        attributes = child.__dict__
        if "need_clip" in attributes and not attributes["need_clip"]:
            names = [name for name, other in module.named_modules() if other is child]
            name = f"module.{names[0]}" if names and names[0] else "module"
            raise ValueError(
                f"{name} (a {type(child).__name__}) has need_clip = False, which nothing reads on "
                "a module; expected it on parameters: "
                f"for p in {name}.parameters(): p.need_clip = False"
            )
        for parameter in child._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), parameter)
        waiting.extend(reversed(child._modules.values()))
    return list(found.values())


LabelOf = Callable[[int], str]


def labelled(parameters: object) -> tuple[list[Tensor], LabelOf]:
    """As `with_labels`, but refuses shards of FullyShardedDataParallel."""
    items, label_of = with_labels(parameters)
    refuse_fsdp_shards(items)
    return items, label_of


def with_labels(parameters: object) -> tuple[list[Tensor], LabelOf]:
    """The parameters in an argument of `clip_`, and a function that names the i-th."""
    if isinstance(parameters, Module):
        checked_parameters(parameters)
        parameters = parameters.named_parameters()
    return unnamed(as_list(parameters), "parameters[{}]".format)


def as_list(parameters: object) -> list[Any]:
    """Reads the items of the user's argument, once."""
    if isinstance(parameters, Tensor):
        return [parameters]
    if isinstance(parameters, Module):
        found, cls = checked_parameters(parameters), type(parameters)
        if any(getattr(cls, name) is not getattr(Module, name) for name in _METHODS):
            return list(parameters.parameters())
        return found
    if isinstance(parameters, Iterable) and not isinstance(parameters, str | bytes | dict):
        return list(parameters)
    raise TypeError(
        "expected an iterable of tensors, a tensor, a module or (name, parameter) pairs, "
        f"got {type(parameters).__name__}{_remedy(parameters)}"
    )


def _remedy(parameters: object) -> str:
    """Advice for an argument that is not iterable but holds parameters; else ""."""
    if isinstance(parameters, MethodType):
        return f"; call it: {parameters.__name__}()"
    if isinstance(parameters, dict):
        return "; pass its items()"
    if isinstance(parameters, Optimizer):
        return (
            "; pass the parameters of the model, or let the optimizer clip in its step: "
            "ClippedOptimizer(optimizer, 1.0)"
        )
    return ""


def unnamed(items: list[Any], label_of: LabelOf) -> tuple[list[Tensor], LabelOf]:
    """Splits (name, parameter) pairs into parameters and names; bare parameters stay."""
    items, label_of = _without_names(items, label_of, "parameter")
    if not are_tensors(items):
        refuse_no_tensors(
            enumerate(items), "parameters", "tensors, a module, or (name, parameter) pairs"
        )
    return items, label_of


def _without_names(items: list[Any], label_of: LabelOf, noun: str) -> tuple[list[Any], LabelOf]:
    """Splits (name, item) pairs into items and names; bare items keep `label_of`."""
    if not (items and isinstance(items[0], tuple)):
        return items, label_of
    for position, pair in enumerate(items):
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(
                f"{noun}s[{position}] must be a (name, {noun}) pair as the first one is, "
                f"got {pair!r:.80}; pass either pairs or tensors"
            )
    names = [name for name, _ in items]
    return [item for _, item in items], names.__getitem__


def device_of(items: Sequence[Tensor]) -> torch.device:
    """The device of results: that of the first tensor, or the CPU for an empty list."""
    return items[0].device if items else torch.device("cpu")


def names_at(positions: Iterable[int], argument: object, label_of: LabelOf) -> list[str]:
    """Looks up the names of parameters for a message; clipping itself needs no names."""
    if isinstance(argument, Module):
        names = [name for name, _ in argument.named_parameters()]
        return [names[i] for i in positions]
    return [label_of(i) for i in positions]


def tensors_in(tensors: object) -> tuple[list[Tensor], LabelOf]:
    """The tensors, None left out, in an argument of gradients themselves, and their names."""
    label_of: LabelOf = "tensors[{}]".format
    if type(tensors) is list and PLAIN.issuperset(map(type, tensors)):
        return tensors, label_of
    if isinstance(tensors, Module):
        raise TypeError(
            f"tensors must be the gradients, got {type(tensors).__name__}, a module; expected "
            "[p.grad for p in module.parameters() if p.grad is not None], norms_by_name(module), "
            "or clip_(module, 1.0)"
        )
    if isinstance(tensors, GradientSource):
        raise TypeError(
            f"tensors must be the gradients, got {type(tensors).__name__}; expected its buffers, "
            "or clip_, which takes it in place of parameters"
        )
    items = tensors if type(tensors) is list else as_list(tensors)
    if are_tensors(items):
        return items, label_of
    items, label_of = _without_names(items, label_of, "tensor")
    there = [(position, item) for position, item in enumerate(items) if item is not None]
    refuse_no_tensors(
        there, "tensors", "the gradients: [p.grad for p in ... if p.grad is not None]"
    )
    return [item for _, item in there], lambda index: label_of(there[index][0])


def refuse_parameters(tensors: Sequence[Tensor], label_of: LabelOf) -> None:
    """Raises TypeError for tensors that are most likely weights: parameters, or requiring grad."""
    for index, tensor in enumerate(tensors):
        if tensor.requires_grad or isinstance(tensor, Parameter):
            fault = "is a parameter" if isinstance(tensor, Parameter) else "requires grad"
            raise TypeError(
                f"{label_of(index)} {fault}, and would itself be clipped in place, not its .grad; "
                "expected gradients or updates that autograd does not follow: for gradients in "
                ".grad call clip_(parameters, 1.0); to clip these values pass tensor.detach(), "
                "which has the same memory; with derivatives, functional.clip_by_global_norm"
            )


def are_tensors(items: Sequence[object]) -> bool:
    """Whether all items are tensors, of any class."""
    return all(issubclass(cls, Tensor) for cls in set(map(type, items)))


def refuse_no_tensors(items: Iterable[tuple[int, object]], noun: str, expected: str) -> None:
    """Raises TypeError if one of the items, given with their positions, is not a tensor."""
    for position, item in items:
        if not isinstance(item, Tensor):
            remedy = ""
            if isinstance(item, Module) and noun == "parameters":
                remedy = ": pass the model that has it, or torch.nn.ModuleList of several"
            if isinstance(item, dict) and "params" in item:
                remedy = ': of parameter groups, pass [p for g in groups for p in g["params"]]'
            raise TypeError(
                f"{noun}[{position}] must be a tensor, got {type(item).__name__}; "
                f"expected {expected}{remedy}"
            )
