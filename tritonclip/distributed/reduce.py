"""The norm of all pieces, from the norms of the pieces that lie here: one all-reduce.

    p > 0      SUM of weight * norm**p, in float64; a vector of bins where that might not fit
    0          SUM of weighted counts
    inf, -inf  MAX of the norm or of its negative, beside a flag: maxima may lose NaN

The buffer has one row for the norm of all, or one for each parameter, with or without a gradient
here. All processes find the same bits: they hold the same sums, and combine them alike. Nothing
waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonclip.distributed.domain import Domain
from tritonclip.distributed.sharding import Piece, Sharding

# Orders whose powers of norms narrower than float64 fit it: (3.4e38)**6 = 1.6e231 and
# (1.4e-45)**6 = 7.5e-270.
_UNBINNED = 6.0
# Orders up to which bins are few: 77 at 64. Beyond, the largest norm is found first.
_BINNED = 64.0
# Binary exponents of the powers in a bin: from 2**-950 to 2**950, so that sums of 2**70 fit.
_SPAN = 1900.0
# Norms in float64, denormal ones and sums of 2**70 too, lie within this binary exponent of 1.
_EXPONENTS = 1100.0


class Places:
    """Positions of gradients among the parameters; on a device from the first use on."""

    __slots__ = ("_on", "positions")

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = positions
        self._on: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The positions, int64[n]."""
        if device not in self._on:
            # Never an inference tensor, which belongs to one mode.
            with torch.inference_mode(False):
                self._on[device] = torch.tensor(self.positions, dtype=torch.int64, device=device)
        return self._on[device]


@dataclass(slots=True, eq=False)
class Share:
    """The gradients of one of a plan's groups, as pieces.

    Attributes:
        piece: what each of them is.
        places: theirs among the parameters.
        narrow: they are no float64.
    """

    piece: Piece
    places: Places
    narrow: bool


@dataclass(slots=True, eq=False)
class Reduction:
    """Makes norms of pieces the norms of whole gradients; kept by a plan.

    Attributes:
        sharding: of the list.
        shares: of the plan's groups.
        places: of all gradients of the plan.
    """

    sharding: Sharding
    shares: Sequence[Share]
    places: Places

    def norm(
        self, norms: Sequence[Tensor], norm_type: float, device: torch.device, *, each: bool
    ) -> Tensor:
        """The norm of all gradients, float64[1]; or of each parameter's, 0 where nobody has one.

        Args:
            norms: for each group partial norms, or with `each` the norm of each gradient; float64.
            norm_type: p of the p-norm.
            device: of the result.
            each: for each parameter, float64[n_parameters].
        """
        own = [n.reshape(-1).to(device) for n in norms]
        if math.isinf(norm_type):
            return self._extreme(own, norm_type, device, each)
        if norm_type > _BINNED:
            return self._by_largest(own, norm_type, device, each)
        bins = self._bins(norm_type)
        rows = [
            _powers(norm, norm_type, bins, narrow=share.narrow, together=not each)
            for norm, share in zip(own, self.shares, strict=True)
        ]
        return _roots(self._sum(self._weighted(rows, bins, device, each)), norm_type)

    def _bins(self, norm_type: float) -> int:
        """How many bins hold power sums; known to every process without a look at gradients."""
        wide = self.sharding.wide or not self.sharding.one_list
        if norm_type == 0 or (norm_type <= _UNBINNED and not wide):
            return 1
        return 2 * round(_EXPONENTS / _width(norm_type)) + 1

    def _weighted(
        self, rows: Sequence[Tensor], n_columns: int, device: torch.device, each: bool
    ) -> Tensor:
        """Weighted rows of all groups, added up, or one for each parameter."""
        counted = [
            (row * share.piece.weight if share.piece.weight != 1 else row, share)
            for row, share in zip(rows, self.shares, strict=True)
            # Not multiplied by 0, which would make inf NaN.
            if share.piece.weight
        ]
        n_rows = self.sharding.n_parameters if each else 1
        if not each and counted:
            return counted[0][0] if len(counted) == 1 else sum(row for row, _ in counted)  # type: ignore[return-value]
        total = torch.zeros((n_rows, n_columns), dtype=torch.float64, device=device)
        for row, share in counted:
            total.index_copy_(0, share.places.on(device), row)
        return total

    def _by_largest(
        self, own: Sequence[Tensor], norm_type: float, device: torch.device, each: bool
    ) -> Tensor:
        """Norms of a high order: the largest of all is taken out first, by one more all-reduce."""
        largest = self._extreme([n.nan_to_num(nan=0.0) for n in own], math.inf, device, each)
        scale = torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
        rows = []
        for norm, share in zip(own, self.shares, strict=True):
            divisor = scale[share.places.on(device)] if each else scale
            powers = (norm / divisor).pow(norm_type).reshape(-1, 1)
            rows.append(powers if each else powers.sum(0, keepdim=True))
        total = self._sum(self._weighted(rows, 1, device, each))
        return scale * total[:, 0].pow(1 / norm_type)

    def _extreme(
        self, own: Sequence[Tensor], norm_type: float, device: torch.device, each: bool
    ) -> Tensor:
        """The largest or the smallest of norms."""
        from torch.distributed import ReduceOp

        sign = 1.0 if norm_type > 0 else -1.0
        n_rows = self.sharding.n_parameters if each else 1
        rows = torch.zeros((n_rows, 2), dtype=torch.float64, device=device)
        rows[:, 0] = -math.inf
        for norm, share in zip(own, self.shares, strict=True):
            if not share.piece.weight:
                continue
            # A gradient whose smallest magnitude is inf is told from none at all.
            flags = torch.where(norm.isnan(), 2.0, norm.isinf().to(torch.float64))
            found = torch.stack(
                [(sign * norm).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf), flags],
                1,
            )
            if each:
                rows.index_copy_(0, share.places.on(device), found)
            elif len(found):
                rows = torch.maximum(rows, found.amax(0, keepdim=True))
        value, flag = self._all_reduce(rows, ReduceOp.MAX).unbind(1)
        # Nobody has such a gradient, or an element of it.
        value = torch.where((flag == 0) & value.isinf(), 0.0, sign * value)
        return torch.where(flag == 2, math.nan, value)

    def _sum(self, rows: Tensor) -> Tensor:
        from torch.distributed import ReduceOp

        return self._all_reduce(rows, ReduceOp.SUM)

    def _all_reduce(self, buffer: Tensor, op: object) -> Tensor:
        """Reduces over one group after the other, in place where it can."""
        from torch import distributed as dist

        domain = self.sharding.domain
        for at, group in enumerate(domain.groups):
            carrier = domain.carrier(at, buffer.device)
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


