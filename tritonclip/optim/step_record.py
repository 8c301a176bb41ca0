"""The norms of a step for a recorder: of all gradients, of groups with a rule, of each parameter.

The norm of each parameter, its largest magnitude and its share of zeros are ordinary norms, of
order 2, inf and 0. Each takes a reading of the gradients, but the first where one rule measures it
for all parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from tritonclip.backends import choose
from tritonclip.engine import verify
from tritonclip.engine.norms import Norms
from tritonclip.messages import warn_user
from tritonclip.monitor.recorder import Recorder
from tritonclip.monitor.stats import Flag, Outcomes
from tritonclip.named_norms import STATISTICS, NamedNorms, zeros_of
from tritonclip.optim.clip_groups import UNLIMITED, ClipGroup, Grouping, global_norm_of
from tritonclip.optim.param_groups import are_same, key_of, label_of_member


class ParameterNames:
    """The names of the parameters of a clip group, kept from step to step."""

    def __init__(self) -> None:
        self._known: Any = ()
        self._names: tuple[str, ...] | None = None

    def of(self, group: ClipGroup) -> tuple[str, ...] | None:
        """The names of the group's parameters, in order; None where parameters share one."""
        found = group.gradients.sources
        if found is None:
            # The views of a FlatGradients do not change.
            found = group.gradients.tensors
        is_list = isinstance(found, list)
        if not (are_same(found, self._known) if is_list else found is self._known):
            # The user's list may change.
            self._known = list(found) if is_list else found
            names = tuple(map(group.gradients.label_of, range(len(found))))
            self._names = names if len(set(names)) == len(names) else None
        return self._names


def _values_of(group: ClipGroup) -> list[Sequence[float | Tensor]]:
    """Each gradient's norm and statistics: numbers, or a tensor where the host does not decide."""
    values: list[Sequence[float | Tensor]] = []
    for norm, each in zip(STATISTICS, group.recorded, strict=False):
        plan = each.gradients.plan
        assert plan is not None
        if plan.verifying:
            verify.check_norms(each)
        # By a norm of order 0, the share of zeros.
        found = zeros_of(each) if norm.order == 0 else each.numbers()
        if found is None:
            found = each.norm_here()
        values.append(found if isinstance(found, list) else [found])
    return values


