"""The log of an optimizer's steps: statistics, states of rules, skips in a row, the recorder."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritonclip.messages import warn_user
from tritonclip.modes import is_captured, without_grad
from tritonclip.monitor.recorder import Recorder
from tritonclip.monitor.stats import ClipStats
from tritonclip.optim.param_groups import Groups
from tritonclip.optim.states import RuleStates
from tritonclip.optim.step import Step
from tritonclip.optim.step_record import ParameterNames
from tritonclip.rules import Rule
from tritonclip.rules.arguments import as_count

# A run that skips so many steps in a row is no run; nobody may have noticed.
_SUSPICIOUS = 100
# Steps between a number on a GPU and the look at it. They are as many in every process, so that all
# raise at one step. By then it has arrived, or the GPU has work for so many steps.
LAG = 8


class StepLog:
    """Counts and remembers the steps of a wrapper, each by one of the `add` methods.

    Attributes:
        stats: norms, coefficients and counts.
        states: of rules, and of the test for outliers.
        watch: looks at the number of steps skipped in a row.
        recorder: takes every step; None for none.
        names: of the parameters, for the recorder.
    """

    def __init__(self, stats: ClipStats, states: RuleStates, watch: SkipWatch) -> None:
        self.stats, self.states, self.watch = stats, states, watch
        self.recorder: Recorder | None = None
        self.names = ParameterNames()

    @torch.compiler.disable
    @without_grad
    def add(self, step: Step) -> None:
        """Adds a step that was clipped; its flags may say on the device that it was left out."""
        assert step.outcomes is not None
        self.states.steps += 1
        if step.follows:
            step.commit(step.stop)
        if step.outlier is not None:
            step.outlier.commit(step.overflow)
        self.stats.record_(step.outcomes, step.overflow, step.skip)
        if self.recorder is not None:
            self._record(step, step.stop)
        if step.skip is not None:
            self.watch.look(self.stats.consecutive_skips, waited=False)

    def add_left_out(self, step: Step) -> None:
        """Adds a step that was left out: because of an overflow, or else as `add_skipped` does."""
        if step.overflow is None or not bool(step.overflow):
            self.add_skipped(step)
            return
        # The GradScaler did it, which the statistics do not count.
        self.states.steps += 1
        step.commit(left_out=True)
        self._record(step, skipped=True)

    @torch.compiler.disable
    @without_grad
    def add_skipped(self, step: Step) -> None:
        """Adds a step that was left out, and remembers the norm of an outlier."""
        self.states.steps += 1
        step.commit(left_out=True)
        if step.outlier is not None:
            step.outlier.commit(None)
        self.stats.record_skip_()
        self._record(step, skipped=True)
        self.watch.look(self.stats.consecutive_skips, waited=True)

    def _record(self, step: Step, skipped: Tensor | bool | None) -> None:
        """Hands a step to the recorder, if there is one."""
        if self.recorder is not None and step.record is not None:
            outcomes = None if skipped is True else step.outcomes
            step.record.add_to(self.recorder, outcomes, skipped)

    def state_dict(self, groups: Groups) -> dict[str, Any]:
        """The wrapper's own part of a checkpoint of these groups."""
        own: dict[str, Any] = self.stats.state_dict()
        own["calls"] = torch.tensor(self.states.steps, device="cpu")
        states = self.states.state_dict(groups)
        if states:
            own["memory"] = states
        if self.recorder is not None:
            own["recorder"] = self.recorder.state_dict()
        return own

    def loaded(
        self, own: dict[str, Any], rules: dict[str, Rule], device: torch.device
    ) -> tuple[ClipStats, RuleStates, dict[str, Any] | None]:
        """Loads a checkpoint into new objects; this log stays as it is until `restore`.

        Args:
            own: the result of `state_dict`.
            rules: those of the program, by their keys in a checkpoint.
            device: of the optimizer.

        Returns:
            Statistics, states, and the recorder's state or None, for `restore`.

        Raises:
            ValueError: norms that were remembered for another rule.
        """
        own = dict(own)
        states = RuleStates(self.states.skip_above)
        states.load_state_dict(own.pop("memory", {}), rules)
        states.steps = int(own.pop("calls", 0))
        recorded = own.pop("recorder", None)
        stats = ClipStats(device)
        stats.load_state_dict(own)
        return stats, states, recorded

    def restore(
        self, stats: ClipStats, states: RuleStates, recorded: dict[str, Any] | None, groups: Groups
    ) -> None:
        """Goes on from a checkpoint of these groups that was `loaded`."""
        # In the object that users have.
        vars(self.stats).update(vars(stats))
        self.states = states
        states.resume(groups)
        self.watch.forget()
        if self.recorder is not None and recorded is not None:
            self.recorder.load_state_dict(recorded)


class SkipWatch:
    """Looks at the number of steps skipped in a row; at a GPU's some steps later.

    Args:
        most: steps in a row after which RuntimeError is raised; None to warn at 100.
    """

    def __init__(self, most: object = None) -> None:
        self.most = None if most is None else as_count("max_consecutive_skips", most, 1)
        self._warned = False
        self._arriving: deque[Callable[[], int]] = deque()

    def refuse_without_skips(self, nonfinite: str, skip_above: object) -> None:
        """Refuses a number of steps for a wrapper that skips none."""
        if self.most is not None and nonfinite != "skip" and skip_above is None:
            raise ValueError(
                "max_consecutive_skips was given, but no step is skipped: expected "
                f"nonfinite='skip' or skip_above beside it, got nonfinite={nonfinite!r} alone"
            )

    def forget(self) -> None:
        """Drops numbers of steps before a checkpoint was loaded."""
        self._arriving.clear()

    def look(self, in_a_row: Tensor, *, waited: bool) -> None:
        """Raises or warns where too many steps were skipped in a row.

        Args:
            in_a_row: the number of them, on any device.
            waited: this step has waited for the device already; else the number of `LAG` steps
                before is looked at, if it is on a GPU.
        """
        n = int(in_a_row) if waited else self._read(in_a_row)
        if self.most is not None and n >= self.most:
            self.forget()
            raise RuntimeError(
                f"{n} steps in a row were skipped, and max_consecutive_skips is {self.most}: their "
                "gradients were NaN or inf, or above skip_above. Parameters are those of the last "
                "step that was taken. Look for the first NaN with nonfinite='error', lower the "
                "learning rate, or raise the limits"
            )
        if self.most is None and n >= _SUSPICIOUS and not self._warned:
            self._warned = True
            warn_user(
                f"{n} steps in a row were skipped, because their gradients were NaN or inf, or "
                "above skip_above: nothing is learned. nonfinite='error' names the gradients; "
                "max_consecutive_skips raises an error in place of this warning",
                RuntimeWarning,
            )

    def _read(self, in_a_row: Tensor) -> int:
        """The number, or a GPU's of `LAG` looks before; 0 where there is none."""
        if in_a_row.device.type == "cpu":
            return int(in_a_row)
        if in_a_row.device.type != "cuda" or is_captured(in_a_row.device):
            return 0
        self._arriving.append(_sent(in_a_row))
        return self._arriving.popleft()() if len(self._arriving) > LAG else 0


def _sent(number: Tensor) -> Callable[[], int]:
    """Begins to copy a number from a GPU; the result waits for it."""
    copied = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
    copied.copy_(number, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(number.device))

    def read() -> int:
        event.synchronize()
        return int(copied)

    return read
