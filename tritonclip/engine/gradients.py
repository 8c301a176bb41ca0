"""The gradients that one call clips, each once, with their plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from sys import modules
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tritonclip import settings
from tritonclip.engine.arguments import (
    FSDP_MARKS,
    LabelOf,
    are_fsdp_shards,
    gradient_of,
    names_at,
)
from tritonclip.engine.plan import NewPlan, Plan, make_plan, unique_indices
from tritonclip.engine.plan_cache import PlanCache, plans
from tritonclip.engine.reading import copy_of, write_back_
from tritonclip.messages import join_names
from tritonclip.modes import is_observed, refuse_batches, refuse_tracer
from tritonclip.rules import Norm, Rule


class Gradients:
    """The gradients of one call, with their plan.

    Args:
        tensors: the gradients, in order; one may come again.
        device: of results where there is no gradient.
        label_of: names the i-th source where it has no name.
        sources: the parameters that the gradients are of, with and without one; None where the
            tensors were handed over themselves.
        argument: the user's, which may know names.
        cache: of plans.

    Attributes:
        tensors: as users see them, each once.
        plan: all that is known of the list; None for an empty one.
        copies: dense copies that stand for some of the tensors, by their index.
        readable: tensors that verbs read and write, one for each of the plan's.
        addresses: theirs where they are known.
        distinct: indices of `tensors` among the gradients of the sources; None for all.
        sharding: how the list lies over processes, see `tritonclip.distributed`; None for one.
        wanted: of a list over processes, all parameters that are to be clipped.
        absent: of these, the ones without a gradient here.
        error: that of a rejected list, which its processes raise together; None for others.

    Raises:
        TypeError: gradients that are no plain floating-point or complex tensors.
        ValueError: gradients whose elements overlap, or that have no memory.
        RuntimeError: the backend asked for cannot serve them.
    """

    # The values that most lists have: a call sets only those that differ.
    plan: Plan | None = None
    addresses: list[int] | None = None
    distinct: list[int] | None = None
    copies: Mapping[int, Tensor] = MappingProxyType({})
    sharding: Any = None
    wanted: Sequence[Tensor] = ()
    absent: Sequence[Tensor] = ()
    # Only measured: the caller puts the norms of other meshes together, as torch's callers do.
    may_be_part: bool = False
    error: Exception | None = None

    def __init__(
        self,
        tensors: list[Tensor],
        device: torch.device,
        label_of: LabelOf,
        sources: Sequence[Tensor] | None = None,
        argument: object = None,
        cache: PlanCache = plans,
    ) -> None:
        self.tensors: Sequence[Tensor] = tensors
        self.device, self.label_of = device, label_of
        self.sources, self.argument = sources, argument
        self.readable: list[Tensor] = tensors
        if not tensors:
            return
        setting = settings.current()
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
        if sources and "torch.distributed.fsdp" in modules:
            # A plan of whole gradients says nothing of shards.
            may_cache = may_cache and not any(map(hasattr, sources, FSDP_MARKS))
        plan = None
        if may_cache:
            plan = cache.find(tensors, addresses, setting, self.sharding)  # type: ignore[arg-type]
        if plan is None and self.sharding is None:
            # Tied parameters: the list without repeats may be known.
            once = unique_indices(map(id, tensors))
            if once is not None:
                tensors, addresses = self._keep(once, tensors, addresses)
                plan = cache.find(tensors, addresses, setting) if may_cache else None  # type: ignore[arg-type]
        if plan is None:
            self._plan_anew(tensors, addresses, setting, cache if may_cache else None)
        else:
            self.plan, self.addresses, self.readable = plan, addresses, tensors
            if plan.staged:
                self.copies = {i: copy_of(tensors[i]) for i in plan.staged}
                self.readable = [self.copies.get(i, grad) for i, grad in enumerate(tensors)]
                self.addresses = None
            if plan.views:
                self.readable = plan.readable(self.readable)

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
        new = self._make_plan(tensors, addresses, verifying=setting.verifying)
        self.plan, self.readable, self.copies = new.plan, new.readable, new.copies
        if new.distinct is not None:
            _, addresses = self._keep(new.distinct, tensors, addresses)
        self.addresses = None if new.plan.staged else addresses
        if cache is not None and new.distinct is None:
            assert addresses is not None
            cache.keep(new.plan, tensors, addresses, setting, self.sharding)

    def _make_plan(
        self, tensors: list[Tensor], addresses: list[int] | None, *, verifying: bool
    ) -> NewPlan:
        whole = not are_fsdp_shards(self.sources or ())
        return make_plan(tensors, addresses, self.label, verifying=verifying, whole=whole)

    def twin(self, copies: list[Tensor]) -> Gradients:
        """The same list of dense copies, planned anew, for `verify()`.

        Results, limits and coefficients are rounded as those of this list.
        """
        twin, plan = copy(self), self.plan
        assert plan is not None
        twin.tensors = twin.readable = copies
        twin.addresses, twin.copies = None, {}
        if not copies:
            twin.plan = replace(plan, verifying=False)
            return twin
        new = twin._make_plan(copies, None, verifying=False)
        twin.plan, twin.readable = new.plan, new.readable
        new.plan.dtype = plan.dtype
        for group in new.plan.groups:
            group.layout.dtype = plan.dtype
        return twin

    def is_term(self, index: int) -> bool:
        """Whether a gradient is one of several terms of a sum, which other processes have."""
        return False

    def reject_(self, error: Exception) -> None:
        """Raises an error about the list; later, where other processes wait for its norms."""
        raise error

    def refuse_shards(self, rule: Rule) -> None:
        """Refuses a rule that would need more of a gradient than its shard."""

    def verify_agreement(
        self,
        call: str,
        rule: Rule | Norm,
        grad_scale: float | Tensor = 1.0,
        nonfinite: str = "propagate",
        total_norm: Tensor | None = None,
    ) -> None:
        """Under `verify()`, raises on all processes of the list where they make another call."""

    @property
    def n_parameters(self) -> int:
        """The parameters that the list was collected from, with and without a gradient."""
        return len(self.tensors if self.sources is None else self.sources)

    def label(self, index: int) -> str:
        """Names the gradient at an index in messages."""
        return self.labels([index])

    def labels(self, indices: Iterable[int]) -> str:
        """Names gradients in a message."""
        positions = self.positions()
        found = [i if positions is None else positions[i] for i in indices]
        return join_names(names_at(found, self.argument, self.label_of))

    def culprits(self, indices: Iterable[int]) -> str:
        """Names gradients that are to blame, of every process that shares the norm; or ""."""
        return self.labels(indices)

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
        """Writes copies back."""
        for index, dense in self.copies.items() if wrote else ():
            write_back_(self.tensors[index], dense)
