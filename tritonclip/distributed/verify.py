"""Under `verify()`: whether processes that share a norm agree, and the norm once more, plainly.

They have to have the same parameters in the same order, unless the user names a group; and shards
that count as copies of each other have to have one norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonclip.distributed.gradients import ShardedGradients
from tritonclip.distributed.partial_sums import PartialSum, sums_of, zeros_for
from tritonclip.distributed.process_groups import everyones
from tritonclip.distributed.shards import where
from tritonclip.engine.arguments import needs_clip
from tritonclip.engine.verify import VerificationError, norm_of

# Copies that processes computed each by itself may differ by rounding; other shards differ by more.
_COPIES = 1e-3
_TOLERANCE = {True: 1e-12, False: 1e-6}


class _Entry(NamedTuple):
    """A gradient's shard in one process."""

    position: int
    label: str
    where: tuple[int, ...]
    weight: float
    norm: float
    wide: bool
    empty: bool


class Agreement:
    """The gradients of all processes of a domain, compared before their norms are reduced.

    Every process of the domain makes one, and waits for the others.

    Raises:
        ValueError: lists of parameters that differ; copies that are none.
    """

    def __init__(self, gradients: ShardedGradients, norm_type: float) -> None:
        sharding = gradients.sharding
        self._norm_type, self._one_list = norm_type, sharding.one_list
        self._n_parameters = sharding.n_parameters
        lists = everyones(_layouts(gradients), sharding.domain)
        if sharding.one_list:
            _check_lists(lists)
        self._entries: dict[int, list[_Entry]] = everyones(
            _entries(gradients, norm_type) + _sums(gradients, norm_type), sharding.domain
        )
        if sharding.one_list:
            self._check_copies()
        else:
            self._check_counts()

    def _check_copies(self) -> None:
        """Refuses shards that count as one and are not."""
        processes: dict[tuple[int, tuple[int, ...]], list[tuple[int, _Entry]]] = {}
        for rank, entries in self._entries.items():
            for entry in entries:
                if entry.weight:
                    processes.setdefault((entry.position, entry.where), []).append((rank, entry))
        for (first, entry), *others in processes.values():
            counted, found = round(1 / entry.weight), 1 + len(others)
            if found != counted:
                raise ValueError(
                    f"the gradient of {entry.label} counts as copied to {counted} processes, but "
                    f"only {found} have one, rank {first} among them; expected a gradient on all "
                    "of them: make it zeros where it is None"
                )
            for rank, other in others:
                if not _alike(entry.norm, other.norm):
                    raise ValueError(
                        f"the gradient of {entry.label} counts as a copy on ranks {first} and "
                        f"{rank}, but its norm of order {self._norm_type} is {entry.norm} on one "
                        f"and {other.norm} on the other; expected the same gradient: all-reduce "
                        "it, or pass process_group= and copies= where these are other shards"
                    )

    def _check_counts(self) -> None:
        """Refuses numbers of copies that the norms contradict."""
        found: dict[tuple[str, tuple[int, ...], float], list[float]] = {}
        for entries in self._entries.values():
            for entry in entries:
                if 0 < entry.weight < 1 and 0 < entry.norm < math.inf:
                    key = entry.label, entry.where, entry.weight
                    found.setdefault(key, []).append(entry.norm)
        for (label, _, weight), norms in found.items():
            n_copies = round(1 / weight)
            while norms:
                same = [norm for norm in norms if _alike(norm, norms[0])]
                if len(same) % n_copies:
                    raise ValueError(
                        f"the gradient of {label} counts as held by {n_copies} processes each, but "
                        f"{len(same)} have one of norm {norms[0]}; expected as many copies as "
                        "process_group and copies= say"
                    )
                norms = [norm for norm in norms if not _alike(norm, norms[0])]

    def check(self, reduced: Tensor, *, each: bool) -> None:
        """Compares the norm of all shards, or of each parameter's, with a plain sum.

        Raises:
            VerificationError: a norm that differs.
        """
        by_position: dict[int, list[tuple[float, float]]] = {}
        n_holders: dict[tuple[int, tuple[int, ...]], int] = {}
        every = [e for entries in self._entries.values() for e in entries if not e.empty]
        for entry in every:
            key = entry.position, entry.where
            n_holders[key] = n_holders.get(key, 0) + 1
        for entry in every:
            # By the copies that are there, not by those that the placements promise.
            weight = 1 / n_holders[entry.position, entry.where] if self._one_list else entry.weight
            by_position.setdefault(entry.position if each else 0, []).append((entry.norm, weight))
        expected = [
            _combined(by_position.get(i, []), self._norm_type) for i in range(reduced.numel())
        ]
        tolerance = _TOLERANCE[bool(every) and all(entry.wide for entry in every)]
        for ours, right in zip(reduced.tolist(), expected, strict=True):
            same = ours == right or (math.isnan(ours) and math.isnan(right))
            if not same and not abs(ours - right) <= tolerance * abs(right):
                raise VerificationError(
                    f"tritonclip reduced a norm of order {self._norm_type} to {ours!r}, its plain "
                    f"reference to {right!r}. This is a bug in tritonclip or in its compiler: use "
                    "tritonclip.use_backend('torch') and report it"
                )


