"""Collectives over the groups of a domain: numbers are reduced, objects told to every process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tritonclip.distributed.domain import Domain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def all_reduce(
    buffer: Tensor, groups: Sequence[ProcessGroup], domain: Domain, *, largest: bool = False
) -> Tensor:
    """Sums, or largest numbers, over one group after the other; in place where it can."""
    from torch import distributed as dist

    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    for group in groups:
        carrier = domain.carrier(group, buffer.device)
        sent = buffer if carrier is None else buffer.to(carrier)
        dist.all_reduce(sent, op=op, group=group)
        buffer = sent.to(buffer.device)
    return buffer


def everyones(own: Any, domain: Domain) -> dict[int, Any]:
    """An object of each process of the domain, by rank; each of them calls this, and waits."""
    from torch import distributed as dist

    known = {dist.get_rank(): own}
    for group in domain.groups:
        gathered: list[dict[int, Any]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(gathered, known, group=group)
        known = {rank: one for part in gathered for rank, one in part.items()}
    return dict(sorted(known.items()))
