"""Watches over steps, which read numbers of a device some steps later, and then raise.

A step on a GPU does not wait to know whether it was taken. Its numbers are sent to the host, which
reads them a fixed number of steps later: by then they have arrived, and every process raises at the
same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from torch import Tensor

from tritonclip.messages import warn_user
from tritonclip.modes import is_captured
from tritonclip.monitor.row_buffer import begin_copy
from tritonclip.optim.refusals import Policy
from tritonclip.rules.arguments import as_count

# A run that skips so many steps in a row learns nothing, and nobody may have noticed.
_SUSPICIOUS = 100
# The number of steps after which a number of a GPU is read, the same on every process, so that all
# raise at the same step. By then it has arrived, or the GPU has work queued for so many steps.
DELAY_STEPS = 8


def sent(number: Tensor) -> Callable[[], int]:
    """Begins to copy a number from its device; the returned function waits for it."""
    if number.device.type != "cuda":
        # Cloned, because later steps add to a count in place.
        return partial(int, number.clone())
    copied, event = begin_copy(number)

    def read() -> int:
        event.synchronize()
        return int(copied)

    return read


class SkipWatch:
    """Raises at `most` steps skipped in a row, or warns at 100; some steps later on a GPU."""

    def __init__(self, most: object = None) -> None:
        self.most = None if most is None else as_count("max_consecutive_skips", most, 1)
        self._warned = False
        self._arriving: deque[Callable[[], int]] = deque()

    def refuse_without_skips(self, policy: Policy, skip_above: object) -> None:
        """Refuses `max_consecutive_skips` for a wrapper that skips no step."""
        if self.most is not None and not policy.skips and skip_above is None:
            raise ValueError(
                "max_consecutive_skips was given, but no step is skipped: expected "
                f"nonfinite='skip' or skip_above beside it, got nonfinite={policy.name!r} alone"
            )

    def forget(self) -> None:
        """Drops the numbers that are still to be read, such as those from before a load."""
        self._arriving.clear()

    def look(self, in_a_row: Tensor, *, synced: bool) -> None:
        """Raises or warns at too many skips in a row, at once if this step has `synced`."""
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
        """Returns the number; an accelerator's is that of `DELAY_STEPS` calls before, or 0."""
        if in_a_row.device.type == "cpu":
            return int(in_a_row)
        if in_a_row.device.type == "meta" or is_captured(in_a_row.device):
            return 0
        self._arriving.append(sent(in_a_row))
        return self._arriving.popleft()() if len(self._arriving) > DELAY_STEPS else 0
