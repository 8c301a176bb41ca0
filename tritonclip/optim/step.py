"""The clipping of one optimizer step: parameter groups, each under the rule that holds for it.

All groups are measured before the first gradient is written, so that a step can still be refused.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tritonclip.distributed.domain import Holders
from tritonclip.engine.measure import is_finite, total
from tritonclip.engine.nonfinite import raise_if_any_nonfinite, raise_if_nonfinite
from tritonclip.engine.planner import PlanCache
from tritonclip.flat.flat_gradients import FlatGradients
from tritonclip.grad_mode import without_grad
from tritonclip.monitor.stats import Outcomes
from tritonclip.optim.memory import Memory
from tritonclip.optim.param_groups import Groups
from tritonclip.optim.refusals import refuse, refuse_other_models
from tritonclip.optim.shares import (
    UNLIMITED,
    Members,
    Share,
    divide,
    divide_flat,
    measure,
    numbered,
    write_,
)
from tritonclip.rules import ClipByGlobalNorm, Rule

# The norm that is compared with skip_above.
_WHOLE = ClipByGlobalNorm(math.inf, eps=0.0)
_REMEDY = (
    "Neither gradients nor parameters were changed. To go on, set nonfinite to 'propagate', 'zero' "
    "or 'skip'"
)

if TYPE_CHECKING:
    from tritonclip.optim.observation import Observation


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
        not_in_buffers: Members = (),
        holders: Holders | None = None,
    ) -> None:
        self._zero, self._writes_all = nonfinite == "zero", grad_scale is not None
        self._grad_scale = 1.0 if grad_scale is None else grad_scale
        covers_all = check_finite or self._writes_all
        self._groups, self._memory = groups, memory
        self._begun: Share | None = None
        self.observation: Observation | None = None
        if flat is None or any("clip" in group for group in groups):
            shares = self._shares = divide(groups, rule, plans, holders, covers_all=covers_all)
        else:
            shares = self._shares = divide_flat(
                groups, rule, plans, holders, flat, not_in_buffers, covers_all=covers_all
            )
        self.follows = False
        if any(share.rule.per_unit for share in shares):
            refuse_other_models(groups, shares)
        for share in shares:
            if not share.rule.fixed:
                self.follows = True
                numbering = partial(numbered, share, groups, flat)
                share.following = memory.follow(share.group_index, share.rule, numbering)
                share.rule = share.following
        needs_norm = check_finite or self._zero
        measured = [
            share
            for share in shares
            if share.gradients.plan is not None and (needs_norm or not share.rule.clamps)
        ]
        plans_made = [share.gradients.plan for share in shares]
        if len(shares) > 1 or not all(plan is None or plan.ordinary for plan in plans_made):
            refuse(shares, measured, self._grad_scale)
        for share in measured:
            share.norms = measure(share, share.rule, self._grad_scale)

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
                    largest = measure(share, UNLIMITED, self._grad_scale)
                    flags.append(~torch.isfinite(total(largest)))
        if not flags:
            return torch.zeros((), dtype=torch.bool, device=self._device)
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
                norms = measure(share, _WHOLE, self._grad_scale)
            norm = norms.norm()
            parts.append(_norm_of(norm) if norms.per_gradient else norm)
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return torch.zeros((), device=self._device)
        return _norm_of(torch.stack([part.to(self._device).double() for part in parts]))

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

    @without_grad
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
                outcomes[share.group_index] = write_(share, self._grad_scale, self._zero)
            elif self._writes_all and share.norms is not None:
                write_(share, self._grad_scale, zero_nonfinite=False)
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

    @property
    def _device(self) -> torch.device:
        """Of the first gradient."""
        return self._shares[0].gradients.device if self._shares else torch.device("cpu")


def _norm_of(norms: Tensor) -> Tensor:
    """The norm of all from the 2-norms of parts, in float64: none of them overflows."""
    norm: Tensor = torch.linalg.vector_norm(norms, dtype=torch.float64)
    return norm
