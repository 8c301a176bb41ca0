"""From what a user hands over to a gradient list: checked, each gradient once, grouped.

What no rule could clip is refused here, before anything is written.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from tritonclip.familiar import Familiar
from tritonclip.gradient_list import GradientList, Group

# What the library can read; subclasses may hold anything.
PLAIN = {Tensor, Parameter}
_get_dtype = attrgetter("dtype")
_get_device = attrgetter("device")
_get_is_cpu = attrgetter("is_cpu")
_get_layout = attrgetter("layout")
_get_is_nested = attrgetter("is_nested")
_familiar = Familiar()


def of_parameters(
    parameters: object, label_of: Callable[[int], str] = "parameters[{}]".format
) -> GradientList:
    """The gradients of what `clip_` accepts: tensors, a module, or named parameters.

    Args:
        parameters: what was handed over.
        label_of: what messages call the i-th parameter where it has no name.

    Raises:
        TypeError: what is none of these; gradients that are no plain floating-point or complex
            tensors.
        ValueError: gradients whose elements overlap in memory.
    """
    items, label_of = labelled(parameters, label_of)
    grads = [g for p in items if (g := p.grad) is not None and getattr(p, "need_clip", True)]

    def positions() -> Sequence[int]:
        return [
            i for i, p in enumerate(items) if p.grad is not None and getattr(p, "need_clip", True)
        ]

    device = items[0].device if items else torch.device("cpu")
    result = _gradient_list(grads, positions, device, label_of)
    if not items and isinstance(parameters, GeneratorType):
        result.remark = "`parameters` is an empty generator, no gradient clipping will occur."
    elif items and not grads and not any(p.requires_grad or p.grad is not None for p in items):
        result.remark = (
            f"none of the {len(items)} tensors has a .grad or requires a gradient, no gradient "
            "clipping will occur; expected parameters, not their gradients"
        )
    return result


def labelled(
    parameters: object, label_of: Callable[[int], str] = "parameters[{}]".format
) -> tuple[list[Tensor], Callable[[int], str]]:
    """The parameters of what `clip_` accepts, and what messages call the i-th; raises as above."""
    items = _items(parameters)
    if items and isinstance(items[0], tuple):
        names, items = _unzip(items)
        label_of = names.__getitem__
    _check_tensors(items, "parameters", "tensors, a module, or (name, parameter) pairs")
    return items, label_of


def of_tensors(
    tensors: object, label_of: Callable[[int], str] = "tensors[{}]".format
) -> GradientList:
    """The gradient list whose gradients are the tensors themselves; raises as above."""
    items = _items(tensors)
    _check_tensors(items, "tensors", "the gradients: [p.grad for p in ... if p.grad is not None]")
    device = items[0].device if items else torch.device("cpu")
    return _gradient_list(items, lambda: range(len(items)), device, label_of)


def _check_tensors(items: Sequence[object], noun: str, expected: str) -> None:
    if set(map(type, items)) <= PLAIN:
        return
    for position, item in enumerate(items):
        if not isinstance(item, Tensor):
            raise TypeError(
                f"{noun}[{position}] must be a tensor, got {type(item).__name__}; "
                f"expected {expected}"
            )


def _items(parameters: object) -> list[Any]:
    """What was handed over, read once: pairs for a module."""
    if isinstance(parameters, Tensor):
        return [parameters]
    if isinstance(parameters, Module):
        return list(parameters.named_parameters())
    if isinstance(parameters, Iterable) and not isinstance(parameters, str | bytes):
        return list(parameters)
    raise TypeError(
        "expected an iterable of tensors, a tensor, a module or (name, parameter) pairs, "
        f"got {type(parameters).__name__}"
    )


def _unzip(pairs: list[Any]) -> tuple[list[str], list[Tensor]]:
    """Names and parameters of (name, parameter) pairs."""
    for position, pair in enumerate(pairs):
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(
                f"parameters[{position}] must be a (name, parameter) pair as the first one is, "
                f"got {pair!r:.80}; pass either pairs or tensors"
            )
    names, parameters = zip(*pairs, strict=True)
    return list(names), list(parameters)


def _gradient_list(
    grads: list[Tensor],
    positions: Callable[[], Sequence[int]],
    device: torch.device,
    label_of: Callable[[int], str],
) -> GradientList:
    """Drops repeated gradients, checks the others, and groups them."""
    addresses = _addresses(grads) if grads else None
    groups = None if addresses is None else _familiar.groups(grads, addresses)
    if groups is not None:
        return GradientList(grads[0].device, grads, label_of, positions, groups=groups)
    once = _distinct(grads, addresses)
    if once is not None:
        every, grads = positions, [grads[i] for i in once]
        addresses = None if addresses is None else [addresses[i] for i in once]
        # Called for messages only, and before the parameters have other gradients.
        positions = lambda: [every()[i] for i in once]  # noqa: E731
    result = GradientList(
        device=grads[0].device if grads else device,
        grads=grads,
        label_of=label_of,
        positions=positions,
    )
    if grads:
        _fill_groups(result, addresses)
        if addresses is not None and once is None:
            _familiar.learn(grads, addresses, result.groups)
    return result


def _addresses(grads: list[Tensor]) -> list[int] | None:
    """Where each gradient lies; None if any has no memory of its own, as sparse ones."""
    try:
        return list(map(Tensor.data_ptr, grads))
    except (RuntimeError, NotImplementedError, ValueError):
        return None


def _distinct(grads: list[Tensor], addresses: list[int] | None) -> list[int] | None:
    """Places of gradients that are not the very memory of an earlier one; None for all of them."""
    if addresses is not None and len(set(addresses)) == len(grads):
        return None
    first: dict[object, int] = {}
    for place, grad in enumerate(grads):
        first.setdefault(_memory(grad), place)
    return list(first.values()) if len(first) < len(grads) else None


def _memory(grad: Tensor) -> object:
    """What tells the memory of a gradient from that of another."""
    if grad.layout == torch.sparse_coo and grad.is_coalesced():
        grad = grad._values()
    if grad.layout != torch.strided or grad.is_nested or grad.data_ptr() == 0:
        return id(grad)
    if flattened(grad) is not None:
        return grad.data_ptr(), grad.dtype, grad.numel()
    return grad.data_ptr(), grad.dtype, grad.shape, grad.stride()


def _fill_groups(result: GradientList, addresses: list[int] | None) -> None:
    """Sorts gradients into groups; the usual list, all alike and contiguous, in one go."""
    grads = list(result.grads)
    if addresses is not None and 0 in addresses:
        _refuse_freed(result, addresses)
    dtypes = set(map(_get_dtype, grads))
    if (
        addresses is not None
        and set(map(type, grads)) <= PLAIN
        and set(map(_get_layout, grads)) == {torch.strided}
        and not any(map(_get_is_nested, grads))
        and len(dtypes) == 1
        and next(iter(dtypes)).is_floating_point
        and _on_one_device(grads)
        and all(map(Tensor.is_contiguous, grads))
    ):
        group = Group(grads, range(len(grads)), flat=True, addresses=addresses)
        result.groups.append(group)
        return

    members: dict[tuple[torch.device, torch.dtype, bool, bool], tuple[list[Tensor], list[int]]] = {}
    for place, grad in enumerate(grads):
        tensor, flat = _readable(grad, result, place)
        key = (tensor.device, tensor.dtype, flat, grad.is_complex())
        tensors, places = members.setdefault(key, ([], []))
        tensors.append(tensor)
        places.append(place)
    for (_, _, flat, pairs), (tensors, places) in members.items():
        result.groups.append(Group(tensors, places, flat, pairs))


def _refuse_freed(result: GradientList, addresses: list[int]) -> None:
    for place, (grad, address) in enumerate(zip(result.grads, addresses, strict=True)):
        if address == 0 and type(grad) in PLAIN and grad.numel() and not grad.is_meta:
            raise ValueError(
                f"the gradient of {result.label(place)} has {grad.numel()} elements and no memory: "
                "its storage was freed, or it is one of PyTorch's zero tensors; expected memory to "
                "read and write: clip before storage is freed, or replace it by grad.clone()"
            )


def _on_one_device(grads: Sequence[Tensor]) -> bool:
    # Asking for a device by name takes twice as long.
    return all(map(_get_is_cpu, grads)) or len(set(map(_get_device, grads))) == 1


def _readable(grad: Tensor, result: GradientList, place: int) -> tuple[Tensor, bool]:
    """A real dense tensor of the gradient's elements, and whether it is flat.

    Shares the gradient's memory, or that of its coalesced copy. Refuses what cannot be clipped.
    """
    if type(grad) not in PLAIN:
        raise TypeError(
            f"the gradient of {result.label(place)} is a {type(grad).__name__}, a tensor subclass "
            "that tritonclip cannot read; expected a plain tensor: pass local or full tensors (for "
            "DTensor: grad.to_local() or grad.full_tensor())"
        )
    if grad.is_nested:
        raise TypeError(
            f"the gradient of {result.label(place)} is a nested tensor; expected a plain one: pass "
            "the tensors that it is made of"
        )
    if not (grad.is_floating_point() or grad.is_complex()):
        raise TypeError(
            f"the gradient of {result.label(place)} has dtype {grad.dtype}; expected a "
            "floating-point or complex dtype"
        )
    if grad.layout == torch.sparse_coo:
        coalesced = grad if grad.is_coalesced() else grad.coalesce()
        if coalesced is not grad:
            result._coalesced.append((grad, coalesced))
        result._sparse.append(grad)
        grad = coalesced._values()
    elif grad.layout != torch.strided:
        raise TypeError(
            f"the gradient of {result.label(place)} has layout {grad.layout}; expected strided or "
            "sparse_coo: convert it with grad.to_dense() or grad.to_sparse_coo()"
        )
    if grad.is_complex():
        grad = torch.view_as_real(grad.conj() if grad.is_conj() else grad)
    if grad.is_contiguous():
        return grad, True
    flat = flattened(grad)
    if flat is not None:
        return flat, True
    if _overlaps(grad):
        raise ValueError(
            f"elements of the gradient of {result.label(place)} share memory (shape "
            f"{tuple(grad.shape)}, strides {grad.stride()}), so it cannot be scaled in place; "
            "expected a gradient without overlap: replace it by grad.clone()"
        )
    return grad, False


def flattened(grad: Tensor) -> Tensor | None:
    """A flat view of a gradient dense in another order of its dimensions, as channels_last is."""
    order = sorted(range(grad.dim()), key=grad.stride, reverse=True)
    permuted = grad.permute(order)
    return permuted.view(-1) if permuted.is_contiguous() else None


def _overlaps(grad: Tensor) -> bool:
    """Whether elements may share memory: whether a stride lies within the span of smaller ones."""
    span = 0
    for stride, size in sorted(zip(grad.stride(), grad.shape, strict=True)):
        if size > 1:
            if stride <= span:
                return True
            span += stride * (size - 1)
    return False
