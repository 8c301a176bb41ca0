"""Norms of a gradient list that lies over several processes: measured here, reduced over all.

Every process of a list measures the same norms, whichever gradients it has, and enters the same
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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from tritonclip.backends.choose import layout_of
from tritonclip.backends.interface import Batch
from tritonclip.backends.operators import MOST_IN_FLOAT64, as_tensor, unscaled
from tritonclip.distributed.agreement import agree, ask_limits
from tritonclip.distributed.process_groups import ERRORS, all_reduce, gather_objects
from tritonclip.distributed.shards import LocalShard, Sharding, shard_of
from tritonclip.engine.arguments import needs_clip
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.norms import Norms, moduli_of
from tritonclip.engine.units import batches_of, weight_of
from tritonclip.modes import outside_inference, refuse_tracer, without_grad
from tritonclip.rules import Norm, Rule, has_user_limit

# Flags of maxima.
_NAN, _REJECTED = 1.0, 2.0


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


@dataclass(slots=True, eq=False)
class Reduction:
    """How the shards of a plan's groups and gradients lie; `flags` are `sharding.is_partial`."""

    sharding: Sharding
    shard_groups: Sequence[ShardGroup]
    positions: CachedIntegers
    flags: CachedIntegers

    @without_grad
    def measure(
        self,
        gradients: Gradients,
        norm: Norm,
        grad_scale: float | Tensor,
        *,
        names_culprits: bool = False,
    ) -> ReducedNorms:
        """Measures all of a list; of a rejected one, raises when the others have its norm."""
        norms = self.take_part(gradients, norm, grad_scale)
        if gradients.error is None:
            assert norms is not None
            return norms
        if norms is not None and names_culprits:
            # The others ask for names where a norm is NaN.
            gather_objects([], self.sharding.domain)
        raise gradients.error

    def take_part(
        self, gradients: Gradients, norm: Norm, grad_scale: float | Tensor
    ) -> ReducedNorms | None:
        """As `measure`, without the error; None of a rejected list that no process waits for."""
        # Of norms by tensor without DTensors, the others find the same error in their parameters.
        if gradients.error is None or self.sharding.one_list or not norm.each:
            return measure_shards(gradients, norm, grad_scale)
        return None

    def ask_limit(self, rule: Rule, norms: Norms) -> None:
        """Asks for a limit that may raise on one process alone."""
        if has_user_limit(rule):
            ask_limits([(rule, norms)])


# Norms of some gradients, partial ones or one for each, and the group of these gradients.
MeasuredShards = tuple[Tensor, ShardGroup]


@dataclass(slots=True)
class ReducedNorms(Norms):
    """The norms of gradients whose shards lie over several processes."""

    # The norm of all gradients, or with `per_gradient` of each parameter's; float64, 1-d.
    reduced: Tensor

    def norm(self) -> Tensor:
        norm = unscaled(self.reduced, self.grad_scale).to(self.plan.dtype)
        return norm if self.per_gradient else norm.reshape(())

    def lack_weights(self) -> None:
        """Not known of other processes, which have to decide alike."""

    def in_order(self, results: list[Tensor]) -> Tensor:
        """The norm of each gradient here."""
        return self.norm_here()

    @property
    def n_norms(self) -> int:
        return len(self.reduced)

    def here(self, values: Tensor) -> Tensor:
        """Of one value for each parameter, those of the gradients here."""
        return values[self.plan.reduction.positions.on(values.device)]

    def whole(self) -> Sequence[Tensor]:
        """The parameters that are to be clipped, or the tensors; DTensors have the whole shape."""
        return self.gradients.wanted

    def positions(self) -> tuple[Sequence[int] | None, int]:
        """The positions of parameters to be clipped among all, and the number of all."""
        sources = self.gradients.sources
        if sources is None:
            return self.gradients.positions(), self.gradients.n_parameters
        wanted = [i for i, parameter in enumerate(sources) if needs_clip(parameter)]
        return None if len(wanted) == len(sources) else wanted, len(sources)


