"""The norms of all processes that hold a gradient list, from those that each of them measured.

Every process of a list reduces the same norms, whichever gradients it has, and enters the same
collectives. Norms travel as float64 numbers: a row for the norm of all gradients, or one for each
parameter, with or without a gradient here.

    p up to 6    one sum of weight * norm**p
    inf          one maximum of norms, with a flag for NaN, which maxima may lose
    other p      this maximum, then a sum of powers of norms over it

All processes find the same bits: they hold the same sums, and combine them alike. Nothing waits for
the device, unless a gradient is missing that may be a term of a sum.

When one process rejects its gradients, all processes raise and none hangs: it enters the reduction
as if it had none, and marks its numbers. On a CPU, where numbers are read at once, all raise before
anything is written. On an accelerator the others have the norm NaN, as for a NaN of that process.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.backends.choose import layout_of
from tritonclip.backends.operators import MOST_IN_FLOAT64, as_tensor, moduli_of
from tritonclip.distributed.agreement import agree
from tritonclip.distributed.process_groups import all_reduce
from tritonclip.distributed.shards import LocalShard, Sharding


class ShardNorms(NamedTuple):
    """Norms of gradients with one shard: partial ones, or one for each at its position."""

    norms: Tensor
    shard: LocalShard
    positions: tuple[int, ...]


class PartialSum(NamedTuple):
    """A term of a gradient's sum, or the sum: real, or with `pairs` complex numbers as pairs."""

    position: int
    tensor: Tensor
    pairs: bool
    shard: LocalShard


def can_read(device: torch.device) -> bool:
    """Whether numbers of a device can be read without a wait."""
    return device.type == "cpu"


@dataclass(slots=True, eq=False)
class Reduction:
    """One reduction of the norm of all gradients, or of one for each of `n_each` rows.

    Attributes:
        sharding: how the list lies.
        norm_type: p of the p-norm.
        device: of the numbers: that of the first parameter, as gradients may be missing.
        error: that of a process that rejects its gradients; on a CPU all then raise, else the norm
            is NaN.
        n_each: rows, of norms of each gradient; None for one norm.
        terms: the Partial gradients here; None where none can be.
        absent: parameters without a gradient here, by position.
    """

    sharding: Sharding
    norm_type: float
    device: torch.device
    error: Exception | None = None
    n_each: int | None = None
    terms: Sequence[PartialSum] | None = None
    absent: Mapping[int, Tensor] = field(default_factory=dict)

    def run(self, measured: Sequence[ShardNorms]) -> Tensor:
        """The norm of all gradients, float64[1]; or of each parameter's, 0 where nobody has one.

        Raises the error of a process that entered with a rejected list.
        """
        p, by_largest = self.norm_type, self.norm_type > MOST_IN_FLOAT64
        measured = [
            part._replace(norms=part.norms.reshape(-1).to(self.device)) for part in measured
        ]
        rows, rejected, measured = self._everyones(measured, largest=by_largest)
        if by_largest:
            norms, flags = rows.view(2, -1).unbind()
            norms = torch.where(flags > 0, math.nan, norms)
        else:
            norms = rows.sqrt() if p == 2 else rows.pow(1 / p)
        if MOST_IN_FLOAT64 < p < math.inf:
            # NaN and inf come out of the powers at any scale.
            scale = torch.where((norms > 0) & (norms < math.inf), norms, 1.0)
            scaled = []
            for part in measured:
                divisor = scale
                if self.n_each is not None:
                    divisor = scale[self.sharding.upload(part.positions, self.device)]
                scaled.append(part._replace(norms=part.norms / divisor))
            powers = all_reduce(self._sums_of_powers(scaled), self.sharding.domain.groups)
            norms = scale * powers.pow(1 / p)
        return norms if can_read(self.device) else torch.where(rejected > 0, math.nan, norms)

    def _everyones(
        self, measured: Sequence[ShardNorms], *, largest: bool
    ) -> tuple[Tensor, Tensor, Sequence[ShardNorms]]:
        """Rows of all processes; the mark of those that reject their gradients, if it is not read.

        And the norms of this process, with those of Partial sums.
        """
        domain, rows_of = self.sharding.domain, self._maxima if largest else self._sums_of_powers
        groups, mesh_groups = domain.groups, domain.mesh_groups
        rows = rows_of(measured)
        # A mark in a separate number, which no inf or NaN of another process hides.
        numbers = torch.cat([rows, rows.new_full((1,), float(self.error is not None))])
        if self.terms is not None and (self.sharding.copied or self.terms):
            # The first collective carries flags, and the others go by them.
            flags = self.sharding.upload(self.sharding.is_partial, self.device, torch.float64)
            if domain.by_mesh_first:
                groups = groups[len(mesh_groups) :]
                sent = torch.cat([numbers, flags])
                sent = all_reduce(sent, mesh_groups, largest=largest)
                numbers, flags = sent.split([len(numbers), len(flags)])
            else:
                flags = all_reduce(flags.clone(), mesh_groups, largest=largest)
            if sums := self._measure_sums(self.terms, flags):
                more = rows_of(sums)
                if domain.by_mesh_first:
                    # A sum over all processes of the meshes is whole on each of them.
                    if not all(
                        math.prod(group.size() for group in shard.sums_over) == domain.inner
                        and shard.weight == 1 / domain.inner
                        for _, shard, _ in sums
                    ):
                        more = all_reduce(more, mesh_groups, largest=largest)
                    elif not largest:
                        # Each process has the same bits of these sums, and one weight of them.
                        more = more * domain.inner
                rows = numbers[:-1]
                rows = torch.maximum(rows, more) if largest else rows + more
                numbers = torch.cat([rows, numbers[-1:]])
                measured = [*measured, *sums]
        numbers = all_reduce(numbers, groups, largest=largest)
        if can_read(self.device) and float(numbers[-1]) > 0:
            # Of which one process has the reason.
            agree({}, self.error, domain)
        return numbers[:-1], numbers[-1], measured

    def _sums_of_powers(self, measured: Sequence[ShardNorms]) -> Tensor:
        """Weighted powers, added up, or at the positions of their parameters."""
        p, rows = self.norm_type, self._zeros()
        for norms, shard, positions in measured:
            # Not multiplied by 0, which would make inf NaN.
            if not shard.weight:
                continue
            if self.n_each is not None:
                powers = norms.pow(p) * shard.weight
                rows.index_copy_(0, self.sharding.upload(positions, self.device), powers)
            else:
                power = torch.dot(norms, norms) if p == 2 else norms.pow(p).sum()
                rows.add_(power, alpha=shard.weight)
        return rows

    def _maxima(self, measured: Sequence[ShardNorms]) -> Tensor:
        """Norms, then flags for NaN: the largest, or at the positions of their parameters."""
        rows = torch.stack([self._zeros(), self._zeros()])
        for norms, shard, positions in measured:
            if not shard.weight:
                continue
            found = torch.stack([norms.nan_to_num(0.0, math.inf), norms.isnan().to(norms)])
            if self.n_each is not None:
                rows.index_copy_(1, self.sharding.upload(positions, self.device), found)
            elif len(norms):
                rows = torch.maximum(rows, found.amax(1, keepdim=True))
        return rows.view(-1)

    def _zeros(self) -> Tensor:
        n_rows = 1 if self.n_each is None else self.n_each
        return torch.zeros(n_rows, dtype=torch.float64, device=self.device)

    def _measure_sums(self, terms: Sequence[PartialSum], flags: Tensor) -> list[ShardNorms]:
        """Measures the sums of which gradients are terms, here or in another process."""
        sharding = self.sharding
        # A parameter that requires no gradient has none anywhere.
        missing = {at: one for at, one in self.absent.items() if one.requires_grad}
        if any(at in missing for at, _ in sharding.copied):
            terms = [*terms, *zeros_for(missing, sharding, flags.tolist())]
        alike: dict[tuple[object, ...], list[PartialSum]] = {}
        for term in _sums_of(terms):
            key = term.shard.weight, term.shard.sums_over, term.tensor.dtype, term.pairs
            alike.setdefault(key, []).append(term)
        measured = []
        for members in alike.values():
            tensors, (first, *_) = [term.tensor for term in members], members
            each = self.n_each is not None
            norms = norms_of(tensors, self.norm_type, pairs=first.pairs, each=each)
            positions = tuple(term.position for term in members)
            measured.append(ShardNorms(norms.reshape(-1).to(self.device), first.shard, positions))
        return measured