class StepRecord:
    """The norms of a step for its recorder, before clipping; refused before anything is written.

    `names` are kept from step to step.

    Attributes:
        refusal: the error of gradients without norms by name, if other processes have to get it.
        clip_groups: to be measured with those of the step: the norm of each parameter, where other
            processes have shards of it.
    """

    def __init__(
        self,
        recorder: Recorder,
        clip_groups: Sequence[ClipGroup],
        grouping: Grouping,
        names: ParameterNames,
    ) -> None:
        self.refusal: Exception | None = None
        self.clip_groups: list[ClipGroup] = []
        self._recorder = recorder
        # The clip group of all parameters, in the order of the recorder: its reading gives the norm
        # of each. Else gradients that are measured for the recorder alone.
        self._whole: ClipGroup | None = None
        self._named: NamedNorms | None = None
        # The norm of all, and those by name, in this order, and then, if the recorder takes them,
        # largest magnitudes and shares of zeros; a 1-d tensor has several of them.
        self._norms: list[float | Tensor | None] = []
        self._order: tuple[str, ...] = ()
        # Names whose gradient is that of an earlier one, and counts there.
        self._again: set[str] = set()
        if not recorder.each:
            return
        groups, flat = grouping.groups, grouping.flat
        # Other processes have to get the error for gradients that are refused.
        is_collective = grouping.processes is not None
        is_spread = is_collective or any(group.is_spread for group in clip_groups)
        clipped = [group for group in clip_groups if not group.unclipped]
        if len(clipped) == 1 and clipped[0].index is None and not is_spread:
            (whole,) = clipped
            found, n = names.of(whole), sum([len(group["params"]) for group in groups])
            if (
                found
                and whole.flat is flat
                and (flat is not None or len(found) == n)
                and found == (recorder.names or found)
                and whole.gradients.positions() is None
            ):
                whole.by_name, whole.with_statistics = True, recorder.statistics
                self._whole, self._order = whole, found
                return
        parameters: Any = flat
        if flat is None:
            parameters = [
                (label_of_member(groups, index, position), parameter)
                for index, group in enumerate(groups)
                for position, parameter in enumerate(group["params"])
            ]
        try:
            self._named = NamedNorms(parameters)
        except (TypeError, ValueError, RuntimeError) as error:
            if not is_collective:
                raise
            self.refusal = error
            return
        if flat is None and not is_spread:
            positions = self._named.gradients.positions() or range(len(parameters))
            there = {name for name, parameter in parameters if parameter.grad is not None}
            self._again = there - {parameters[i][0] for i in positions}
        recorded = ClipGroup(self._named.gradients, UNLIMITED, unclipped=True)
        recorded.with_statistics = recorder.statistics
        if recorded.is_spread:
            self.clip_groups.append(recorded)

    def check(self, clip_groups: Sequence[ClipGroup]) -> None:
        """Refuses a recorder that cannot take the step, of these clip groups."""
        if self._whole is None:
            names = [
                key_of(group.index)
                for group in clip_groups
                if group.index is not None and group.has_norm
            ]
            if self._named is not None:
                names += self._named.names
            # Those of the recorder first: of parameters frozen since nothing is known.
            self._order = tuple(dict.fromkeys([*(self._recorder.names or ()), *names]))
        self._recorder.prepare(self._order)

    def measure(self, clip_groups: Sequence[ClipGroup], grad_scale: float | Tensor) -> None:
        """Takes the norms of a step that is measured, and not written yet."""
        norm: float | Tensor | None = None
        by_group: dict[str, float | Tensor] = {}
        for group in clip_groups:
            if not group.has_norm:
                continue
            if group.index is None:
                norm = group.norm()
            else:
                by_group[key_of(group.index)] = group.norm()
        if norm is None:
            # By value, and where every group has a rule, no rule of the wrapper measures a norm.
            norm, _ = global_norm_of(clip_groups, grad_scale)
        if self._whole is not None:
            self._norms = [norm, *chain.from_iterable(_values_of(self._whole))]
            return
        columns: list[Mapping[str, float | Tensor | None]] = [{}] * (
            3 if self._recorder.statistics else 1
        )
        if self._named is not None:
            columns = self._columns_of_named(self._named, grad_scale)
        columns[0] = {**by_group, **columns[0]}
        for name in self._again:
            columns = [{**column, name: None} for column in columns]
        self._norms = [norm, *(column.get(name) for column in columns for name in self._order)]

    def _columns_of_named(
        self, named: NamedNorms, grad_scale: float | Tensor
    ) -> list[Mapping[str, float | Tensor | None]]:
        """Norms by name, and statistics, of gradients that are measured for the recorder alone."""
        group = self.clip_groups[0] if self.clip_groups else None
        measured = [] if group is None else group.recorded
        if self._recorder.statistics:
            statistics: Sequence[Norms] = measured
            if group is None:
                statistics = named.measure_statistics(grad_scale)
            return [*named.statistics_by_name(statistics)]
        each = measured[0].norm_here() if measured else named.measure(2.0, grad_scale)
        if choose.host_decides(each.device):
            return [named.numbers_by_name(each.tolist(), 2.0)]
        return [named.by_name(each, 2.0)]

    def add_to(
        self, recorder: Recorder, outcomes: Outcomes, left_out: Flag, loss: float | Tensor | None
    ) -> None:
        """Records the step."""
        result = None if left_out is True else outcomes.get(None)
        coefficient, limit = (None, None) if result is None else (result.coefficient, result.limit)
        norm, *norms = self._norms
        if recorder is not self._recorder:
            recorder.prepare(self._order)
        try:
            recorder.append_([norm, coefficient, limit, left_out, loss, *norms])
        except OSError as error:
            # The step is taken: training goes on.
            warn_user(
                f"{recorder!r} could not write: {error}. Training goes on, and the rows are kept "
                "for the next flush",
                RuntimeWarning,
            )