def measure_shards(gradients: Gradients, norm: Norm, grad_scale: float | Tensor) -> ReducedNorms:
    """Measures shards and reduces their norms; the caller raises the error of a rejected list."""
    norm_type, each, by_unit = norm
    if by_unit:
        return _measure_units(gradients, grad_scale)
    if each:
        refuse_tracer()
    plan = gradients.plan
    assert plan is not None
    reduction, sharding = plan.reduction, gradients.sharding
    # A weight of 0: on a mesh of other processes.
    is_part = gradients.may_be_part and all(shard.weight for shard in sharding.shards)
    if not (each or is_part) and (uncovered := sharding.domain.uncovered):
        raise ValueError(uncovered)
    batches, measured, terms = [], [], []
    for group, shards in zip(plan.groups, reduction.shard_groups, strict=True):
        tensors, addresses = gradients.of_group(group.indices)
        batch = group.layout.bind(tensors, addresses)
        batches.append(batch)
        if shards.shard.sums_over:
            pairs = zip(shards.positions.numbers, tensors, strict=True)
            terms += [PartialSum(at, tensor, group.pairs, shards.shard) for at, tensor in pairs]
        else:
            norms = _norms_of(tensors, batch, norm_type, pairs=group.pairs, each=each)
            measured.append((norms, shards))
    n_each = sharding.n_parameters if each else None
    reduced = NormReduction(gradients, norm_type, n_each, terms).run(measured)
    partials = []
    for group, shards, batch in zip(plan.groups, reduction.shard_groups, batches, strict=True):
        whole = reduced
        if each:
            whole = batch.partials_each(reduced[shards.positions.on(plan.device)], norm_type)
        partials.append(whole.to(group.device))
    return ReducedNorms(batches, partials, norm_type, each, grad_scale, gradients, plan, reduced)


def _measure_units(gradients: Gradients, grad_scale: float | Tensor) -> ReducedNorms:
    """As `measure_shards`, by unit: one all-reduce serves norms of gradients and of weights."""
    try:
        batches = batches_of(gradients)
    except ERRORS as error:
        gradients.reject_(error)
        batches = batches_of(gradients)
    plan = gradients.plan
    assert plan is not None
    n, device = gradients.sharding.n_parameters, plan.device
    units = [batch.measure() for batch in batches]
    groups = list(zip(batches, units, plan.reduction.shard_groups, strict=True))
    measured = [(batch.norms_each(norms), shards) for batch, norms, shards in groups]
    # Weights stand below the n gradients.
    for batch, norms, shards in groups:
        below = CachedIntegers([n + position for position in shards.positions.numbers])
        measured.append((batch.norms_each(norms.flip(0)), ShardGroup(shards.shard, below)))
    measured += _absent_weights(gradients, n, device)
    reduced = NormReduction(gradients, 2.0, 2 * n).run(measured)
    partials = []
    for batch, norms, shards in groups:
        positions = shards.positions.on(device)
        norms_each, limits = (half[positions].to(norms.device) for half in reduced.split(n))
        partials.append(batch.with_whole(norms, norms_each, limits))
    as_batches: list[Any] = [*batches]
    return ReducedNorms(as_batches, partials, 2.0, True, grad_scale, gradients, plan, reduced[:n])


def _absent_weights(gradients: Gradients, n: int, device: torch.device) -> list[MeasuredShards]:
    """Weights that are one unit with those of other processes, and have no gradient here."""
    sharding, measured = gradients.sharding, []
    for at, parameter in zip(sharding.absent, gradients.absent, strict=True):
        if parameter.dim() < 2 and parameter.requires_grad:
            shards = ShardGroup(shard_of(parameter, at, sharding), CachedIntegers([n + at]))
            weight = weight_of(parameter).detach()
            wide = weight.to(torch.complex128 if weight.is_complex() else torch.float64)
            norm: Tensor = torch.linalg.vector_norm(wide)
            measured.append((norm.reshape(1).to(device), shards))
    return measured


def _norms_of(
    tensors: list[Tensor], batch: Batch | None, norm_type: float, *, pairs: bool, each: bool
) -> Tensor:
    """Partial norms of like gradients, which a batch may have, or, with `each`, their norms."""
    if pairs and norm_type != 2.0:
        tensors, batch = [moduli_of(tensor) for tensor in tensors], None
    if batch is None:
        batch = layout_of(tensors).bind(tensors, None)
    measured = batch.norm(norm_type, per_gradient=each)
    return batch.norms_each(measured, norm_type) if each else as_tensor(measured)


class _Rejected(Exception):
    """Some process of the domain rejects its gradients."""


