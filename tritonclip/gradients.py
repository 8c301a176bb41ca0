"""From what a user hands over to a gradient list: checked, each gradient once, grouped.

What no rule could clip is refused here, before anything is written.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

# What the library can read; subclasses may hold anything.
PLAIN = {Tensor, Parameter}
_get_dtype = attrgetter("dtype")
_get_device = attrgetter("device")
_get_is_cpu = attrgetter("is_cpu")


@dataclass(slots=True)
class Group:
    """Gradients of one device and dtype.

    Attributes:
        tensors: to measure and to write: real, each without overlap; complex gradients appear as
            pairs of reals.
        places: where each stands in the gradient list.
        flat: whether each is contiguous, so that a pointer and a size say it all.
        pairs: whether these are complex gradients.
        addresses: of contiguous tensors, where they are known already.
        base: what all tensors are views of, in FlatGradients.
        memo: what backends remember of tensors that never change.
    """

    tensors: list[Tensor]
    places: Sequence[int]
    flat: bool
    pairs: bool = False
    addresses: list[int] | None = None
    base: Tensor | None = None
    memo: dict[Any, Any] | None = None

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.tensors[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tensors: real, also for complex gradients."""
        return self.tensors[0].dtype

    @property
    def written(self) -> list[Tensor]:
        """What an in-place write shows in: views count versions with their base."""
        return self.tensors if self.base is None else [self.base]

    def moduli(self) -> list[Tensor]:
        """The moduli of complex gradients, 1-d, in new memory."""
        # torch has no modulus of half-precision complex numbers on every device.
        wide = [t.float() if t.dtype == torch.float16 else t for t in self.tensors]
        return [torch.view_as_complex(t.reshape(-1, 2)).abs() for t in wide]


@dataclass(slots=True)
class GradientList:
    """The gradients that one call clips.

    Attributes:
        device: where results go: of the first gradient, else of the first parameter.
        grads: the gradients as users see them, each once, in order.
        groups: what backends read and write.
        label_of: what messages call the i-th of what the user handed over.
        positions: gives the place of each gradient among what the user handed over.
        came_from_empty_generator: nothing was handed over, by a generator that was already
            exhausted.
    """

    device: torch.device
    grads: Sequence[Tensor]
    label_of: Callable[[int], str]
    positions: Callable[[], Sequence[int]]
    came_from_empty_generator: bool = False
    groups: list[Group] = field(default_factory=list)
    # Sparse gradients that had to be coalesced into a new tensor, and that tensor.
    _coalesced: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _sparse: list[Tensor] = field(default_factory=list)

    @property
    def result_dtype(self) -> torch.dtype:
        """float64 where any gradient is, else float32."""
        return (
            torch.float64 if any(g.dtype == torch.float64 for g in self.groups) else torch.float32
        )

    @property
    def has_sparse(self) -> bool:
        """Whether any gradient is sparse."""
        return bool(self._sparse)

    def label(self, place: int) -> str:
        """How messages call the gradient at a place of the list."""
        return self.label_of(self.positions()[place])

    def labels(self, places: Iterable[int]) -> str:
        """Some gradients for a message."""
        positions = self.positions()
        return some([self.label_of(positions[place]) for place in places])

    def places_where(self, condition: Callable[[Tensor], bool]) -> list[int]:
        """The places of gradients of a kind."""
        return [place for place, grad in enumerate(self.grads) if condition(grad)]

    def finish_writing(self) -> None:
        """Makes what was written to the groups arrive in sparse gradients, for autograd too."""
        for sparse, coalesced in self._coalesced:
            sparse.copy_(coalesced)
        if self._sparse:
            torch.autograd.graph.increment_version(self._sparse)


def some(labels: Sequence[str]) -> str:
    """Names for a message, at most eight of them."""
    more = f" and {len(labels) - 8} more" if len(labels) > 8 else ""
    return ", ".join(labels[:8]) + more


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
    result.came_from_empty_generator = isinstance(parameters, GeneratorType) and not items
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
    addresses = _addresses(grads)
    once = _distinct(grads, addresses)
    if once is not None:
        every, grads, addresses = positions, [grads[i] for i in once], None
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
    return result


def _addresses(grads: list[Tensor]) -> list[int] | None:
    """Where each gradient lies; None if any is sparse, which has no memory of its own."""
    try:
        return list(map(Tensor.data_ptr, grads))
    except (RuntimeError, NotImplementedError):
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
    if grad.layout != torch.strided or grad.numel() == 0:
        return id(grad)
    if flattened(grad) is not None:
        return grad.data_ptr(), grad.dtype, grad.numel()
    return grad.data_ptr(), grad.dtype, grad.shape, grad.stride()


def _fill_groups(result: GradientList, addresses: list[int] | None) -> None:
    """Sorts gradients into groups; the usual list, all alike and contiguous, in one go."""
    grads = list(result.grads)
    if set(map(type, grads)) <= PLAIN:
        dtypes = set(map(_get_dtype, grads))
        if len(dtypes) == 1 and next(iter(dtypes)).is_floating_point and _on_one_device(grads):
            try:
                if all(map(Tensor.is_contiguous, grads)):
                    everywhere = range(len(grads))
                    group = Group(grads, everywhere, flat=True, addresses=addresses)
                    result.groups.append(group)
                    return
            except (RuntimeError, NotImplementedError):
                # Sparse tensors have no strides.
                pass

    members: dict[tuple[torch.device, torch.dtype, bool, bool], tuple[list[Tensor], list[int]]] = {}
    for place, grad in enumerate(grads):
        tensor, flat = _readable(grad, result, place)
        key = (tensor.device, tensor.dtype, flat, grad.is_complex())
        tensors, places = members.setdefault(key, ([], []))
        tensors.append(tensor)
        places.append(place)
    for (_, _, flat, pairs), (tensors, places) in members.items():
        result.groups.append(Group(tensors, places, flat, pairs))


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
