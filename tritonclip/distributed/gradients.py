"""Collects the gradients of a call: those of one process, or shards of which others have more.

`collect` asks the one question: are DTensors among the parameters, or did the user name a process
group? If so, the list is a `ShardedGradients`, which `tritonclip.distributed.execute` serves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from tritonclip import settings
from tritonclip.distributed.process_groups import Processes, everyones
from tritonclip.distributed.reduction import Reduction, ShardGroup, Slots
from tritonclip.distributed.shards import LocalShard, Sharding, are_sharded, local_shards
from tritonclip.engine.arguments import (
    PLAIN,
    LabelOf,
    as_list,
    device_of,
    names_at,
    positions_to_clip,
    refuse_parameters,
    tensors_in,
    unnamed,
)
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.plan import NewPlan, Plan, empty_plan, make_plan
from tritonclip.engine.plan_cache import PlanCache, plans
from tritonclip.messages import join_names

# What gradients and arguments that cannot be clipped raise.
ERRORS = (TypeError, ValueError, RuntimeError)
_PLAIN_TENSOR = frozenset({Tensor})
_get_requires_grad = attrgetter("requires_grad")


def collect(
    parameters: object,
    label_of: LabelOf = "parameters[{}]".format,
    processes: Processes | None = None,
    cache: PlanCache = plans,
    device: torch.device | None = None,
) -> Gradients:
    """Collects the gradients of tensors, a module, or named parameters, with their plan.

    Args:
        parameters: the user's argument; read once.
        label_of: names the i-th parameter in messages, where it has no name.
        processes: that the gradients are spread over, where no DTensor says so.
        cache: of plans.
        device: of results where there is no parameter.

    Raises:
        TypeError, ValueError, RuntimeError: an argument of another kind; as :class:`Gradients`,
            unless other processes wait for the norms of the list.
    """
    sources = parameters if type(parameters) is list else as_list(parameters)
    if processes is not None or not PLAIN.issuperset(map(type, sources)):
        sources, label_of = unnamed(sources, label_of)
        positions = positions_to_clip(sources)
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
    tensors: object,
    label_of: LabelOf = "tensors[{}]".format,
    processes: Processes | None = None,
    cache: PlanCache = plans,
    *,
    writes: bool = False,
) -> Gradients:
    """Collects gradients that are the tensors themselves, None left out; raises as `collect`.

    For a call that `writes`, tensors that require grad raise TypeError.
    """
    items, label_of = tensors_in(tensors, label_of)
    plain = _PLAIN_TENSOR.issuperset(map(type, items))
    if writes and not (plain and True not in map(_get_requires_grad, items)):
        refuse_parameters(items, label_of)
    device = device_of(items)
    if processes is not None or (not plain and are_sharded(items)):
        return ShardedGradients(items, items, label_of, processes, device, label_of, cache=cache)
    return Gradients(items, device, label_of, argument=tensors, cache=cache)


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


def error_of(gradients: Gradients) -> Exception | None:
    """Why this process rejects a list, and will raise when the other processes know of it."""
    return gradients.error if isinstance(gradients, ShardedGradients) else None


class ShardedGradients(Gradients):
    """The gradients of one call of which other processes may have other shards.

    Args:
        parameters: all that are to be clipped, with and without a gradient.
        grads: of each parameter, or None.
        label_of_parameter: names the i-th of these parameters.
        processes: the user's group and copies; None without.
        device: of the first parameter; the others as for :class:`Gradients`.

    Attributes:
        wanted: the parameters, as handed over.
        tensors: of DTensors the local shards.
        sharding: how the list lies over processes.
        wrappers: DTensors around the tensors, whose versions count too.
        absent: parameters without a gradient.
        error: why this process rejects its gradients, which it then dropped; None where it does
            not. It is raised when the other processes know of it.

    Raises:
        TypeError, ValueError, RuntimeError: as :class:`Gradients`, where no other process waits;
            meshes or groups that no process can reduce over.
    """

    sharding: Sharding
    wanted: Sequence[Tensor]
    wrappers: Sequence[Tensor]
    absent: Sequence[Tensor]
    error: Exception | None = None

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
        views: Any = None,
    ) -> None:
        self.wanted, self._processes = parameters, processes
        self.label_of_parameter, self._cache = label_of_parameter, cache
        self.device, self.label_of = device, label_of
        self.sources, self.argument = sources, argument
        try:
            self._take(grads, views)
        except Exception as error:
            self.reject_(error)

    def _take(self, grads: Sequence[Tensor | None], views: Any = None) -> None:
        shards = local_shards(self.wanted, grads, self._processes, self.label_of_parameter)
        self.sharding, self.wrappers, self.absent = shards.sharding, shards.wrappers, shards.absent
        self.plan = self.addresses = self.distinct = self.versions = None
        super().__init__(
            shards.tensors,
            self.device,
            self.label_of,
            self.sources,
            self.argument,
            self._cache,
            views,
        )
        if not shards.tensors:
            # As the other processes, with which it takes part.
            verifying = settings.current().verifying
            nothing = empty_plan(self.device, verifying=verifying, wide=self.sharding.wide)
            nothing.reduction = self._reduction(nothing, self.sharding.positions)
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
            shards=sharding.shards,
            wide=sharding.wide,
        )
        kept = range(len(tensors)) if new.distinct is None else new.distinct
        new.plan.reduction = self._reduction(new.plan, [sharding.positions[i] for i in kept])
        return new

    def _reduction(self, plan: Plan, positions: Sequence[int]) -> Reduction | None:
        """How norms are reduced; None where no other process has a shard."""
        sharding = self.sharding
        if not (sharding.domain.groups or sharding.domain.uncovered):
            return None
        shard_at = dict(zip(sharding.positions, sharding.shards, strict=True))
        groups = []
        for group in plan.groups:
            own = positions if group.indices is None else [positions[i] for i in group.indices]
            narrow = group.dtype != torch.float64
            groups.append(ShardGroup(shard_at[own[0]], Slots(own), narrow))
        return Reduction(sharding, groups, Slots(positions), Slots(sharding.is_partial))

    def reject_(self, error: Exception) -> None:
        """Drops all gradients, so that this process can take part and the others learn why.

        Raising at once would leave them waiting; it does so where nobody waits.
        """
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

    def without_tensors(self) -> ShardedGradients:
        """As of :class:`Gradients`; its processes still find each other."""
        twin = super().without_tensors()
        assert isinstance(twin, ShardedGradients)
        twin.wrappers = twin.wanted = ()
        return twin

    def shard(self, index: int) -> LocalShard:
        """The shard of the gradient at an index."""
        own = index if self.distinct is None else self.distinct[index]
        return self.sharding.shards[own]

    def position(self, index: int) -> int:
        """The position of a gradient among the parameters that are to be clipped."""
        return self.sharding.positions[index if self.distinct is None else self.distinct[index]]

    def culprits(self, indices: Iterable[int]) -> str:
        """As of :class:`Gradients`, each with its ranks; every process calls this, and waits."""
        if self.plan is None or self.plan.reduction is None:
            return self.labels(indices)
        ranks: dict[str, list[int]] = {}
        own = [self.label(i) for i in indices]
        for rank, labels in everyones(own, self.sharding.domain).items():
            for label in labels:
                ranks.setdefault(label, []).append(rank)
        return join_names(
            [f"{label} (on rank {', '.join(map(str, at))})" for label, at in ranks.items()]
        )

    def finish_writing(self, *, wrote: bool = True) -> None:
        """As of :class:`Gradients`; also counts versions of DTensors."""
        super().finish_writing(wrote=wrote)
        if self.wrappers and wrote:
            torch.autograd.graph.increment_version(self.wrappers)
