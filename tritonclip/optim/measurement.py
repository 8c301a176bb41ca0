"""The norms of an optimizer step, measured before it writes: over processes, by one exchange.

The norms of all rules travel together. A step then costs one SUM, and a MAX if a rule or a policy
needs one, however many parameter groups have a rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.distributed.execute import exchange
from tritonclip.distributed.gradients import error_of
from tritonclip.distributed.reduction import run_exchanges
from tritonclip.distributed.refusals import is_awaited
from tritonclip.engine.norms import measure as measure_list
from tritonclip.engine.norms import measure_by
from tritonclip.optim.shares import UNLIMITED, Share
from tritonclip.rules import ClipByGlobalNorm, Rule

# The norm that is compared with skip_above.
WHOLE = ClipByGlobalNorm(math.inf, eps=0.0)


class Wanted(NamedTuple):
    """Norms to be measured.

    Attributes:
        share: of which.
        rule: that asks for them.
        field: of the share, which takes them.
    """

    share: Share
    rule: Rule
    field: str

    @property
    def is_spread(self) -> bool:
        """Whether other processes have pieces of the gradients."""
        plan = self.share.gradients.plan
        return plan is not None and plan.reduction is not None

    @property
    def form(self) -> str:
        """The owner, class and order of the rule as text; they must agree in all processes."""
        index = self.share.group_index
        owner = "unclipped" if self.share.unclipped else "shared" if index is None else f"[{index}]"
        return f"{owner}: {self.rule.name} of order {self.rule.norm_type}"


def wanted(
    shares: Sequence[Share],
    observed: Sequence[Share] = (),
    *,
    by_value: bool,
    check_finite: bool,
    whole: bool,
) -> list[Wanted]:
    """All norms of a step.

    Args:
        shares: of the step.
        observed: measured beside them.
        by_value: also for rules that clamp.
        check_finite: it will be asked whether every gradient is finite.
        whole: the 2-norm of all clipped gradients will be asked for.
    """
    found = []
    for share in shares:
        if share.gradients.plan is None:
            continue
        rule, is_measured = share.rule, by_value or not share.rule.clamps
        if is_measured:
            found.append(Wanted(share, rule, "norms"))
            if check_finite and hides_nonfinite(rule):
                found.append(Wanted(share, UNLIMITED, "largest"))
        if whole and not share.unclipped and not (is_measured and rule.norm_type == 2.0):
            found.append(Wanted(share, WHOLE, "whole"))
    return found + [Wanted(share, share.rule, "norms") for share in observed]


def is_measured_alone(
    share: Share, grad_scale: float | Tensor, *, by_value: bool, check_finite: bool
) -> bool:
    """Measures the only share of a step; False where that is not all, or checks come first.

    Args:
        share: of which the norms of its rule are measured.
        grad_scale: the loss scale that gradients carry.
        by_value: also for a rule that clamps.
        check_finite: it will be asked whether every gradient is finite.
    """
    plan, rule = share.gradients.plan, share.rule
    if plan is None or not plan.ordinary or rule.per_unit or not rule.fixed:
        return False
    if check_finite and hides_nonfinite(rule):
        return False
    if by_value or not rule.clamps:
        # By value, an element counts as it came.
        scale = 1.0 if rule.clamps else grad_scale
        share.norms = measure_list(share.gradients, rule.norm_type, rule.per_gradient, scale)
    return True


def hides_nonfinite(rule: Rule) -> bool:
    """Whether the norms that a rule asks for do not show NaN and inf."""
    return rule.norm_type in (0.0, -math.inf)


def measure(wanted: Sequence[Wanted], grad_scale: float | Tensor) -> None:
    """Measures norms; of shares that are refused those that other processes wait for.

    Raises:
        TypeError, ValueError, RuntimeError: gradients that a process refuses; on a CPU only.
    """
    here = [one for one in wanted if not one.is_spread]
    spread = [one for one in wanted if one.is_spread]
    for share, rule, field in here:
        norms = measure_by(share.gradients, rule, _scale(rule, grad_scale))
        setattr(share, field, norms)
    if not spread:
        return
    sent = [one for one in spread if _is_sent(one)]
    exchanges = [
        exchange(share.gradients, rule, _scale(rule, grad_scale)) for share, rule, _ in sent
    ]
    for (share, _, field), norms in zip(sent, run_exchanges(exchanges), strict=True):
        setattr(share, field, norms)


def _is_sent(one: Wanted) -> bool:
    gradients = one.share.gradients
    return error_of(gradients) is None or is_awaited(gradients, one.rule)


def _scale(rule: Rule, grad_scale: float | Tensor) -> float | Tensor:
    # By value, an element counts as it came.
    return 1.0 if rule.clamps else grad_scale


def global_norm_of(shares: Sequence[Share], grad_scale: float | Tensor) -> Tensor:
    """The 2-norm before clipping of all gradients that a rule holds for; 0-d."""
    clipped = [s for s in shares if not s.unclipped and s.gradients.plan is not None]
    missing = [s for s in clipped if s.whole is None and not s.has_whole]
    measure([Wanted(share, WHOLE, "whole") for share in missing], grad_scale)
    parts = []
    for share in clipped:
        norms = share.norms if share.has_whole else share.whole
        assert norms is not None
        norm = norms.norm()
        parts.append(_norm_of(norm) if norms.per_gradient else norm)
    if len(parts) == 1:
        return parts[0]
    device = device_of(shares)
    if not parts:
        return torch.zeros((), device=device)
    return _norm_of(torch.stack([part.to(device).double() for part in parts]))


def norms_of(shares: Sequence[Share]) -> dict[int | None, Tensor]:
    """The norms before clipping that rules asked for, 0-d, by group."""
    found = {}
    for share in shares:
        if share.has_norm:
            norm = torch.zeros((), device=share.gradients.device)
            if share.norms is not None:
                norm = share.norms.norm()
            found[share.group_index] = _norm_of(norm) if norm.dim() else norm
    return found


def nonfinite_of(shares: Sequence[Share]) -> Tensor:
    """Whether any gradient is NaN or inf, or any norm does not fit its dtype; 0-d bool."""
    flags = []
    for share in shares:
        if share.norms is not None:
            flags.append(~share.norms.is_finite())
            if share.largest is not None:
                flags.append(~torch.isfinite(share.largest.total()))
    if not flags:
        return torch.zeros((), dtype=torch.bool, device=device_of(shares))
    device = flags[0].device
    return flags[0] if len(flags) == 1 else torch.stack([f.to(device) for f in flags]).any()


def device_of(shares: Sequence[Share]) -> torch.device:
    """Of the first gradient."""
    return shares[0].gradients.device if shares else torch.device("cpu")


def _norm_of(norms: Tensor) -> Tensor:
    """The norm of all from the 2-norms of parts, in float64: none of them overflows."""
    norm: Tensor = torch.linalg.vector_norm(norms, dtype=torch.float64)
    return norm
