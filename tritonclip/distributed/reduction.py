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

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from tritonclip.backends.choose import host_decides, layout_of
from tritonclip.backends.interface import Of
from tritonclip.backends.operators import MOST_IN_FLOAT64, as_tensor, moduli_of
from tritonclip.distributed.agreement import agree
from tritonclip.distributed.domain import all_reduce
from tritonclip.distributed.shards import Shard, Sharding

T = TypeVar("T")
# Norms of gradients with one shard: partial ones, or one for each at its position.
_Measured = tuple[Tensor, Shard, tuple[int, ...]]


class Term(NamedTuple):
    """A term of a gradient that is a sum: real, or with `pairs` complex numbers as pairs."""

    position: int
    tensor: Tensor
    pairs: bool
    shard: Shard


@dataclass(slots=True, eq=False)
class Reduction:
    """One reduction, which gets the norms and the terms of this process, and runs.

    Attributes:
        sharding: how the list lies.
        parameters: all that are to be clipped, with or without a gradient here.
        norm_type: p of the p-norm.
        of: whose norms: one of "all" gradients; one of "each", in a row for each parameter; or by
            "rows", where as many rows with the norms of weights stand below these.
        device: of the numbers: that of the first parameter, as gradients may be missing.
        error: that of a process that rejects its gradients; on a CPU all then raise, else the norm
            is NaN.
        terms: the Partial gradients here.
    """

    sharding: Sharding
    parameters: Sequence[Tensor]
    norm_type: float
    of: Of
    device: torch.device
    error: Exception | None = None
    terms: list[Term] = field(default_factory=list)
    _measured: list[_Measured] = field(default_factory=list)

    def add(self, norms: Tensor, shard: Shard, positions: tuple[int, ...]) -> None:
        """Takes norms of gradients with one shard: partial ones, or one for each position."""
        self._measured.append((norms.reshape(-1).to(self.device), shard, positions))

    def run(self) -> Tensor:
        """The norm of all gradients, float64[1]; or of each row's, 0 where nobody has one.

        Raises the error of a process that entered with a rejected list.
        """
        p, largest = self.norm_type, self.norm_type > MOST_IN_FLOAT64
        domain, groups = self.sharding.domain, self.sharding.domain.groups
        numbers = self._numbers(self._measured, largest=largest)
        if self.error is not None:
            numbers[-1] = 1.0
        # By rows, no gradient is a sum.
        if self.of != "rows" and (self.sharding.flags or self.terms):
            numbers, groups = self._with_sums(numbers, largest=largest)
        numbers = all_reduce(numbers, groups, largest=largest)
        rows, rejected = numbers[:-1], numbers[-1]
        if host_decides(self.device) and float(rejected) > 0:
            # Of which one process has the reason.
            agree({}, self.error, domain)
        if largest:
            norms, flags = rows.view(2, -1).unbind()
            norms = torch.where(flags > 0, math.nan, norms)
        else:
            norms = rows.sqrt() if p == 2 else rows.pow(1 / p)
        if MOST_IN_FLOAT64 < p < math.inf:
            # NaN and inf come out of the powers at any scale.
            scale = torch.where((norms > 0) & (norms < math.inf), norms, 1.0)
            numbers = self._numbers(self._measured, largest=False, scale=scale)
            norms = scale * all_reduce(numbers[:-1], domain.groups).pow(1 / p)
        return norms if host_decides(self.device) else torch.where(rejected > 0, math.nan, norms)

    def _numbers(
        self, measured: Sequence[_Measured], *, largest: bool, scale: Tensor | None = None
    ) -> Tensor:
        """Rows, and then the mark of a process that rejects its gradients, here 0.

        Rows have weighted powers of norms over `scale`, added up; or the largest norms, and below
        these flags for NaN. They are those of all gradients, or stand at the positions of their
        parameters.
        """
        p, n = self.norm_type, len(self.parameters)
        n_rows = {"all": 1, "each": n, "rows": 2 * n}[self.of]
        # A mark in a separate number, which no inf or NaN of another process hides.
        n_kinds = 2 if largest else 1
        numbers = torch.zeros(n_kinds * n_rows + 1, dtype=torch.float64, device=self.device)
        rows = numbers[:-1].view(n_kinds, n_rows)
        for norms, shard, positions in measured:
            # Not multiplied by 0, which would make inf NaN.
            if not shard.weight:
                continue
            at = None if self.of == "all" else self.sharding.upload(positions, self.device)
            if scale is not None:
                norms = norms / (scale if at is None else scale[at])
            if at is None and not largest:
                power = torch.dot(norms, norms) if p == 2 else norms.pow(p).sum()
                rows.add_(power, alpha=shard.weight)
                continue
            if largest:
                found = torch.stack([norms.nan_to_num(0.0, math.inf), norms.isnan().to(norms)])
            else:
                found = (norms.pow(p) * shard.weight).view(1, -1)
            if at is not None:
                rows.index_copy_(1, at, found)
            elif len(norms):
                torch.maximum(rows, found.amax(1, keepdim=True), out=rows)
        return numbers

    # A gradient with a Partial placement is a sum, of which each process has one term. Its
    # parameter does not say so, and a process may have no gradient. But a gradient can be Partial
    # only along a mesh dimension that the parameter is copied along, so that flags for these
    # dimensions travel with the first numbers of a reduction. A process that has all gradients
    # knows the sums without them. Where one is missing, the process reads the flags, which waits
    # for the device, and takes part with zeros in place of a term.

    def _with_sums(
        self, numbers: Tensor, *, largest: bool
    ) -> tuple[Tensor, tuple[dist.ProcessGroup, ...]]:
        """Numbers with the norms of sums, and the groups that they are still to be reduced over."""
        sharding, domain = self.sharding, self.sharding.domain
        groups, mesh_groups = domain.groups, domain.mesh_groups
        flags = sharding.upload(tuple(sharding.flags.values()), self.device, torch.float64)
        # The first collective carries flags, and the others go by them.
        by_mesh_first = bool(mesh_groups) and groups[: len(mesh_groups)] == mesh_groups
        if by_mesh_first:
            groups = groups[len(mesh_groups) :]
            sent = all_reduce(torch.cat([numbers, flags]), mesh_groups, largest=largest)
            numbers, flags = sent.split([len(numbers), len(flags)])
        else:
            flags = all_reduce(flags.clone(), mesh_groups, largest=largest)
        if not (sums := self._measure_sums(flags)):
            return numbers, groups
        self._measured += sums
        rows, more = numbers[:-1], self._numbers(sums, largest=largest)[:-1]
        if by_mesh_first:
            # A sum over all processes of the meshes is whole on each of them.
            if not all(
                math.prod(group.size() for group in shard.sums_over) == domain.inner
                and shard.weight == 1 / domain.inner
                for _, shard, _ in sums
            ):
                more = all_reduce(more, mesh_groups, largest=largest)
            elif not largest:
                # Each process has the same bits of these sums, and one weight of them.
                more *= domain.inner
        if largest:
            torch.maximum(rows, more, out=rows)
        else:
            rows += more
        return numbers, groups

    def _measure_sums(self, flags: Tensor) -> list[_Measured]:
        """Measures the sums, or means, of which gradients here or in another process are terms.

        By one all-reduce for each dtype and mesh dimension, in new memory.
        """
        terms, sharding = self.terms, self.sharding
        absent = {at: self.parameters[at] for at, _ in sharding.flags if sharding.grads[at] is None}
        # A parameter that requires no gradient has none anywhere.
        if missing := {at: p for at, p in absent.items() if p.requires_grad}:
            terms = [*terms, *zeros_for(missing, sharding, flags.tolist())]
        measured, each = [], self.of == "each"
        terms = sorted(terms, key=lambda term: term.position)
        for members in _alike(
            terms, lambda term: (term.shard.sums_over, term.tensor.dtype, term.tensor.device)
        ):
            divided = [
                tensor if shard.divisor == 1 else tensor / shard.divisor
                for _, tensor, _, shard in members
            ]
            flat = torch.cat([tensor.reshape(-1) for tensor in divided])
            parts = all_reduce(flat, members[0].shard.sums_over).split([x.numel() for x in divided])
            sums = [
                term._replace(tensor=part.view(term.tensor.shape))
                for term, part in zip(members, parts, strict=True)
            ]
            for same in _alike(sums, lambda term: (term.shard.weight, term.pairs)):
                tensors = [term.tensor for term in same]
                norms = norms_of(tensors, self.norm_type, pairs=same[0].pairs, each=each)
                positions = tuple(term.position for term in same)
                measured.append((norms.reshape(-1).to(self.device), same[0].shard, positions))
        return measured