def norms_of(tensors: list[Tensor], norm_type: float, *, pairs: bool, each: bool) -> Tensor:
    """Partial norms of like gradients, or, with `each`, the norm of each."""
    if pairs and norm_type != 2.0:
        tensors = [moduli_of(tensor) for tensor in tensors]
    batch = layout_of(tensors).bind(tensors, None)
    measured = batch.norm(norm_type, "each" if each else "all")
    return batch.combine(measured, norm_type, "each", wide=True) if each else as_tensor(measured)


# A gradient with a Partial placement is a sum, of which each process has one term. Its parameter
# does not say so, and a process may have no gradient. But a gradient can be Partial only along a
# mesh dimension that the parameter is copied along, so that flags for these dimensions travel with
# the first numbers of a reduction. A process that has all gradients knows the sums without them.
# Where one is missing, the process reads the flags, which waits for the device, and takes part with
# zeros in place of a term.


def zeros_for(
    absent: Mapping[int, Tensor], sharding: Sharding, flags: Sequence[float]
) -> list[PartialSum]:
    """The terms of absent parameters that others have gradients of, by the flags of everyone."""
    sums: dict[int, list[int]] = {}
    for (at, dim), flag in zip(sharding.copied, flags, strict=True):
        if flag and at in absent:
            sums.setdefault(at, []).append(dim)
    terms = []
    for at, dims in sums.items():
        local: Tensor = absent[at]._local_tensor  # type: ignore[attr-defined]
        zeros = torch.zeros_like(local, requires_grad=False)
        pairs = zeros.is_complex()
        shard = sharding.shard(at, sums=dims)
        terms.append(PartialSum(at, torch.view_as_real(zeros) if pairs else zeros, pairs, shard))
    return terms


def _sums_of(terms: Sequence[PartialSum]) -> list[PartialSum]:
    """The sums, or means, in new memory: by one all-reduce for each dtype and mesh dimension."""
    alike: dict[tuple[object, ...], list[PartialSum]] = {}
    for term in sorted(terms, key=lambda term: term.position):
        key = term.shard.sums_over, term.tensor.dtype, term.tensor.device
        alike.setdefault(key, []).append(term)
    sums = []
    for members in alike.values():
        flat = torch.cat(
            [
                (tensor if shard.divisor == 1 else tensor / shard.divisor).reshape(-1)
                for _, tensor, _, shard in members
            ]
        )
        flat = all_reduce(flat, members[0].shard.sums_over)
        sizes = [term.tensor.numel() for term in members]
        for term, tensor in zip(members, flat.split(sizes), strict=True):
            sums.append(term._replace(tensor=tensor.view(term.tensor.shape)))
    return sums
