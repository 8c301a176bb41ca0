"""Exchanges of numbers between processes, which share collectives where they need like ones.

An exchange is a generator. It yields a `Request`, is sent the reduced numbers, and may ask again.
`together` runs several side by side: requests that are alike travel in one buffer. All processes
serve them in one order, because the requests of an exchange are the same whichever gradients a
process has.

    norms = together([reduction.norm(...) for reduction in reductions])   one SUM, at most one MAX
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from tritonclip.distributed.collectives import all_reduce
from tritonclip.distributed.domain import Domain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class Request(NamedTuple):
    """Numbers to be reduced.

    Attributes:
        numbers: of this process; float64.
        groups: reduced over one after the other.
        domain: that they are of.
        device: that they travel from: of the first parameter, because gradients may be missing.
        largest: the largest number is asked for, not the sum.
        early: the exchange may ask again.
    """

    numbers: Tensor
    groups: Sequence[ProcessGroup]
    domain: Domain
    device: torch.device
    largest: bool
    early: bool = False

    def is_like(self, other: Request) -> bool:
        """Whether one collective serves both."""
        return (
            self.largest == other.largest
            and self.device.type == other.device.type
            and tuple(self.groups) == tuple(other.groups)
        )


Exchange = Generator[Request, Tensor, T]


def together(exchanges: Sequence[Exchange[T]]) -> list[T]:
    """Runs exchanges to their ends, and returns their results in order.

    Raises:
        Exception: that of the first exchange that fails; the others are given up.
    """
    results: dict[int, T] = {}
    waiting: dict[int, Request] = {}
    answers: dict[int, Tensor | None] = dict.fromkeys(range(len(exchanges)))
    while answers:
        for at, answer in answers.items():
            try:
                waiting[at] = exchanges[at].send(answer)  # type: ignore[arg-type]  # None starts it
            except StopIteration as end:
                results[at] = end.value
        answers = _served(waiting) if waiting else {}
    return [results[at] for at in range(len(exchanges))]


def _served(waiting: dict[int, Request]) -> dict[int, Tensor | None]:
    """Serves the requests that are like the most urgent one, and takes them out of `waiting`."""
    # A maximum may come before a sum that others wait for by now, flags before other numbers.
    first = min(waiting.values(), key=lambda request: (not request.early, not request.largest))
    served = {at: waiting.pop(at) for at, one in list(waiting.items()) if one.is_like(first)}
    reduced = _reduced(list(served.values()))
    return dict(zip(served, reduced, strict=True))


def _reduced(requests: Sequence[Request]) -> Sequence[Tensor]:
    """The numbers of like requests after their collective, in the shapes and places that they had.

    A single request's may be overwritten.
    """
    first, *others = requests
    own = [request.numbers for request in requests]
    flat = own[0] if not others else torch.cat([n.reshape(-1).to(first.device) for n in own])
    flat = all_reduce(flat.to(first.device), first.groups, first.domain, largest=first.largest)
    parts = [flat] if not others else flat.split([n.numel() for n in own])
    return [part.view_as(n).to(n.device) for part, n in zip(parts, own, strict=True)]