def sum_parts(parts: Sequence[Tensor], piece: Piece) -> list[Tensor]:
    """The sums, or means, whose parts are gradients: in new memory, by one all-reduce a dimension.

    Args:
        parts: real, of one dtype and device.
        piece: says over which groups.
    """
    from torch import distributed as dist

    flat = torch.cat([part.reshape(-1) for part in parts])
    for group in piece.sums_over:
        dist.all_reduce(flat, group=group)
    if piece.divisor != 1:
        flat.div_(piece.divisor)
    sizes = [part.numel() for part in parts]
    return [one.view(part.shape) for one, part in zip(flat.split(sizes), parts, strict=True)]


def _width(norm_type: float) -> float:
    """Binary exponents of the norms in a bin."""
    return min(_SPAN / norm_type, _SPAN)


def _powers(norms: Tensor, norm_type: float, bins: int, *, narrow: bool, together: bool) -> Tensor:
    """norm**p, a row each of one number a bin: by magnitude, so that every power fits."""
    if bins == 1 or (narrow and norm_type <= _UNBINNED):
        if norm_type == 2 and together:
            powers = torch.dot(norms, norms).reshape(1, 1)
        else:
            powers = (norms if norm_type == 0 else norms.pow(norm_type)).reshape(-1, 1)
        half = bins // 2
        rows = pad(powers, (half, half)) if half else powers
    else:
        width, half = _width(norm_type), bins // 2
        exponents = torch.frexp(norms).exponent.to(norms.dtype)
        at = torch.round(exponents / width).clamp(-half, half)
        # In two factors: one may not fit.
        shift = torch.exp2(-at * (width / 2))
        powers = (norms * shift * shift).pow(norm_type)
        columns = torch.arange(-half, half + 1, device=norms.device)
        rows = torch.where(at[:, None] == columns, powers[:, None], 0.0)
    return rows.sum(0, keepdim=True) if together and rows.shape[0] != 1 else rows


def _roots(sums: Tensor, norm_type: float) -> Tensor:
    """The norm of each row of power sums, 1-d."""
    bins = sums.shape[1]
    if norm_type == 0:
        return sums[:, 0].round()
    roots = sums.sqrt() if norm_type == 2 else sums.pow(1 / norm_type)
    if bins == 1:
        return roots[:, 0]
    columns = torch.arange(-(bins // 2), bins // 2 + 1, dtype=sums.dtype, device=sums.device)
    shift = torch.exp2(columns * (_width(norm_type) / 2))
    roots = roots * shift * shift
    largest = roots.amax(1, keepdim=True)
    # Dividing by 1 instead of 0, inf and NaN gives just these.
    scale = torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
    return (scale * (roots / scale).pow(norm_type).sum(1, keepdim=True).pow(1 / norm_type))[:, 0]
