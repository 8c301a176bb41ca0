"""Counts of an optimizer's steps, on its device; a step costs no operator, reading them does."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tritonclip.grad_mode import outside_inference
from tritonclip.tracing import n_dispatch_modes

# In this order in one tensor, so that they move together.
COUNTS = ("steps", "measured_steps", "clipped_steps", "skipped_steps")
# Coefficients on a device that are kept until they are compared with 1 together: each has a block
# of 512 bytes on a GPU, and would take two launches by itself.
KEPT = 64


class StepCounts:
    """Steps that were taken, measured, clipped and skipped.

    The host adds up all that it knows. Coefficients that only the device knows are kept, and
    counted together.

    Attributes:
        device: of all counts.
        consecutive_skips: steps that were skipped since the last one that was not; 0-d int64.
    """

    def __init__(self, device: torch.device) -> None:
        # Never an inference tensor, which no later step could add to.
        zeros = outside_inference(torch.zeros)
        self._counts = zeros(len(COUNTS), dtype=torch.int64, device=device)
        self.device = self._counts.device
        self.consecutive_skips = zeros((), dtype=torch.int64, device=device)
        # Spares a step without skips an operation.
        self._may_have_skipped = False
        # Steps taken, measured and clipped that `_counts` lacks, and coefficients of others.
        self._known = [0, 0, 0]
        self._coefficients: list[Tensor] = []

    def read(self) -> Tensor:
        """All counts in the order of COUNTS, int64[4]; later steps may change it."""
        self._count_coefficients()
        known, self._known = self._known, [0, 0, 0]
        for i, n in enumerate(known):
            if n:
                self._counts[i].add_(n)
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
            overflow: whether the step was left out and counts nowhere, 0-d bool on the device; None
                for no.
            skip: whether it was left out and counts as skipped, likewise.
        """
        if overflow is not None or skip is not None:
            self._add_uncertain(coefficients, overflow, skip)
            return
        if self._may_have_skipped:
            self.consecutive_skips.zero_()
            self._may_have_skipped = False
        if all(type(coefficient) is float for coefficient in coefficients):
            self._known[0] += 1
            self._known[1] += bool(coefficients)
            self._known[2] += any(coefficient < 1 for coefficient in coefficients)
        elif self._is_recorded():
            # The host runs once, its replays often.
            self._counts[:2].add_(1)
            self._counts[2].add_(_is_clipped(coefficients, self.device))
        else:
            self._known[0] += 1
            self._known[1] += 1
            own = coefficients[0]
            if len(coefficients) > 1 or not isinstance(own, Tensor):
                own = ~_is_clipped(coefficients, self.device)
            self._coefficients.append(own.to(self.device))
            if len(self._coefficients) >= KEPT:
                self._count_coefficients()

    def add_skipped(self) -> None:
        """Counts a step that was skipped."""
        self._counts[3].add_(1)
        self.consecutive_skips.add_(1)
        self._may_have_skipped = True

    def move_(self, device: torch.device) -> None:
        """Moves all counts."""
        self._counts = self.read().to(device)
        self.device = self._counts.device
        self.consecutive_skips = self.consecutive_skips.to(device)

    def load(self, counts: Mapping[str, Tensor | int]) -> None:
        """Takes counts by name; those that are missing begin again."""
        own = self.read()
        for i, name in enumerate(COUNTS):
            own[i].fill_(counts.get(name, 0))
        self.consecutive_skips.fill_(counts.get("consecutive_skips", 0))
        self._may_have_skipped = True

    def _count_coefficients(self) -> None:
        """Counts the steps whose coefficients are kept."""
        kept, self._coefficients = self._coefficients, []
        if kept:
            self._counts[2].add_((torch.stack(kept) < 1).sum())

    def _is_recorded(self) -> bool:
        """Whether operators are recorded now, by a CUDA graph or a tracer, to be replayed."""
        is_cuda = self.device.type == "cuda"
        return bool(n_dispatch_modes()) or (is_cuda and torch.cuda.is_current_stream_capturing())

    def _add_uncertain(
        self,
        coefficients: Sequence[float | Tensor],
        overflow: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        """As `add`, of a step that only the device knows to be taken."""
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
