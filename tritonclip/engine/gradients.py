"""The gradients that one call clips, collected from the user's argument, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from tritonclip.distributed.domain import Holders
from tritonclip.distributed.sharding import Piece, Sharding, Shares, shares_of
from tritonclip.engine.modules import check_marks, parameters_of
from tritonclip.engine.plan import Plan
from tritonclip.engine.refusals import (
    PLAIN,
    are_tensors,
    refuse_fsdp_shards,
    refuse_no_tensors,
    some,
)

LabelOf = Callable[[int], str]


class Gradients:
    """The gradients of one call.

    Attributes:
        tensors: as users see them, of DTensors the local pieces; each once, in order.
        plan: all that is known of the list; None for an empty one.
        readable: tensors that verbs read and write, one for each of the plan's.
        addresses: theirs where they are known.
        device: of results where there is no gradient.
        sources: the parameters, or the tensors themselves, that the list was collected from.
        parameters: one for each gradient that was collected, where these are no `sources`.
        handed_over: the user's argument.
        label_of: names the i-th source where it has no name.
        distinct: indices of `tensors` among the gradients of the sources; None for all.
        sharding: what the tensors are pieces of; None for whole gradients.
        wrappers: DTensors around the tensors, whose versions count too.
        absent: parameters without a gradient, of a list that has a sharding.
        refusal: why this process refuses its gradients, which were dropped; the others are told.
        coalesced: sparse gradients that had to be coalesced into a new tensor, and that tensor.
        versions: tensors of which all readable ones are views; None where they are no views.
    """

    __slots__ = (
        "_shares_without",
        "absent",
        "addresses",
        "coalesced",
        "device",
        "distinct",
        "handed_over",
        "label_of",
        "parameters",
        "plan",
        "readable",
        "refusal",
        "sharding",
        "sources",
        "tensors",
        "versions",
        "wrappers",
    )

    def __init__(
        self,
        tensors: Sequence[Tensor],
        device: torch.device,
        label_of: LabelOf,
        sources: Sequence[Tensor] | None = None,
        handed_over: object = None,
    ) -> None:
        self.tensors, self.device, self.label_of = tensors, device, label_of
        self.sources, self.handed_over = sources, handed_over
        self.parameters: Sequence[Tensor] | None = None
        self.plan: Plan | None = None
        self.readable: list[Tensor] = []
        self.addresses: list[int] | None = None
        self.distinct: list[int] | None = None
        self.coalesced: list[tuple[Tensor, Tensor]] = []
        self.versions: Sequence[Tensor] | None = None
        self.sharding: Sharding | None = None
        self.wrappers: list[Tensor] = []
        self.absent: list[Tensor] = []
        self.refusal: Exception | None = None
        self._shares_without: Callable[[], Shares | None] | None = None

    def beside(self, parameters: Sequence[Tensor]) -> Gradients:
        """The same list, beside the parameters that it was not collected from.

        Args:
            parameters: one for each gradient, those met twice included.
        """
        twin = copy(self)
        twin.parameters = parameters
        return twin

    def refuse_(self, error: Exception) -> bool:
        """Drops all gradients, so that this process can tell the others why; if there are any.

        Raising at once would leave them waiting.
        """
        shares = None if self._shares_without is None else self._shares_without()
        if shares is None:
            return False
        self.tensors, self.readable, self.addresses, self.distinct = [], [], None, None
        self.refusal = error
        _spread(self, shares)
        return True

    @property
    def first(self) -> Tensor | None:
        """The first parameter that the list was collected from; None where that is not known."""
        return self.sources[0] if self.sources else None

    def label(self, index: int) -> str:
        """Names the gradient at an index in messages."""
        return self._labels([index])[0]

    def labels(self, indices: Iterable[int]) -> str:
        """Some gradients for a message."""
        return some(self._labels(indices))

    def _labels(self, indices: Iterable[int]) -> list[str]:
        places = self.places()
        return self._names_at([i if places is None else places[i] for i in indices])

    def label_of_parameter(self, position: int) -> str:
        """Names the parameter at a position in a list that has a sharding."""
        if self.sources is None:
            return self.label_of(position)
        wanted = [i for i, p in enumerate(self.sources) if getattr(p, "need_clip", True)]
        return self._names_at([wanted[position]])[0]

    def _names_at(self, places: Sequence[int]) -> list[str]:
        """The names of sources, looked up in the user's argument; clipping never needs them."""
        if isinstance(self.handed_over, Module):
            names = [name for name, _ in self.handed_over.named_parameters()]
            return [names[i] for i in places]
        return [self.label_of(i) for i in places]

    def places(self) -> Sequence[int] | None:
        """Where the gradients stand among the sources; None where every source has one."""
        if self.sources is None or len(self.sources) == len(self.tensors):
            return self.distinct
        there = [i for i, p in enumerate(self.sources) if gradient_of(p) is not None]
        return there if self.distinct is None else [there[i] for i in self.distinct]

    def piece(self, index: int) -> Piece:
        """What the gradient at an index is a piece of; only for a list that has a sharding."""
        assert self.sharding is not None
        return self.sharding.pieces[index if self.distinct is None else self.distinct[index]]

    def position(self, index: int) -> int:
        """Where the parameter of a gradient stands in a list that has a sharding."""
        assert self.sharding is not None
        return self.sharding.positions[index if self.distinct is None else self.distinct[index]]

    def indices_where(self, condition: Callable[[Tensor], bool]) -> list[int]:
        """The indices of gradients of a kind."""
        return [index for index, grad in enumerate(self.tensors) if condition(grad)]

    def of(self, indices: Sequence[int] | None) -> tuple[list[Tensor], list[int] | None]:
        """The readable tensors of a group, and their addresses where they are known."""
        if indices is None:
            return self.readable, self.addresses
        tensors = [self.readable[i] for i in indices]
        return tensors, None if self.addresses is None else [self.addresses[i] for i in indices]

    def warning(self) -> str:
        """Why the list is empty, where the user probably did not intend it; else ""."""
        if not self.sources and isinstance(self.handed_over, GeneratorType):
            return "`parameters` is an empty generator, no gradient clipping will occur."
        if self.sources and not any(p.requires_grad or p.grad is not None for p in self.sources):
            return (
                f"none of the {len(self.sources)} tensors has a .grad or requires a gradient, no "
                "gradient clipping will occur; expected parameters, not their gradients"
            )
        return ""

    def finish_writing(self, *, wrote: bool = True) -> None:
        """Carries values written over to sparse gradients, and versions to wrappers."""
        for sparse, coalesced in self.coalesced:
            sparse.copy_(coalesced)
        if self.plan is not None and self.plan.sparse:
            torch.autograd.graph.increment_version([self.tensors[i] for i in self.plan.sparse])
        if self.wrappers and wrote:
            torch.autograd.graph.increment_version(self.wrappers)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter that is to be clipped."""
    return parameter.grad if getattr(parameter, "need_clip", True) else None


def of_parameters(
    parameters: object,
    label_of: LabelOf = "parameters[{}]".format,
    holders: Holders | None = None,
    *,
    tells: bool = False,
) -> Gradients:
    """Collects the gradients of tensors, a module, or named parameters.

    Args:
        parameters: handed over by the user; read once.
        label_of: names the i-th parameter in messages, where it has no name.
        holders: the processes that the gradients are spread over, where no DTensor says so.
        tells: gradients that are refused become a refusal of the list, which the caller tells the
            processes that share the norm, and raises.

    Raises:
        TypeError: an argument of another kind.
    """
    sources = parameters if type(parameters) is list else _as_list(parameters)
    if holders is not None or not PLAIN.issuperset(map(type, sources)):
        sources, label_of = _unnamed(sources, label_of)
        if holders is not None or not PLAIN.issuperset(map(type, sources)):
            wanted = [p for p in sources if getattr(p, "need_clip", True)]
            label = partial(_name, wanted, sources, parameters, label_of)
            without = partial(shares_of, wanted, [None] * len(wanted), holders, label)
            refusal = None
            try:
                shares = shares_of(wanted, [p.grad for p in wanted], holders, label)
            except TypeError as error:
                if not tells:
                    raise
                shares, refusal = without(), error
            if shares is not None:
                device = sources[0].device if sources else torch.device("cpu")
                gradients = Gradients(shares.tensors, device, label_of, sources, parameters)
                gradients.refusal = refusal
                gradients._shares_without = without if tells else None
                return _spread(gradients, shares)
    tensors = [g for p in sources if (g := p.grad) is not None and getattr(p, "need_clip", True)]
    device = sources[0].device if sources else torch.device("cpu")
    return Gradients(tensors, device, label_of, sources, parameters)


def of_tensors(
    tensors: object,
    label_of: LabelOf = "tensors[{}]".format,
    holders: Holders | None = None,
    *,
    tells: bool = False,
) -> Gradients:
    """The gradients that are the tensors themselves, None left out; raises as above."""
    if isinstance(tensors, Module):
        raise TypeError(
            f"tensors must be the gradients, got {type(tensors).__name__}, a module; expected "
            "[p.grad for p in module.parameters() if p.grad is not None], or norms_by_name(module)"
        )
    items = tensors if type(tensors) is list else _as_list(tensors)
    if not are_tensors(items):
        numbered = [(place, item) for place, item in enumerate(items) if item is not None]
        refuse_no_tensors(
            numbered, "tensors", "the gradients: [p.grad for p in ... if p.grad is not None]"
        )
        items, label_of = [item for _, item in numbered], _picked(label_of, numbered)
    if holders is not None or not PLAIN.issuperset(map(type, items)):
        shares = shares_of(items, items, holders, label_of)
        if shares is not None:
            device = items[0].device if items else torch.device("cpu")
            gradients = Gradients(shares.tensors, device, label_of)
            if tells:
                none: list[Tensor | None] = [None] * len(items)
                gradients._shares_without = partial(shares_of, items, none, holders, label_of)
            return _spread(gradients, shares)
    device = items[0].device if items else torch.device("cpu")
    return Gradients(items, device, label_of)


def _picked(label_of: LabelOf, numbered: Sequence[tuple[int, object]]) -> LabelOf:
    return lambda index: label_of(numbered[index][0])


def of_unclipped(
    parameters: list[Tensor], label_of: LabelOf, holders: Holders | None = None
) -> Gradients:
    """The gradients of parameters, also of those with need_clip = False; raises as above."""
    grads = [parameter.grad for parameter in parameters]
    there = [i for i, grad in enumerate(grads) if grad is not None]
    tensors = [grad for grad in grads if grad is not None]
    device = parameters[0].device if parameters else torch.device("cpu")
    gradients = Gradients(tensors, device, lambda i: label_of(there[i]))
    shares = None
    if holders is not None or not PLAIN.issuperset(map(type, parameters)):
        shares = shares_of(parameters, grads, holders, label_of)
    if shares is None:
        return gradients
    gradients.tensors = shares.tensors
    return _spread(gradients, shares)


def _name(
    wanted: list[Tensor], sources: list[Tensor], handed_over: object, label_of: LabelOf, at: int
) -> str:
    """Names one of the parameters that are to be clipped."""
    position = next(i for i, p in enumerate(sources) if p is wanted[at])
    if isinstance(handed_over, Module):
        return [name for name, _ in handed_over.named_parameters()][position]
    return label_of(position)


def _spread(gradients: Gradients, shares: Shares) -> Gradients:
    """Tells a gradient list what its tensors are pieces of."""
    gradients.sharding, gradients.wrappers = shares.sharding, shares.wrappers
    gradients.absent = shares.absent
    return gradients


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
    """The parameters in an argument of `clip_`, and the name of the i-th; raises as above."""
    if isinstance(parameters, Module):
        check_marks(parameters)
        parameters = parameters.named_parameters()
    items = _as_list(parameters)
    if not PLAIN.issuperset(map(type, items)):
        items, label_of = _unnamed(items, label_of)
    return items, label_of


def _as_list(parameters: object) -> list[Any]:
    """The items of the user's argument, read once."""
    if isinstance(parameters, Tensor):
        return [parameters]
    if isinstance(parameters, Module):
        return parameters_of(parameters)
    if isinstance(parameters, Iterable) and not isinstance(parameters, str | bytes):
        return list(parameters)
    raise TypeError(
        "expected an iterable of tensors, a tensor, a module or (name, parameter) pairs, "
        f"got {type(parameters).__name__}"
    )


def _unnamed(items: list[Any], label_of: LabelOf) -> tuple[list[Tensor], LabelOf]:
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