class NormReduction:
    """One reduction of the norm of all gradients, or of `n_each`.

    `terms` are the Partial gradients here. They may be missing in some of the processes.
    """

    def __init__(
        self,
        gradients: Gradients,
        norm_type: float,
        n_each: int | None,
        terms: Sequence[PartialSum] | None = None,
    ) -> None:
        plan = gradients.plan
        assert plan is not None
        self._gradients, self._norm_type, self._terms = gradients, norm_type, terms
        self._each, self._n_rows = n_each is not None, 1 if n_each is None else n_each
        self._device, self._domain = plan.device, gradients.sharding.domain
        self._flags: CachedIntegers = plan.reduction.flags
        # This process measured no gradients. On a CPU all then raise, else the norm is NaN.
        self._rejected = gradients.error is not None

    @property
    def _reads(self) -> bool:
        """Whether numbers can be read without a wait for the device."""
        return self._device.type == "cpu"

    def run(self, measured: Sequence[MeasuredShards]) -> Tensor:
        """The norm of all gradients, float64[1]; or of each parameter's, 0 where nobody has one.

        Raises the error of a process that entered with a rejected list.
        """
        try:
            return self._reduce([(n.reshape(-1).to(self._device), group) for n, group in measured])
        except _Rejected:
            # Of which one process has the reason.
            pass
        agree({}, self._gradients.error, self._domain)
        raise AssertionError("a process reported an error but sent no message")

    def _reduce(self, measured: Sequence[MeasuredShards]) -> Tensor:
        p = self._norm_type
        if p <= MOST_IN_FLOAT64:
            total, _ = self._everyones(measured, largest=False)
            return (total.sqrt() if p == 2 else total.pow(1 / p))[:, 0]
        rows, measured = self._everyones(measured, largest=True)
        largest, flags = rows.unbind(1)
        largest = torch.where(flags >= _NAN, math.nan, largest)
        if p == math.inf:
            return largest
        # NaN and inf come out of the powers at any scale.
        scale = torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
        powers = []
        for norm, group in measured:
            divisor = scale[group.positions.on(self._device)] if self._each else scale
            powers.append((norm / divisor).pow(p).reshape(-1, 1))
        total = self._weighted(powers, measured)
        if self._rejected:
            # Where nobody has raised.
            total.fill_(math.nan)
        return scale * self._all_reduce(total, self._domain.groups)[:, 0].pow(1 / p)

    def _everyones(
        self, measured: Sequence[MeasuredShards], *, largest: bool
    ) -> tuple[Tensor, Sequence[MeasuredShards]]:
        """Rows of all processes, and the norms of this one, with those of Partial sums."""
        domain, sharding = self._domain, self._gradients.sharding
        rows, groups = self._marked(self._rows(measured, largest), largest=largest), domain.groups
        if self._terms is not None and (sharding.copied or self._terms):
            # The first collective carries flags, and the others go by them.
            flags = self._flags.on(self._device, torch.float64)
            sent, size = flags.clone(), 0
            if domain.by_mesh_first:
                groups, size = groups[len(domain.mesh_groups) :], rows.numel()
                sent = torch.cat([rows.reshape(-1), flags])
            sent = self._all_reduce(sent, domain.mesh_groups, largest=largest)
            if size:
                rows = sent[:size].view_as(rows)
            if sums := self._measure_sums(self._terms, sent[size:]):
                more = self._rows(sums, largest)
                if domain.by_mesh_first:
                    if not all(group.shard.is_everywhere(domain) for _, group in sums):
                        more = self._all_reduce(more, domain.mesh_groups, largest=largest)
                    elif not largest:
                        # Each process has the same bits of these sums, and one weight of them.
                        more = more * domain.inner
                if largest:
                    rows = torch.maximum(rows, more)
                else:
                    rows[:-1] += more
                measured = [*measured, *sums]
        rows = self._all_reduce(rows, groups, largest=largest)
        return self._unmarked(rows, largest=largest), measured

    def _rows(self, measured: Sequence[MeasuredShards], largest: bool) -> Tensor:
        """Float64[n, 1] of weighted powers, or float64[n, 2] of norms and flags for NaN."""
        if not largest:
            return self._weighted([self._powers_of(norms) for norms, _ in measured], measured)
        rows = torch.zeros((self._n_rows, 2), dtype=torch.float64, device=self._device)
        for norm, group in measured:
            if not group.shard.weight:
                continue
            found = torch.stack([norm.nan_to_num(0.0, math.inf), norm.isnan() * _NAN], 1)
            if self._each:
                rows.index_copy_(0, group.positions.on(self._device), found)
            elif len(found):
                rows = torch.maximum(rows, found.amax(0, keepdim=True))
        return rows

    def _powers_of(self, norms: Tensor) -> Tensor:
        p = self._norm_type
        if p == 2 and not self._each:
            return torch.dot(norms, norms).reshape(1, 1)
        return norms.pow(p).reshape(-1, 1)

    def _weighted(self, powers: Sequence[Tensor], measured: Sequence[MeasuredShards]) -> Tensor:
        """Weighted powers, added up, or at the positions of their parameters: float64[n, 1]."""
        counted = [
            (power if group.shard.weight == 1 else power * group.shard.weight, group)
            for power, (_, group) in zip(powers, measured, strict=True)
            # Not multiplied by 0, which would make inf NaN.
            if group.shard.weight
        ]
        if counted and not self._each:
            totals = [p if len(p) == 1 else p.sum(0, keepdim=True) for p, _ in counted]
            return sum(totals[1:], totals[0])
        rows = torch.zeros((self._n_rows, 1), dtype=torch.float64, device=self._device)
        for power, group in counted:
            rows.index_copy_(0, group.positions.on(self._device), power)
        return rows

    def _all_reduce(
        self, numbers: Tensor, groups: Sequence[dist.ProcessGroup], *, largest: bool = False
    ) -> Tensor:
        """Numbers after a collective over groups, if there are any."""
        if not groups:
            return numbers
        # They travel from the device of the first parameter, because gradients may be missing.
        sent = numbers.to(self._gradients.device)
        return all_reduce(sent, groups, self._domain, largest=largest).to(self._device)

    def _marked(self, rows: Tensor, *, largest: bool) -> Tensor:
        """Rows that say whether this process rejects its gradients."""
        if not largest:
            # In a row of its own, which no inf or NaN of another process hides.
            return torch.cat([rows, rows.new_full((1, 1), float(self._rejected))])
        if self._rejected:
            rows[:, 1] = _REJECTED
        return rows

    def _unmarked(self, rows: Tensor, *, largest: bool) -> Tensor:
        """The rows alone. Raises where a process rejected its gradients, if that costs no wait."""
        if largest:
            if self._reads and len(rows) and float(rows[0, 1]) == _REJECTED:
                raise _Rejected
            return rows
        n_rejected = rows[-1, 0]
        if not self._reads:
            return torch.where(n_rejected > 0, math.nan, rows[:-1])
        if n_rejected > 0:
            raise _Rejected
        return rows[:-1]

    def _measure_sums(self, terms: Sequence[PartialSum], flags: Tensor) -> list[MeasuredShards]:
        """Measures the sums of which gradients are terms, here or in another process."""
        sharding, absent = self._gradients.sharding, self._gradients.absent
        copied = {at for at, _ in sharding.copied}
        # A parameter that requires no gradient has none anywhere.
        if any(
            at in copied and parameter.requires_grad
            for at, parameter in zip(sharding.absent, absent, strict=True)
        ):
            terms = [*terms, *zeros_for(absent, sharding, flags.tolist())]
        alike: dict[tuple[object, ...], list[PartialSum]] = {}
        for term in _sums_of(terms, sharding):
            key = term.shard.weight, term.shard.sums_over, term.tensor.dtype, term.pairs
            alike.setdefault(key, []).append(term)
        measured = []
        for members in alike.values():
            tensors, pairs = [term.tensor for term in members], members[0].pairs
            norms = _norms_of(tensors, None, self._norm_type, pairs=pairs, each=self._each)
            positions = CachedIntegers([term.position for term in members])
            group = ShardGroup(members[0].shard, positions)
            measured.append((norms.reshape(-1).to(self._device), group))
        return measured


