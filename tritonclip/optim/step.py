"""The clipping of one optimizer step: parameter groups, each under the rule that holds for it.

All groups are measured before the first gradient is written, so that a step can still be refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tritonclip.distributed.domain import Holders
from tritonclip.distributed.sharding import meshes_of
from tritonclip.engine import execute
from tritonclip.engine.building import refuse_
from tritonclip.engine.gradients import Gradients, of_parameters, of_unclipped
from tritonclip.engine.measure import Norms, is_finite, total
from tritonclip.engine.nonfinite import raise_if_any_nonfinite, raise_if_nonfinite
from tritonclip.engine.planner import PlanCache, plan_
from tritonclip.engine.refusals import (
    refuse_for_rule,
    refuse_other_model,
    refuse_read_only,
    refuse_shared,
)
from tritonclip.engine.together import tell_others
from tritonclip.flat.flat_gradients import FlatGradients
from tritonclip.grad_mode import without_grad
from tritonclip.monitor.stats import Clipped, Outcomes
from tritonclip.optim.memory import Memory
from tritonclip.optim.param_groups import Groups, label_of_member, rule_of
from tritonclip.rules import ClipByGlobalNorm, Following, Rule

# Scales nothing but a loss scale; its norm is finite where every gradient is.
_UNLIMITED = ClipByGlobalNorm(math.inf, math.inf, eps=0.0)
# The norm that is compared with skip_above.
_WHOLE = ClipByGlobalNorm(math.inf, eps=0.0)
_REMEDY = (
    "Neither gradients nor parameters were changed. To go on, set nonfinite to 'propagate', 'zero' "
    "or 'skip'"
)


if TYPE_CHECKING:
    from tritonclip.optim.observation import Observation


@dataclass(slots=True)
class _Share:
    """Gradients that share a rule.

    Attributes:
        gradients: with their plan.
        rule: that holds for them.
        group_index: the one parameter group that they belong to; None for several.
        unclipped: no rule holds for them.
        norms: before clipping, where they were measured.
        following: the rule, where its limit changes from step to step.
    """

    gradients: Gradients
    rule: Rule
    group_index: int | None
    unclipped: bool = False
    norms: Norms | None = None
    following: Following | None = None


class StepClipping:
    """The gradients of one step: measured when it is made, written by `write_`.

    Args:
        groups: parameter groups of an optimizer.
        rule: for the groups that have no key `clip`, under one norm.
        nonfinite: of the wrapper's policies; only "zero" changes the gradients that are written.
        grad_scale: the loss scale that all gradients still carry; None for none.
        check_finite: `nonfinite` will be asked for. It covers every gradient, also those that no
            rule holds for.
        plans: of the wrapper.
        memory: of the wrapper, for rules whose limit changes from step to step.
        flat: the gradients of all groups, but for those of `not_in_buffers`.
        not_in_buffers: parameters that are not in `flat`: (group, position).
        holders: the processes that the gradients are spread over.

    Attributes:
        follows: a rule has a limit that changes from step to step.
        observation: for a recorder; None without one.

    Raises:
        TypeError, ValueError: a `clip` that is no rule, and as for `clip_`.
    """

    @without_grad
    def __init__(
        self,
        groups: Groups,
        rule: Rule,
        nonfinite: str,
        grad_scale: Tensor | float | None,
        *,
        check_finite: bool,
        plans: PlanCache,
        memory: Memory,
        flat: FlatGradients | None = None,
        not_in_buffers: Sequence[tuple[int, int]] = (),
        holders: Holders | None = None,
    ) -> None:
        self._zero = nonfinite == "zero"
        self._grad_scale = 1.0 if grad_scale is None else grad_scale
        self._writes_all = grad_scale is not None
        self._covers_all = check_finite or self._writes_all
        self._groups, self._plans, self._holders = groups, plans, holders
        self._memory = memory
        self._begun: _Share | None = None
        self.observation: Observation | None = None
        if flat is None or any("clip" in group for group in groups):
            self._shares = self._divide(rule)
        else:
            self._shares = self._divide_flat(rule, flat, not_in_buffers)
        self.follows = False
        if any(share.rule.per_unit for share in self._shares):
            self._refuse_other_models()
        for share in self._shares:
            if not share.rule.fixed:
                self.follows = True
                numbering = partial(self._numbering, share, flat)
                share.following = memory.follow(share.group_index, share.rule, numbering)
                share.rule = share.following
        needs_norm = check_finite or self._zero
        measured = [
            share
            for share in self._shares
            if share.gradients.plan is not None and (needs_norm or not share.rule.clamps)
        ]
        self._refuse(measured)
        for share in measured:
            share.norms = self._measure(share, share.rule)

    def _refuse(self, measured: Sequence[_Share]) -> None:
        """Refuses gradients, and tells those that would wait for the first norm."""
        refusal = next((s.gradients.refusal for s in self._shares if s.gradients.refusal), None)
        try:
            if refusal is not None:
                raise refusal
            for share in self._shares:
                plan = share.gradients.plan
                if plan is not None and not plan.ordinary:
                    refuse_read_only(share.gradients)
                    refuse_for_rule(share.gradients, share.rule)
            if len(self._shares) > 1:
                refuse_shared([share.gradients for share in self._shares])
        except (TypeError, ValueError, RuntimeError) as error:
            for share in measured:
                gradients = share.gradients
                if gradients.plan is None or gradients.plan.reduction is None:
                    continue
                if gradients.refusal is not None or refuse_(gradients, error):
                    again = partial(self._measure, share, share.rule)
                    tell_others(gradients, share.rule, again, names_culprits=False)
                if gradients.plan.device.type == "cpu":
                    # Of which the others do not come to a second norm.
                    break
            raise

    def _refuse_other_models(self) -> None:
        """Refuses rules that exclude parameters of no group."""
        every = [p for group in self._groups for p in group["params"]]
        for share in self._shares:
            refuse_other_model(share.rule, every)

    def _numbering(self, share: _Share, flat: FlatGradients | None) -> tuple[Sequence[int], int]:
        """The place of a share's parameters among all of the optimizer's, and the number of all."""
        every = [p for group in self._groups for p in group["params"]]
        place = {id(parameter): at for at, parameter in enumerate(every)}
        own = share.gradients.sources
        if own is None:
            assert flat is not None
            own = flat.parameters
        return [place[id(parameter)] for parameter in own], len(every)

    def _measure(self, share: _Share, rule: Rule) -> Norms:
        scale = 1.0 if rule.clamps else self._grad_scale
        return execute.measure_by(share.gradients, rule, scale)

    def _divide(self, rule: Rule) -> list[_Share]:
        """A share for the groups without a rule, and one for each group that has one."""
        if any("clip" in group for group in self._groups) or self._covers_all:
            self._holders = _with_meshes(self._holders, self._groups)
        common: list[int] = []
        unclipped: list[tuple[int, int]] = []
        shares = []
        for index, group in enumerate(self._groups):
            if "clip" not in group:
                common.append(index)
                continue
            own = rule_of(index, group)
            if own is not None:
                shares.append(_Share(self._collect([index]), own, index))
            else:
                unclipped += [(index, i) for i in range(len(group["params"]))]
        if common:
            shares.insert(0, _Share(self._collect(common), rule, None))
        if self._covers_all:
            unclipped += [
                (index, i)
                for index, group in enumerate(self._groups)
                if group.get("clip", rule) is not None
                for i, p in enumerate(group["params"])
                if not getattr(p, "need_clip", True)
            ]
            shares += self._unclipped(unclipped)
        return shares

    def _divide_flat(
        self, rule: Rule, flat: FlatGradients, not_in_buffers: Sequence[tuple[int, int]]
    ) -> list[_Share]:
        """One share, found without reading every parameter, and the parameters left out."""
        for index, position in not_in_buffers:
            parameter = self._groups[index]["params"][position]
            if parameter.grad is not None and getattr(parameter, "need_clip", True):
                raise RuntimeError(
                    f"{label_of_member(self._groups, index, position)} has a gradient, but was "
                    "left out of FlatGradients, because it required none or had need_clip = False; "
                    "make a new FlatGradients and set the attribute flat to it"
                )
        gradients = flat.gradients(
            per_gradient=rule.per_gradient, holders=self._holders, weights=rule.per_unit
        )
        shares = [_Share(gradients, rule, None)]
        if self._covers_all:
            shares += self._unclipped(not_in_buffers)
        return shares

    def _collect(self, indices: Sequence[int]) -> Gradients:
        """The gradients of whole groups, less those that need no clipping."""
        groups = self._groups
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

        return plan_(of_parameters(parameters, label_of, self._holders, tells=True), self._plans)

    def _unclipped(self, members: Sequence[tuple[int, int]]) -> list[_Share]:
        """The gradients that no rule holds for, as one share, if there are any."""
        groups = self._groups
        parameters = [groups[n]["params"][i] for n, i in members]
        if not parameters:
            return []
        gradients = of_unclipped(
            parameters, lambda i: label_of_member(groups, *members[i]), self._holders
        )
        plan_(gradients, self._plans)
        if gradients.plan is None:
            return []
        return [_Share(gradients, _UNLIMITED, None, unclipped=True)]

    @torch.compiler.disable
    @without_grad
    def nonfinite(self) -> Tensor:
        """Whether any gradient is NaN or inf, or any norm does not fit its dtype; 0-d bool.

        It is on the device of the first gradient and does not wait for it.
        """
        flags = []
        for share in self._shares:
            if share.norms is not None:
                flags.append(~is_finite(share.norms))
                if share.rule.norm_type in (0.0, -math.inf):
                    # These norms do not show NaN and inf.
                    largest = self._measure(share, _UNLIMITED)
                    flags.append(~torch.isfinite(total(largest)))
        if not flags:
            device = self._shares[0].gradients.device if self._shares else torch.device("cpu")
            return torch.zeros((), dtype=torch.bool, device=device)
        device = flags[0].device
        return flags[0] if len(flags) == 1 else torch.stack([f.to(device) for f in flags]).any()

    @torch.compiler.disable
    @without_grad
    def global_norm(self) -> Tensor:
        """The 2-norm before clipping of all gradients that a rule holds for; 0-d.

        It is on the device of the first gradient and does not wait for it.
        """
        parts = []
        for share in self._shares:
            norms = share.norms
            if share.unclipped or share.gradients.plan is None:
                continue
            if norms is None or norms.norm_type != 2.0:
                norms = self._measure(share, _WHOLE)
            norm = norms.norm()
            parts.append(_norm_of(norm) if norms.per_gradient else norm)
        if len(parts) == 1:
            return parts[0]
        device = self._shares[0].gradients.device if self._shares else torch.device("cpu")
        if not parts:
            return torch.zeros((), device=device)
        return _norm_of(torch.stack([part.to(device).double() for part in parts]))

    @torch.compiler.disable
    @without_grad
    def norms(self) -> dict[int | None, Tensor]:
        """Norms of all gradients that share a rule, 0-d, by group, None for the wrapper's rule.

        Before clipping; of rules that measure norms, also where no gradient is there.
        """
        found = {}
        for share in self._shares:
            if not (share.unclipped or share.rule.clamps):
                norm = torch.zeros((), device=share.gradients.device)
                if share.norms is not None:
                    norm = share.norms.norm()
                found[share.group_index] = _norm_of(norm) if norm.dim() else norm
        return found

    @torch.no_grad()
    def remember_in(self, memory: Memory) -> None:
        """Has `commit` write to another memory, which a checkpoint brought; the limits stay."""
        if memory is self._memory:
            return
        self._memory = memory
        for share in self._shares:
            if share.following is not None:
                share.following = memory.take_over(share.group_index, share.following)

    @torch.compiler.disable
    @without_grad
    def commit(self, left_out: Tensor | bool | None) -> None:
        """Makes the rules whose limit changes remember this step; see `Following.commit`."""
        for share in self._shares:
            if share.following is not None:
                share.following.commit(left_out)

    @torch.compiler.disable
    @without_grad
    def raise_if_nonfinite(self, remedy: str = _REMEDY) -> None:
        """RuntimeError that names the parameters with NaN or inf; waits for the device."""
        if not bool(self.nonfinite()):
            return
        for share in self._shares:
            if share.norms is not None:
                if not share.unclipped:
                    norm = total(share.norms)
                    finite = is_finite(share.norms)
                    raise_if_nonfinite(share.gradients, share.rule, norm, remedy, finite)
                raise_if_any_nonfinite(share.gradients, remedy)

    @torch.compiler.disable
    @without_grad
    def write_(self) -> Outcomes:
        """Clips all groups, once; returns norms before clipping and coefficients, 0-d.

        For a rule that is per gradient the largest norm and the least coefficient, for one that
        clamps None. Gradients that no rule holds for are written only to divide them by the loss
        scale.
        """
        outcomes: Outcomes = {}
        for share in self._shares:
            self._begun = share
            if not share.unclipped:
                outcomes[share.group_index] = self._write_share_(share)
            elif self._writes_all and share.norms is not None:
                execute.write_(
                    share.gradients,
                    share.rule,
                    share.norms,
                    self._grad_scale,
                    zero_nonfinite=False,
                )
        return outcomes

    def written_to(self) -> list[Tensor]:
        """The tensors whose versions tell of a write: gradients, or the buffers that hold them."""
        lists = [share.gradients for share in self._shares]
        return [grad for g in lists for grad in (g.tensors if g.versions is None else g.versions)]

    def is_refused(self, error: BaseException) -> bool:
        """Whether `write_` ended by an error about its first rule, before it wrote anything."""
        return (
            isinstance(error, TypeError | ValueError)
            and bool(self._shares)
            and self._begun in (None, self._shares[0])
        )

    def _write_share_(self, share: _Share) -> Clipped | None:
        plan = share.gradients.plan
        if plan is None:
            zero = torch.zeros((), dtype=torch.float32, device=share.gradients.device)
            return Clipped(zero, torch.ones_like(zero), math.nan)
        norm, by_group, limit = execute.write_(
            share.gradients, share.rule, share.norms, self._grad_scale, zero_nonfinite=self._zero
        )
        if norm is None:
            return None
        if not share.rule.per_gradient:
            return Clipped(norm, _as_tensor(by_group[0][1], norm), limit)
        if not by_group:
            return Clipped(norm.new_zeros(()), norm.new_ones(()), limit)
        least = [_as_tensor(coefficient, norm).min() for _, coefficient in by_group]
        coefficient = least[0] if len(least) == 1 else torch.stack(least).min()
        return Clipped(norm.max(), coefficient, limit)


def _with_meshes(holders: Holders | None, groups: Groups) -> Holders | None:
    """Holders of lists that are clipped in one step, which all processes take or skip together."""
    meshes = meshes_of(p for group in groups for p in group["params"])
    return (holders or Holders())._replace(meshes=meshes) if meshes else holders


def _norm_of(norms: Tensor) -> Tensor:
    """The norm of all from the 2-norms of parts, in float64: none of them overflows."""
    norm: Tensor = torch.linalg.vector_norm(norms, dtype=torch.float64)
    return norm


def _as_tensor(number: float | Tensor, like: Tensor) -> Tensor:
    """A number or a tensor, on the device of another one."""
    if isinstance(number, Tensor):
        return number.to(like.device)
    return torch.full((), number, dtype=like.dtype, device=like.device)
