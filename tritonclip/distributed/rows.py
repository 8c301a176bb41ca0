"""The rows of a reduction: one for the norm of all gradients, or one for each parameter's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonclip.distributed.places import Share

# Norms of some gradients, partial ones or one for each, and the share of these gradients.
Measured = tuple[Tensor, Share]


@dataclass(frozen=True, slots=True)
class Rows:
    """Makes the rows of a reduction.

    Attributes:
        n: parameters, or 1.
        device: of the rows.
        each: one for each parameter.
    """

    n: int
    device: torch.device
    each: bool

    def weighted(
        self, powers: Sequence[Tensor], measured: Sequence[Measured], n_columns: int
    ) -> Tensor:
        """Weighted powers, added up, or at the places of their parameters: float64[n, n_columns].

        Args:
            powers: rows for each entry of `measured`.
            measured: says whose they are.
            n_columns: numbers of a row.
        """
        counted = [
            (own * share.piece.weight if share.piece.weight != 1 else own, share)
            for own, (_, share) in zip(powers, measured, strict=True)
            # Not multiplied by 0, which would make inf NaN.
            if share.piece.weight
        ]
        if not self.each and counted:
            return counted[0][0] if len(counted) == 1 else sum(own for own, _ in counted)  # type: ignore[return-value]
        rows = torch.zeros((self.n, n_columns), dtype=torch.float64, device=self.device)
        for own, share in counted:
            rows.index_copy_(0, share.places.on(self.device), own)
        return rows

    def extremes(self, measured: Sequence[Measured], sign: float) -> Tensor:
        """The largest of norms times a sign, and flags for inf and NaN: float64[n, 2]."""
        rows = torch.zeros((self.n, 2), dtype=torch.float64, device=self.device)
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
