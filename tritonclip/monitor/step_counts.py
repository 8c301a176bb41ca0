"""Counts of an optimizer's steps, on its device; a plain step costs no operator there."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonclip.modes import (
    follow_stream,
    is_captured,
    is_pre_dispatch,
    n_dispatch_modes,
    outside_inference,
)
from tritonclip.monitor.verdict import TAKEN, Flag, Verdict, unless
from tritonclip.rules.arguments import saved_count

# In this order in one tensor, which moves in one copy.
COUNTS = (
    *("steps", "measured_steps", "clipped_steps", "well_clipped_steps"),
    *("skipped_steps", "overflowed_steps"),
)
# A coefficient between it and 1 is that of a norm at the limit, as another clip with the same limit
# leaves it: that adds up to 1e-6 to the norm it divides by, and so does the rule.
BARELY = 1 - 2e-5
_IN_A_ROW = "consecutive_skips"
# Steps that are kept until one launch counts them all. A coefficient on a GPU keeps a block of 512
# bytes meanwhile; to count it alone would take two launches.
KEPT = 64
# An operator lets other threads run, and two that add to the same counts at once lose steps. One
# for all counts, which are copied and saved; a signal may come while its thread holds it.
_ADDING = RLock()


def _renew_lock() -> None:
    global _ADDING
    _ADDING = RLock()


if hasattr(os, "register_at_fork"):
    # The thread that held it is not in the forked process.
    os.register_at_fork(after_in_child=_renew_lock)


class _Uncertain(NamedTuple):
    """A step of which only the device knows whether it was taken; flags and numbers are 0-d."""

    left_out: Tensor
    overflow: Flag
    skip: Flag
    coefficient: Tensor | None


class StepCounts:
    """Steps that were taken, measured, clipped, skipped, and left out because of an overflow.

    Steps are kept with their coefficients on the device, and counted KEPT at a time or when the
    counts are read. Any thread may read: each step is one entry of a list. So may any CUDA stream,
    which then waits for the one that counted before.
    """

    # The last CUDA stream that used the tensors. Of the class: counts that were copied or saved
    # begin without one.
    _stream: Any = None

    def __init__(self, device: torch.device) -> None:
        # Never an inference tensor, which no later step could add to.
        zeros = outside_inference(torch.zeros)
        self._counts = zeros(len(COUNTS), dtype=torch.int64, device=device)
        self._in_a_row = zeros((), dtype=torch.int64, device=device)
        # Spares a step without skips an operation.
        self._may_have_skipped = False
        # Of each step taken, the coefficients: numbers, or a 0-d tensor on the device; or a step of
        # which the device knows whether it was.
        self._kept: list[Sequence[float] | Tensor | _Uncertain] = []
        # A step with a coefficient below the first was clipped, below the second well clipped.
        self._bounds = torch.linspace(1.0, BARELY, 2, device=device)
        self._follow_stream()

    def __getstate__(self) -> dict[str, Any]:
        self._follow_stream()
        return {name: value for name, value in vars(self).items() if name != "_stream"}

    @property
    def device(self) -> torch.device:
        """The device of all counts."""
        return self._counts.device

    @property
    def consecutive_skips(self) -> Tensor:
        """Steps skipped in a row until now; 0-d int64."""
        self._follow_stream()
        return self._in_a_row

    def read(self) -> Tensor:
        """All counts in the order of COUNTS, int64[6]; later steps change the tensor.

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

    def add(self, coefficients: Sequence[float | Tensor], verdict: Verdict = TAKEN) -> None:
        """Counts a step: as taken, as an overflow, or else as skipped.

        Args:
            coefficients: of the rules that measured a norm: numbers, or 0-d on any device.
            verdict: whether it was left out, and why; flags may be on any device.
        """
        left_out, device = verdict.left_out, self._counts.device
        # On a CPU without a call. Replays of a graph repeat the device's work, not the host's.
        captured = self._counts.is_cuda and is_captured(device)
        if self._counts.is_cuda:
            self._follow_stream()
        recorded = captured or n_dispatch_modes() or is_pre_dispatch()
        step: Sequence[float] | Tensor | _Uncertain
        if isinstance(left_out, Tensor):
            self._may_have_skipped = True
            step = self._uncertain(coefficients, left_out, verdict)
            self._in_a_row.add_(step.skip).mul_(step.left_out)
            if recorded:
                self._counts.add_(self._sums_of_uncertain([step]))
                return
        elif left_out:
            with _ADDING:
                self._follow_stream()
                self._counts[5 if verdict.overflow else 4].add_(1)
            if not verdict.overflow:
                self._in_a_row.add_(1)
                self._may_have_skipped = True
            return
        else:
            if self._may_have_skipped:
                self._in_a_row.zero_()
                self._may_have_skipped = False
            if recorded:
                self._counts[: 1 + bool(coefficients)].add_(1)
                if coefficients:
                    self._counts[2:4].add_(self._are_below(coefficients))
                return
            if {float}.issuperset(map(type, coefficients)):
                step = coefficients  # type: ignore[assignment]  # all float
            elif len(coefficients) == 1 and isinstance(coefficients[0], Tensor):
                step = coefficients[0].to(device)
            else:
                step = self._least(coefficients)
        self._kept.append(step)
        if len(self._kept) >= KEPT:
            self._count_kept()

    def move_(self, device: torch.device) -> None:
        """Moves all counts."""
        self._counts = self.read().to(device)
        self._in_a_row = self._in_a_row.to(device)
        self._bounds = self._bounds.to(device)
        # Of another device it may be.
        self._stream = None
        self._follow_stream()

    def load(self, counts: Mapping[str, object]) -> None:
        """Loads counts by name; missing ones become 0, but clipped steps count as well clipped."""
        counts = {"well_clipped_steps": counts.get("clipped_steps", 0), **counts}
        numbers = {name: saved_count(name, counts.get(name, 0)) for name in (*COUNTS, _IN_A_ROW)}
        own = self.read()
        self._in_a_row.fill_(numbers.pop(_IN_A_ROW))
        for count, number in zip(own, numbers.values(), strict=True):
            count.fill_(number)
        self._may_have_skipped = True

    def _count_kept(self) -> None:
        """Counts the kept steps; an error or an interrupt leaves them kept."""
        with _ADDING:
            self._follow_stream()
            steps = self._kept[:]
            if steps:
                self._counts.add_(self._sums(steps))
                del self._kept[: len(steps)]

    def _follow_stream(self) -> None:
        """Makes the current stream wait for the one that used the tensors before.

        Not that of a CUDA graph, which may wait for none outside of it.
        """
        if self._counts.is_cuda and not is_captured(self.device):
            self._stream = follow_stream(self._stream, self._tensors(), self.device)

    def _tensors(self) -> Iterator[Tensor]:
        """All tensors, those of kept steps too."""
        yield from (self._counts, self._in_a_row, self._bounds)
        for step in self._kept[:]:
            numbers = step if isinstance(step, _Uncertain) else (step,)
            yield from (number for number in numbers if isinstance(number, Tensor))

    def _sums(self, steps: Sequence[Sequence[float] | Tensor | _Uncertain]) -> Tensor:
        """The counts of these steps, int64[6]."""
        counts, coefficients, uncertain = [0] * len(COUNTS), list[Tensor](), list[_Uncertain]()
        for step in steps:
            if isinstance(step, _Uncertain):
                uncertain.append(step)
                continue
            counts[0] += 1
            if isinstance(step, Tensor):
                counts[1] += 1
                coefficients.append(step)
            elif step:
                # NaN is not below.
                counts[1] += 1
                counts[2] += any(number < 1 for number in step)
                counts[3] += any(number < BARELY for number in step)
        if not (coefficients or uncertain) and self.device.type == "cpu":
            return torch.frombuffer(array("q", counts), dtype=torch.int64)
        # An upload would wait for the device.
        sums = torch.stack(
            [torch.full((), n, dtype=torch.int64, device=self.device) for n in counts]
        )
        if coefficients:
            sums[2:4] += (torch.stack(coefficients)[:, None] < self._bounds).sum(0)
        return sums + self._sums_of_uncertain(uncertain) if uncertain else sums

    def _uncertain(
        self, coefficients: Sequence[float | Tensor], left_out: Tensor, verdict: Verdict
    ) -> _Uncertain:
        """A step of which only the device knows whether it was taken."""
        overflow, skip = verdict.overflow, verdict.skip
        if isinstance(overflow, Tensor):
            overflow = overflow.to(self.device).reshape(())
        if isinstance(skip, Tensor):
            skip = unless(skip.to(self.device).reshape(()), overflow)
        least = self._least(coefficients).reshape(()) if coefficients else None
        return _Uncertain(left_out.to(self.device).reshape(()), overflow, skip, least)

    def _sums_of_uncertain(self, steps: Sequence[_Uncertain]) -> Tensor:
        """The counts of these steps, int64[6]."""
        no = torch.zeros((), dtype=torch.bool, device=self.device)
        one = torch.ones((), device=self.device)
        taken = ~torch.stack([step.left_out for step in steps])
        measured = torch.stack([no if step.coefficient is None else ~no for step in steps])
        least = [one if step.coefficient is None else step.coefficient for step in steps]
        flags = [
            torch.stack([flag if isinstance(flag, Tensor) else no for flag in column])
            for column in ([step.skip for step in steps], [step.overflow for step in steps])
        ]
        below = (torch.stack(least)[:, None] < self._bounds).unbind(1)
        counted = [taken, *(flag & taken for flag in (measured, *below)), *flags]
        return torch.stack(counted).sum(1)

    def _are_below(self, coefficients: Sequence[float | Tensor]) -> Tensor:
        """Whether any coefficient is below each of the bounds; NaN is not. bool[2]."""
        return self._least(coefficients).reshape(1) < self._bounds

    def _least(self, coefficients: Sequence[float | Tensor]) -> Tensor:
        """The least coefficient that is not NaN, 0-d."""
        numbers = [
            coefficient.to(self.device)
            if isinstance(coefficient, Tensor)
            else torch.full((), coefficient, device=self.device)
            for coefficient in coefficients
        ]
        return numbers[0] if len(numbers) == 1 else torch.stack(numbers).nan_to_num(nan=1.0).amin()