# DTensors whose placement is Partial: the gradient is a sum, of which each process has a term. A
# parameter does not say whether its gradient is Partial, and a process may have none. Only along a
# dimension that the parameter is copied along can it be. So flags for these dimensions travel with
# the first numbers of a reduction. A process that has all gradients knows the sums by itself: flags
# are read, and the device is waited for, only where a gradient is missing. The process then takes
# part with zeros, as the others do with their terms.


class PartialSum(NamedTuple):
    """A term of a gradient's sum, or the sum: real, or with `pairs` complex numbers as pairs."""

    position: int
    tensor: Tensor
    pairs: bool
    shard: LocalShard


def zeros_for(
    absent: Sequence[Tensor], sharding: Sharding, flags: Sequence[float]
) -> list[PartialSum]:
    """The terms of `absent` parameters that others have gradients of, by the flags of everyone."""
    parameters = dict(zip(sharding.absent, absent, strict=True))
    sums: dict[int, list[int]] = {}
    for (at, dim), flag in zip(sharding.copied, flags, strict=True):
        if flag and at in parameters:
            sums.setdefault(at, []).append(dim)
    terms = []
    for at, dims in sums.items():
        local: Tensor = parameters[at]._local_tensor  # type: ignore[attr-defined]
        zeros = torch.zeros_like(local, requires_grad=False)
        pairs = zeros.is_complex()
        shard = shard_of(parameters[at], at, sharding, dims)
        terms.append(PartialSum(at, torch.view_as_real(zeros) if pairs else zeros, pairs, shard))
    return terms


def _sums_of(terms: Sequence[PartialSum], sharding: Sharding) -> list[PartialSum]:
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
        flat = all_reduce(flat, members[0].shard.sums_over, sharding.domain)
        sizes = [term.tensor.numel() for term in members]
        for term, tensor in zip(members, flat.split(sizes), strict=True):
            sums.append(term._replace(tensor=tensor.view(term.tensor.shape)))
    return sums
