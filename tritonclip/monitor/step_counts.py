"""Counts of an optimizer's steps, on its device; a plain step costs no operator there."""

from array import array
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tritonclip.modes import is_captured, is_pre_dispatch, n_dispatch_modes, outside_inference

# In this order in one tensor, which moves in one copy.
COUNTS = ("steps", "measured_steps", "clipped_steps", "skipped_steps")
# Steps that are kept until one launch counts them all. A coefficient on a GPU keeps a block of 512
# bytes meanwhile; to count it alone would take two launches.
KEPT = 64


class StepCounts:
    """Steps that were taken, measured, clipped and skipped.

    Steps are kept with their coefficients on the device, and counted KEPT at a time or when the
    counts are read. Any thread may read: each step is one entry of a queue.

    Attributes:
        consecutive_skips: steps skipped in a row until now; 0-d int64.
    """

    def __init__(self, device: torch.device) -> None:
        # Never an inference tensor, which no later step could add to.
        zeros = outside_inference(torch.zeros)
        self._counts = zeros(len(COUNTS), dtype=torch.int64, device=device)
        self.consecutive_skips = zeros((), dtype=torch.int64, device=device)
        # Spares a step without skips an operation.
        self._may_have_skipped = False
        # For each step taken: whether it measured a norm; whether it was clipped, or a 0-d
        # coefficient on the device that is below 1 if it was.
        self._kept: deque[tuple[bool, bool | Tensor]] = deque()

    @property
    def device(self) -> torch.device:
        """The device of all counts."""
        return self._counts.device

    def read(self) -> Tensor:
        """All counts in the order of COUNTS, int64[4]; later steps change the tensor.

        Raises:
            RuntimeError: a CUDA graph is captured, whose replays would count steps again.
        """
        if is_captured(self.device):
            raise RuntimeError(
                "statistics cannot be read while a CUDA graph is captured, because its replays "
                "would count the same steps again; read them after the capture"
            )
        self._count_kept()
        return self._counts

    def add(
        self,
        coefficients: Sequence[float | Tensor],
        overflow: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Counts a step.

        Args:
            coefficients: of the rules that measured a norm: numbers, or 0-d on any device.
            overflow: whether the step overflowed, and does not count; 0-d bool on the device, None
                for no.
            skip: whether the step was skipped, and counts as such; likewise.
        """
        if overflow is not None or skip is not None:
            self._add_uncertain(coefficients, overflow, skip)
            return
        if self._may_have_skipped:
            self.consecutive_skips.zero_()
            self._may_have_skipped = False
        device = self._counts.device
        # On a CPU without a call.
        captured = self._counts.is_cuda and is_captured(device)
        if captured or n_dispatch_modes() or is_pre_dispatch():
            # Replays repeat the device's work, not the host's.
            self._counts[: 1 + bool(coefficients)].add_(1)
            if coefficients:
                self._counts[2].add_(_is_clipped(coefficients, device))
            return
        clipped: bool | Tensor
        if {float}.issuperset(map(type, coefficients)):
            # Below 1, and NaN is not; without entering Python code.
            clipped = any(map((1.0).__gt__, coefficients))  # type: ignore[arg-type]  # all float
        elif len(coefficients) == 1 and isinstance(coefficients[0], Tensor):
            clipped = coefficients[0].to(device)
        else:
            clipped = ~_is_clipped(coefficients, device)
        self._kept.append((bool(coefficients), clipped))
        if len(self._kept) >= KEPT:
            self._count_kept()

    def add_skipped(self) -> None:
        """Counts a skipped step."""
        self._counts[3].add_(1)
        self.consecutive_skips.add_(1)
        self._may_have_skipped = True

    def move_(self, device: torch.device) -> None:
        """Moves all counts."""
        self._counts = self.read().to(device)
        self.consecutive_skips = self.consecutive_skips.to(device)

    def load(self, counts: Mapping[str, Tensor | int]) -> None:
        """Loads counts by name; missing ones become 0."""
        own = self.read()
        for i, name in enumerate(COUNTS):
            own[i].fill_(counts.get(name, 0))
        self.consecutive_skips.fill_(counts.get("consecutive_skips", 0))
        self._may_have_skipped = True

    def _count_kept(self) -> None:
        """Counts the kept steps; an error or an interrupt leaves them kept."""
        steps: list[tuple[bool, bool | Tensor]] = []
        try:
            while self._kept:
                steps.append(self._kept.popleft())
        except IndexError:
            # Another thread took the last.
            pass
        if not steps:
            return
        try:
            more = self._sums(steps)
        except BaseException:
            self._kept.extendleft(reversed(steps))
            raise
        self._counts.add_(more)

    def _sums(self, steps: Sequence[tuple[bool, bool | Tensor]]) -> Tensor:
        """The counts of these steps, int64[4]."""
        known, coefficients = [len(steps), 0, 0, 0], []
        for measured, clipped in steps:
            known[1] += measured
            if isinstance(clipped, Tensor):
                coefficients.append(clipped)
            else:
                known[2] += clipped
        if not coefficients and self.device.type == "cpu":
            return torch.frombuffer(array("q", known), dtype=torch.int64)
        # An upload would wait for the device.
        sums = [torch.full((), n, dtype=torch.int64, device=self.device) for n in known]
        if coefficients:
            sums[2] += (torch.stack(coefficients) < 1).sum()
        return torch.stack(sums)

    def _add_uncertain(
        self,
        coefficients: Sequence[float | Tensor],
        overflow: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        """As `add`, for a step of which only the device knows whether it was taken."""
        no = torch.zeros((), dtype=torch.bool, device=self.device)
        overflow = no if overflow is None else overflow
        skip = no if skip is None else skip & ~overflow
        taken = ~(overflow | skip)
        measured = clipped = no
        if coefficients:
            measured, clipped = taken, _is_clipped(coefficients, self.device) & taken
        self._counts.add_(torch.stack([taken, measured, clipped, skip]))
        self.consecutive_skips.add_(skip).mul_(~taken)
        self._may_have_skipped = True


def _is_clipped(coefficients: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """Whether any coefficient is below 1; NaN is not. 0-d bool."""
    flags = [
        coefficient.to(device) < 1
        if isinstance(coefficient, Tensor)
        else torch.full((), coefficient < 1, dtype=torch.bool, device=device)
        for coefficient in coefficients
    ]
    return flags[0] if len(flags) == 1 else torch.stack(flags).any()
