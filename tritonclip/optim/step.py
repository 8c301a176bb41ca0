"""The clipping of one optimizer step: parameter groups, each under the rule that holds for it.

All groups are measured before the first gradient is written, so that a step can still be refused.

The norms of a step for its recorder, measured before the first gradient is written.

A step that failed after it began to write gradients, and the one that is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tritonclip import settings
from tritonclip.distributed.process_groups import Holders
from tritonclip.engine.norms import total
from tritonclip.engine.plan_cache import PlanCache
from tritonclip.flat.flat_gradients import FlatGradients
from tritonclip.messages import warn_user
from tritonclip.modes import without_grad
from tritonclip.monitor.recorder import Recorder
from tritonclip.monitor.stats import Outcomes
from tritonclip.norms import NamedNorms
from tritonclip.optim.clip_groups import (
    NONFINITE_REMEDY,
    Members,
    Share,
    divide,
    divide_flat,
    global_norm_of,
    is_measured_alone,
    measure,
    nonfinite_of,
    norms_of,
    refuse,
    refuse_nonfinite,
    refuse_other_models,
    refuse_other_steps,
    refused,
    wanted,
    write_,
)
from tritonclip.optim.param_groups import Groups, OwnRules, label_of_member
from tritonclip.optim.states import Judgement, Memory
from tritonclip.rules import ClipByNorm, Numbering, Rule
from tritonclip.rules.rule import Adaptive


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


# Measures each gradient, and limits none.
_EACH = ClipByNorm(math.inf)


class Observation:
    """The norms of a step before clipping, on the device; refused before anything is written.

    Args:
        recorder: that is going to be told.
        groups: parameter groups of the optimizer.
        flat: the gradients of all groups, if they are in buffers.
        grad_scale: the loss scale that gradients still carry.
        tells: the caller tells other processes of gradients that are refused.

    Attributes:
        refusal: why the gradients have no norms by name; only where others are told.
        shares: to be measured with those of the step: the norm of each parameter, where other
            processes have pieces of it.
    """

    def __init__(
        self,
        recorder: Recorder,
        groups: Groups,
        flat: FlatGradients | None,
        grad_scale: Tensor | float | None,
        *,
        tells: bool,
    ) -> None:
        self.refusal: Exception | None = None
        self._recorder, self._grad_scale = recorder, grad_scale
        self._named: NamedNorms | None = None
        self.shares: list[Share] = []
        self._norms: dict[str, Tensor | None] = {}
        if not recorder.each:
            return
        parameters: Any = flat
        if flat is None:
            parameters = [
                (label_of_member(groups, index, position), parameter)
                for index, group in enumerate(groups)
                for position, parameter in enumerate(group["params"])
            ]
        try:
            self._named = NamedNorms(parameters)
        except (TypeError, ValueError, RuntimeError) as error:
            if not tells:
                raise
            self.refusal = error
            return
        gradients = self._named.gradients
        if gradients.plan is not None and gradients.plan.reduction is not None:
            self.shares.append(Share(gradients, _EACH, None, unclipped=True))

    def check(self, indices: Iterable[int | None]) -> None:
        """Refuses a recorder that cannot take the step, whose rules belong to these groups."""
        names = [] if self._named is None else self._named.names
        self._recorder.prepare(self._in_order([*_names_of(indices), *names]))

    def take(self, clipping: StepClipping) -> None:
        """Takes the norms of a step that is measured, and not written yet."""
        norms = clipping.norms()
        # By value, and where every group has a rule, no rule of the wrapper measures a norm.
        self._norm = norms.pop(None) if None in norms else clipping.global_norm()
        own: dict[str, Tensor | None] = dict(zip(_names_of(norms), norms.values(), strict=True))
        if self._named is not None:
            measured = self.shares[0].norms if self.shares else None
            if measured is None:
                own |= self._named.measure(2.0, self._grad_scale)
            else:
                own |= self._named.by_name(total(measured), 2.0)
        self._norms = {name: own.get(name) for name in self._in_order(own)}

    def _in_order(self, names: Iterable[str]) -> list[str]:
        """Names, those of the recorder first: of parameters frozen by now nothing is known."""
        return list(dict.fromkeys([*(self._recorder.names or ()), *names]))

    def add_to(
        self, recorder: Recorder, outcomes: Outcomes | None, skipped: Tensor | bool | None
    ) -> None:
        """Records the step.

        Args:
            recorder: that takes it.
            outcomes: of clipping; None where nothing was clipped.
            skipped: whether the step was left out; None for no.
        """
        own = None if outcomes is None else outcomes.get(None)
        try:
            recorder.add_(
                self._norm,
                coefficient=None if own is None else own.coefficient,
                limit=None if own is None else own.limit,
                skipped=False if skipped is None else skipped,
                norms=self._norms,
            )
        except OSError as error:
            # The step is taken: training goes on.
            warn_user(
                f"{recorder!r} could not write: {error}. Training goes on, and the rows are kept "
                "for the next flush",
                RuntimeWarning,
            )


def _names_of(indices: Iterable[int | None]) -> list[str]:
    """The names of norms of groups that have a rule."""
    return [f"group{index}" for index in indices if index is not None]


def as_recorder(recorder: object) -> Recorder | None:
    """The user's `recorder`.

    Raises:
        TypeError: no recorder.
    """
    if recorder is None or isinstance(recorder, Recorder):
        return recorder
    raise TypeError(
        f"recorder must be a Recorder or None, got {type(recorder).__name__}; make one by "
        "tritonclip.record('run.csv')"
    )


class Attempt:
    """The part of a step that must happen once: its gradients are divided and clipped.

    Attributes:
        clipping: the gradients, measured.
        skip: whether to leave the step out, on the device; None for no.
        outlier: the verdict of the test for outliers, where there is one.
        overflow: whether a GradScaler leaves it out, on the device; None for no.
        stop: whether the device is to leave it out; None where the host has decided to take it.
        outcomes: of the clipping, as soon as all gradients are written.
    """

    def __init__(
        self,
        clipping: StepClipping,
        skip: Tensor | None,
        outlier: Judgement | None,
        *,
        scaled: bool,
    ) -> None:
        self.clipping, self.skip, self.outlier = clipping, skip, outlier
        self.overflow: Tensor | None = None
        self.stop: Tensor | None = None
        self.outcomes: Outcomes | None = None
        self._scaled = scaled
        self._seen: list[tuple[Tensor, int]] = []
        self._verdict: bool | None = None

    def fail(self) -> None:
        """Remembers the gradients that the failed step leaves."""
        self._verdict = None
        self._seen = [(grad, _version(grad)) for grad in self.clipping.written_to()]

    def judge(self, there: Iterable[Tensor]) -> None:
        """Decides now whether the next step goes on: before a GradScaler writes to gradients."""
        self._verdict = None
        self._verdict = self.goes_on(there)

    def refuse_unscaling(self, there: Iterable[Tensor]) -> None:
        """RuntimeError where a GradScaler would divide the gradients that the failed step left."""
        self.judge(there)
        if self._verdict:
            raise RuntimeError(
                "the step before ended after it divided or clipped these gradients, and unscale_ "
                "would divide them again; expected another step, which goes on with them, or new "
                "gradients: call zero_grad and backward"
            )

    def goes_on(self, there: Iterable[Tensor]) -> bool:
        """Whether the gradients are those that the failed step left, so that none is written again.

        Raises:
            RuntimeError: some are, and would be divided or clipped twice, or not at all.
        """
        if self._verdict is not None:
            return self._verdict
        present = set(map(id, there))
        same = [id(grad) in present and _version(grad) == n for grad, n in self._seen]
        whole = self.outcomes is not None
        if not any(same) or (whole and not self._scaled and not all(same)):
            return False
        if whole and all(same):
            return True
        raise RuntimeError(
            "the step before ended while it divided or clipped gradients, and some of them are "
            "still there as it left them; expected new gradients: call zero_grad and backward"
        )

    def remember_in(self, memory: Memory) -> None:
        """Has the step remembered there: a checkpoint may have been loaded since it failed."""
        self.clipping.remember_in(memory)
        if self.outlier is not None and memory.skip_above is not None:
            # The step goes on as it was judged.
            self.outlier = memory.judge(self.outlier.norm)._replace(flag=self.outlier.flag)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
