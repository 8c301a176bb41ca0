"""The norms of a step for a recorder: of all gradients, of groups with a rule, of each parameter.

The norm of each parameter takes a reading of the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from tritonclip.backends import choose
from tritonclip.messages import warn_user
from tritonclip.monitor.recorder import Recorder
from tritonclip.monitor.stats import Flag, Outcomes
from tritonclip.named_norms import NamedNorms
from tritonclip.optim.clip_groups import (
    EACH_NORM,
    UNLIMITED,
    ClipGroup,
    Grouping,
    global_norm_of,
)
from tritonclip.optim.param_groups import key_of


class StepRecord:
    """The norms of a step for its recorder, before clipping; refused before anything is written.

    Attributes:
        refusal: of gradients without norms by name, if other processes have to get it.
        clip_groups: to be measured with those of the step, where other processes have shards.
    """

    def __init__(self, recorder: Recorder, grouping: Grouping) -> None:
        self.refusal: Exception | None = None
        self.clip_groups: list[ClipGroup] = []
        self._recorder = recorder
        # The gradients that have norms by name.
        self._named: NamedNorms | None = None
        # The norm of all, and those by name, in this order.
        self._norms: list[float | Tensor | None] = []
        self._order: tuple[str, ...] = ()
        if not recorder.each:
            return
        try:
            parameters = [p for group in grouping.groups for p in group["params"]]
            self._named = NamedNorms(parameters, names=grouping.names())
        except (TypeError, ValueError, RuntimeError) as error:
            # Other processes have to get it.
            if grouping.processes is None:
                raise
            self.refusal = error
            return
        group = ClipGroup(self._named.gradients, UNLIMITED, unclipped=True)
        if group.is_spread:
            self.clip_groups.append(group)

    def check(self, clip_groups: Sequence[ClipGroup]) -> None:
        """Refuses a recorder that cannot take the step, of these clip groups."""
        names = [key_of(g.index) for g in clip_groups if g.index is not None and g.has_norm]
        if self._named is not None:
            names += self._named.names
        earlier_names, order = self._recorder.names or (), tuple(names)
        if order != earlier_names:
            # Those of the recorder first: of parameters frozen since nothing is known.
            order = tuple(dict.fromkeys([*earlier_names, *names]))
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
        if self._named is not None:
            by_name.update(self._norms_of_named(self._named, grad_scale))
        self._norms = [norm, *map(by_name.get, self._order)]

    def _norms_of_named(
        self, named: NamedNorms, grad_scale: float | Tensor
    ) -> Mapping[str, float | Tensor]:
        """Norms by name."""
        if self.clip_groups:
            each = self.clip_groups[0].others[EACH_NORM].norm_here()
        else:
            each = named.measure(2.0, grad_scale)
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
