"""The norms of a step for a recorder: of all gradients, of groups with a rule, of each parameter.

The norm of each parameter takes a reading of the gradients, unless the rule measures it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from torch import Tensor

from tritonclip.backends import choose
from tritonclip.engine import verify
from tritonclip.engine.norms import Norms
from tritonclip.messages import warn_user
from tritonclip.monitor.recorder import Recorder
from tritonclip.monitor.stats import Flag, Outcomes
from tritonclip.named_norms import NamedNorms, is_measured
from tritonclip.optim.clip_groups import UNLIMITED, ClipGroup, Grouping, global_norm_of
from tritonclip.optim.param_groups import are_same, key_of, label_of_member


class ParameterNames:
    """The names of the parameters in clip groups, kept from step to step."""

    def __init__(self) -> None:
        # The parameters of each clip group.
        self._known: list[list[Tensor]] = []
        self._names: list[list[str]] | None = None

    def of(self, clip_groups: Sequence[ClipGroup]) -> list[list[str]] | None:
        """The names of each clip group's parameters; None where parameters share one."""
        found = [_parameters_in(group) for group in clip_groups]
        if len(found) != len(self._known) or not all(map(are_same, found, self._known)):
            # The user's list may change.
            self._known = list(map(list, found))
            names = [
                list(map(group.gradients.label_of, range(len(params))))
                for params, group in zip(found, clip_groups, strict=True)
            ]
            every = [*chain.from_iterable(names)]
            self._names = names if len(set(every)) == len(every) else None
        return self._names


def _parameters_in(group: ClipGroup) -> Sequence[Tensor]:
    """The parameters of a clip group that a rule holds for, with and without gradients."""
    sources = group.gradients.sources
    assert sources is not None
    return sources


def _add_norms_(by_name: dict[str, float | Tensor], group: ClipGroup, names: Sequence[str]) -> None:
    """Adds norms of a clip group by name; 0 where there is no gradient."""
    positions = group.gradients.positions()
    if positions is not None:
        for name, p in zip(names, _parameters_in(group), strict=True):
            if is_measured(p) and p.grad is None:
                by_name[name] = 0.0
        names = [names[i] for i in positions]
    if group.recorded is not None:
        by_name.update(zip(names, _values_of(group.recorded), strict=True))


def _values_of(norms: Norms) -> Sequence[float] | Tensor:
    """The norm of each gradient: numbers, or a tensor where the host does not decide."""
    plan = norms.gradients.plan
    assert plan is not None
    if plan.verifying:
        verify.Reference(norms.gradients).check_norms(norms)
    numbers = norms.numbers()
    return numbers if isinstance(numbers, list) else norms.norm_here()


