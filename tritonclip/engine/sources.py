"""The parameters in the user's argument: tensors, a module, or (name, parameter) pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from tritonclip.distributed.fsdp import refuse_fsdp_shards
from tritonclip.engine.modules import check_marks, parameters_of
from tritonclip.engine.refusals import PLAIN

LabelOf = Callable[[int], str]


def labelled(
    parameters: object, label_of: LabelOf = "parameters[{}]".format
) -> tuple[list[Tensor], LabelOf]:
    """As `with_labels`, for parameters whose gradients are whole."""
    items, label_of = with_labels(parameters, label_of)
    refuse_fsdp_shards(items)
    return items, label_of


def with_labels(
    parameters: object, label_of: LabelOf = "parameters[{}]".format
) -> tuple[list[Tensor], LabelOf]:
    """The parameters in an argument of `clip_`, and the name of the i-th.

    Raises:
        TypeError: an argument of another kind.
    """
    if isinstance(parameters, Module):
        check_marks(parameters)
        parameters = parameters.named_parameters()
    items = as_list(parameters)
    if not PLAIN.issuperset(map(type, items)):
        items, label_of = unnamed(items, label_of)
    return items, label_of


def as_list(parameters: object) -> list[Any]:
    """The items of the user's argument, read once."""
    if isinstance(parameters, Tensor):
        return [parameters]
    if isinstance(parameters, Module):
        return parameters_of(parameters)
    if isinstance(parameters, Iterable) and not isinstance(parameters, str | bytes | dict):
        return list(parameters)
    raise TypeError(
        "expected an iterable of tensors, a tensor, a module or (name, parameter) pairs, "
        f"got {type(parameters).__name__}{_remedy(parameters)}"
    )


def _remedy(parameters: object) -> str:
    """The end of a message about an argument that has parameters; "" for any other."""
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
    """The parameters of (name, parameter) pairs, if they are pairs, and their names."""
    if items and isinstance(items[0], tuple):
        for position, pair in enumerate(items):
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
                raise TypeError(
                    f"parameters[{position}] must be a (name, parameter) pair as the first one is, "
                    f"got {pair!r:.80}; pass either pairs or tensors"
                )
        names = [name for name, _ in items]
        items = [parameter for _, parameter in items]
        label_of = names.__getitem__
    if not are_tensors(items):
        refuse_no_tensors(
            enumerate(items), "parameters", "tensors, a module, or (name, parameter) pairs"
        )
    return items, label_of


def device_of(items: Sequence[Tensor]) -> torch.device:
    """The device of results for a list; the CPU for an empty one."""
    return items[0].device if items else torch.device("cpu")


def places_to_clip(sources: Sequence[Tensor]) -> list[int]:
    """Where the parameters stand that are to be clipped."""
    return [i for i, p in enumerate(sources) if getattr(p, "need_clip", True)]


def names_at(places: Iterable[int], handed_over: object, label_of: LabelOf) -> list[str]:
    """The names of sources, looked up in the user's argument; clipping never needs them."""
    if isinstance(handed_over, Module):
        names = [name for name, _ in handed_over.named_parameters()]
        return [names[i] for i in places]
    return [label_of(i) for i in places]


def are_tensors(items: Sequence[object]) -> bool:
    """Whether all items are tensors, of any class."""
    return all(issubclass(kind, Tensor) for kind in set(map(type, items)))


def refuse_no_tensors(items: Iterable[tuple[int, object]], noun: str, expected: str) -> None:
    """Refuses items, each with its position, among which one is no tensor."""
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
