"""Whether processes that share a norm agree, and the errors that one of them raises on all.

Under `verify()` they have to be about to do the same with the same parameters, and shards that
count as copies of each other have to have one norm. The reduced norm is computed again, plainly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tritonclip import settings
from tritonclip.backends.operators import combine_numbers
from tritonclip.distributed.partial_sums import PartialSum, sums_of, zeros_for
from tritonclip.distributed.process_groups import (
    ERRORS,
    Domain,
    all_reduce,
    domain_of,
    gather_objects,
)
from tritonclip.distributed.shards import where
from tritonclip.engine.arguments import LabelOf
from tritonclip.engine.execute import checked_limit
from tritonclip.engine.norms import Norms
from tritonclip.engine.plan import WIDE
from tritonclip.engine.verify import VerificationError, norm_of
from tritonclip.rules import BoundRule, ClipState, Norm, Rule
from tritonclip.rules.rule import Adaptive

if TYPE_CHECKING:
    from tritonclip.distributed.gradients import ShardedGradients


def agree(described: Mapping[str, str], error: Exception | None, domain: Domain) -> None:
    """Raises on every process of a domain where one has an error, or describes a name otherwise."""
    message = None
    if error is not None:
        index = next((i for i, cls in enumerate(ERRORS) if isinstance(error, cls)), None)
        message = index, str(error) if index is not None else f"{type(error).__name__}: {error}"
    everyone = gather_objects((message, dict(described)), domain)
    if error is not None:
        raise error
    for rank, (found, _) in everyone.items():
        if found is not None:
            index, text = found
            raise (RuntimeError if index is None else ERRORS[index])(
                f"rank {rank} raised, so no gradient was clipped on any rank: {text}"
            )
    for name in dict.fromkeys(name for _, texts in everyone.values() for name in texts):
        holders: dict[str, list[str]] = {}
        for rank, (_, texts) in everyone.items():
            holders.setdefault(texts.get(name, "nothing"), []).append(f"rank {rank}")
        if len(holders) > 1:
            shown = " and ".join(f"{', '.join(at)} has {text}" for text, at in holders.items())
            raise ValueError(
                f"processes that share a norm differ in {name}: {shown}; expected the same rules, "
                "policies, states and parameters in the same order on all of them. For processes "
                "with other parameters, pass process_group="
            )


def verify_replicas(
    model: DistributedDataParallel,
    rule: Rule,
    grad_scale: object,
    nonfinite: str,
    state: ClipState | None,
) -> None:
    """Under `verify()`, raises on every process where replicas would be clipped differently."""
    if not settings.current().verifying:
        return
    named = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    described = describe_call(rule, grad_scale, nonfinite, state)
    described |= describe_parameters([p for _, p in named], lambda at: named[at][0])
    agree(described, None, domain_of([], model.process_group))


def describe_call(
    rule: Rule | Norm, grad_scale: object, nonfinite: str, state: ClipState | None
) -> dict[str, str]:
    """What processes that share a norm have to agree on, by name."""
    # A tensor's text has its device, which differs.
    scale = grad_scale.tolist() if isinstance(grad_scale, Tensor) else grad_scale
    return {
        "the rule": str(rule) if isinstance(rule, Norm) else describe_rule(rule),
        "the policy for NaN and inf": nonfinite,
        "the loss scale": f"{scale!r:.80}",
        "the state": "none" if state is None else describe_state(state.state_dict()),
    }


def has_user_limit(rule: Rule) -> bool:
    """Whether a limit is code of the user's, which may raise on one process alone."""
    cls: Any = type(getattr(rule, "rule", rule))
    limit = cls.advance if issubclass(cls, Adaptive) else cls.limit
    module = str(getattr(limit, "__module__", ""))
    return not (rule.clamps or module.startswith("tritonclip."))


def limited(rule: Rule) -> BoundRule:
    """The rule, which then asks for its limit once."""
    return rule if isinstance(rule, BoundRule) else BoundRule(rule, ClipState())


def ask_limits(measured: Sequence[tuple[BoundRule, Norms]]) -> None:
    """Asks for limits before the first write; all raise where one process has no valid limit."""
    error: Exception | None = None
    for rule, norms in measured:
        try:
            checked_limit(rule, rule.limit(norms), norms)
        except Exception as found:
            error = error or found
    first = measured[0][1].gradients
    domain: Domain = first.sharding.domain
    # Where none has an error, each process sends one number.
    flag = torch.full((1,), float(error is not None), dtype=torch.float32, device=first.device)
    if bool(all_reduce(flag, domain.groups, domain, largest=True)):
        agree({}, error, domain)


