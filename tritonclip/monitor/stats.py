"""`ClipStats`: norms, coefficients and counts of a training run, kept on the device."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonclip.messages import NamesAttributes, join_names, warn_user
from tritonclip.monitor.step_counts import COUNTS, StepCounts
from tritonclip.monitor.verdict import TAKEN, Verdict


class Clipped(NamedTuple):
    """The outcome of one rule at one step: 0-d tensors, or numbers.

    Attributes:
        norm: before clipping, 0-d; the largest norm for a rule that is per gradient.
        coefficient: the least coefficient for a rule that is per gradient.
        limit: the largest norm after clipping; NaN if there is no single limit.
    """

    norm: Tensor
    coefficient: float | Tensor
    limit: float | Tensor


# By parameter group, None for the wrapper's rule; the value is None for a rule without a norm.
Outcomes = dict[int | None, Clipped | None]
# Counts that a summary leaves out.
_NOT_SHOWN = ("measured_steps", "well_clipped_steps")
# Clipped steps, all of them at the limit, that are warned of.
_SUSPICIOUS = 10
_LAST = ("last_norm", "last_coefficient", "last_limit", "consecutive_skips")


class ClipStats(NamesAttributes):
    """Norms, coefficients and counts of a :class:`ClippedOptimizer`, its attribute `stats`.

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

    Attributes:
        last_norm: the norm *before* clipping at the last step under the wrapper's rule,
            floating-point. For a rule with a norm for each gradient, the largest. NaN for
            ClipByValue, which measures no norm, and before the first step.
        last_coefficient: the factor of the gradients at the last step under the same rule. The
            least one for a rule with a coefficient for each gradient or unit. 1 if nothing was
            clipped.
        last_limit: the largest norm that the same rule allowed at the last step. NaN if gradients
            had different limits, for ClipByValue, and before the first step.
        group_norms: a dict with the `last_norm` of each parameter group that has its own rule, by
            the number of the group.
        group_coefficients: a dict with the `last_coefficient` of these groups.
    """

    # Of the class, so that a loaded state leaves both as they are.
    _was_warned = False
    _follows = False

    def __init__(self, device: torch.device) -> None:
        self._counts = StepCounts(device)
        self._coefficient: float | Tensor = torch.nan
        self._limit: float | Tensor = torch.nan
        self.last_norm = self._nan()
        self.group_norms: dict[int, Tensor] = {}
        self.group_coefficients: dict[int, Tensor] = {}

    @property
    def steps(self) -> Tensor:
        """Steps that updated the parameters; 0-d int64."""
        return self._counts.read()[0].clone()

    @property
    def measured_steps(self) -> Tensor:
        """Steps at which any rule measured a norm, which ClipByValue does not; 0-d int64."""
        return self._counts.read()[1].clone()

    @property
    def clipped_steps(self) -> Tensor:
        """Steps at which the coefficient of any rule was below 1; 0-d int64."""
        return self._counts.read()[2].clone()

    @property
    def skipped_steps(self) -> Tensor:
        """Steps skipped by nonfinite="skip" or skip_above, not by a GradScaler; 0-d int64."""
        return self._counts.read()[4].clone()

    @property
    def overflowed_steps(self) -> Tensor:
        """Steps that a GradScaler left out because of an overflow; 0-d int64.

        torch's GradScaler does not call `step` for them, and they do not count, unless the wrapped
        optimizer is fused.
        """
        return self._counts.read()[5].clone()

    @property
    def consecutive_skips(self) -> Tensor:
        """Steps skipped in a row until now; 0-d int64."""
        return self._counts.consecutive_skips

    @property
    def last_coefficient(self) -> Tensor:
        """The factor of the gradients at the last step; 0-d, of the dtype of `last_norm`."""
        last = as_tensor(self._coefficient, self.last_norm)
        # A copy: steps that are not yet counted need the original.
        return last.clone() if last is self._coefficient else last

    @property
    def last_limit(self) -> Tensor:
        """The largest norm allowed at the last step; 0-d, of the dtype of `last_norm`."""
        return as_tensor(self._limit, self.last_norm)

    def summary(self) -> dict[str, float | int]:
        """All statistics as plain numbers, for a logger; the one call that waits for the device.

        Returns:
            norm, coefficient, limit, steps, clipped_steps, skipped_steps, overflowed_steps,
            consecutive_skips, and clipped_share, the clipped fraction of the steps that measured a
            norm (NaN without any). For each group with its own rule also group<i>_norm and
            group<i>_coefficient.

        Raises:
            RuntimeError: parameters on the device meta.

        Warns:
            UserWarning: ten steps or more were clipped by limits that do not follow the norms, and
                no norm was more than 2e-5 of the limit above it: something else clips first.

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
        counts = torch.cat([counts, self.consecutive_skips.reshape(1)])
        by_group: dict[str, Tensor] = {}
        for i, norm in self.group_norms.items():
            by_group[f"group{i}_norm"] = norm
            by_group[f"group{i}_coefficient"] = self.group_coefficients[i]
        floats = [self.last_norm, self.last_coefficient, self.last_limit, *by_group.values()]
        # One transfer for all.
        counts = counts.double()
        row = torch.cat([counts, torch.stack([f.to(counts) for f in floats])]).tolist()
        count_names = (*COUNTS, "consecutive_skips")
        numbers = {name: int(n) for name, n in zip(count_names, row, strict=False)}
        n_measured, n_well_clipped = map(numbers.pop, _NOT_SHOWN)
        self._warn_if_clipped_before(numbers["clipped_steps"], n_well_clipped)
        share = numbers["clipped_steps"] / n_measured if n_measured else torch.nan
        names = ("norm", "coefficient", "limit", *by_group)
        measured = dict(zip(names, row[len(count_names) :], strict=True))
        return {**measured, **numbers, "clipped_share": share}

    def _warn_if_clipped_before(self, n_clipped: int, n_well_clipped: int) -> None:
        """Warns, once, where every clipped norm was at the limit."""
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

        A step that was left out changes nothing but the count of overflows or of skips. A limit
        that `follows` the norms may often be near them.
        """
        self._follows = self._follows or follows
        left_out, device = verdict.left_out, self.last_norm.device
        if left_out is True:
            self._counts.add((), verdict)
            return
        last: dict[int | None, tuple[Tensor, Tensor]] = {}
        if isinstance(left_out, Tensor):
            left_out = left_out.to(device)
            verdict = verdict._replace(left_out=left_out)
            last = {owner: self._last(owner) for owner in outcomes}
        # Groups that no longer have their own rule drop out.
        self.group_norms, self.group_coefficients = {}, {}
        # If every group has its own rule, the wrapper's norm is unknown.
        for owner, outcome in {None: None, **outcomes}.items():
            norm, coefficient, limit = outcome or (self._unknown(), torch.nan, torch.nan)
            norm = norm.to(device)
            if isinstance(left_out, Tensor) and owner in last:
                old_norm, old_coefficient = last[owner]
                coefficient = as_tensor(coefficient, norm)
                norm = torch.where(left_out, old_norm.to(norm.dtype), norm)
                coefficient = torch.where(left_out, old_coefficient.to(norm.dtype), coefficient)
                limit = torch.where(left_out, self.last_limit.to(norm.dtype), limit)
            if owner is None:
                self.last_norm, self._coefficient, self._limit = norm, coefficient, limit
            else:
                self.group_norms[owner] = norm
                self.group_coefficients[owner] = as_tensor(coefficient, norm).clone()
        measured = [outcome.coefficient for outcome in outcomes.values() if outcome is not None]
        self._counts.add(measured, verdict)

    def move_(self, device: torch.device) -> None:
        """Moves all tensors, if the model was moved after its optimizer was made."""
        if self._counts.device.type == "meta":
            # There are no values to move.
            vars(self).update(vars(ClipStats(device)))
            return
        self._counts.move_(device)
        self.last_norm = self.last_norm.to(device)
        self._coefficient = self.last_coefficient
        self._limit = self.last_limit
        self.group_norms = {i: norm.to(device) for i, norm in self.group_norms.items()}
        self.group_coefficients = {i: c.to(device) for i, c in self.group_coefficients.items()}

    def _last(self, owner: int | None) -> tuple[Tensor, Tensor]:
        if owner is None:
            return self.last_norm, as_tensor(self._coefficient, self.last_norm)
        nan = self._nan()
        return self.group_norms.get(owner, nan), self.group_coefficients.get(owner, nan)

    def _unknown(self) -> Tensor:
        """NaN for the norm of a step; the same tensor while no step has one, without a launch."""
        is_known = self._coefficient is not torch.nan or self._limit is not torch.nan
        return self._nan() if is_known else self.last_norm

    def _nan(self) -> Tensor:
        return torch.full((), torch.nan, dtype=torch.float32, device=self._counts.device)

    def __repr__(self) -> str:
        return f"<ClipStats on {self._counts.device}; summary() reads it>"

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all tensors but those of single groups, by name."""
        counts = dict(zip(COUNTS, self._counts.read().clone(), strict=True))
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
        last = [_saved_number(name, state.get(name, self._nan())) for name in _LAST[:3]]
        self._counts.load(state)
        self.group_norms.clear()
        self.group_coefficients.clear()
        device = self._counts.device
        self.last_norm, self._coefficient, self._limit = (
            self._nan() if number.is_meta else number.to(device, copy=True) for number in last
        )


def _saved_number(name: str, value: object) -> Tensor:
    """A number in a saved state, a 0-d floating-point tensor."""
    if type(value) in (float, int):
        value = torch.tensor(float(value), device="cpu")  # type: ignore[arg-type]  # a number
    if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 0:
        return value.detach()
    raise ValueError(
        f"{name} of a saved state must be a number or a 0-d floating-point tensor, got "
        f"{value!r:.80}; expected the result of state_dict(). Nothing was loaded"
    )


def as_tensor(number: float | Tensor, like: Tensor) -> Tensor:
    """A number or a 0-d tensor as a 0-d tensor with the dtype and device of `like`."""
    if isinstance(number, Tensor):
        return number.to(like)
    return torch.scalar_tensor(number, dtype=like.dtype, device=like.device)
