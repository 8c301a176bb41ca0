"""Norms, coefficients and counts of a training run, kept on the device."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonclip.attributes import NamesAttributes
from tritonclip.grad_mode import outside_inference


class Clipped(NamedTuple):
    """The outcome of one rule at one step.

    Attributes:
        norm: before clipping, 0-d; the largest one for a rule that is per gradient.
        coefficient: 0-d; the least one for a rule that is per gradient.
        limit: the largest norm after clipping, a number or 0-d; NaN where there is not one.
    """

    norm: Tensor
    coefficient: Tensor
    limit: float | Tensor


# By parameter group, under None for the wrapper's own rule; None for a rule that measures nothing.
Outcomes = dict[int | None, Clipped | None]
# In this order in one tensor, so that they move together.
_COUNTERS = ("steps", "measured_steps", "clipped_steps", "skipped_steps")
_LAST = ("last_norm", "last_coefficient", "last_limit", "consecutive_skips")


class ClipStats(NamesAttributes):
    """Norms, coefficients and counts of a :class:`ClippedOptimizer`; only `summary` waits for them.

    All are tensors on the device of the optimizer's first parameter.

    Attributes:
        last_norm: the norm *before* clipping at the last step, under the wrapper's own rule; 0-d,
            floating-point. The largest of all gradients for rules that are per gradient. NaN for
            ClipByValue, which measures none, and before the first step.
        last_coefficient: the factor of the gradients at the last step, under the same rule; 0-d.
            The least one for rules that are per gradient, and of all units for ClipByUnitNorm; 1
            where nothing was clipped.
        last_limit: the largest norm that the same rule allowed at the last step; 0-d. NaN where
            each gradient had a limit of its own, for ClipByValue, and before the first step.
        consecutive_skips: steps that were skipped since the last one that was not; 0-d int64.
        group_norms: `last_norm` of the parameter groups that have a rule of their own, by the
            number of the group.
        group_coefficients: `last_coefficient` of these.
    """

    def __init__(self, device: torch.device) -> None:
        # Never an inference tensor, which no later step could add to.
        zeros = outside_inference(torch.zeros)
        self._counters = zeros(len(_COUNTERS), dtype=torch.int64, device=device)
        self.consecutive_skips = zeros((), dtype=torch.int64, device=device)
        # Spares a step without skips an operation.
        self._may_have_skipped = False
        self._limit: float | Tensor = torch.nan
        self.last_norm = self._nan()
        self.last_coefficient = self._nan()
        self.group_norms: dict[int, Tensor] = {}
        self.group_coefficients: dict[int, Tensor] = {}

    @property
    def steps(self) -> Tensor:
        """Steps that updated the parameters; 0-d int64."""
        return self._counters[0].clone()

    @property
    def measured_steps(self) -> Tensor:
        """Steps at which any rule measured a norm: not with ClipByValue alone; 0-d int64."""
        return self._counters[1].clone()

    @property
    def clipped_steps(self) -> Tensor:
        """Steps at which the coefficient of any rule was below 1; 0-d int64."""
        return self._counters[2].clone()

    @property
    def skipped_steps(self) -> Tensor:
        """Steps that nonfinite="skip" or skip_above left out; 0-d int64. A GradScaler's do not."""
        return self._counters[3].clone()

    @property
    def last_limit(self) -> Tensor:
        """See the class; 0-d, of the dtype of `last_norm`."""
        dtype, device = self.last_norm.dtype, self.last_norm.device
        return torch.as_tensor(self._limit, dtype=dtype, device=device)

    def summary(self) -> dict[str, float | int]:
        """Everything as plain numbers, for a logger; the one call that waits for the device.

        Returns:
            norm, coefficient, limit, steps, clipped_steps, skipped_steps, clipped_share (of the
            steps that measured a norm; NaN without any); for every group that has a rule of its own
            also group<i>_norm and group<i>_coefficient.

        Raises:
            RuntimeError: parameters on the device meta.

        Example:
            >>> ClipStats(torch.device("cpu")).summary()["steps"]
            0
        """
        if self._counters.is_meta:
            raise RuntimeError(
                "the optimizer's parameters are on the device meta, which keeps no values, and so "
                "are its statistics; expected parameters with values: make the optimizer after "
                "model.to_empty(), which replaces the parameters"
            )
        floats = {
            "norm": self.last_norm,
            "coefficient": self.last_coefficient,
            "limit": self.last_limit,
        }
        for i, norm in self.group_norms.items():
            floats[f"group{i}_norm"] = norm
            floats[f"group{i}_coefficient"] = self.group_coefficients[i]
        counters = self._counters.double()
        # One transfer for all.
        row = torch.cat([counters, torch.stack([f.to(counters) for f in floats.values()])]).tolist()
        counts = {name: int(n) for name, n in zip(_COUNTERS, row, strict=False)}
        n_measured = counts.pop("measured_steps")
        share = counts["clipped_steps"] / n_measured if n_measured else torch.nan
        measured = dict(zip(floats, row[len(_COUNTERS) :], strict=True))
        return {**measured, **counts, "clipped_share": share}

    @torch.compiler.disable
    def record_(
        self, outcomes: Outcomes, overflow: Tensor | None = None, skip: Tensor | None = None
    ) -> None:
        """Keeps the outcomes of a step and counts it; flags are 0-d bool, None where impossible.

        A step that overflowed leaves everything as it was, one that was skipped all but its count.
        """
        device = self._counters.device
        overflow = None if overflow is None else overflow.to(device)
        measured = [outcome for outcome in outcomes.values() if outcome is not None]
        skip = None if skip is None else skip.to(device)
        left_out = overflow if skip is None else skip if overflow is None else overflow | skip
        # Groups that no longer have a rule of their own drop out.
        last = {} if left_out is None else {owner: self._last(owner) for owner in outcomes}
        self.group_norms, self.group_coefficients = {}, {}
        # Without groups that have the wrapper's rule, its norm is not known.
        for owner, outcome in {None: None, **outcomes}.items():
            norm, coefficient, limit = outcome or (self._nan(), self._nan(), torch.nan)
            norm, coefficient = norm.to(device), coefficient.to(device)
            if left_out is not None and owner in last:
                old_norm, old_coefficient = last[owner]
                norm = torch.where(left_out, old_norm.to(norm.dtype), norm)
                coefficient = torch.where(left_out, old_coefficient.to(norm.dtype), coefficient)
                limit = torch.where(left_out, self.last_limit.to(norm.dtype), limit)
            if owner is None:
                self.last_norm, self.last_coefficient, self._limit = norm, coefficient, limit
            else:
                self.group_norms[owner], self.group_coefficients[owner] = norm, coefficient
        flags = [outcome.coefficient.to(device) < 1 for outcome in measured]
        clipped = flags[0] if len(flags) == 1 else torch.stack(flags).any() if flags else None
        self._count_(clipped, overflow, skip)

    @torch.compiler.disable
    def record_skip_(self) -> None:
        """Counts a step that was left out."""
        self._counters[3].add_(1)
        self.consecutive_skips.add_(1)
        self._may_have_skipped = True

    def move_(self, device: torch.device) -> None:
        """Moves everything, where the model was moved after its optimizer was made."""
        if device == self._counters.device:
            return
        if self._counters.is_meta:
            # Without values that could be moved.
            vars(self).update(vars(ClipStats(device)))
            return
        self._counters = self._counters.to(device)
        self.consecutive_skips = self.consecutive_skips.to(device)
        self.last_norm = self.last_norm.to(device)
        self.last_coefficient = self.last_coefficient.to(device)
        self.group_norms = {i: norm.to(device) for i, norm in self.group_norms.items()}
        self.group_coefficients = {i: c.to(device) for i, c in self.group_coefficients.items()}

    def _last(self, owner: int | None) -> tuple[Tensor, Tensor]:
        if owner is None:
            return self.last_norm, self.last_coefficient
        nan = self._nan()
        return self.group_norms.get(owner, nan), self.group_coefficients.get(owner, nan)

    def _nan(self) -> Tensor:
        return torch.full((), torch.nan, dtype=torch.float32, device=self._counters.device)

    def _count_(self, clipped: Tensor | None, overflow: Tensor | None, skip: Tensor | None) -> None:
        if overflow is None and skip is None:
            if self._may_have_skipped:
                self.consecutive_skips.zero_()
                self._may_have_skipped = False
            if clipped is None:
                self._counters[0].add_(1)
            else:
                # Also measured_steps, its neighbour.
                self._counters[:2].add_(1)
                self._counters[2].add_(clipped)
            return
        no = torch.zeros((), dtype=torch.bool, device=self._counters.device)
        overflow = no if overflow is None else overflow
        skip = no if skip is None else skip & ~overflow
        taken = ~(overflow | skip)
        measured, clipped = (no, no) if clipped is None else (taken, clipped & taken)
        self._counters.add_(torch.stack([taken, measured, clipped, skip]))
        self.consecutive_skips.add_(skip).mul_(~taken)
        self._may_have_skipped = True

    def __repr__(self) -> str:
        return f"<ClipStats on {self._counters.device}; summary() reads it>"

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all but the norms and coefficients of single groups."""
        counters = dict(zip(_COUNTERS, self._counters.clone(), strict=True))
        return counters | {name: getattr(self, name).clone() for name in _LAST}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the result of `state_dict`; missing entries start anew."""
        self.group_norms.clear()
        self.group_coefficients.clear()
        for counter, name in zip(self._counters, _COUNTERS, strict=True):
            counter.fill_(state.get(name, 0))
        self.consecutive_skips.fill_(state.get("consecutive_skips", 0))
        self._may_have_skipped = True
        for name, own in (("last_norm",) * 2, ("last_coefficient",) * 2, ("last_limit", "_limit")):
            last = torch.as_tensor(state.get(name, self._nan()), device=self._counters.device)
            setattr(self, own, last.clone())
