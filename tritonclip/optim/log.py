"""The log of an optimizer's steps: statistics, remembered norms, skips in a row, the recorder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tritonclip.monitor.stats import ClipStats, Outcomes
from tritonclip.optim.param_groups import Groups
from tritonclip.optim.states import Judgement, Memory, SkipWatch
from tritonclip.optim.step import StepClipping
from tritonclip.rules import Rule

if TYPE_CHECKING:
    from tritonclip.monitor.recorder import Recorder


class StepLog:
    """Counts and remembers the steps of a wrapper, each by one of the `add` methods.

    Attributes:
        stats: norms, coefficients and counts.
        memory: of rules, and of the test for outliers.
        watch: looks at the number of steps skipped in a row.
        recorder: takes every step; None for none.
    """

    def __init__(self, stats: ClipStats, memory: Memory, watch: SkipWatch) -> None:
        self.stats, self.memory, self.watch = stats, memory, watch
        self.recorder: Recorder | None = None

    def judge(self, clipping: StepClipping) -> Judgement | None:
        """Whether a measured step is an outlier, if outliers are skipped."""
        if self.memory.skip_above is None:
            return None
        judgement: Judgement = self.memory.judge(clipping.global_norm())
        return judgement

    def add(
        self,
        clipping: StepClipping,
        outcomes: Outcomes,
        overflow: Tensor | None = None,
        skip: Tensor | None = None,
        outlier: Judgement | None = None,
    ) -> None:
        """Adds a step that was clipped; flags say on the device that it was left out after all."""
        self.memory.steps += 1
        if clipping.follows:
            clipping.commit(either(overflow, skip))
        if outlier is not None:
            outlier.commit(overflow)
        self.stats.record_(outcomes, overflow, skip)
        if self.recorder is not None:
            self._record(clipping, outcomes, either(overflow, skip))
        if skip is not None:
            self.watch.look(self.stats.consecutive_skips, waited=False)

    def add_left_out(
        self, clipping: StepClipping, outlier: Judgement | None, overflow: Tensor | None
    ) -> None:
        """Adds a step that was left out: because of an overflow, or else as `add_skipped` does."""
        if overflow is None or not bool(overflow):
            self.add_skipped(clipping, outlier)
            return
        # The GradScaler did it, which the statistics do not count.
        self.memory.steps += 1
        clipping.commit(left_out=True)
        self._record(clipping, None, True)

    def add_skipped(self, clipping: StepClipping, outlier: Judgement | None) -> None:
        """Adds a step that was left out, and remembers the norm of an outlier."""
        self.memory.steps += 1
        clipping.commit(left_out=True)
        if outlier is not None:
            outlier.commit(None)
        self.stats.record_skip_()
        self._record(clipping, None, True)
        self.watch.look(self.stats.consecutive_skips, waited=True)

    def _record(
        self, clipping: StepClipping, outcomes: Outcomes | None, skipped: Tensor | bool | None
    ) -> None:
        """Hands a step to the recorder, if there is one."""
        if self.recorder is not None and clipping.observation is not None:
            clipping.observation.add_to(self.recorder, outcomes, skipped)

    def state_dict(self, groups: Groups) -> dict[str, Any]:
        """The wrapper's own part of a checkpoint of these groups."""
        own: dict[str, Any] = self.stats.state_dict()
        own["calls"] = torch.tensor(self.memory.steps, device="cpu")
        memory = self.memory.state_dict(groups)
        if memory:
            own["memory"] = memory
        if self.recorder is not None:
            own["recorder"] = self.recorder.state_dict()
        return own

    def loaded(
        self, own: dict[str, Any], rules: dict[str, Rule], device: torch.device
    ) -> tuple[ClipStats, Memory, dict[str, Any] | None]:
        """Loads a checkpoint into new objects; this log stays as it is until `take`.

        Args:
            own: the result of `state_dict`.
            rules: those of the program, by owner.
            device: of the optimizer.

        Returns:
            Statistics, memory, and the recorder's state or None, for `take`.

        Raises:
            ValueError: norms that were remembered for another rule.
        """
        own = dict(own)
        memory = Memory(self.memory.skip_above)
        memory.load_state_dict(own.pop("memory", {}), rules)
        memory.steps = int(own.pop("calls", 0))
        recorded = own.pop("recorder", None)
        stats = ClipStats(device)
        stats.load_state_dict(own)
        return stats, memory, recorded

    def take(
        self, stats: ClipStats, memory: Memory, recorded: dict[str, Any] | None, groups: Groups
    ) -> None:
        """Goes on from a checkpoint of these groups that was `loaded`."""
        self.stats.load_state_dict(stats.state_dict())
        self.memory = memory
        memory.resume(groups)
        self.watch.forget()
        if self.recorder is not None and recorded is not None:
            self.recorder.load_state_dict(recorded)


def either(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Whether one of two flags is true, 0-d bool; None for one that cannot be."""
    if a is None or b is None:
        return b if a is None else a
    return a | b.to(a.device)
