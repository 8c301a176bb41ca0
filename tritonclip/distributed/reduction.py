"""The norm of all shards, from the norms of the shards that lie here: one all-reduce.

Norms travel as float64 numbers that can be added up, or compared: a row for the norm of all
gradients, or one for each parameter, with or without a gradient here.

    p > 0      weight * norm**p; above order 6 of norms over the largest, which takes a maximum
    0          weighted counts
    inf, -inf  the norm or its negative, and a flag: maxima may lose NaN

All processes find the same bits: they hold the same sums, and combine them alike. Nothing waits for
the device, unless a gradient is missing that may be a term of a sum, see `partial_sums.py`.

A reduction is an exchange: a generator that yields a `Request`, is sent the reduced numbers, and
may yield another. `run_exchanges` runs several side by side: requests that are alike travel in one
buffer. All processes serve them in one order, because the requests of an exchange are the same
whichever gradients a process has.

    run_exchanges([NormReduction(...).run(measured), ...])   one SUM, at most one MAX
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from tritonclip.backends.operators import MOST_IN_FLOAT64
from tritonclip.distributed.process_groups import Domain, all_reduce
from tritonclip.distributed.shards import LocalShard, Sharding
from tritonclip.modes import outside_inference


class CachedIntegers:
    """Integers, as of positions among the parameters; on a device from the first use on."""

    __slots__ = ("_on", "numbers")

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self._on: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def on(self, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
        """The integers, 1-d."""
        if (device, dtype) not in self._on:
            # Copied before anything goes on, as other streams may read it; never an inference
            # tensor, which belongs to one mode.
            uploaded = outside_inference(torch.tensor)
            self._on[device, dtype] = uploaded(self.numbers, dtype=dtype, device=device)
        return self._on[device, dtype]


@dataclass(slots=True, eq=False)
class ShardGroup:
    """The shard of each gradient of a plan's group, and their positions among the parameters."""

    shard: LocalShard
    positions: CachedIntegers


# Norms of some gradients, partial ones or one for each, and the group of these gradients.
MeasuredShards = tuple[Tensor, ShardGroup]


# A flag of maxima; 1 and 2 are for inf and NaN.
REJECTED = 3.0


def extreme_of(rows: Tensor, sign: float) -> Tensor:
    """The norm of each row of extremes, 1-d."""
    value, flag = rows.unbind(1)
    # Nobody has such a gradient, or an element of it.
    value = torch.where((flag == 0) & value.isinf(), 0.0, sign * value)
    return torch.where(flag >= 2, math.nan, value)


T = TypeVar("T")


class Request(NamedTuple):
    """Numbers of this process, float64, to be added up over groups, or compared."""

    numbers: Tensor
    groups: Sequence[dist.ProcessGroup]
    domain: Domain
    # They travel from that of the first parameter, because gradients may be missing.
    device: torch.device
    largest: bool
    # The exchange may ask again.
    early: bool = False

    def is_like(self, other: Request) -> bool:
        """Whether one collective serves both."""
        return (
            self.largest == other.largest
            and self.device.type == other.device.type
            and tuple(self.groups) == tuple(other.groups)
        )


Exchange = Generator[Request, Tensor, T]


def run_exchanges(exchanges: Sequence[Exchange[T]]) -> list[T]:
    """The results of exchanges, in order; the error of the first that fails ends them all."""
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
    # A maximum may come before a sum that others wait for, flags before other numbers.
    first = min(waiting.values(), key=lambda request: (not request.early, not request.largest))
    served = {at: waiting.pop(at) for at, request in [*waiting.items()] if request.is_like(first)}
    reduced = _reduced(list(served.values()))
    return dict(zip(served, reduced, strict=True))


def _reduced(requests: Sequence[Request]) -> Sequence[Tensor]:
    """The numbers of like requests after their collective, shaped and placed as before."""
    first, *others = requests
    sent = [request.numbers for request in requests]
    flat = sent[0] if not others else torch.cat([n.reshape(-1).to(first.device) for n in sent])
    flat = all_reduce(flat.to(first.device), first.groups, first.domain, largest=first.largest)
    parts = [flat] if not others else flat.split([n.numel() for n in sent])
    return [part.view_as(n).to(n.device) for part, n in zip(parts, sent, strict=True)]


# Measures the sums of Partial gradients, given the reduced flags of all processes.
Sums = Callable[[Tensor], list[MeasuredShards]]


