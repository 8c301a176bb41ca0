"""The shares of an optimizer step: gradients of its parameter groups, by the rule they share.

`divide` makes them; `measure` and `write_` clip one.

The norms of an optimizer step, measured before it writes: over processes, by one exchange.

The norms of all rules travel together. A step then costs one SUM, and a MAX if a rule or a policy
needs one, however many parameter groups have a rule.

Refuses the gradients of an optimizer step before any is written, and tells other processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from tritonclip.distributed.process_groups import Holders, domain_of, everyones
from tritonclip.distributed.reduction import together
from tritonclip.distributed.refusals import is_told
from tritonclip.distributed.shards import meshes_of
from tritonclip.engine import execute
from tritonclip.engine.arguments import device_of
from tritonclip.engine.checks import (
    raise_if_any_nonfinite,
    raise_if_nonfinite,
    refuse_for_rule,
    refuse_other_model,
    refuse_read_only,
    refuse_shared,
)
from tritonclip.engine.gradients import Gradients, of_parameters, of_unclipped
from tritonclip.engine.norms import Norms, is_finite, norms_exchange, total
from tritonclip.engine.plan import refuse_
from tritonclip.engine.plan_cache import PlanCache, plan_
from tritonclip.flat.flat_gradients import FlatGradients
from tritonclip.monitor.stats import Clipped, as_tensor
from tritonclip.optim.param_groups import Groups, OwnRules, label_of_member
from tritonclip.rules import BoundRule, ClipByGlobalNorm, Rule

# Scales nothing but a loss scale; its norm is finite where every gradient is.
UNLIMITED = ClipByGlobalNorm(math.inf, math.inf, eps=0.0)
# Parameters of an optimizer: (group, position).
Members = Sequence[tuple[int, int]]


@dataclass(slots=True)
class Share:
    """Gradients that share a rule.

    Attributes:
        gradients: with their plan.
        rule: that holds for them.
        group_index: the one parameter group that they belong to; None for several.
        unclipped: no rule holds for them.
        norms: before clipping, where they were measured.
        largest: their largest magnitude, where `norms` do not show NaN and inf.
        whole: their 2-norm, where `norms` are others and one was asked for.
        following: the rule, where its limit changes from step to step.
    """

    gradients: Gradients
    rule: Rule
    group_index: int | None
    unclipped: bool = False
    norms: Norms | None = None
    largest: Norms | None = None
    whole: Norms | None = None
    following: BoundRule | None = None

    @property
    def has_norm(self) -> bool:
        """Whether a rule holds for them that measures norms."""
        return not (self.unclipped or self.rule.clamps)

    @property
    def has_whole(self) -> bool:
        """Whether `norms` are 2-norms."""
        return self.norms is not None and self.norms.norm_type == 2.0


def divide(
    groups: Groups,
    rule: Rule,
    own_rules: OwnRules,
    plans: PlanCache,
    holders: Holders | None,
    *,
    covers_all: bool,
) -> list[Share]:
    """A share for the groups without a rule, and one for each group that has one.

    Args:
        groups: parameter groups of an optimizer.
        rule: for the groups that have none of their own.
        own_rules: of the others.
        plans: of the optimizer.
        holders: the processes that the gradients are spread over.
        covers_all: whether gradients that no rule holds for are a share too.
    """
    if covers_all or own_rules:
        holders = _with_meshes(holders, groups)
    common: list[int] = []
    unclipped: list[tuple[int, int]] = []
    shares = []
    for index, group in enumerate(groups):
        if index not in own_rules:
            common.append(index)
        elif (own := own_rules[index]) is not None:
            shares.append(Share(_collect(groups, [index], plans, holders), own, index))
        else:
            unclipped += [(index, i) for i in range(len(group["params"]))]
    if common:
        shares.insert(0, Share(_collect(groups, common, plans, holders), rule, None))
    if covers_all:
        unclipped += [
            (index, i)
            for index, group in enumerate(groups)
            if own_rules.get(index, rule) is not None
            for i, p in enumerate(group["params"])
            if not getattr(p, "need_clip", True)
        ]
        shares += _unclipped(groups, unclipped, plans, holders)
    return shares


def divide_flat(
    groups: Groups,
    rule: Rule,
    plans: PlanCache,
    holders: Holders | None,
    flat: FlatGradients,
    not_in_buffers: Members,
    *,
    covers_all: bool,
) -> list[Share]:
    """As `divide`, for gradients in buffers, of groups without a rule: no parameter is read.

    `not_in_buffers` are the parameters of the groups that `flat` does not hold; they are refused
    where they have a gradient to clip.
    """
    error = _left_out(groups, not_in_buffers)
    if error is not None and holders is None:
        raise error
    gradients = flat.gradients(
        per_gradient=rule.per_gradient, holders=holders, weights=rule.per_unit, tells=True
    )
    if error is not None and not refuse_(gradients, error):
        raise error
    shares = [Share(gradients, rule, None)]
    return shares + _unclipped(groups, not_in_buffers, plans, holders) if covers_all else shares


def _left_out(groups: Groups, not_in_buffers: Members) -> RuntimeError | None:
    """The error for a gradient to clip that buffers lack."""
    for index, position in not_in_buffers:
        parameter = groups[index]["params"][position]
        if parameter.grad is not None and getattr(parameter, "need_clip", True):
            return RuntimeError(
                f"{label_of_member(groups, index, position)} has a gradient, but was "
                "left out of FlatGradients, because it required none or had need_clip = False; "
                "make a new FlatGradients and set the attribute flat to it"
            )
    return None


def write_(share: Share, grad_scale: float | Tensor, zero_nonfinite: bool) -> Clipped | None:
    """Clips a share by its rule; returns the outcome, None of a rule that clamps."""
    if share.gradients.plan is None:
        zero = torch.zeros((), dtype=torch.float32, device=share.gradients.device)
        return Clipped(zero, torch.ones_like(zero), math.nan)
    norm, by_group, limit = execute.write_(
        share.gradients, share.rule, share.norms, grad_scale, zero_nonfinite=zero_nonfinite
    )
    if norm is None:
        return None
    if not share.rule.per_gradient:
        return Clipped(norm, by_group[0][1], limit)
    if not by_group:
        return Clipped(norm.new_zeros(()), norm.new_ones(()), limit)
    largest = norm.max()
    if len(by_group) == 1 and not isinstance(by_group[0][1], Tensor):
        return Clipped(largest, by_group[0][1], limit)
    least = [as_tensor(coefficient, norm).min() for _, coefficient in by_group]
    coefficient = least[0] if len(least) == 1 else torch.stack(least).min()
    return Clipped(largest, coefficient, limit)


def _collect(
    groups: Groups, indices: Sequence[int], plans: PlanCache, holders: Holders | None
) -> Gradients:
    """The gradients of whole groups, less those that need no clipping."""
    if len(indices) == 1:
        parameters = groups[indices[0]]["params"]
    else:
        parameters = [p for index in indices for p in groups[index]["params"]]

    def label_of(position: int) -> str:
        for index in indices:
            n = len(groups[index]["params"])
            if position < n:
                break
            position -= n
        return label_of_member(groups, index, position)

    gradients = of_parameters(parameters, label_of, holders, tells=True)
    if not parameters:
        gradients.device = _device_of(groups)
    return plan_(gradients, plans)


def _unclipped(
    groups: Groups, members: Members, plans: PlanCache, holders: Holders | None
) -> list[Share]:
    """The gradients that no rule holds for, as one share, if a process may have any."""
    parameters = [groups[n]["params"][i] for n, i in members]
    if not parameters and (holders is None or holders.group is None):
        # Else other processes, which have other parameters, may have some of these.
        return []
    gradients = of_unclipped(parameters, lambda i: label_of_member(groups, *members[i]), holders)
    if not parameters:
        gradients.device = _device_of(groups)
    plan_(gradients, plans)
    if gradients.plan is None:
        return []
    return [Share(gradients, UNLIMITED, None, unclipped=True)]


def _device_of(groups: Groups) -> torch.device:
    """The device of a list without parameters: that of the first one of all groups."""
    return device_of([p for group in groups for p in group["params"]])


def _with_meshes(holders: Holders | None, groups: Groups) -> Holders | None:
    """Holders of lists that are clipped in one step, which all processes take or skip together."""
    meshes = meshes_of(p for group in groups for p in group["params"])
    return (holders or Holders())._replace(meshes=meshes) if meshes else holders


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
        share.norms = execute.measure(share.gradients, rule.norm_type, rule.per_gradient, scale)
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
        norms = execute.measure_by(share.gradients, rule, _scale(rule, grad_scale))
        setattr(share, field, norms)
    if not spread:
        return
    sent = [one for one in spread if _is_sent(one)]
    exchanges = [
        norms_exchange(share.gradients, rule, _scale(rule, grad_scale)) for share, rule, _ in sent
    ]
    for (share, _, field), norms in zip(sent, together(exchanges), strict=True):
        setattr(share, field, norms)


def _is_sent(one: Wanted) -> bool:
    gradients = one.share.gradients
    return gradients.refusal is None or is_told(gradients, one.rule)


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
    device = first_device(shares)
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
            flags.append(~is_finite(share.norms))
            if share.largest is not None:
                flags.append(~torch.isfinite(total(share.largest)))
    if not flags:
        return torch.zeros((), dtype=torch.bool, device=first_device(shares))
    device = flags[0].device
    return flags[0] if len(flags) == 1 else torch.stack([f.to(device) for f in flags]).any()


def first_device(shares: Sequence[Share]) -> torch.device:
    """Of the first gradient."""
    return shares[0].gradients.device if shares else torch.device("cpu")


def _norm_of(norms: Tensor) -> Tensor:
    """The norm of all from the 2-norms of parts, in float64: none of them overflows."""
    norm: Tensor = torch.linalg.vector_norm(norms, dtype=torch.float64)
    return norm


NONFINITE_REMEDY = (
    "Neither gradients nor parameters were changed. To go on, set nonfinite to 'propagate', 'zero' "
    "or 'skip'"
)


def refused(check: Callable[[], None], shares: Sequence[Share]) -> Exception | None:
    """The error of a check, if other processes wait for the norms of a share; None for no error.

    All shares are then refused: measuring them tells the others. Where nobody waits, it raises.

    Args:
        check: raises an error where the gradients cannot be clipped.
        shares: all that are measured in this step.

    Raises:
        TypeError, ValueError, RuntimeError: that of the check.
    """
    try:
        check()
    except (TypeError, ValueError, RuntimeError) as error:
        lists = [share.gradients for share in shares]
        spread = [g for g in lists if g.plan is not None and g.plan.reduction is not None]
        for gradients in spread:
            if gradients.refusal is None:
                refuse_(gradients, error)
        if all(gradients.refusal is None for gradients in spread):
            raise
        return error
    return None


def refuse(shares: Sequence[Share]) -> None:
    """Refuses gradients that their rules have no meaning for.

    Args:
        shares: of the step.

    Raises:
        TypeError, ValueError, RuntimeError: a share that its rule has no meaning for, or that was
            refused when it was collected; a gradient in two shares.
    """
    for share in shares:
        if share.gradients.refusal is not None:
            raise share.gradients.refusal
    for share in shares:
        plan = share.gradients.plan
        if plan is not None and not plan.ordinary:
            refuse_read_only(share.gradients)
            refuse_for_rule(share.gradients, share.rule)
    if len(shares) > 1:
        refuse_shared([share.gradients for share in shares])


def refuse_nonfinite(shares: Sequence[Share], remedy: str) -> NoReturn:
    """RuntimeError for a step that is not finite, which names the parameters with NaN or inf.

    Args:
        shares: measured.
        remedy: ends the message.
    """
    for share in shares:
        if share.norms is not None:
            if not share.unclipped:
                norm = total(share.norms)
                finite = is_finite(share.norms)
                raise_if_nonfinite(share.gradients, share.rule, norm, remedy, finite)
            raise_if_any_nonfinite(share.gradients, remedy)
    plans = [share.gradients.plan for share in shares]
    if any(plan is not None and plan.reduction is not None for plan in plans):
        raise RuntimeError(f"Another process refuses its gradients. {remedy}")
    raise RuntimeError(
        "Every gradient is finite, but divided by the loss scale the largest does not fit its "
        f"dtype. {remedy}"
    )


def refuse_other_steps(wanted: Sequence[Wanted], groups: Groups, holders: Holders | None) -> None:
    """Refuses, under `verify()`, a step in which processes would send different norms.

    Every process of the step calls this, and waits for the others.

    Args:
        wanted: all norms of the step.
        groups: parameter groups of the optimizer.
        holders: the processes that the gradients are spread over.

    Raises:
        ValueError: a process with other rules or policies than the first one's.
    """
    meshes = meshes_of(p for group in groups for p in group["params"])
    if not meshes and holders is None:
        return
    domain = domain_of(meshes, None if holders is None else holders.group)
    forms = everyones([one.form for one in wanted if one.is_spread], domain)
    first, *others = forms
    for rank in others:
        if forms[rank] != forms[first]:
            raise ValueError(
                "the processes of one step measure different norms: "
                f"rank {first} {forms[first]}, rank {rank} {forms[rank]}; expected the same rules, "
                "policies and parameter groups in the same order everywhere"
            )


def refuse_other_models(groups: Groups, shares: Sequence[Share]) -> None:
    """Refuses rules that exclude parameters of no group."""
    every = [p for group in groups for p in group["params"]]
    for share in shares:
        refuse_other_model(share.rule, every)
