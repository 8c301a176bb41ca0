"""The shares of an optimizer step: gradients of its parameter groups, by the rule they share.

`divide` makes them; `measure` and `write_` clip one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonclip.distributed.process_groups import Holders
from tritonclip.distributed.shards import meshes_of
from tritonclip.engine import execute
from tritonclip.engine.arguments import device_of
from tritonclip.engine.gradients import Gradients, of_parameters, of_unclipped
from tritonclip.engine.norms import Norms
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
