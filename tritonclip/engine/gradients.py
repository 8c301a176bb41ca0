"""The gradients that one call clips, each once, with their plan.

Whether a list lies over processes is asked once, where it is collected: are DTensors among the
parameters, or did the user name a process group? The list then has a `sharding`, by which its plan
is found, and its plan one with the shard of each gradient; see `tritonclip.distributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from operator import attrgetter
from sys import modules

import torch
from torch import Tensor

from tritonclip import settings
from tritonclip.backends.interface import Batch
from tritonclip.distributed.domain import Domain, Processes, gather_objects
from tritonclip.distributed.shards import Sharding, are_sharded, local_tensors
from tritonclip.engine.arguments import (
    FSDP_MARKS,
    LabelOf,
    are_fsdp_shards,
    as_list,
    device_of,
    gradient_of,
    names_at,
    needs_clip,
    refuse_parameters,
    tensors_in,
    unnamed,
)
from tritonclip.engine.plan import Plan, make_plan, unique_indices
from tritonclip.engine.plan_cache import PlanCache, plans
from tritonclip.engine.reading import as_real, copy_of, write_back_
from tritonclip.messages import join_names
from tritonclip.modes import PLAIN, is_observed, refuse_batches, refuse_tracer

_PLAIN_TENSOR = frozenset({Tensor})
_get_requires_grad = attrgetter("requires_grad")


def collect(
    parameters: object,
    label_of: LabelOf = "parameters[{}]".format,
    processes: Processes | None = None,
    cache: PlanCache = plans,
    device: torch.device | None = None,
) -> Gradients:
    """Collects the gradients of tensors, a module, or named parameters; raises as `take_`.

    `processes` hold the list between them where no DTensor says so. `device` is that of results
    where there is no parameter.
    """
    sources = parameters if type(parameters) is list else as_list(parameters)
    if processes is not None or not PLAIN.issuperset(map(type, sources)):
        sources, label_of = unnamed(sources, label_of)
        wanted = [p for p in sources if getattr(p, "need_clip", True)]

        def label_of_wanted(index: int) -> str:
            positions = [i for i, parameter in enumerate(sources) if needs_clip(parameter)]
            return names_at([positions[index]], parameters, label_of)[0]

        gradients = Gradients(device or device_of(sources), label_of, sources, parameters)
        grads = [p.grad for p in wanted]
        return _take_spread_(gradients, wanted, grads, label_of_wanted, processes, cache)
    tensors = [g for p in sources if (g := p.grad) is not None and getattr(p, "need_clip", True)]
    if device is None:
        device = sources[0].device if sources else torch.device("cpu")
    return Gradients(device, label_of, sources, parameters).take_(tensors, cache)


def collect_tensors(
    tensors: object, processes: Processes | None = None, *, writes: bool = False
) -> Gradients:
    """As `collect`, of tensors that are gradients; one that `writes` refuses parameters."""
    items, label_of = tensors_in(tensors)
    plain = _PLAIN_TENSOR.issuperset(map(type, items))
    if writes and not (plain and True not in map(_get_requires_grad, items)):
        refuse_parameters(items, label_of)
    gradients = Gradients(device_of(items), label_of)
    if plain and processes is None:
        return gradients.take_(items)
    gradients.may_be_part = not writes
    return _take_spread_(gradients, items, items, label_of, processes)


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
    gradients = Gradients(device, lambda index: label_of(there[index]))
    return _take_spread_(gradients, parameters, grads, label_of, processes, cache)


def _take_spread_(
    gradients: Gradients,
    wanted: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    label_of_wanted: LabelOf,
    processes: Processes | None,
    cache: PlanCache = plans,
) -> Gradients:
    """As `take_`, of DTensors the shards that lie here; other processes may have others.

    `grads` are one or None for each of the `wanted` parameters. A list that is refused while other
    processes wait for its norms has its `error`, and no gradient.
    """
    if processes is None and not are_sharded([*wanted, *grads]):
        return gradients.take_([g for g in grads if g is not None], cache)
    gradients.sharding = Sharding(wanted, grads, processes)
    gradients.wanted, gradients.label_of_wanted = wanted, label_of_wanted
    try:
        if processes is not None:
            gradients.sharding.copies = processes.copies_of(wanted)
        tensors, gradients.wrappers = local_tensors(grads)
        gradients.take_(tensors, cache)
    except Exception as error:
        gradients.reject_(error)
    return gradients


@dataclass(eq=False)
class Gradients:
    """The gradients of one call, with their plan.

    Attributes:
        device: of results where there is no gradient.
        label_of: names the i-th source where it has no name.
        sources: the parameters that the gradients are of, with and without one; None where the
            tensors were handed over themselves.
        argument: the user's, which may know names.
        tensors: the gradients as users see them, each once; of DTensors the local shards.
        plan: all that is known of the list; None for an empty one.
        copies: dense copies that stand for some of the tensors, by their index.
        readable: tensors that verbs read and write, one for each of the plan's.
        addresses: theirs where they are known.
        distinct: indices of `tensors` among the gradients of the sources; None for all.
        sharding: how a list over processes lies; None for other lists, which need none of these:
        wanted: all parameters that are to be clipped, with or without a gradient here.
        label_of_wanted: names the i-th of them.
        wrappers: DTensors around the tensors, whose versions count too.
        may_be_part: it is only measured, and the caller puts the norms of other meshes together,
            as torch's callers do.
        error: that of a rejected list, which its processes raise together; None for others.
    """

    device: torch.device
    label_of: LabelOf
    sources: Sequence[Tensor] | None = None
    argument: object = None
    tensors: Sequence[Tensor] = field(init=False)
    readable: list[Tensor] = field(init=False)
    copies: dict[int, Tensor] = field(init=False)
    # The values that most lists have: a call sets only those that differ.
    plan: Plan | None = field(default=None, init=False)
    addresses: list[int] | None = field(default=None, init=False)
    distinct: list[int] | None = field(default=None, init=False)
    sharding: Sharding | None = field(default=None, init=False)
    wanted: Sequence[Tensor] = field(default=(), init=False)
    label_of_wanted: LabelOf = field(default=str, init=False)
    wrappers: Sequence[Tensor] = field(default=(), init=False)
    may_be_part: bool = field(default=False, init=False)
    error: Exception | None = field(default=None, init=False)

    def take_(self, tensors: list[Tensor], cache: PlanCache = plans) -> Gradients:
        """Takes gradients, in order, of which one may come again, and finds or makes their plan.

        Raises:
            TypeError: gradients that are no plain floating-point or complex tensors.
            ValueError: gradients whose elements overlap, or that have no memory.
            RuntimeError: the backend asked for cannot serve them.
        """
        self.tensors = self.readable = tensors
        self.copies, sharding = {}, self.sharding
        setting = settings.current()
        if not tensors:
            if sharding is not None:
                self._plan_anew([], None, setting, None)
            return self
        # A mode may hand out other tensors than asked for, which no plan may keep.
        observed = is_observed()
        if observed:
            refuse_tracer()
            refuse_batches(tensors)
        addresses: list[int] | None
        try:
            addresses = list(map(Tensor.data_ptr, tensors))
        except (RuntimeError, NotImplementedError, ValueError):
            # Sparse gradients, among others, have no memory that an address could tell.
            addresses = None
        may_cache = addresses is not None and not observed
        if sharding is None and self.sources and "torch.distributed.fsdp" in modules:
            # A plan of whole gradients says nothing of shards.
            may_cache = may_cache and not any(map(hasattr, self.sources, FSDP_MARKS))
        plan = None
        if may_cache:
            plan = cache.find(tensors, addresses, setting, sharding)  # type: ignore[arg-type]
        if plan is None and sharding is None:
            # Tied parameters: the list without repeats may be known.
            once = unique_indices(map(id, tensors))
            if once is not None:
                tensors, addresses = self._keep(once, tensors, addresses)
                plan = cache.find(tensors, addresses, setting) if may_cache else None  # type: ignore[arg-type]
        if plan is None:
            self._plan_anew(tensors, addresses, setting, cache if may_cache else None)
            return self
        self.plan, self.addresses, self.readable = plan, addresses, tensors
        if plan.staged:
            self.copies = {i: copy_of(tensors[i]) for i in plan.staged}
            self.readable = [self.copies.get(i, grad) for i, grad in enumerate(tensors)]
            self.addresses = None
        if plan.pairs:
            self.readable = list(map(as_real, self.readable))
        return self

    def _keep(
        self, indices: list[int], tensors: list[Tensor], addresses: list[int] | None
    ) -> tuple[list[Tensor], list[int] | None]:
        """Drops gradients that occurred before; returns the others and their addresses."""
        self.distinct = indices if self.distinct is None else [self.distinct[i] for i in indices]
        self.tensors = kept = [tensors[i] for i in indices]
        return kept, None if addresses is None else [addresses[i] for i in indices]

    def _plan_anew(
        self,
        tensors: list[Tensor],
        addresses: list[int] | None,
        setting: settings.Settings,
        cache: PlanCache | None,
    ) -> None:
        """Makes a plan; a cache keeps it where it may serve other lists."""
        sharding = self.sharding
        if sharding is not None:
            sharding.locate(self.label_of_wanted)
        plan, distinct, self.copies, self.readable = make_plan(
            *(tensors, addresses, self.label, self.device),
            verifying=setting.verifying,
            whole=not are_fsdp_shards(self.sources or ()),
            sharding=sharding,
        )
        if tensors or plan.domain is not None:
            self.plan = plan
        if distinct is not None:
            _, addresses = self._keep(distinct, tensors, addresses)
            if sharding is not None:
                shards = list(sharding.shards.items())
                sharding.shards = dict(shards[i] for i in distinct)
        self.addresses = None if plan.staged else addresses
        if cache is not None and distinct is None:
            assert addresses is not None
            cache.keep(plan, tensors, addresses, setting, sharding)

    def reject_(self, error: Exception) -> None:
        """Raises an error about the list, or drops its gradients where other processes wait for it.

        Norms of the list then raise the error, when the others know.
        """
        if self.error is not None:
            # Dropped already; the others get the first error.
            return
        if self.sharding is None:
            raise error
        self.sharding, self.plan = copy(self.sharding), None
        self.sharding.grads = [None] * len(self.wanted)
        self.addresses, self.distinct, self.wrappers = None, None, ()
        try:
            self.take_([])
        except Exception:
            # Numbers of copies may be wrong in this process only.
            self.sharding.copies = None
            self.take_([])
        if self.plan is None:
            raise error
        self.error = error

    @property
    def domain(self) -> Domain | None:
        """The processes that norms are reduced over; None where no others have shards."""
        return None if self.plan is None else self.plan.domain

    def label(self, index: int) -> str:
        """Names the gradient at an index in messages."""
        return self.labels([index])

    def labels(self, indices: Iterable[int]) -> str:
        """Names gradients in a message."""
        positions = self.positions()
        found = [i if positions is None else positions[i] for i in indices]
        return join_names(names_at(found, self.argument, self.label_of))

    def culprits(self, indices: Iterable[int]) -> str:
        """Names the gradients to blame, of every process that shares the norm; "" without any.

        Each of several processes calls this, and waits; names then have their ranks.
        """
        if self.domain is None:
            return self.labels(indices)
        ranks: dict[str, list[int]] = {}
        names_here = [self.label(i) for i in indices]
        for rank, labels in gather_objects(names_here, self.domain).items():
            for label in labels:
                ranks.setdefault(label, []).append(rank)
        return join_names(
            [f"{label} (on rank {', '.join(map(str, at))})" for label, at in ranks.items()]
        )

    def terms(self) -> list[int]:
        """The indices of gradients that are terms of a sum, which other processes have, too."""
        n, groups = range(len(self.tensors)), () if self.plan is None else self.plan.groups
        return sorted(i for group in groups if group.shard.sums_over for i in group.of(n))

    def positions(self) -> Sequence[int] | None:
        """The positions of the gradients among the sources; None where every source has one."""
        if self.sources is None or len(self.sources) == len(self.tensors):
            return self.distinct
        there = [i for i, p in enumerate(self.sources) if gradient_of(p) is not None]
        return there if self.distinct is None else [there[i] for i in self.distinct]

    def indices_where(self, condition: Callable[[Tensor], bool]) -> list[int]:
        """The indices of gradients of a kind."""
        return [index for index, grad in enumerate(self.tensors) if condition(grad)]

    def of_group(self, indices: Sequence[int] | None) -> tuple[list[Tensor], list[int] | None]:
        """The readable tensors of a group, and their addresses where they are known."""
        if indices is None:
            return self.readable, self.addresses
        tensors = [self.readable[i] for i in indices]
        return tensors, None if self.addresses is None else [self.addresses[i] for i in indices]

    def batches(self) -> list[Batch]:
        """The readable tensors of each group, in the hands of its backend."""
        groups = () if self.plan is None else self.plan.groups
        return [group.layout.bind(*self.of_group(group.indices)) for group in groups]

    def dense(self) -> Sequence[Tensor]:
        """The gradients as users see them; of some, dense copies."""
        if not self.copies:
            return self.tensors
        return [self.copies.get(i, grad) for i, grad in enumerate(self.tensors)]

    def owners(self) -> list[Tensor]:
        """The parameter of each gradient, in order."""
        at, sources = self.positions(), self.sources
        assert sources is not None
        return list(sources) if at is None else [sources[i] for i in at]

    def finish_writing(self, *, wrote: bool = True) -> None:
        """Writes copies back, and counts the versions of DTensors."""
        if not wrote:
            return
        for index, dense in self.copies.items():
            write_back_(self.tensors[index], dense)
        if self.wrappers:
            torch.autograd.graph.increment_version(self.wrappers)
