"""Collects the gradients of a call: those of one process, or shards of which others have more.

`collect` asks the one question: are DTensors among the parameters, or did the user name a process
group? If so, the list is a `ShardedGradients`, which measures itself together with those of the
other processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from tritonclip import settings
from tritonclip.distributed import agreement
from tritonclip.distributed.norms import (
    CachedIntegers,
    Reduction,
    ShardGroup,
)
from tritonclip.distributed.process_groups import Processes, gather_objects
from tritonclip.distributed.shards import (
    LocalShard,
    Sharding,
    are_sharded,
    known_sharding,
    local_tensors,
)
from tritonclip.engine.arguments import (
    PLAIN,
    LabelOf,
    as_list,
    device_of,
    names_at,
    needs_clip,
    refuse_parameters,
    tensors_in,
    unnamed,
)
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.plan import NewPlan, Plan, empty_plan, make_plan
from tritonclip.engine.plan_cache import PlanCache, plans
from tritonclip.messages import join_names
from tritonclip.rules import BoundRule, Norm, Rule

_PLAIN_TENSOR = frozenset({Tensor})
_get_requires_grad = attrgetter("requires_grad")


def collect(
    parameters: object,
    label_of: LabelOf = "parameters[{}]".format,
    processes: Processes | None = None,
    cache: PlanCache = plans,
    device: torch.device | None = None,
) -> Gradients:
    """Collects the gradients of tensors, a module, or named parameters; raises as `Gradients`.

    `processes` hold the list between them where no DTensor says so. `device` is that of results
    where there is no parameter.
    """
    sources = parameters if type(parameters) is list else as_list(parameters)
    if processes is not None or not PLAIN.issuperset(map(type, sources)):
        sources, label_of = unnamed(sources, label_of)
        positions = [i for i, parameter in enumerate(sources) if needs_clip(parameter)]
        wanted = [sources[i] for i in positions]
        grads = [p.grad for p in wanted]
        if processes is not None or are_sharded([*wanted, *grads]):
            return ShardedGradients(
                wanted,
                grads,
                lambda at: names_at([positions[at]], parameters, label_of)[0],
                processes,
                device or device_of(sources),
                label_of,
                sources,
                parameters,
                cache,
            )
    tensors = [g for p in sources if (g := p.grad) is not None and getattr(p, "need_clip", True)]
    if device is None:
        device = sources[0].device if sources else torch.device("cpu")
    return Gradients(tensors, device, label_of, sources, parameters, cache)


def collect_tensors(
    tensors: object, processes: Processes | None = None, *, writes: bool = False
) -> Gradients:
    """As `collect`, of tensors that are gradients; one that `writes` refuses parameters."""
    items, label_of = tensors_in(tensors)
    plain = _PLAIN_TENSOR.issuperset(map(type, items))
    if writes and not (plain and True not in map(_get_requires_grad, items)):
        refuse_parameters(items, label_of)
    device = device_of(items)
    if processes is not None or (not plain and are_sharded(items)):
        sharded = ShardedGradients(items, items, label_of, processes, device, label_of)
        sharded.may_be_part = not writes
        return sharded
    return Gradients(items, device, label_of)


def collect_all(
    parameters: list[Tensor],
    label_of: LabelOf,
    processes: Processes | None,
    cache: PlanCache,
    device: torch.device,
) -> Gradients:
    """As `collect`, also gradients of parameters with need_clip = False."""
    grads = [parameter.grad for parameter in parameters]
    there = [i for i, grad in enumerate(grads) if grad is not None]

    def label(index: int) -> str:
        return label_of(there[index])

    if processes is not None or are_sharded([*parameters, *grads]):
        return ShardedGradients(parameters, grads, label_of, processes, device, label, cache=cache)
    return Gradients([g for g in grads if g is not None], device, label, cache=cache)


class ShardedGradients(Gradients):
    """The gradients of one call of which other processes may have other shards.

    `tensors` are local shards. Where other processes wait, a process that rejects its gradients
    drops them and keeps its `error`; elsewhere it raises as :class:`Gradients`.
    """

    sharding: Sharding
    # DTensors around the tensors, whose versions count too.
    wrappers: Sequence[Tensor]

    def __init__(
        self,
        parameters: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        label_of_parameter: LabelOf,
        processes: Processes | None,
        device: torch.device,
        label_of: LabelOf,
        sources: Sequence[Tensor] | None = None,
        argument: object = None,
        cache: PlanCache = plans,
    ) -> None:
        self.wanted, self._processes = parameters, processes
        self.label_of_parameter, self._cache = label_of_parameter, cache
        self.device, self.label_of = device, label_of
        self.sources, self.argument = sources, argument
        try:
            self._take(grads)
        except Exception as error:
            self.reject_(error)

    def _take(self, grads: Sequence[Tensor | None]) -> None:
        label_of = self.label_of_parameter
        self.sharding = sharding = known_sharding(self.wanted, grads, self._processes, label_of)
        tensors, self.wrappers = local_tensors(grads)
        self.absent = [self.wanted[i] for i in sharding.absent]
        self.plan = self.addresses = self.distinct = None
        super().__init__(
            tensors, self.device, self.label_of, self.sources, self.argument, self._cache
        )
        if not tensors:
            # As the other processes, with which it takes part.
            verifying = settings.current().verifying
            nothing = empty_plan(self.device, verifying=verifying, wide=sharding.wide)
            nothing.reduction = self._reduction(nothing, sharding.positions)
            self.plan = None if nothing.reduction is None else nothing

    def _make_plan(
        self, tensors: list[Tensor], addresses: list[int] | None, *, verifying: bool
    ) -> NewPlan:
        sharding = self.sharding
        new = make_plan(
            tensors,
            addresses,
            self.label,
            verifying=verifying,
            whole=False,
            shards=[self.shard(i) for i in range(len(tensors))],
            wide=sharding.wide,
        )
        new.plan.requires_grad = True
        kept = range(len(tensors)) if new.distinct is None else new.distinct
        new.plan.reduction = self._reduction(new.plan, [self.position(i) for i in kept])
        return new

    def _reduction(self, plan: Plan, positions: Sequence[int]) -> Reduction | None:
        """How norms are reduced; None where no other process has a shard."""
        sharding = self.sharding
        if not (sharding.domain.groups or sharding.domain.uncovered):
            return None
        shard_at = dict(zip(sharding.positions, sharding.shards, strict=True))
        groups = []
        for group in plan.groups:
            at = group.of(positions)
            groups.append(ShardGroup(shard_at[at[0]], CachedIntegers(at)))
        return Reduction(
            sharding, groups, CachedIntegers(positions), CachedIntegers(sharding.is_partial)
        )

    def reject_(self, error: Exception) -> None:
        """Drops all gradients, so that others that wait learn why; raises where nobody waits."""
        if self.error is not None:
            # Dropped already; the others get the first error.
            return
        nothing = [None] * len(self.wanted)
        try:
            self._take(nothing)
        except Exception:
            # Numbers of copies may be wrong in this process only.
            if self._processes is not None:
                self._processes = self._processes._replace(copies=None)
            self._take(nothing)
        if self.plan is None:
            raise error
        self.error = error

    def refuse_shards(self, rule: Rule) -> None:
        if rule.clamps and any(shard.sums_over for shard in self.sharding.shards):
            sums = [i for i in range(len(self.tensors)) if self.shard(i).sums_over]
            raise TypeError(
                f"{rule.name} would clamp the parts of a sum, which does not clamp the sum: "
                f"the gradients of {self.labels(sums)} are DTensors with a Partial "
                "placement; expected Shard or Replicate: grad.redistribute() them, or clip by norm"
            )
        if rule.per_unit and self.tensors:
            _refuse_split(self)
        if rule.per_gradient and not self.sharding.one_list:
            raise ValueError(
                f"{rule.name} measures each gradient, and process_group does not say which "
                "tensors of its processes are pieces of one; expected DTensors without "
                "process_group, or a rule with one norm"
            )

    def verify_agreement(
        self,
        call: str,
        rule: Rule | Norm,
        grad_scale: float | Tensor = 1.0,
        nonfinite: str = "propagate",
        total_norm: Tensor | None = None,
    ) -> None:
        """As of :class:`Gradients`; every process of the list waits."""
        if not self._is_reduced:
            return
        state = rule.state if isinstance(rule, BoundRule) else None
        described = {"the call": call}
        described |= agreement.describe_call(rule, float(grad_scale), nonfinite, state)
        if total_norm is not None:
            described["the total norm"] = repr(float(total_norm))
        # Tensors that are no gradients of known parameters may be others elsewhere, under one norm.
        each = rule.each if isinstance(rule, Norm) else rule.per_gradient
        if self.sharding.one_list and (self.sources is not None or each):
            described |= agreement.describe_parameters(self.wanted, self.label_of_parameter)
        agreement.agree(described, self.error, self.sharding.domain)

    @property
    def _is_reduced(self) -> bool:
        """Whether other processes have shards."""
        return self.plan is not None and self.plan.reduction is not None

    def twin(self, copies: list[Tensor]) -> Gradients:
        twin = super().twin(copies)
        twin.wrappers = ()  # type: ignore[attr-defined]  # of shards
        return twin

    def is_term(self, index: int) -> bool:
        return bool(self.shard(index).sums_over)

    def shard(self, index: int) -> LocalShard:
        """The shard of the gradient at an index."""
        return self.sharding.shards[index if self.distinct is None else self.distinct[index]]

    def position(self, index: int) -> int:
        """The position of a gradient among the parameters that are to be clipped."""
        return self.sharding.positions[index if self.distinct is None else self.distinct[index]]

    def culprits(self, indices: Iterable[int]) -> str:
        """As of :class:`Gradients`, each with its ranks; every process calls this, and waits."""
        if not self._is_reduced:
            return self.labels(indices)
        ranks: dict[str, list[int]] = {}
        names_here = [self.label(i) for i in indices]
        for rank, labels in gather_objects(names_here, self.sharding.domain).items():
            for label in labels:
                ranks.setdefault(label, []).append(rank)
        return join_names(
            [f"{label} (on rank {', '.join(map(str, at))})" for label, at in ranks.items()]
        )

    def finish_writing(self, *, wrote: bool = True) -> None:
        super().finish_writing(wrote=wrote)
        if self.wrappers and wrote:
            torch.autograd.graph.increment_version(self.wrappers)


def _refuse_split(gradients: ShardedGradients) -> None:
    """Refuses DTensors whose units lie on several processes, unless they are one unit."""
    for index, parameter in enumerate(gradients.owners()):
        expected = getattr(parameter, "placements", ())
        found = getattr(parameter.grad, "placements", ())
        mesh = getattr(parameter, "device_mesh", None)
        sizes = () if mesh is None else tuple(mesh.shape)
        # Shard(0) and _StridedShard(0) give each process some of the rows.
        if expected != found or not all(
            placement.is_replicate() or getattr(placement, "dim", None) == 0 or size == 1
            for placement, size in zip(found, sizes, strict=True)
        ):
            raise TypeError(
                f"{gradients.label(index)} has the placements {expected} and its gradient {found}; "
                "a rule by unit expects the same for both, and rows that are whole on their "
                "process: Replicate or Shard(0), as fully_shard makes them. Clip such a model by "
                "norm, or set need_clip = False on these parameters"
            )