def _alike(items: Iterable[T], key_of: Callable[[T], Hashable]) -> Iterable[list[T]]:
    """The items with the same key, in the order of the first of each."""
    alike: dict[Hashable, list[T]] = {}
    for item in items:
        alike.setdefault(key_of(item), []).append(item)
    return alike.values()


def zeros_for(
    missing: Mapping[int, Tensor], sharding: Sharding, flags: Sequence[float]
) -> list[Term]:
    """The terms of parameters without a gradient that others have one of, by everyone's flags."""
    sums: dict[int, list[int]] = {}
    for (at, dim), flag in zip(sharding.flags, flags, strict=True):
        if flag and at in missing:
            sums.setdefault(at, []).append(dim)
    terms = []
    for at, dims in sums.items():
        local: Tensor = missing[at]._local_tensor  # type: ignore[attr-defined]
        zeros, shard = torch.zeros_like(local, requires_grad=False), sharding.shard(at, sums=dims)
        pairs = zeros.is_complex()
        terms.append(Term(at, torch.view_as_real(zeros) if pairs else zeros, pairs, shard))
    return terms


def norms_of(tensors: list[Tensor], norm_type: float, *, pairs: bool, each: bool) -> Tensor:
    """Partial norms of like gradients, or, with `each`, the norm of each."""
    if pairs and norm_type != 2.0:
        tensors = [moduli_of(tensor) for tensor in tensors]
    batch = layout_of(tensors).bind(tensors, None)
    measured = batch.norm(norm_type, "each" if each else "all")
    return batch.combine(measured, norm_type, "each", wide=True) if each else as_tensor(measured)
