"""The log of an optimizer's steps: statistics, states of rules, skips and errors, the recorder."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from tritonclip.modes import without_grad
from tritonclip.monitor.recorder import Recorder, saved_place
from tritonclip.monitor.stats import ClipStats, either
from tritonclip.optim.clip_groups import Grouping
from tritonclip.optim.outliers import OutlierTest
from tritonclip.optim.states import RuleStates
from tritonclip.optim.step import Step
from tritonclip.optim.step_record import ParameterNames
from tritonclip.optim.watches import ErrorWatch, SkipWatch, WatchedStep
from tritonclip.rules.arguments import saved_count


class StepLog:
    """Counts and remembers the steps of a wrapper, taken and left out.

    Attributes:
        states: of rules, and of the test for outliers.
        watch: looks at the number of steps skipped in a row.
        errors: leaves steps out until the error of the first is raised.
        recorder: takes every step; None for none.
        names: of the parameters, for the recorder.
    """

    def __init__(self, grouping: Grouping, states: RuleStates, watch: SkipWatch) -> None:
        self.stats, self.states, self.watch = ClipStats(grouping.device), states, watch
        self._grouping = grouping
        self.errors = ErrorWatch()
        self.recorder: Recorder | None = None
        self.names = ParameterNames()

    @torch.compiler.disable
    @without_grad
    def add(self, step: Step) -> None:
        """Adds a step by its verdict: the norm of an outlier is remembered, not of an overflow."""
        verdict = step.verdict
        self.states.steps += 1
        found = None
        if isinstance(verdict.error, Tensor):
            # First: whatever raises below, the step is known to be left out.
            found = self.errors.add(self.states.steps - 1, verdict.error, step.clip_groups)
        if step.follows:
            step.commit(verdict.left_out)
        if step.outlier is not None:
            step.outlier.commit(either(verdict.overflow, verdict.error))
        self.stats.record_(step.outcomes, verdict, follows=step.follows)
        if self.recorder is not None and step.record is not None:
            loss = self.states.outliers.loss
            step.record.add_to(self.recorder, step.outcomes, verdict.left_out, loss)
        if verdict.skip is not False:
            self.watch.look(self.stats.consecutive_skips, synced=verdict.skip is True)
        if found is not None:
            self._raise(found)

    def synchronize(self) -> None:
        """Raises the error of a step that the device has left out; waits for the device."""
        found = self.errors.wait()
        if found is not None:
            self._raise(found)

    def _raise(self, found: WatchedStep) -> NoReturn:
        """Raises the error of a step, and goes on from the state before it."""
        error = found.error(self.states.steps - found.step - 1, self._grouping.groups)
        self.states.steps = found.step
        self.errors.forget()
        raise error

    def n_steps(self) -> int:
        """The steps before the first that will raise; waits for the device if any may."""
        return self.states.steps - self.errors.n_left_out()

    def state_dict(self) -> dict[str, Any]:
        """The wrapper's own part of a checkpoint, for all rules of the program."""
        saved: dict[str, Any] = self.stats.state_dict()
        saved["calls"] = torch.tensor(self.n_steps(), device="cpu")
        # Rules that no step could take are no reason not to save.
        rules = self._grouping.rules(anew=False)
        states = self.states.state_dict(self._grouping.groups, rules)
        if states:
            saved["memory"] = states
        if self.recorder is not None:
            saved["recorder"] = self.recorder.state_dict()
        return saved

    def loaded(self, part: object) -> tuple[ClipStats, RuleStates, dict[str, Any] | None]:
        """Loads a checkpoint into new objects; this log stays as it is until `restore`.

        Returns statistics, states, and the recorder's state or None. ValueError for norms that were
        remembered for another rule, and for anything but the result of `state_dict`.
        """
        if not isinstance(part, dict):
            raise ValueError(
                "the part of the ClippedOptimizer in a saved state must be a dict, got "
                f"{part!r:.80}; expected the result of its state_dict(). Nothing was loaded"
            )
        part = dict(part)
        states = RuleStates(OutlierTest(self.states.outliers.skip_above))
        grouping = self._grouping
        n_parameters = sum(len(group["params"]) for group in grouping.groups)
        states.load_state_dict(part.pop("memory", {}), grouping.rules(), n_parameters)
        states.steps = saved_count("calls", part.pop("calls", 0))
        recorded = part.pop("recorder", None)
        if recorded is not None:
            saved_place(recorded)
        part.pop("has_state", None)
        stats = ClipStats(grouping.device)
        stats.load_state_dict(part)
        return stats, states, recorded

    def restore(
        self, stats: ClipStats, states: RuleStates, recorded: dict[str, Any] | None
    ) -> None:
        """Goes on from a checkpoint that was `loaded`."""
        # In the object that users have.
        vars(self.stats).update(vars(stats))
        self.states = states
        states.resume(self._grouping.groups)
        self.watch.forget()
        self.errors.forget()
        if self.recorder is not None and recorded is not None:
            self.recorder.load_state_dict(recorded)
