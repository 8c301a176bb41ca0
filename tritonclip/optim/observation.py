"""The norms of a step for its recorder, measured before the first gradient is written."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tritonclip.engine.norms import total
from tritonclip.flat.flat_gradients import FlatGradients
from tritonclip.messages import warn_user
from tritonclip.monitor.recorder import Recorder
from tritonclip.monitor.stats import Outcomes
from tritonclip.norms import NamedNorms
from tritonclip.optim.param_groups import Groups, label_of_member
from tritonclip.optim.shares import Share
from tritonclip.rules import ClipByNorm

if TYPE_CHECKING:
    from tritonclip.optim.step import StepClipping


# Measures each gradient, and limits none.
_EACH = ClipByNorm(math.inf)


class Observation:
    """The norms of a step before clipping, on the device; refused before anything is written.

    Args:
        recorder: that is going to be told.
        groups: parameter groups of the optimizer.
        flat: the gradients of all groups, if they are in buffers.
        grad_scale: the loss scale that gradients still carry.
        tells: the caller tells other processes of gradients that are refused.

    Attributes:
        refusal: why the gradients have no norms by name; only where others are told.
        shares: to be measured with those of the step: the norm of each parameter, where other
            processes have pieces of it.
    """

    def __init__(
        self,
        recorder: Recorder,
        groups: Groups,
        flat: FlatGradients | None,
        grad_scale: Tensor | float | None,
        *,
        tells: bool,
    ) -> None:
        self.refusal: Exception | None = None
        self._recorder, self._grad_scale = recorder, grad_scale
        self._named: NamedNorms | None = None
        self.shares: list[Share] = []
        self._norms: dict[str, Tensor | None] = {}
        if not recorder.each:
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
            if not tells:
                raise
            self.refusal = error
            return
        gradients = self._named.gradients
        if gradients.plan is not None and gradients.plan.reduction is not None:
            self.shares.append(Share(gradients, _EACH, None, unclipped=True))

    def check(self, indices: Iterable[int | None]) -> None:
        """Refuses a recorder that cannot take the step, whose rules belong to these groups."""
        names = [] if self._named is None else self._named.names
        self._recorder.prepare(self._in_order([*_names_of(indices), *names]))

    def take(self, clipping: StepClipping) -> None:
        """Takes the norms of a step that is measured, and not written yet."""
        norms = clipping.norms()
        # By value, and where every group has a rule, no rule of the wrapper measures a norm.
        self._norm = norms.pop(None) if None in norms else clipping.global_norm()
        own: dict[str, Tensor | None] = dict(zip(_names_of(norms), norms.values(), strict=True))
        if self._named is not None:
            measured = self.shares[0].norms if self.shares else None
            if measured is None:
                own |= self._named.measure(2.0, self._grad_scale)
            else:
                own |= self._named.by_name(total(measured), 2.0)
        self._norms = {name: own.get(name) for name in self._in_order(own)}

    def _in_order(self, names: Iterable[str]) -> list[str]:
        """Names, those of the recorder first: of parameters frozen by now nothing is known."""
        return list(dict.fromkeys([*(self._recorder.names or ()), *names]))

    def add_to(
        self, recorder: Recorder, outcomes: Outcomes | None, skipped: Tensor | bool | None
    ) -> None:
        """Records the step.

        Args:
            recorder: that takes it.
            outcomes: of clipping; None where nothing was clipped.
            skipped: whether the step was left out; None for no.
        """
        own = None if outcomes is None else outcomes.get(None)
        try:
            recorder.add_(
                self._norm,
                coefficient=None if own is None else own.coefficient,
                limit=None if own is None else own.limit,
                skipped=False if skipped is None else skipped,
                norms=self._norms,
            )
        except OSError as error:
            # The step is taken: training goes on.
            warn_user(
                f"{recorder!r} could not write: {error}. Training goes on, and the rows are kept "
                "for the next flush",
                RuntimeWarning,
            )


def _names_of(indices: Iterable[int | None]) -> list[str]:
    """The names of norms of groups that have a rule."""
    return [f"group{index}" for index in indices if index is not None]


def as_recorder(recorder: object) -> Recorder | None:
    """The user's `recorder`.

    Raises:
        TypeError: no recorder.
    """
    if recorder is None or isinstance(recorder, Recorder):
        return recorder
    raise TypeError(
        f"recorder must be a Recorder or None, got {type(recorder).__name__}; make one by "
        "tritonclip.record('run.csv')"
    )
