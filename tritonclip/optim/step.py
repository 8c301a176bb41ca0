"""The clipping of one optimizer step: parameter groups, each under the rule that holds for it.

All groups are measured before the first gradient is written, so that a step can still be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tritonclip import settings
from tritonclip.distributed.process_groups import Holders
from tritonclip.engine.plan_cache import PlanCache
from tritonclip.flat.flat_gradients import FlatGradients
from tritonclip.modes import without_grad
from tritonclip.monitor.stats import Outcomes
from tritonclip.optim.measurement import (
    global_norm_of,
    is_measured_alone,
    measure,
    nonfinite_of,
    norms_of,
    wanted,
)
from tritonclip.optim.memory import Memory
from tritonclip.optim.param_groups import Groups, OwnRules
from tritonclip.optim.refusals import (
    NONFINITE_REMEDY,
    refuse,
    refuse_nonfinite,
    refuse_other_models,
    refuse_other_steps,
    refused,
)
from tritonclip.optim.shares import Members, Share, divide, divide_flat, write_
from tritonclip.rules import Numbering, Rule
from tritonclip.rules.rule import Adaptive

if TYPE_CHECKING:
    from tritonclip.optim.observation import Observation


class StepClipping:
    """The gradients of one step: measured when it is made, written by `write_`.

    Args:
        groups: parameter groups of an optimizer.
        rule: for the groups that have none of their own, under one norm.
        own_rules: of the others.
        nonfinite: of the wrapper's policies; only "zero" changes the gradients that are written.
        grad_scale: the loss scale that all gradients still carry; None for none.
        check_finite: `nonfinite` will be asked for. It covers every gradient, also those that no
            rule holds for.
        plans: of the wrapper.
        memory: of the wrapper, for rules whose limit changes from step to step.
        flat: the gradients of all groups, but for those of `not_in_buffers`.
        not_in_buffers: parameters that are not in `flat`: (group, position).
        holders: the processes that the gradients are spread over.
        observation: for a recorder; None without one.
        names_culprits: whether `raise_if_nonfinite` comes next where a norm is NaN.
        refusal: why the gradients cannot be clipped, if that is known already.

    Attributes:
        follows: a rule has a limit that changes from step to step.
        observation: as handed over.

    Raises:
        TypeError, ValueError, RuntimeError: the refusal, and as for `clip_`.
    """

    @without_grad
    def __init__(
        self,
        groups: Groups,
        rule: Rule,
        own_rules: OwnRules,
        nonfinite: str,
        grad_scale: Tensor | float | None,
        *,
        check_finite: bool,
        plans: PlanCache,
        memory: Memory,
        flat: FlatGradients | None = None,
        not_in_buffers: Members = (),
        holders: Holders | None = None,
        observation: Observation | None = None,
        names_culprits: Callable[[], bool] | None = None,
        refusal: Exception | None = None,
    ) -> None:
        self._zero, self._writes_all = nonfinite == "zero", grad_scale is not None
        self._grad_scale = 1.0 if grad_scale is None else grad_scale
        covers_all = check_finite or self._writes_all
        self._groups, self._memory = groups, memory
        self._flat, self._holders = flat, holders
        self._begun: Share | None = None
        self.observation = observation
        if flat is None or own_rules:
            shares = self._shares = divide(
                groups, rule, own_rules, plans, holders, covers_all=covers_all
            )
        else:
            shares = self._shares = divide_flat(
                groups, rule, plans, holders, flat, not_in_buffers, covers_all=covers_all
            )
        self.follows = False
        share = shares[0] if len(shares) == 1 and observation is None and refusal is None else None
        by_value = check_finite or self._zero
        if share is None or not is_measured_alone(
            share, self._grad_scale, by_value=by_value, check_finite=check_finite
        ):
            self._measure(refusal, check_finite=check_finite, names_culprits=names_culprits)

    def _measure(
        self,
        refusal: Exception | None,
        *,
        check_finite: bool,
        names_culprits: Callable[[], bool] | None,
    ) -> None:
        """Checks all shares, then measures all that the step needs."""
        shares, observation = self._shares, self.observation
        observed = [] if observation is None else observation.shares
        refusal = refused(partial(self._check, refusal), [*shares, *observed])
        # A recorder gets the norm of the wrapper's rule, else that of all clipped gradients.
        has_own = any(share.has_norm and share.group_index is None for share in shares)
        needed = wanted(
            shares,
            observed,
            by_value=check_finite or self._zero,
            check_finite=check_finite,
            whole=self._memory.skip_above is not None or not (observation is None or has_own),
        )
        if settings.current().verifying:
            refuse_other_steps(needed, self._groups, self._holders)
        measure(needed, self._grad_scale)
        refusals = (share.gradients.refusal for share in (*shares, *observed))
        refusal = refusal or next(filter(None, refusals), None)
        if refusal is not None:
            if names_culprits is not None and names_culprits():
                with suppress(RuntimeError):
                    self.raise_if_nonfinite()
            raise refusal
        if observation is not None:
            observation.take(self)

    def _check(self, refusal: Exception | None) -> None:
        """Refuses a step that cannot be clipped or recorded; gives changing rules their states."""
        shares = self._shares
        if refusal is not None:
            raise refusal
        refuse(shares)
        if any(share.rule.per_unit for share in shares):
            refuse_other_models(self._groups, shares)
        for share in shares:
            if not share.rule.fixed:
                self.follows = True
                each = share.rule.per_gradient and isinstance(share.rule, Adaptive)
                self._memory.meet(self._groups, each=each)
                rows = self._rows_of(share)
                share.following = self._memory.follow(share.group_index, share.rule, rows)
                share.rule = share.following
        if self.observation is not None:
            self.observation.check([s.group_index for s in shares if s.has_norm])

    def _rows_of(self, share: Share) -> Numbering:
        """Looks up the rows of a share's parameters in the memory of now."""
        # Without the share, which keeps the gradients and, by its rule, this: a cycle.
        memory, flat, own = self._memory, self._flat, share.gradients.sources
        if own is None:
            assert flat is not None
            return lambda: memory.rows(flat.parameters)
        return lambda: memory.rows(own)

    @torch.compiler.disable
    @without_grad
    def nonfinite(self) -> Tensor:
        """Whether any gradient is NaN or inf, or any norm does not fit its dtype; 0-d bool.

        It is on the device of the first gradient and does not wait for it.
        """
        return nonfinite_of(self._shares)

    @torch.compiler.disable
    @without_grad
    def global_norm(self) -> Tensor:
        """The 2-norm before clipping of all gradients that a rule holds for; 0-d.

        It is on the device of the first gradient and does not wait for it.
        """
        return global_norm_of(self._shares, self._grad_scale)

    @torch.compiler.disable
    @without_grad
    def norms(self) -> dict[int | None, Tensor]:
        """Norms of all gradients that share a rule, 0-d, by group, None for the wrapper's rule.

        Before clipping; of rules that measure norms, also where no gradient is there.
        """
        return norms_of(self._shares)

    @without_grad
    def remember_in(self, memory: Memory) -> None:
        """Has `commit` write to another memory, which a checkpoint brought; the limits stay."""
        if memory is self._memory:
            return
        self._memory = memory
        memory.meet(self._groups)
        for share in self._shares:
            if share.following is not None:
                rows = self._rows_of(share)
                share.following = memory.take_over(share.group_index, share.following, rows)

    @torch.compiler.disable
    @without_grad
    def commit(self, left_out: Tensor | bool | None) -> None:
        """Makes the rules whose limit changes remember this step; see `BoundRule.commit`."""
        for share in self._shares:
            if share.following is not None:
                share.following.commit(left_out)

    @torch.compiler.disable
    @without_grad
    def raise_if_nonfinite(self, remedy: str = NONFINITE_REMEDY) -> None:
        """RuntimeError that names the parameters with NaN or inf; waits for the device."""
        if bool(self.nonfinite()):
            refuse_nonfinite(self._shares, remedy)

    @torch.compiler.disable
    @without_grad
    def write_(self) -> Outcomes:
        """Clips all groups, once; returns norms before clipping, 0-d, and coefficients.

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