class StepRecord:
    """The norms of a step for its recorder, before clipping; refused before anything is written."""

    def __init__(
        self,
        recorder: Recorder,
        clip_groups: Sequence[ClipGroup],
        grouping: Grouping,
        names: ParameterNames,
    ) -> None:
        # For gradients without norms by name, if other processes have to get it.
        self.refusal: Exception | None = None
        # To be measured with those of the step, where other processes have shards.
        self.clip_groups: list[ClipGroup] = []
        self._recorder = recorder
        # Clip groups whose reading gives the norm of each gradient, and names of their parameters.
        self._clipped: Sequence[ClipGroup] = ()
        self._names: Sequence[list[str]] = ()
        # All norms by name are those of one clip group, in order.
        self._is_whole = False
        # Gradients that are measured for the recorder alone.
        self._named: NamedNorms | None = None
        # The norm of all, and those by name, in this order; a 1-d tensor has several of them.
        self._norms: list[float | Tensor | None] = []
        self._order: tuple[str, ...] = ()
        if not recorder.each:
            return
        groups = grouping.groups
        # Other processes have to get the error for gradients that are refused.
        is_collective = grouping.processes is not None
        clipped = [group for group in clip_groups if not group.unclipped]
        is_spread = is_collective or True in [group.is_spread for group in clip_groups]
        if not is_spread:
            found = names.of(clipped)
            if found is not None:
                self._clipped, self._names = clipped, found
                for group in clipped:
                    group.is_recorded = True
                n_named, n = sum(map(len, found)), sum([len(group["params"]) for group in groups])
                if n_named == n:
                    return
        measured = {id(p) for group in self._clipped for p in _parameters_in(group)}
        parameters = [
            (label_of_member(groups, index, position), parameter)
            for index, group in enumerate(groups)
            for position, parameter in enumerate(group["params"])
            if id(parameter) not in measured
        ]
        try:
            self._named = NamedNorms(parameters)
        except (TypeError, ValueError, RuntimeError) as error:
            if not is_collective:
                raise
            self.refusal = error
            return
        gradients = self._named.gradients
        recorded = ClipGroup(gradients, UNLIMITED, unclipped=True, is_recorded=True)
        if recorded.is_spread:
            self.clip_groups.append(recorded)

    def check(self, clip_groups: Sequence[ClipGroup]) -> None:
        """Refuses a recorder that cannot take the step, of these clip groups."""
        names = []
        for group in clip_groups:
            if group.index is not None and group.has_norm:
                names.append(key_of(group.index))
        complete = True
        for group, group_names in zip(self._clipped, self._names, strict=True):
            if group.gradients.positions() is None:
                names += group_names
            else:
                parameters = _parameters_in(group)
                names += [
                    name for name, p in zip(group_names, parameters, strict=True) if is_measured(p)
                ]
                complete = False
        if self._named is not None:
            names += self._named.names
        earlier_names, order = self._recorder.names or (), tuple(names)
        if order != earlier_names:
            # Those of the recorder first: of parameters frozen since nothing is known.
            order = tuple(dict.fromkeys([*earlier_names, *names]))
        self._is_whole = complete and len(self._names) == 1 and order == tuple(self._names[0])
        self._order = order
        self._recorder.prepare(order)

    def measure(self, clip_groups: Sequence[ClipGroup], grad_scale: float | Tensor) -> None:
        """Takes the norms of a step that is measured, and not written yet."""
        norm: float | Tensor | None = None
        by_name: dict[str, float | Tensor] = {}
        for group in clip_groups:
            if not group.has_norm:
                continue
            if group.index is None:
                norm = group.norm()
            else:
                by_name[key_of(group.index)] = group.norm()
        if norm is None:
            # By value, and where every group has a rule, no rule of the wrapper measures a norm.
            norm, _ = global_norm_of(clip_groups, grad_scale)
        if self._is_whole and (recorded := self._clipped[0].recorded) is not None:
            found = _values_of(recorded)
            self._norms = [norm, found] if isinstance(found, Tensor) else [norm, *found]
            return
        for group, names in zip(self._clipped, self._names, strict=True):
            _add_norms_(by_name, group, names)
        if self._named is not None:
            by_name.update(self._norms_of_named(self._named, grad_scale))
        self._norms = [norm, *map(by_name.get, self._order)]

    def _norms_of_named(
        self, named: NamedNorms, grad_scale: float | Tensor
    ) -> Mapping[str, float | Tensor]:
        """Norms by name of gradients that are measured for the recorder alone."""
        measured = self.clip_groups[0].recorded if self.clip_groups else None
        each = named.measure(2.0, grad_scale) if measured is None else measured.norm_here()
        if choose.host_decides(each.device):
            return named.numbers_by_name(each.tolist(), 2.0)
        return named.by_name(each, 2.0)

    def add(self, outcomes: Outcomes, left_out: Flag, loss: float | Tensor | None) -> None:
        """Records the step."""
        recorder = self._recorder
        result = None if left_out is True else outcomes.get(None)
        coefficient, limit = (None, None) if result is None else (result.coefficient, result.limit)
        norm, *norms = self._norms
        try:
            recorder.append_([norm, coefficient, limit, left_out, loss, *norms])
        except OSError as error:
            # The step is taken: training goes on. Later warnings of the same text are not shown.
            warn_user(
                f"the recorder of {recorder.path} could not write: {error}. Training goes on, and "
                "the rows are kept for the next flush",
                RuntimeWarning,
            )
