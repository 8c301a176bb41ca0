"""Statistics of a training run, kept on the device: norms, coefficients, and counts of steps.

A step is counted by its `Verdict`. A flag is a bool if the host decides; otherwise it is a 0-d
tensor, and nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tritonclip.backends import choose
from tritonclip.messages import join_names, warn_user
from tritonclip.modes import outside_inference
from tritonclip.rules.arguments import saved_count

Flag: TypeAlias = "bool | Tensor"


def either(flag: Flag, other: Flag) -> Flag:
    """Whether either flag is true; a result that is a tensor is on the device of the first one."""
    if isinstance(flag, bool):
        return flag or other
    if isinstance(other, bool):
        return other or flag
    return flag | other.to(flag.device)


class Verdict(NamedTuple):
    """Whether a step is left out, by the host or by the device alone, and why.

    Attributes:
        overflow: a GradScaler found an overflow, which is not counted as a skip.
        skip: the policy or `skip_above` skips the step.
    """

    left_out: Flag = False
    overflow: Flag = False
    skip: Flag = False

    def read(self) -> Verdict:
        """Returns the verdict in bools; waits for the device."""
        if not self.left_out:
            return TAKEN
        overflow = bool(self.overflow)
        return Verdict(left_out=True, overflow=overflow, skip=not overflow)


TAKEN = Verdict()


# The counts stand in this order in one tensor, which moves in one copy.
COUNTS = (
    *("steps", "measured_steps", "clipped_steps", "well_clipped_steps"),
    *("skipped_steps", "overflowed_steps", "consecutive_skips"),
)
# A coefficient between this and 1 means that the norm was at the limit, as another clip with the
# same limit leaves it: that clip and the rule each add up to 1e-6 to the norm they divide by.
BARELY = 1 - 2e-5
_SKIPPED, _OVERFLOWED, _IN_A_ROW = range(4, 7)
# A step adds 1 to a count if its least coefficient is below the count's bound. A step without a
# coefficient has `_UNMEASURED`, and so adds to the first count alone.
_UNMEASURED = 2.0
_BOUNDS = (3.0, 2.0, 1.0, BARELY, 0.0, 0.0, 0.0)


class StepCounts:
    """Counts of steps that were taken, measured, clipped, skipped, or left out by an overflow.

    They are numbers if the host decides. Otherwise they are one tensor on the device: nothing
    waits for it, and every replay of a captured CUDA graph adds to it.
    """

    def __init__(self, device: torch.device) -> None:
        # In the order of COUNTS.
        self.values: list[int] | Tensor = [0] * len(COUNTS)
        self.move_(device)

    @property
    def device(self) -> torch.device:
        """The device of all counts."""
        return self.values.device if isinstance(self.values, Tensor) else torch.device("cpu")

    def read(self) -> Tensor:
        """Copies all counts in the order of COUNTS, int64[7]."""
        if isinstance(self.values, Tensor):
            return self.values.clone()
        return torch.tensor(self.values, device="cpu")

    def add(self, coefficients: Sequence[float | Tensor], verdict: Verdict = TAKEN) -> None:
        """Counts a step, with the coefficients of the rules that measured a norm."""
        numbers, (left_out, overflow, _) = self.values, verdict
        if isinstance(numbers, Tensor):
            self._add_on_device(numbers, coefficients, verdict)
        elif left_out:
            numbers[_OVERFLOWED if overflow else _SKIPPED] += 1
            numbers[_IN_A_ROW] += not overflow
        else:
            numbers[0] += 1
            numbers[_IN_A_ROW] = 0
            if coefficients:
                # A coefficient that is NaN is not below 1, so the step is not counted as clipped.
                numbers[1] += 1
                if True in [c < 1 for c in coefficients]:
                    numbers[2] += 1
                    numbers[3] += True in [c < BARELY for c in coefficients]

    def _add_on_device(
        self, counts: Tensor, coefficients: Sequence[float | Tensor], verdict: Verdict
    ) -> None:
        """Does as `add`, by operators on the device."""
        least: float | Tensor = _UNMEASURED
        if coefficients:
            found = [self._here(coefficient) for coefficient in coefficients]
            # NaN counts as 1. With a dimension, `least` is compared in the wider dtype of the two.
            least = (found[0] if len(found) == 1 else torch.stack(found)).nan_to_num(nan=1.0)
            least = least.amin(0, keepdim=True) if least.dim() else least.reshape(1)
        step = self._bounds > least
        if verdict.left_out is False:
            counts[_IN_A_ROW].zero_()
        else:
            left_out, overflow = self._here(verdict.left_out), verdict.overflow
            reason = self._overflowed if overflow is True else self._skipped
            if isinstance(overflow, Tensor):
                reason = torch.where(self._here(overflow), self._overflowed, reason)
            step = torch.where(left_out, reason, step)
            counts[_IN_A_ROW].mul_(left_out)
        counts.add_(step)

    def _here(self, number: float | Tensor) -> Tensor:
        """Returns a number or flag on the device of the counts, 0-d."""
        if isinstance(number, Tensor):
            return number.to(self.device).reshape(())
        return torch.full((), number, device=self.device)

    @outside_inference
    def move_(self, device: torch.device) -> None:
        """Moves all counts."""
        if choose.host_decides(device):
            if isinstance(self.values, Tensor):
                self.values = self.values.tolist()
            return
        # A copy, and not an inference tensor: later steps add to it in place.
        self.values = self.read().to(device, copy=True)
        self._bounds = torch.tensor(_BOUNDS, dtype=torch.float32, device=device)
        # The counts that a step adds to if it was left out, for each of the two reasons.
        self._skipped = torch.tensor([0, 0, 0, 0, 1, 0, 1], device=device)
        self._overflowed = torch.tensor([0, 0, 0, 0, 0, 1, 0], device=device)

    def load(self, counts: Mapping[str, object]) -> None:
        """Loads counts by name; missing ones become 0, but clipped steps count as well clipped."""
        counts = {"well_clipped_steps": counts.get("clipped_steps", 0), **counts}
        numbers, device = [saved_count(name, counts.get(name, 0)) for name in COUNTS], self.device
        self.values = numbers
        self.move_(device)


class Clipped(NamedTuple):
    """The outcome of one rule at one step: 0-d tensors, or numbers.

    Attributes:
        norm: the norm before clipping, 0-d; the largest norm for a rule that is per gradient.
        coefficient: the factor of the gradients; the least one for a rule that is per gradient.
        limit: the largest norm after clipping; NaN if there is no single limit.
    """

    norm: Tensor
    coefficient: float | Tensor
    limit: float | Tensor


# Keys are parameter groups, None for the wrapper's rule; values are None for rules without a norm.
Outcomes = dict[int | None, Clipped | None]
_UNKNOWN = (torch.nan, torch.nan, torch.nan)
# Counts that a summary leaves out.
_NOT_SHOWN = ("measured_steps", "well_clipped_steps")
# A warning comes after so many clipped steps, if all of them had a norm at the limit.
_SUSPICIOUS = 10
_LAST = ("last_norm", "last_coefficient", "last_limit")


class ClipStats:
    """The `stats` of a :class:`~tritonclip.ClippedOptimizer`: norms, coefficients and counts.

    All are 0-d tensors on the device of the optimizer's first parameter. Only `summary` waits for
    the device.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> inner = torch.optim.SGD([weight], lr=1.0)
        >>> optimizer = tritonclip.ClippedOptimizer(inner, 9.0)
        >>> for step in range(2):
        ...     optimizer.zero_grad()
        ...     (weight * weight).sum().backward()
        ...     optimizer.step()
        >>> optimizer.stats.clipped_steps, optimizer.stats.last_norm
        (tensor(1), tensor(8.0000))
        >>> optimizer.stats.summary()["clipped_share"]
        0.5
    """

    # Defaults on the class, so that loading a state does not reset either of them.
    _was_warned = False
    _follows = False

    def __init__(self, device: torch.device) -> None:
        self._counts = StepCounts(device)
        self._moved_to = device
        # The outcomes of the last step that was taken; tensors are made of them only when read.
        self._last: Outcomes = {}

    @property
    def device(self) -> torch.device:
        """The device of all statistics."""
        return self._counts.device

    @property
    def last_norm(self) -> Tensor:
        """The norm *before* clipping at the last step under the wrapper's rule, floating-point.

        The largest one for a rule with a norm for each gradient. NaN for ClipByValue, which
        measures no norm, and before the first step.
        """
        return self._of(None)[0]

    @property
    def group_norms(self) -> dict[int, Tensor]:
        """The `last_norm` of each parameter group that has its own rule, by the group's number."""
        return {i: self._of(i)[0] for i in self._last if i is not None}

    @property
    def group_coefficients(self) -> dict[int, Tensor]:
        """The `last_coefficient` of each of these groups, by the group's number."""
        return {i: self._of(i)[1].clone() for i in self._last if i is not None}

    @property
    def steps(self) -> Tensor:
        """Steps that updated the parameters; 0-d int64."""
        return self._counts.read()[0]

    @property
    def measured_steps(self) -> Tensor:
        """Steps at which any rule measured a norm, which ClipByValue does not; 0-d int64."""
        return self._counts.read()[1]

    @property
    def clipped_steps(self) -> Tensor:
        """Steps at which the coefficient of any rule was below 1; 0-d int64."""
        return self._counts.read()[2]

    @property
    def skipped_steps(self) -> Tensor:
        """Steps skipped by nonfinite="skip" or skip_above, not by a GradScaler; 0-d int64."""
        return self._counts.read()[4]

    @property
    def overflowed_steps(self) -> Tensor:
        """Steps that a GradScaler left out because of an overflow; 0-d int64.

        Under torch's GradScaler they count only if the wrapped optimizer is fused. For any other
        one, torch's GradScaler does not call `step`.
        """
        return self._counts.read()[5]

    @property
    def consecutive_skips(self) -> Tensor:
        """Steps skipped in a row until now; 0-d int64."""
        return self._counts.read()[6]

    @property
    def last_coefficient(self) -> Tensor:
        """The factor of the gradients at the last step under the wrapper's rule, 1 if none clipped.

        0-d, of the dtype of `last_norm`; the least one for a rule with several.
        """
        # Copied, because a backend may write to the original again.
        return self._of(None)[1].clone()

    @property
    def last_limit(self) -> Tensor:
        """The largest norm that the wrapper's rule allowed at the last step; 0-d as `last_norm`.

        NaN if gradients had different limits, for ClipByValue, and before the first step.
        """
        return self._of(None)[2]

    def summary(self) -> dict[str, float | int]:
        """Returns all statistics as plain numbers, for a logger; only this waits for the device.

        Returns:
            norm, coefficient, limit, steps, clipped_steps, skipped_steps, overflowed_steps,
            consecutive_skips, and clipped_share, the clipped fraction of the steps that measured a
            norm (NaN without any). For each group with its own rule also group<i>_norm and
            group<i>_coefficient.

        Raises:
            RuntimeError: parameters on the device meta.

        Warns:
            UserWarning: ten steps or more were clipped by limits that do not follow the norms, and
                no norm exceeded its limit by more than 2e-5 of it: something else clips first. If
                the host decides, the tenth clipped step warns already.

        Example:
            >>> ClipStats(torch.device("cpu")).summary()["steps"]
            0
        """
        counts = self._counts.read()
        if counts.is_meta:
            raise RuntimeError(
                "the statistics have no values, since the optimizer's parameters are on the device "
                "meta; expected parameters with values: make the optimizer after model.to_empty(), "
                "which replaces the parameters"
            )
        measured = dict(zip(("norm", "coefficient", "limit"), self._of(None), strict=True))
        for i in self.group_norms:
            measured[f"group{i}_norm"], measured[f"group{i}_coefficient"], _ = self._of(i)
        # All numbers move in one transfer.
        counts = counts.double()
        row = torch.cat([counts, torch.stack([f.to(counts) for f in measured.values()])]).tolist()
        numbers = {name: int(n) for name, n in zip(COUNTS, row, strict=False)}
        n_measured, n_well_clipped = map(numbers.pop, _NOT_SHOWN)
        self._warn_if_clipped_before(numbers["clipped_steps"], n_well_clipped)
        share = numbers["clipped_steps"] / n_measured if n_measured else torch.nan
        last_numbers = dict(zip(measured, row[len(COUNTS) :], strict=True))
        return {**last_numbers, **numbers, "clipped_share": share}

    def _warn_if_clipped_before(self, n_clipped: int, n_well_clipped: int) -> None:
        """Warns once if every clipped norm was at the limit."""
        if n_clipped < _SUSPICIOUS or n_well_clipped or self._was_warned or self._follows:
            return
        self._was_warned = True
        warn_user(
            f"all {n_clipped} clipped steps had a norm at the limit, and none had one above it, as "
            "if something else clips to the same limit first, so that these statistics are not of "
            "gradients before clipping; expected one of the two: remove the other (an option of "
            "the trainer, torch.nn.utils.clip_grad_norm_, clip_), or use the bare optimizer"
        )

    def record_(
        self, outcomes: Outcomes, verdict: Verdict = TAKEN, *, follows: bool = False
    ) -> None:
        """Keeps the outcomes of a step and counts it.

        A step that was left out changes nothing but the count of overflows or of skips. If a limit
        `follows` the norms, it may often be near them, so there is no warning.
        """
        self._follows = self._follows or follows
        left_out, coefficients = verdict.left_out, []
        if left_out is not True:
            coefficients = [o.coefficient for o in outcomes.values() if o is not None]
            if isinstance(left_out, Tensor):
                # Groups that have lost their rule keep their outcomes, if the step is left out.
                owners: Outcomes = {None: None, **dict.fromkeys(self._last), **outcomes}
                outcomes = {
                    owner: self._kept(owner, outcome, left_out) for owner, outcome in owners.items()
                }
            self._last = outcomes
        self._counts.add(coefficients, verdict)
        known = self._counts.values
        if isinstance(known, list) and known[2] == _SUSPICIOUS:
            self._warn_if_clipped_before(known[2], known[3])

    def _kept(self, owner: int | None, outcome: Clipped | None, left_out: Tensor) -> Clipped | None:
        """Returns the outcome of a step, or the last step's if the device left this one out."""
        if outcome is None and self._last.get(owner) is None:
            return None
        stays, numbers = left_out.to(self.device), []
        for before, number in zip(self._of(owner), outcome or _UNKNOWN, strict=True):
            if isinstance(number, Tensor):
                number = number.to(self.device)
                before = before.to(number.dtype)
            numbers.append(torch.where(stays, before, number))
        return Clipped(*numbers)

    def _of(self, owner: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns norm, coefficient and limit of a rule at the last step, 0-d; NaN if unknown."""
        outcome = self._last.get(owner)
        if outcome is None:
            nan = torch.full((), torch.nan, dtype=torch.float32, device=self.device)
            return nan, nan, nan
        norm = outcome.norm.to(self.device)
        return norm, as_tensor(outcome.coefficient, norm), as_tensor(outcome.limit, norm)

    def follow_(self, device: torch.device) -> None:
        """Moves all statistics, if the model was moved after its optimizer was made."""
        if device == self._moved_to:
            return
        if self.device.type == "meta":
            # There are no values to move.
            vars(self).update(vars(ClipStats(device)))
        self._counts.move_(device)
        self._moved_to = device

    def __repr__(self) -> str:
        return f"<ClipStats on {self.device}; summary() reads it>"

    def state_dict(self) -> dict[str, Tensor]:
        """Copies all statistics but those of single groups, by name."""
        counts = dict(zip(COUNTS, self._counts.read(), strict=True))
        return counts | {name: getattr(self, name).clone() for name in _LAST}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the result of `state_dict`; entries that are missing begin anew.

        Raises:
            ValueError: an entry of another kind, or of another name; nothing is loaded.
        """
        if not isinstance(state, dict):
            raise ValueError(f"expected the result of ClipStats.state_dict(), got {state!r:.80}")
        if unknown := [*state.keys() - {*COUNTS, *_LAST}]:
            raise ValueError(
                f"a saved state has no entry {join_names(sorted(map(repr, unknown)))}; expected "
                "the result of state_dict() of this version of tritonclip, or of an earlier one. "
                "Nothing was loaded"
            )
        last = [_saved_number(name, state.get(name, torch.nan), self.device) for name in _LAST]
        self._counts.load(state)
        self._last = {None: Clipped(*last)}


def _saved_number(name: str, value: object, device: torch.device) -> Tensor:
    """Reads a number of a saved state as a 0-d floating-point tensor on a device."""
    if type(value) in (float, int):
        number = float(value)  # type: ignore[arg-type]  # a number
        wide = torch.tensor(number, dtype=torch.float64, device="cpu")
        # Only a number that needs float64 gets it, because not every device has it.
        value = wide if wide.isfinite() and wide.float() != wide else wide.float()
    if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 0:
        if value.is_meta:
            # A tensor on meta has no value.
            return torch.full_like(value, torch.nan, device=device)
        return value.detach().to(device, copy=True)
    raise ValueError(
        f"{name} of a saved state must be a number or a 0-d floating-point tensor, got "
        f"{value!r:.80}; expected the result of state_dict(). Nothing was loaded"
    )


def as_tensor(number: float | Tensor, like: Tensor) -> Tensor:
    """Returns a number or a 0-d tensor as a 0-d tensor with the dtype and device of `like`."""
    if isinstance(number, Tensor):
        return number.to(like)
    return torch.scalar_tensor(number, dtype=like.dtype, device=like.device)
