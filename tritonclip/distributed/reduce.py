"""The norm of all pieces, from the norms of the pieces that lie here: one all-reduce.

A SUM of weighted powers, see `powers.py`, or for inf and -inf a MAX. The buffer has one row for the
norm of all, or one for each parameter, with or without a gradient here. All processes find the same
bits: they hold the same sums, and combine them alike. Nothing waits for the device, unless a
gradient is missing that may be a part of a sum, see `parts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonclip.distributed.collectives import all_reduce
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
from tritonclip.distributed.sharding import Sharding

# Norms of some gradients, partial ones or one for each, and what the gradients are pieces of.
Measured = tuple[Tensor, Share]
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
        *,
        each: bool,
        sums: Sums | None = None,
        refused: bool = False,
    ) -> Tensor:
        """The norm of all gradients, float64[1]; or of each parameter's, 0 where nobody has one.

        Args:
            measured: for some gradients partial norms, or with `each` their norms; float64.
            norm_type: p of the p-norm.
            device: of the result.
            each: for each parameter, float64[n_parameters].
            sums: measures Partial gradients, which are not in `measured`; None where there can be
                none.
            refused: this process refuses its gradients, of which it measured none. On a CPU every
                process then raises; elsewhere the norm is NaN.

        Raises:
            Refused: a process of the domain refuses its gradients; on a CPU only.
        """
        own = [(n.reshape(-1).to(device), share) for n, share in measured]
        one = _Exchange(self, norm_type, device, each, sums, refused)
        if math.isinf(norm_type):
            return one.extreme(own, norm_type)
        if norm_type > BINNED:
            return one.by_largest(own)
        return one.by_powers(own)


class Refused(Exception):
    """Some process of the domain refuses its gradients."""


@dataclass(slots=True)
class _Exchange:
    """One reduction of norms."""

    reduction: Reduction
    norm_type: float
    device: torch.device
    each: bool
    sums: Sums | None
    refused: bool

    @property
    def _sharding(self) -> Sharding:
        return self.reduction.sharding

    @property
    def _reads(self) -> bool:
        """Whether a look at numbers waits for nothing."""
        return self.device.type == "cpu"

    def by_powers(self, own: Sequence[Measured]) -> Tensor:
        """The root of sums of powers."""
        # Known to every process without a look at gradients.
        wide = self._sharding.wide or not self._sharding.one_list
        bins = count_bins(self.norm_type, wide=wide)

        def rows_of(measured: Sequence[Measured]) -> Tensor:
            rows = [
                powers_of(norm, self.norm_type, bins, narrow=share.narrow, together=not self.each)
                for norm, share in measured
            ]
            return self._weighted(rows, [share for _, share in measured], bins)

        return roots_of(self._everyones(rows_of, own, largest=False)[0], self.norm_type)

    def by_largest(self, own: Sequence[Measured]) -> Tensor:
        """Norms of a high order: the largest of all is taken out first, by one more all-reduce."""
        largest, own = self._largest(own)
        scale = torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
        rows = []
        for norm, share in own:
            divisor = scale[share.places.on(self.device)] if self.each else scale
            powers = (norm / divisor).pow(self.norm_type).reshape(-1, 1)
            rows.append(powers if self.each else powers.sum(0, keepdim=True))
        total = self._weighted(rows, [share for _, share in own], 1)
        if self.refused:
            # On a CPU all have raised; elsewhere the root of this is NaN.
            total.fill_(-math.inf)
        domain = self._sharding.domain
        total = all_reduce(total, domain.groups, domain, largest=False)
        return scale * positive(total)[:, 0].pow(1 / self.norm_type)

    def _largest(self, own: Sequence[Measured]) -> tuple[Tensor, Sequence[Measured]]:
        """The largest norm but for NaN, and what was measured, now with the sums."""

        def rows_of(measured: Sequence[Measured]) -> Tensor:
            return self._extremes([(n.nan_to_num(nan=0.0), share) for n, share in measured], 1.0)

        rows, everything = self._everyones(rows_of, own, largest=True)
        return extreme_of(rows, 1.0), everything

    def extreme(self, own: Sequence[Measured], norm_type: float) -> Tensor:
        """The largest or the smallest of norms."""
        sign = 1.0 if norm_type > 0 else -1.0

        def rows_of(measured: Sequence[Measured]) -> Tensor:
            return self._extremes(measured, sign)

        return extreme_of(self._everyones(rows_of, own, largest=True)[0], sign)

    def _everyones(
        self,
        rows_of: Callable[[Sequence[Measured]], Tensor],
        own: Sequence[Measured],
        *,
        largest: bool,
    ) -> tuple[Tensor, Sequence[Measured]]:
        """Rows of all processes, and what this one has measured, sums of parts among it.

        The first collective carries flags, where gradients may be Partial, and the others go by
        them.
        """
        domain, rows = self._sharding.domain, self._marked(rows_of(own), largest=largest)
        groups = domain.groups
        if self.sums is not None:
            flags = self.reduction.flags.on(self.device, torch.float64)
            if domain.by_mesh_first:
                groups = groups[len(domain.mesh_groups) :]
                sent = torch.cat([rows.reshape(-1), flags])
                sent = all_reduce(sent, domain.mesh_groups, domain, largest=largest)
                n = rows.numel()
                rows, flags = sent[:n].view_as(rows), sent[n:]
            else:
                flags = all_reduce(flags.clone(), domain.mesh_groups, domain, largest=largest)
            if sums := self.sums(flags):
                rows = self._with_sums(rows, rows_of(sums), sums, largest=largest)
                own = [*own, *sums]
        rows = all_reduce(rows, groups, domain, largest=largest)
        return self._unmarked(rows, largest=largest), own

    def _with_sums(
        self, rows: Tensor, more: Tensor, sums: Sequence[Measured], *, largest: bool
    ) -> Tensor:
        """Rows to which those of sums are added; of other processes too, if `rows` are."""
        domain = self._sharding.domain
        if not largest:
            more = torch.cat([more, torch.zeros_like(rows[-1:])])
        if domain.by_mesh_first:
            if all(share.piece.is_everywhere(domain) for _, share in sums):
                # Of the very same sums, every process has the same bits.
                more = more if largest else more * domain.inner
            else:
                more = all_reduce(more, domain.mesh_groups, domain, largest=largest)
        return torch.maximum(rows, more) if largest else rows + more

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

    def _weighted(self, rows: Sequence[Tensor], shares: Sequence[Share], n_columns: int) -> Tensor:
        """Weighted rows, added up, or one for each parameter."""
        counted = [
            (row * share.piece.weight if share.piece.weight != 1 else row, share)
            for row, share in zip(rows, shares, strict=True)
            # Not multiplied by 0, which would make inf NaN.
            if share.piece.weight
        ]
        n_rows = self._sharding.n_parameters if self.each else 1
        if not self.each and counted:
            return counted[0][0] if len(counted) == 1 else sum(row for row, _ in counted)  # type: ignore[return-value]
        total = torch.zeros((n_rows, n_columns), dtype=torch.float64, device=self.device)
        for row, share in counted:
            total.index_copy_(0, share.places.on(self.device), row)
        return total

    def _extremes(self, measured: Sequence[Measured], sign: float) -> Tensor:
        """The largest of norms times a sign, and flags for inf and NaN: float64[n, 2]."""
        n_rows = self._sharding.n_parameters if self.each else 1
        rows = torch.zeros((n_rows, 2), dtype=torch.float64, device=self.device)
        rows[:, 0] = -math.inf
        for norm, share in measured:
            if not share.piece.weight:
                continue
            # A gradient whose smallest magnitude is inf is told from none at all.
            flags = torch.where(norm.isnan(), 2.0, norm.isinf().to(torch.float64))
            found = torch.stack(
                [(sign * norm).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf), flags],
                1,
            )
            if self.each:
                rows.index_copy_(0, share.places.on(self.device), found)
            elif len(found):
                rows = torch.maximum(rows, found.amax(0, keepdim=True))
        return rows
