"""The norm of all pieces, from the norms of the pieces that lie here: one all-reduce.

A SUM of weighted powers, see `powers.py`, or for inf and -inf a MAX. The buffer has one row for the
norm of all, or one for each parameter, with or without a gradient here. All processes find the same
bits: they hold the same sums, and combine them alike. Nothing waits for the device, unless a
gradient is missing that may be a part of a sum, see `parts.py`.

A reduction is an exchange, see `exchanges.py`, so that several share their collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tritonclip.distributed.exchanges import Exchange, Request
from tritonclip.distributed.places import Places, Share
from tritonclip.distributed.powers import (
    BINNED,
    REFUSED,
    count_bins,
    extreme_of,
    positive,
    powers_of,
    roots_of,
)
from tritonclip.distributed.rows import Measured, Rows
from tritonclip.distributed.sharding import Sharding

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Measures the sums of Partial gradients, given the reduced flags of all processes.
Sums = Callable[[Tensor], list[Measured]]


@dataclass(slots=True, eq=False)
class Reduction:
    """Makes norms of pieces the norms of whole gradients; kept by a plan.

    Attributes:
        sharding: of the list.
        shares: of the plan's groups.
        places: of all gradients of the plan.
        flags: which of the sharding's copied dimensions a gradient here is Partial along.
    """

    sharding: Sharding
    shares: Sequence[Share]
    places: Places
    flags: Places

    def norm(
        self,
        measured: Sequence[Measured],
        norm_type: float,
        device: torch.device,
        home: torch.device,
        *,
        each: bool,
        sums: Sums | None = None,
        refused: bool = False,
    ) -> Exchange[Tensor]:
        """The norm of all gradients, float64[1]; or of each parameter's, 0 where nobody has one.

        Args:
            measured: for some gradients partial norms, or with `each` their norms; float64.
            norm_type: p of the p-norm.
            device: of the result.
            home: of the first parameter, from which numbers travel.
            each: for each parameter, float64[n_parameters].
            sums: measures Partial gradients, which are not in `measured`; None where there can be
                none.
            refused: this process refuses its gradients, of which it measured none. On a CPU every
                process then raises; elsewhere the norm is NaN.

        Raises:
            Refused: a process of the domain refuses its gradients; on a CPU only.
        """
        own = [(n.reshape(-1).to(device), share) for n, share in measured]
        rows = Rows(self.sharding.n_parameters if each else 1, device, each)
        one = _Norm(self, rows, norm_type, home, sums, refused)
        if math.isinf(norm_type):
            return (yield from one.extreme(own, norm_type))
        if norm_type > BINNED:
            return (yield from one.by_largest(own))
        return (yield from one.by_powers(own))


class Refused(Exception):
    """Some process of the domain refuses its gradients."""


@dataclass(slots=True)
class _Norm:
    """One reduction of norms."""

    reduction: Reduction
    rows: Rows
    norm_type: float
    home: torch.device
    sums: Sums | None
    refused: bool

    @property
    def _sharding(self) -> Sharding:
        return self.reduction.sharding

    @property
    def _reads(self) -> bool:
        """Whether numbers can be read without a wait for the device."""
        return self.rows.device.type == "cpu"

    def by_powers(self, own: Sequence[Measured]) -> Exchange[Tensor]:
        """The root of sums of powers."""
        # Known to every process, whichever gradients it has.
        wide = self._sharding.wide or not self._sharding.one_list
        bins = count_bins(self.norm_type, wide=wide)

        def rows_of(measured: Sequence[Measured]) -> Tensor:
            rows = [
                powers_of(
                    norm, self.norm_type, bins, narrow=share.narrow, together=not self.rows.each
                )
                for norm, share in measured
            ]
            return self.rows.weighted(rows, measured, bins)

        rows, _ = yield from self._everyones(rows_of, own, largest=False)
        return roots_of(rows, self.norm_type)

    def by_largest(self, own: Sequence[Measured]) -> Exchange[Tensor]:
        """Norms of a high order: the largest of all is taken out first, by one more all-reduce."""
        rows_of = partial(self.rows.extremes, sign=1.0)
        found, own = yield from self._everyones(rows_of, own, largest=True, early=True)
        largest = extreme_of(found, 1.0)
        # NaN and inf come out of the powers at any scale.
        scale = torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
        rows = []
        for norm, share in own:
            divisor = scale[share.places.on(self.rows.device)] if self.rows.each else scale
            powers = (norm / divisor).pow(self.norm_type).reshape(-1, 1)
            rows.append(powers if self.rows.each else powers.sum(0, keepdim=True))
        total = self.rows.weighted(rows, own, 1)
        if self.refused:
            # Where nobody has raised: the root of this is NaN.
            total.fill_(-math.inf)
        total = yield from self._reduced(total, self._sharding.domain.groups)
        return scale * positive(total)[:, 0].pow(1 / self.norm_type)

    def extreme(self, own: Sequence[Measured], norm_type: float) -> Exchange[Tensor]:
        """The largest or the smallest of norms."""
        sign = 1.0 if norm_type > 0 else -1.0
        rows_of = partial(self.rows.extremes, sign=sign)
        rows, _ = yield from self._everyones(rows_of, own, largest=True)
        return extreme_of(rows, sign)

    def _everyones(
        self,
        rows_of: Callable[[Sequence[Measured]], Tensor],
        own: Sequence[Measured],
        *,
        largest: bool,
        early: bool = False,
    ) -> Exchange[tuple[Tensor, Sequence[Measured]]]:
        """Rows of all processes, and the norms of this one, with those of sums of parts.

        The first collective carries flags, where gradients may be Partial, and the others go by
        them. `early` where the caller asks for more.
        """
        domain, rows = self._sharding.domain, self._marked(rows_of(own), largest=largest)
        groups = domain.groups
        if self.sums is not None:
            flags = self.reduction.flags.on(self.rows.device, torch.float64)
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
                own = [*own, *sums]
        rows = yield from self._reduced(rows, groups, largest=largest, early=early)
        return self._unmarked(rows, largest=largest), own

    def _of_sums(
        self, more: Tensor, sums: Sequence[Measured], *, largest: bool
    ) -> Exchange[Tensor]:
        """The rows of sums, of as many processes as those that they are added to."""
        domain = self._sharding.domain
        if not largest:
            more = torch.cat([more, torch.zeros_like(more[-1:])])
        if not domain.by_mesh_first:
            return more
        if all(share.piece.is_everywhere(domain) for _, share in sums):
            # Of the very same sums, every process has the same bits.
            return more if largest else more * domain.inner
        return (yield from self._reduced(more, domain.mesh_groups, largest=largest, early=True))

    def _reduced(
        self,
        numbers: Tensor,
        groups: Sequence[ProcessGroup],
        *,
        largest: bool = False,
        early: bool = False,
    ) -> Exchange[Tensor]:
        """Numbers after a collective over groups, if there are any."""
        if not groups:
            return numbers
        return (yield Request(numbers, groups, self._sharding.domain, self.home, largest, early))

    def _marked(self, rows: Tensor, *, largest: bool) -> Tensor:
        """Rows that tell whether this process refuses its gradients: by a flag, or a row of sums.

        No other number would do for sums, where inf and NaN of another process hide it.
        """
        if not largest:
            return torch.cat([rows, rows.new_full((1, rows.shape[1]), float(self.refused))])
        if self.refused and rows.numel():
            rows[:, 1] = REFUSED
        return rows

    def _unmarked(self, rows: Tensor, *, largest: bool) -> Tensor:
        """The rows alone. Raises where a process refused its gradients, if that costs no wait."""
        if largest:
            if self._reads and rows.numel() and float(rows[0, 1]) == REFUSED:
                raise Refused
            return rows
        n_refused = rows[-1, 0]
        if not self._reads:
            return torch.where(n_refused > 0, math.nan, rows[:-1])
        if n_refused > 0:
            raise Refused
        return rows[:-1]
