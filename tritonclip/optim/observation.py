"""What a recorder is told of a step: norms from before the first gradient is written."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from tritonclip.flat.flat_gradients import FlatGradients
from tritonclip.monitor.recorder import Recorder
from tritonclip.monitor.stats import Outcomes
from tritonclip.norms import norms_by_name
from tritonclip.optim.param_groups import Groups, label_of_member
from tritonclip.optim.step import StepClipping


class Observation:
    """The norms of a step before clipping, on the device; refused before anything is written.

    Args:
        clipping: measured, and not written yet.
        recorder: that is going to be told.
        groups: parameter groups of the optimizer.
        flat: the gradients of all groups, if they are in buffers.
        grad_scale: the loss scale that gradients still carry.
    """

    def __init__(
        self,
        clipping: StepClipping,
        recorder: Recorder,
        groups: Groups,
        flat: FlatGradients | None,
        grad_scale: Tensor | float | None,
    ) -> None:
        norms = clipping.norms()
        # By value, and where every group has a rule, no rule of the wrapper measures a norm.
        self._norm = norms.pop(None) if None in norms else clipping.global_norm()
        self._norms: dict[str, Tensor | None]
        self._norms = {f"group{index}": norm for index, norm in norms.items()}
        if recorder.each:
            parameters: Any = flat
            if flat is None:
                parameters = [
                    (label_of_member(groups, index, position), parameter)
                    for index, group in enumerate(groups)
                    for position, parameter in enumerate(group["params"])
                ]
            self._norms |= norms_by_name(parameters, grad_scale=grad_scale)
        if recorder.names is not None:
            # Of parameters that are frozen by now nothing is known.
            missing = dict.fromkeys(recorder.names)
            self._norms = {**missing, **self._norms} if missing else self._norms
        recorder.prepare(self._norms)

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
            warnings.warn(
                f"{recorder!r} could not write: {error}. Training goes on, and the rows are kept "
                "for the next flush",
                RuntimeWarning,
                stacklevel=2,
            )


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
