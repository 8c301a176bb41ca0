"""The arguments of a ClippedOptimizer as attributes, which may be replaced between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tritonclip.distributed.process_groups import Processes
from tritonclip.flat.flat_gradients import FlatGradients
from tritonclip.monitor.stats import ClipStats
from tritonclip.optim.memory import SkipWatch, as_skip_bound
from tritonclip.optim.misplaced import NoRuleNumbers
from tritonclip.optim.observation import as_recorder
from tritonclip.optim.param_groups import not_in_buffers, rule_of_all
from tritonclip.optim.step_log import StepLog
from tritonclip.rules import Outlier, Rule

if TYPE_CHECKING:
    from tritonclip.monitor.recorder import Recorder

_POLICIES = ("propagate", "error", "zero", "skip")


class Replaceable(NoRuleNumbers):
    """Attributes that are checked where they are set."""

    param_groups: list[dict[str, Any]]
    _holders: Processes | None
    _log: StepLog

    @property
    def stats(self) -> ClipStats:
        """Norms, coefficients and counts; see :class:`ClipStats`."""
        return self._log.stats

    @stats.setter
    def stats(self, stats: ClipStats) -> None:
        self._log.stats = stats

    @property
    def clip(self) -> Rule:
        """The rule for all groups that carry none; may be replaced, by a number too."""
        return self._rule

    @clip.setter
    def clip(self, clip: float | Rule) -> None:
        self._rule = rule_of_all(clip)

    @property
    def flat(self) -> FlatGradients | None:
        """The gradients as one buffer for each device and dtype, if any; replaceable."""
        return self._flat

    @flat.setter
    def flat(self, flat: FlatGradients | None) -> None:
        self._not_in_buffers = not_in_buffers(flat, self.param_groups, self._holders)
        known = [] if flat is None else [list(group["params"]) for group in self.param_groups]
        self._flat, self._known_params = flat, known

    @property
    def nonfinite(self) -> str:
        """The policy for a step that is not finite."""
        return self._nonfinite

    @nonfinite.setter
    def nonfinite(self, nonfinite: str) -> None:
        if nonfinite not in _POLICIES:
            raise ValueError(
                f"nonfinite must be 'propagate', 'error', 'zero' or 'skip', got {nonfinite!r}"
            )
        self._nonfinite = nonfinite

    @property
    def skip_above(self) -> float | Outlier | None:
        """The largest norm of a step that is not skipped; replaceable."""
        return self._log.memory.skip_above

    @skip_above.setter
    def skip_above(self, skip_above: float | Outlier | None) -> None:
        self._log.memory.skip_above = as_skip_bound(skip_above)

    @property
    def max_consecutive_skips(self) -> int | None:
        """Skipped steps in a row at which a step raises; replaceable."""
        return self._log.watch.most

    @max_consecutive_skips.setter
    def max_consecutive_skips(self, most: int | None) -> None:
        self._log.watch = SkipWatch(most)

    @property
    def recorder(self) -> Recorder | None:
        """The recorder that takes the norms of every step, if any; replaceable."""
        return self._log.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._log.recorder = as_recorder(recorder)
