"""Watches over steps: they read numbers of a device some steps later, and raise.

A step on a GPU does not wait to know whether it was taken. Its numbers are sent to the host, which
reads them a fixed number of steps later: by then they have arrived, and every process raises at the
same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from tritonclip.messages import warn_user
from tritonclip.modes import is_captured
from tritonclip.monitor.row_buffer import begin_copy
from tritonclip.monitor.stats import Flag, either, unless
from tritonclip.optim.clip_groups import ClipGroup
from tritonclip.optim.param_groups import Groups
from tritonclip.optim.refusals import Policy, nearest_finite
from tritonclip.rules.arguments import as_count

# A run that skips so many steps in a row is no run; nobody may have noticed.
_SUSPICIOUS = 100
# Steps between a number on a GPU and the look at it. They are as many in every process, so that all
# raise at one step. By then it has arrived, or the GPU has work for so many steps.
DELAY_STEPS = 8


def sent(number: Tensor) -> Callable[[], int]:
    """Begins to copy a number from its device; the result waits for it."""
    if number.device.type != "cuda":
        # A count is added to later.
        return partial(int, number.clone())
    copied, event = begin_copy(number)

    def read() -> int:
        event.synchronize()
        return int(copied)

    return read


class SkipWatch:
    """Raises at `most` steps skipped in a row, or warns at 100; on accelerators, later."""

    def __init__(self, most: object = None) -> None:
        self.most = None if most is None else as_count("max_consecutive_skips", most, 1)
        self._warned = False
        self._arriving: deque[Callable[[], int]] = deque()

    def refuse_without_skips(self, policy: Policy, skip_above: object) -> None:
        """Refuses a number of steps for a wrapper that skips none."""
        if self.most is not None and not policy.skips and skip_above is None:
            raise ValueError(
                "max_consecutive_skips was given, but no step is skipped: expected "
                f"nonfinite='skip' or skip_above beside it, got nonfinite={policy.name!r} alone"
            )

    def forget(self) -> None:
        """Drops numbers of steps before a checkpoint was loaded."""
        self._arriving.clear()

    def look(self, in_a_row: Tensor, *, synced: bool) -> None:
        """Raises or warns at too many skips in a row; at once where this step was `synced`."""
        n = int(in_a_row) if synced else self._read(in_a_row)
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
        """The number, or an accelerator's of `DELAY_STEPS` looks before; 0 where there is none."""
        if in_a_row.device.type == "cpu":
            return int(in_a_row)
        if in_a_row.device.type == "meta" or is_captured(in_a_row.device):
            return 0
        self._arriving.append(sent(in_a_row))
        return self._arriving.popleft()() if len(self._arriving) > DELAY_STEPS else 0


class WatchedStep:
    """A step, by its number, that the device leaves out if it or one before is not finite."""

    def __init__(self, step: int, flag: Tensor, clip_groups: Sequence[ClipGroup]) -> None:
        self.step, self.read = step, sent(flag)
        self._lists = [
            (group.gradients.without_tensors(), group.finite)
            for group in clip_groups
            if group.finite is not None
        ]

    def error(self, n_after: int, param_groups: Groups) -> RuntimeError:
        """Names its gradients with NaN or inf; other processes call this, too."""
        found = [(gradients, finite.tolist()) for gradients, finite in self._lists]
        culprits = [
            gradients.culprits([i for i, is_finite in enumerate(finite) if not is_finite])
            for gradients, finite in found
        ]
        names = ", ".join(filter(None, culprits))
        steps = "step" if n_after == 1 else f"{n_after} steps"
        after = f" and of the {steps} after it" if n_after else ""
        blame = (
            f"has non-finite gradients: {names}{nearest_finite(found, param_groups)}"
            if names
            else "is non-finite: every gradient is finite, but their norm does not fit its dtype"
        )
        return RuntimeError(
            f"Step {self.step}, counted from 0, {blame}. The updates of this step{after} were left "
            f"out: parameters, optimizer state and rules are those before step {self.step}. To go "
            "on, set nonfinite to 'propagate', 'zero' or 'skip'"
        )


class ErrorWatch:
    """Has the device leave out all steps from the first that is not finite, until it has raised."""

    def __init__(self) -> None:
        # Whether the last step was left out.
        self._left_out: Flag = False
        self.arriving: deque[WatchedStep] = deque()

    def judge(self, nonfinite: Tensor, left_out: Flag) -> Flag:
        """Whether to leave out a step until its error, or an earlier one, is raised.

        A step that is `left_out` for another reason is no error.
        """
        if is_captured(nonfinite.device):
            raise RuntimeError(
                "nonfinite='async_error' raises from a later step, which the replays of a CUDA "
                "graph cannot do; expected 'skip' while a graph is captured, and a look at "
                "stats.consecutive_skips between replays"
            )
        return either(unless(nonfinite, left_out), self._left_out)

    def add(self, step: int, flag: Tensor, clip_groups: Sequence[ClipGroup]) -> WatchedStep | None:
        """Takes a step that was judged; returns the first one left out, if it is known now."""
        self._left_out = flag
        self.arriving.append(WatchedStep(step, flag, clip_groups))
        if len(self.arriving) > DELAY_STEPS:
            return self._first(1)
        return None

    def wait(self) -> WatchedStep | None:
        """Waits for all steps; returns the first one that was left out."""
        found = self._first(len(self.arriving))
        if found is None:
            self.forget()
        return found

    def _first(self, n: int) -> WatchedStep | None:
        """The first step that was left out, of the n oldest; those before it are done with."""
        for _ in range(n):
            if self.arriving[0].read():
                return self.arriving[0]
            self.arriving.popleft()
        return None

    def n_left_out(self) -> int:
        """The steps that were left out and have not raised; waits for the device."""
        return sum(step.read() for step in self.arriving)

    def forget(self) -> None:
        """Goes on as if no step had been left out."""
        self._left_out = False
        self.arriving.clear()