@dataclass(slots=True, eq=False)
class Reduction:
    """How the shards of a plan's groups and gradients lie; `flags` are `sharding.is_partial`."""

    sharding: Sharding
    shard_groups: Sequence[ShardGroup]
    positions: CachedIntegers
    flags: CachedIntegers


class Rejected(Exception):
    """Some process of the domain rejects its gradients."""


@dataclass(slots=True)
class NormReduction:
    """One reduction of the norm of all gradients, or of each."""

    reduction: Reduction
    norm_type: float
    # Of the norm, and of the first parameter, from which numbers travel.
    device: torch.device
    home: torch.device
    each: bool
    # None where no gradient can be Partial.
    sums: Sums | None
    # This process measured no gradients. On a CPU all then raise `Rejected`, else the norm is NaN.
    rejected: bool

    @property
    def _sharding(self) -> Sharding:
        return self.reduction.sharding

    @property
    def _reads(self) -> bool:
        """Whether numbers can be read without a wait for the device."""
        return self.device.type == "cpu"

    @property
    def _n_rows(self) -> int:
        return self._sharding.n_parameters if self.each else 1

    def run(self, measured: Sequence[MeasuredShards]) -> Exchange[Tensor]:
        """The norm of all gradients, float64[1]; or of each parameter's, 0 where nobody has one."""
        measured = [(n.reshape(-1).to(self.device), group) for n, group in measured]
        if math.isinf(self.norm_type):
            return (yield from self._extreme(measured))
        if self.norm_type > MOST_IN_FLOAT64:
            return (yield from self._by_largest(measured))
        return (yield from self._by_powers(measured))

    def _by_powers(self, measured: Sequence[MeasuredShards]) -> Exchange[Tensor]:
        p = self.norm_type

        def powers_of(norms: Tensor) -> Tensor:
            if p == 2 and not self.each:
                return torch.dot(norms, norms).reshape(1, 1)
            powers = (norms if p == 0 else norms.pow(p)).reshape(-1, 1)
            return powers if self.each or len(powers) == 1 else powers.sum(0, keepdim=True)

        def rows_of(measured: Sequence[MeasuredShards]) -> Tensor:
            return self._weighted([powers_of(norms) for norms, _ in measured], measured)

        sums, _ = yield from self._everyones(rows_of, measured, largest=False)
        if p == 0:
            return sums[:, 0].round()
        return (sums.sqrt() if p == 2 else sums.pow(1 / p))[:, 0]

    def _by_largest(self, measured: Sequence[MeasuredShards]) -> Exchange[Tensor]:
        """Norms of a high order: the largest of all is taken out first, by one more all-reduce."""
        rows_of = partial(self._extremes, sign=1.0)
        found, measured = yield from self._everyones(rows_of, measured, largest=True, early=True)
        largest = extreme_of(found, 1.0)
        # NaN and inf come out of the powers at any scale.
        scale = torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
        rows = []
        for norm, group in measured:
            divisor = scale[group.positions.on(self.device)] if self.each else scale
            powers = (norm / divisor).pow(self.norm_type).reshape(-1, 1)
            rows.append(powers if self.each else powers.sum(0, keepdim=True))
        total = self._weighted(rows, measured)
        if self.rejected:
            # Where nobody has raised.
            total.fill_(math.nan)
        total = yield from self._reduced(total, self._sharding.domain.groups)
        return scale * total[:, 0].pow(1 / self.norm_type)

    def _extreme(self, measured: Sequence[MeasuredShards]) -> Exchange[Tensor]:
        sign = 1.0 if self.norm_type > 0 else -1.0
        rows_of = partial(self._extremes, sign=sign)
        rows, _ = yield from self._everyones(rows_of, measured, largest=True)
        return extreme_of(rows, sign)

    def _weighted(self, powers: Sequence[Tensor], measured: Sequence[MeasuredShards]) -> Tensor:
        """Weighted powers, added up, or at the positions of their parameters: float64[n, 1]."""
        counted = [
            (power * group.shard.weight if group.shard.weight != 1 else power, group)
            for power, (_, group) in zip(powers, measured, strict=True)
            # Not multiplied by 0, which would make inf NaN.
            if group.shard.weight
        ]
        if not self.each and counted:
            return counted[0][0] if len(counted) == 1 else sum(power for power, _ in counted)  # type: ignore[return-value]
        rows = torch.zeros((self._n_rows, 1), dtype=torch.float64, device=self.device)
        for power, group in counted:
            rows.index_copy_(0, group.positions.on(self.device), power)
        return rows

    def _extremes(self, measured: Sequence[MeasuredShards], sign: float) -> Tensor:
        """The largest of norms times a sign, and flags for inf and NaN: float64[n, 2]."""
        rows = torch.zeros((self._n_rows, 2), dtype=torch.float64, device=self.device)
        rows[:, 0] = -math.inf
        for norm, group in measured:
            if not group.shard.weight:
                continue
            # A gradient whose smallest magnitude is inf differs from no gradient.
            flags = torch.where(norm.isnan(), 2.0, norm.isinf().to(torch.float64))
            found = torch.stack(
                [(sign * norm).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf), flags],
                1,
            )
            if self.each:
                rows.index_copy_(0, group.positions.on(self.device), found)
            elif len(found):
                rows = torch.maximum(rows, found.amax(0, keepdim=True))
        return rows

    def _everyones(
        self,
        rows_of: Callable[[Sequence[MeasuredShards]], Tensor],
        measured: Sequence[MeasuredShards],
        *,
        largest: bool,
        early: bool = False,
    ) -> Exchange[tuple[Tensor, Sequence[MeasuredShards]]]:
        """Rows of all processes, and the norms of this one, with those of Partial sums."""
        domain, rows = self._sharding.domain, self._marked(rows_of(measured), largest=largest)
        groups = domain.groups
        if self.sums is not None:
            # The first collective carries flags, and the others go by them.
            flags = self.reduction.flags.on(self.device, torch.float64)
            sent = flags.clone()
            if domain.by_mesh_first:
                groups = groups[len(domain.mesh_groups) :]
                sent = torch.cat([rows.reshape(-1), flags])
            sent = yield from self._reduced(sent, domain.mesh_groups, largest=largest, early=True)
            if domain.by_mesh_first:
                rows, sent = sent[: rows.numel()].view_as(rows), sent[rows.numel() :]
            if sums := self.sums(sent):
                more = yield from self._of_sums(rows_of(sums), sums, largest=largest)
                rows = torch.maximum(rows, more) if largest else rows + more
                measured = [*measured, *sums]
        rows = yield from self._reduced(rows, groups, largest=largest, early=early)
        return self._unmarked(rows, largest=largest), measured

    def _of_sums(
        self, more: Tensor, sums: Sequence[MeasuredShards], *, largest: bool
    ) -> Exchange[Tensor]:
        """The rows of sums, of as many processes as those that they are added to."""
        domain = self._sharding.domain
        if not largest:
            more = torch.cat([more, torch.zeros_like(more[-1:])])
        if not domain.by_mesh_first:
            return more
        if all(group.shard.is_everywhere(domain) for _, group in sums):
            # Of the very same sums, every process has the same bits.
            return more if largest else more * domain.inner
        return (yield from self._reduced(more, domain.mesh_groups, largest=largest, early=True))

    def _reduced(
        self,
        sent: Tensor,
        groups: Sequence[dist.ProcessGroup],
        *,
        largest: bool = False,
        early: bool = False,
    ) -> Exchange[Tensor]:
        """Numbers after a collective over groups, if there are any."""
        if not groups:
            return sent
        return (yield Request(sent, groups, self._sharding.domain, self.home, largest, early))

    def _marked(self, rows: Tensor, *, largest: bool) -> Tensor:
        """Rows that say whether this process rejects its gradients."""
        if not largest:
            # In a row of its own, which no inf or NaN of another process hides.
            return torch.cat([rows, rows.new_full((1, rows.shape[1]), float(self.rejected))])
        if self.rejected and rows.numel():
            rows[:, 1] = REJECTED
        return rows

    def _unmarked(self, rows: Tensor, *, largest: bool) -> Tensor:
        """The rows alone. Raises where a process rejected its gradients, if that costs no wait."""
        if largest:
            if self._reads and rows.numel() and float(rows[0, 1]) == REJECTED:
                raise Rejected
            return rows
        n_refused = rows[-1, 0]
        if not self._reads:
            return torch.where(n_refused > 0, math.nan, rows[:-1])
        if n_refused > 0:
            raise Rejected
        return rows[:-1]