def describe_rule(rule: Any) -> str:
    """The name of a rule, and its numbers; of one that is bound to its state, those of the call."""
    rule = getattr(rule, "rule", rule)
    # Of a class that is no dataclass, attributes take the place of arguments.
    public = [name for name in getattr(rule, "__dict__", ()) if not name.startswith("_")]
    names = dict.fromkeys((*rule.__match_args__, "norm_type", "eps", *public))
    values = {name: getattr(rule, name, None) for name in names}
    shown = (
        f"{name}={value!r}" if isinstance(value, Real | str) else f"{name}: {type(value).__name__}"
        for name, value in values.items()
    )
    return f"{type(rule).__name__}({', '.join(shown)})"


def describe_state(state: Mapping[str, Any]) -> str:
    """The result of `ClipState.state_dict`, with a checksum of the digits of its values."""
    digits = repr(state["values"]).encode()
    return f"{state['kind'] or 'no norms'} after {state['steps']} calls, {crc32(digits):x}"


def describe_parameters(parameters: Sequence[Tensor], label_of: LabelOf) -> dict[str, str]:
    """Name, shape, dtype and placements of each parameter, by its position."""
    return {
        f"the parameter at position {at}": f"{label_of(at)} of shape {tuple(parameter.shape)}, "
        f"{parameter.dtype} and placements {getattr(parameter, 'placements', 'of a plain tensor')}"
        for at, parameter in enumerate(parameters)
    }


# Copies that processes computed each by itself may differ by rounding; other shards differ by more.
_COPIES = 1e-3
_TOLERANCE = {True: 1e-12, False: 1e-6}


class _Entry(NamedTuple):
    position: int
    label: str
    where: tuple[int, ...]
    weight: float
    norm: float
    wide: bool
    empty: bool


class Replicas:
    """The gradients of all processes of a domain, compared before their norms are reduced."""

    def __init__(self, gradients: ShardedGradients, norm_type: float) -> None:
        sharding = gradients.sharding
        self._norm_type, self._one_list = norm_type, sharding.one_list
        entries = [
            _Entry(
                position,
                gradients.label_of_parameter(position),
                where,
                weight,
                norm_of(tensor, norm_type),
                tensor.dtype in WIDE,
                tensor.numel() == 0,
            )
            for position, where, weight, tensor in _shards(gradients)
        ]
        self._entries: dict[int, list[_Entry]] = gather_objects(entries, sharding.domain)
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
        """VerificationError where a plain sum finds another norm, of all or of each parameter."""
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
                    f"reference to {right!r}. Float64 gradients this large or small are beyond the "
                    "limits of range in docs/clipping.md; scale the loss. Other numbers are a bug "
                    "in tritonclip or in its compiler: report it"
                )


def _shards(gradients: ShardedGradients) -> list[tuple[int, tuple[int, ...], float, Tensor]]:
    """Position, coordinates, weight and elements of the shards here, or of the sums of them."""
    sharding, shards = gradients.sharding, []
    local = [pair for pair, here in zip(sharding.copied, sharding.is_partial, strict=True) if here]
    anywhere = {pair for part in gather_objects(local, sharding.domain).values() for pair in part}
    flags = [float(pair in anywhere) for pair in sharding.copied]
    terms = zeros_for(gradients.absent, sharding, flags)
    where_of = dict(zip(sharding.positions, sharding.where, strict=True))
    for at, parameter in zip(sharding.absent, gradients.absent, strict=True):
        where_of[at] = where(getattr(parameter, "_spec", None))
    # Buffers of FlatGradients in place of their views.
    for index, tensor in enumerate(gradients.versions or gradients.tensors):
        shard, at = gradients.shard(index), gradients.position(index)
        if shard.sums_over:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            terms.append(PartialSum(at, real, tensor.is_complex(), shard))
        else:
            shards.append((at, where_of[at], shard.weight, tensor))
    for at, tensor, pairs, shard in sums_of(terms, sharding):
        whole = torch.view_as_complex(tensor) if pairs else tensor
        shards.append((at, where_of[at], shard.weight, whole))
    return shards


def _alike(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= _COPIES * max(abs(a), abs(b)) or math.isnan(a) or math.isnan(b)


def _combined(terms: Sequence[tuple[float, float]], norm_type: float) -> float:
    """The norm of norms, each of which counts by its weight."""
    # Powers of norms, or counts, are weighted; of extremes nothing is.
    exponent = 0.0 if math.isinf(norm_type) else 1 / (norm_type or 1)
    norms = [norm * weight**exponent for norm, weight in terms if weight]
    norm = combine_numbers(norms, norm_type) if norms else 0.0
    return norm if norm_type else round(norm)
