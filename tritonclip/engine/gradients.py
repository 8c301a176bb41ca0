"""The gradients that one call clips, collected from parameters, each once.

The pieces of a gradient list that lie here, or the refusal that other processes are told.

The gradient list of a call that takes the gradients themselves, as `get_total_norm` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from types import GeneratorType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module

from tritonclip.distributed.process_groups import Holders
from tritonclip.distributed.shards import Piece, Sharding, Shares, shares_of
from tritonclip.engine.arguments import (
    LabelOf,
    are_tensors,
    as_list,
    device_of,
    names_at,
    places_to_clip,
    refuse_no_tensors,
    unnamed,
)
from tritonclip.engine.checks import PLAIN, some

if TYPE_CHECKING:
    from tritonclip.engine.plan import Plan


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
        sharding: how the list lies over processes; None for whole gradients.
        wrappers: DTensors around the tensors, whose versions count too.
        absent: parameters without a gradient, of a list that has a sharding.
        refusal: why this process refuses its gradients, which were dropped; the others are told.
        shares_without: makes the shares of a list whose refusal the others can be told.
        coalesced: sparse gradients that had to be coalesced into a new tensor, and that tensor.
        versions: tensors of which all readable ones are views; None where they are no views.
    """

    # The values that most lists have: a call sets only those that differ.
    parameters: Sequence[Tensor] | None = None
    plan: Plan | None = None
    addresses: list[int] | None = None
    distinct: list[int] | None = None
    coalesced: Sequence[tuple[Tensor, Tensor]] = ()
    versions: Sequence[Tensor] | None = None
    sharding: Sharding | None = None
    wrappers: Sequence[Tensor] = ()
    absent: Sequence[Tensor] = ()
    refusal: Exception | None = None
    shares_without: Callable[[], Shares | None] | None = None

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
        self.readable: list[Tensor] = []

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
        shares = None if self.shares_without is None else self.shares_without()
        if shares is None:
            return False
        self.readable, self.addresses, self.distinct = [], None, None
        self.refusal = error
        self.spread_(shares)
        return True

    def spread_(self, shares: Shares | None) -> None:
        """Takes pieces in place of DTensors; None for gradients that are whole."""
        if shares is not None:
            self.tensors, self.wrappers, self.absent, self.sharding = shares

    @property
    def n_parameters(self) -> int:
        """The parameters that the list was collected from, with and without a gradient."""
        # FlatGradients, which have no sources, hold each gradient once.
        return len(self.tensors if self.sources is None else self.sources)

    def label(self, index: int) -> str:
        """Names the gradient at an index in messages."""
        return self.labels([index])

    def labels(self, indices: Iterable[int]) -> str:
        """Some gradients for a message."""
        places = self.places()
        found = [i if places is None else places[i] for i in indices]
        return some(names_at(found, self.handed_over, self.label_of))

    def label_of_parameter(self, position: int) -> str:
        """Names the parameter at a position in a list that has a sharding."""
        places = None if self.sources is None else places_to_clip(self.sources)
        place = position if places is None else places[position]
        return names_at([place], self.handed_over, self.label_of)[0]

    def places(self) -> Sequence[int] | None:
        """Where the gradients stand among the sources; None where every source has one."""
        if self.sources is None or len(self.sources) == len(self.tensors):
            return self.distinct
        there = [i for i, p in enumerate(self.sources) if gradient_of(p) is not None]
        return there if self.distinct is None else [there[i] for i in self.distinct]

    def piece(self, index: int) -> Piece:
        """The piece of the gradient at an index; only for a list that has a sharding."""
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

    def count_versions(self, indices: Sequence[int] | None) -> None:
        """Makes a write to a group through addresses visible to autograd."""
        written: Sequence[Tensor] = self.readable
        if self.versions is not None:
            written = self.versions
        elif indices is not None:
            written = [self.readable[i] for i in indices]
        torch.autograd.graph.increment_version(written)

    def warning(self) -> str:
        """Why the list is empty, where the user probably did not intend it; else ""."""
        if not self.sources and isinstance(self.handed_over, Iterator):
            # As torch says of generators. A `filter` that was used before is empty, too.
            kind = "generator" if isinstance(self.handed_over, GeneratorType) else "iterator"
            return f"`parameters` is an empty {kind}, no gradient clipping will occur."
        if self.sources and not any(p.is_leaf for p in self.sources):
            return (
                f"{self.label_of(0)} is computed from other tensors, as a loss is, and has no "
                ".grad, no gradient clipping will occur; expected the parameters of the model, "
                "such as model.parameters()"
            )
        if self.sources and not any(p.requires_grad or p.grad is not None for p in self.sources):
            return (
                f"none of the {len(self.sources)} tensors has a .grad or requires a gradient, no "
                "gradient clipping will occur; expected parameters that require gradients, not "
                "the gradients themselves"
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
    sources = parameters if type(parameters) is list else as_list(parameters)
    if holders is not None or not PLAIN.issuperset(map(type, sources)):
        sources, label_of = unnamed(sources, label_of)
        if holders is not None or not PLAIN.issuperset(map(type, sources)):
            places = places_to_clip(sources)
            wanted = [sources[i] for i in places]

            def label(at: int) -> str:
                return names_at([places[at]], parameters, label_of)[0]

            gradients = Gradients([], device_of(sources), label_of, sources, parameters)
            if are_pieces_(
                gradients, wanted, [p.grad for p in wanted], holders, label, tells=tells
            ):
                return gradients
    tensors = [g for p in sources if (g := p.grad) is not None and getattr(p, "need_clip", True)]
    device = sources[0].device if sources else torch.device("cpu")
    return Gradients(tensors, device, label_of, sources, parameters)


def of_unclipped(
    parameters: list[Tensor], label_of: LabelOf, holders: Holders | None = None
) -> Gradients:
    """The gradients of parameters, also of those with need_clip = False; `tells` as above."""
    grads = [parameter.grad for parameter in parameters]
    there = [i for i, grad in enumerate(grads) if grad is not None]
    tensors = [grad for grad in grads if grad is not None]
    gradients = Gradients(tensors, device_of(parameters), lambda i: label_of(there[i]))
    if holders is not None or not PLAIN.issuperset(map(type, parameters)):
        are_pieces_(gradients, parameters, grads, holders, label_of, tells=True)
    return gradients


def are_pieces_(
    gradients: Gradients,
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    holders: Holders | None,
    label: LabelOf,
    *,
    tells: bool,
) -> bool:
    """Whether gradients are pieces, which their list then takes; False where all are whole.

    Args:
        gradients: their list.
        parameters: all that are to be clipped.
        grads: of each parameter, or None.
        holders: the processes that the gradients are spread over.
        label: names the i-th parameter in messages.
        tells: as for `of_parameters`.

    Raises:
        TypeError, ValueError: meshes or groups that cannot be reduced over; bad gradients or
            numbers of copies, unless the list tells of them.
    """

    def without() -> Shares | None:
        nothing = [None] * len(parameters)
        try:
            return shares_of(parameters, nothing, holders, label)
        except (TypeError, ValueError):
            # Numbers of copies are this process's own; all others meet another error too.
            user = None if holders is None else holders._replace(copies=None)
            return shares_of(parameters, nothing, user, label)

    refusal = None
    try:
        shares = shares_of(parameters, grads, holders, label)
    except (TypeError, ValueError) as error:
        if not tells:
            raise
        refusal = error
    if refusal is not None:
        shares = without()
    gradients.refusal = refusal
    gradients.shares_without = without if tells else None
    gradients.spread_(shares)
    return shares is not None


def of_tensors(
    tensors: object,
    label_of: LabelOf = "tensors[{}]".format,
    holders: Holders | None = None,
    *,
    tells: bool = False,
) -> Gradients:
    """The gradients that are the tensors themselves, None left out; raises as `of_parameters`."""
    if isinstance(tensors, Module):
        raise TypeError(
            f"tensors must be the gradients, got {type(tensors).__name__}, a module; expected "
            "[p.grad for p in module.parameters() if p.grad is not None], or norms_by_name(module)"
        )
    items = tensors if type(tensors) is list else as_list(tensors)
    if not are_tensors(items):
        numbered = [(place, item) for place, item in enumerate(items) if item is not None]
        refuse_no_tensors(
            numbered, "tensors", "the gradients: [p.grad for p in ... if p.grad is not None]"
        )
        items, label_of = [item for _, item in numbered], _picked(label_of, numbered)
    gradients = Gradients(items, device_of(items), label_of)
    if holders is not None or not PLAIN.issuperset(map(type, items)):
        are_pieces_(gradients, items, items, holders, label_of, tells=tells)
    return gradients


def _picked(label_of: LabelOf, numbered: list[tuple[int, object]]) -> LabelOf:
    return lambda index: label_of(numbered[index][0])