def _layouts(gradients: ShardedGradients) -> list[tuple[Any, ...]]:
    """The parameters of this process, as far as they are the same in every process."""
    wanted = [p for p in gradients.sources or () if needs_clip(p)]
    return [(tuple(p.shape), str(p.dtype), str(getattr(p, "placements", "plain"))) for p in wanted]


def _check_lists(lists: dict[int, list[tuple[Any, ...]]]) -> None:
    """Refuses processes with other parameters than the first one's."""
    first, *others = lists
    for rank in others:
        ours, theirs = lists[first], lists[rank]
        if ours != theirs:
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                min(len(ours), len(theirs)),
            )
            shown = [
                f"{side[at]}" if at < len(side) else "no such parameter" for side in (ours, theirs)
            ]
            raise ValueError(
                f"the processes of one mesh clip different parameters: at position {at}, rank "
                f"{first} has {shown[0]} and rank {rank} {shown[1]}; expected the same "
                "parameters in the same order everywhere, or process_group="
            )


def _entries(gradients: ShardedGradients, norm_type: float) -> list[_Entry]:
    """The shards of this process that are no terms of sums, each measured by itself."""
    sharding = gradients.sharding
    entries = []
    # Buffers of FlatGradients in place of their views.
    for index, tensor in enumerate(gradients.versions or gradients.tensors):
        if not gradients.shard(index).sums_over:
            at = index if gradients.distinct is None else gradients.distinct[index]
            entries.append(
                _entry(
                    gradients,
                    gradients.position(index),
                    gradients.shard(index).weight,
                    sharding.where[at],
                    tensor,
                    norm_type,
                )
            )
    return entries


def _sums(gradients: ShardedGradients, norm_type: float) -> list[_Entry]:
    """The sums of Partial gradients, each measured by itself; every process of a sum calls this."""
    sharding = gradients.sharding
    own = [pair for pair, here in zip(sharding.copied, sharding.is_partial, strict=True) if here]
    known = {pair for theirs in everyones(own, sharding.domain).values() for pair in theirs}
    flags = [float(pair in known) for pair in sharding.copied]
    terms = zeros_for(gradients.absent, sharding, flags)
    for index, tensor in enumerate(gradients.versions or gradients.tensors):
        shard, at = gradients.shard(index), gradients.position(index)
        if shard.sums_over:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            terms.append(PartialSum(at, real, tensor.is_complex(), shard))
    where_of = dict(zip(sharding.positions, sharding.where, strict=True))
    for at, one in zip(sharding.absent, gradients.absent, strict=True):
        where_of[at] = where(getattr(one, "_spec", None))
    entries = []
    for at, tensor, pairs, shard in sums_of(terms, sharding):
        whole = torch.view_as_complex(tensor) if pairs else tensor
        entries.append(_entry(gradients, at, shard.weight, where_of[at], whole, norm_type))
    return entries


def _entry(
    gradients: ShardedGradients,
    position: int,
    weight: float,
    where: tuple[int, ...],
    tensor: Tensor,
    norm_type: float,
) -> _Entry:
    return _Entry(
        position,
        gradients.label_of_parameter(position),
        where,
        weight,
        norm_of(tensor, norm_type),
        tensor.dtype in (torch.float64, torch.complex128),
        tensor.numel() == 0,
    )


def _alike(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= _COPIES * max(abs(a), abs(b)) or math.isnan(a) or math.isnan(b)


def _combined(terms: Sequence[tuple[float, float]], norm_type: float) -> float:
    """The norm of norms, each of which counts by its weight."""
    norms = [norm for norm, weight in terms if weight]
    if any(map(math.isnan, norms)):
        return math.nan
    if math.isinf(norm_type):
        return max(norms, default=0.0) if norm_type > 0 else min(norms, default=0.0)
    if norm_type == 0:
        return round(math.fsum(norm * weight for norm, weight in terms))
    largest = max(norms, default=0.0)
    if not 0 < largest < math.inf:
        return largest
    powers = math.fsum(weight * (norm / largest) ** norm_type for norm, weight in terms if weight)
    root: float = powers ** (1 / norm_type)
    return largest * root
