"""One step of an optimizer, which is measured, judged, and clipped once.

All clip groups are measured before the first gradient is written, so that the step can still be
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from tritonclip import settings
from tritonclip.backends import choose
from tritonclip.distributed.agreement import (
    agree,
    describe_parameters,
    describe_rule,
    describe_state,
)
from tritonclip.distributed.domain import domain_of
from tritonclip.distributed.shards import meshes_of
from tritonclip.engine.execute import ask_limits, limit_of
from tritonclip.engine.norms import measure
from tritonclip.messages import warn_user
from tritonclip.monitor.recorder import Recorder
from tritonclip.monitor.stats import TAKEN, ClipStats, Flag, Outcomes, Verdict, either
from tritonclip.named_norms import NamedNorms
from tritonclip.optim.clip_groups import (
    EACH_NORM,
    TWO_NORM,
    UNBOUNDED,
    UNLIMITED,
    ClipGroup,
    Grouping,
    NormRequest,
    global_norm_of,
    key_of,
    measure_requests,
)
from tritonclip.optim.refusals import Policy, refuse, refuse_nonfinite
from tritonclip.optim.states import Judged, RuleStates
from tritonclip.optim.watches import SkipWatch
from tritonclip.optim.wrapping import takes_found_inf
from tritonclip.rules import BoundRule, ClipByGlobalNorm, Outlier, has_user_limit


class StepRecord:
    """The norms of one step before clipping, for a recorder; raises before gradients are written.

    The recorder takes the norm of all gradients, the norms of groups with a rule and, with `each`,
    the norm of each parameter, for which the gradients are read once more.

    Attributes:
        refusal: the error of gradients without norms by name, if other processes must get it.
        clip_groups: one to measure with those of the step, if other processes have shards.
    """

    def __init__(self, recorder: Recorder, grouping: Grouping) -> None:
        self.refusal: Exception | None = None
        self.clip_groups: list[ClipGroup] = []
        self._recorder = recorder
        # The gradients that have norms by name.
        self._named: NamedNorms | None = None
        # The norm of all gradients, then norms in the order of the recorder's names.
        self._norms: list[float | Tensor | None] = []
        if not recorder.each:
            return
        try:
            self._named = NamedNorms(grouping.parameters(), names=grouping.names())
        except (TypeError, ValueError, RuntimeError) as error:
            # Other processes must get the error too.
            if grouping.processes is None:
                raise
            self.refusal = error
            return
        group = ClipGroup(self._named.gradients, UNLIMITED, unclipped=True)
        if group.is_spread:
            self.clip_groups.append(group)

    def check(self, clip_groups: Sequence[ClipGroup]) -> None:
        """Refuses a recorder that cannot take a step with these clip groups."""
        names = [key_of(g.index) for g in clip_groups if g.index is not None and g.has_norm]
        if self._named is not None:
            names += self._named.names
        # The recorder's names come first; parameters that were frozen since get no norm.
        self._recorder.prepare(tuple(dict.fromkeys([*(self._recorder.names or ()), *names])))

    def measure(self, clip_groups: Sequence[ClipGroup], grad_scale: float | Tensor) -> None:
        """Takes the norms of a step that is measured, before gradients are written."""
        norms: dict[str, float | Tensor] = {
            key_of(group.index): group.norm() for group in clip_groups if group.has_norm
        }
        norm = norms.pop(key_of(None), None)
        if norm is None:
            # The wrapper's rule measures none if it clips by value, or if all groups carry a rule.
            norm, _ = global_norm_of(clip_groups, grad_scale)
        if (named := self._named) is not None:
            if self.clip_groups:
                each = self.clip_groups[0].others[EACH_NORM].norm_here()
            else:
                each = named.measure(2.0, grad_scale)
            if choose.host_decides(each.device):
                norms |= named.numbers_by_name(each.tolist(), 2.0)
            else:
                norms |= named.by_name(each, 2.0)
        self._norms = [norm, *map(norms.get, self._recorder.names or ())]

    def add(self, outcomes: Outcomes, left_out: Flag, loss: float | Tensor | None) -> None:
        """Records the step."""
        recorder = self._recorder
        result = None if left_out is True else outcomes.get(None)
        coefficient, limit = (None, None) if result is None else (result.coefficient, result.limit)
        norm, *norms = self._norms
        try:
            recorder.append_([norm, coefficient, limit, left_out, loss, *norms])
        except OSError as error:
            # The step was taken, so training goes on. Python shows this warning only once.
            warn_user(
                f"the recorder of {recorder.path} could not write: {error}. Training goes on, and "
                "the rows are kept for the next flush",
                RuntimeWarning,
            )


@dataclass(eq=False)
class Step:
    """The gradients of one step, in clip groups: `measure`, `judge`, `clip_`, then `finish`.

    The wrapped optimizer updates the parameters between `clip_` and `finish`.

    Attributes:
        clip_groups: the clip groups of all gradients of this step.
        states: the states of rules and tests, kept between steps.
        policy: the policy for NaN and inf.
        watch: the watch over steps that are skipped in a row.
        record: the norms for a recorder; None without one.
        grad_scale: the loss scale that all gradients still carry, if the step `is_scaled`.
        check_finite: whether `nonfinite` will be read, whatever the policy. The clip groups then
            cover every gradient, even if no rule holds for it.
        follows: whether a rule has a limit that changes from step to step.
        limited: the clip groups whose limits are asked for before the first write: users' rules
            and rules by unit.
        judged: the states of the tests for outliers, and their values after the step.
        verdict: whether the step is left out, once it is judged.
        outcomes: the outcomes of clipping, by the index of the clip group.
        is_counted: whether the step is part of the training.
    """

    clip_groups: list[ClipGroup]
    states: RuleStates
    policy: Policy
    watch: SkipWatch
    record: StepRecord | None
    grad_scale: Tensor | float
    is_scaled: bool
    check_finite: bool
    follows: bool = False
    limited: Sequence[ClipGroup] = ()
    judged: Judged = ()
    verdict: Verdict = TAKEN
    is_judged: bool = False
    is_counted: bool = True
    outcomes: Outcomes = field(default_factory=dict)

    def measure(self, refusal: Exception | None, *, overflow: Flag | None) -> None:
        """Measures all norms of the step. If it is refused, other processes get the error.

        `refusal` is an error that is known already. At an `overflow`, NaN and inf raise none.
        """
        groups, record, check_finite = self.clip_groups, self.record, self.check_finite
        plan = groups[0].gradients.plan if len(groups) == 1 and refusal is None else None
        if plan is None or not plan.ordinary or (rule := groups[0].rule).per_unit:
            self._measure_all(refusal, overflow)
            return
        # Fast path: nothing refuses the only clip group, and its rule's norm is enough.
        (group,) = groups
        # A limit that is a float is fixed, and saves asking `fixed`; bounds may be functions.
        if (rule.clamps or type(rule.known_limit) is not float) and not rule.fixed:
            rule, self.follows = self.states.bind(group), True
        if record is not None:
            record.check(groups)
        if check_finite or self.policy.zeroes or not rule.clamps:
            # For most rules the norm is known without a call of `rule.norm`.
            is_two_norm = type(rule) is ClipByGlobalNorm and rule.norm_type == 2.0
            norm, scale = TWO_NORM if is_two_norm else rule.norm, self.grad_scale
            if rule.clamps:
                # Elements are checked still scaled: the quotient is 1, or NaN if the scale is NaN.
                scale = scale / scale
            group.norms = measure(group.gradients, norm, scale)
            if rule.known_limit is None and (check_finite or self.is_scaled):
                self.limited = groups if has_user_limit(rule) else ()
        if record is not None:
            record.measure(groups, self.grad_scale)

    def _measure_all(self, refusal: Exception | None, overflow: Flag | None) -> None:
        """Does `measure` for several clip groups or norms, and over processes."""
        groups, record = self.clip_groups, self.record
        recorded = [] if record is None else record.clip_groups
        lists = [*groups, *recorded]
        refusal = self._refuse(refusal, lists)
        needed = self._requests(recorded)
        if settings.current().verifying:
            self._verify_agreement(needed, refusal or _error_of(lists))
        measure_requests(needed, self.grad_scale)
        refusal = refusal or _error_of(lists)
        if refusal is not None:
            # Other processes may be in this call and wait for the names of gradients.
            if self.policy.raises and not overflow:
                with suppress(RuntimeError):
                    self.raise_if_nonfinite()
            raise refusal
        if record is not None:
            record.measure(groups, self.grad_scale)
        self.limited = [
            group
            for group in groups
            if group.norms and (group.rule.per_unit or has_user_limit(group.rule))
        ]

    def _requests(self, recorded: Sequence[ClipGroup]) -> list[NormRequest]:
        """Lists all norms that will be read, last those of clip groups that are only `recorded`."""
        groups, found = self.clip_groups, []
        # A recorder gets the norm of the wrapper's rule or, without one, of all clipped gradients.
        has_shared = any(group.has_norm and group.index is None for group in groups)
        reads_two_norm = self.states.skip_above is not None or not (
            self.record is None or has_shared
        )
        for group in groups:
            if group.gradients.plan is None:
                continue
            rule = group.rule
            is_measured = self.check_finite or self.policy.zeroes or not rule.clamps
            if is_measured:
                found.append(NormRequest(group, rule.norm, of_rule=True))
            if (
                reads_two_norm
                and not group.unclipped
                and not (is_measured and rule.norm_type == 2.0)
            ):
                found.append(NormRequest(group, TWO_NORM))
        return found + [NormRequest(group, EACH_NORM) for group in recorded]

    def _verify_agreement(self, needed: Sequence[NormRequest], error: Exception | None) -> None:
        """Raises on every process if processes differ in the step, or if one has an error."""
        grouping, processes = self.states.grouping, self.states.grouping.processes
        meshes = meshes_of(grouping.parameters())
        if not meshes and processes is None:
            return
        above = self.states.skip_above
        is_judged = isinstance(above, Outlier) and self.states.loss is not None
        spread = [group for group in self.clip_groups if group.is_spread]
        texts = {
            "the call": "a step of ClippedOptimizer",
            "the policy for NaN and inf": self.policy.name,
            "max_consecutive_skips": str(self.watch.most),
            "the loss scale": repr(float(self.grad_scale)),
            "skip_above": describe_rule(above) if isinstance(above, Outlier) else str(above),
            "optimizer.loss": "a loss" if is_judged else "none",
        }
        for owner, state in self.states.state_dict().items():
            texts[f"the state of {owner}"] = describe_state(state)
        texts["the parameter groups with a rule"] = ", ".join(group.owner for group in spread)
        for group in spread:
            gradients, domain = group.gradients, group.gradients.domain
            texts[f"the rule of {group.owner}"] = describe_rule(group.rule)
            if domain is not None and domain.one_list:
                found = describe_parameters(gradients.wanted, gradients.label_of_wanted)
                texts |= {f"{name} of {group.owner}": text for name, text in found.items()}
        texts["the norms to measure"] = str(
            [request.describe() for request in needed if request.group.is_spread]
        )
        agree(texts, error, domain_of(meshes, None if processes is None else processes.group))

    def _refuse(self, refusal: Exception | None, lists: Sequence[ClipGroup]) -> Exception | None:
        """Binds the rules and checks the step; returns an error only if all processes get it."""
        try:
            if refusal is not None:
                raise refusal
            # The rules are bound first, because the checks below read their numbers.
            for group in self.clip_groups:
                if not group.rule.fixed:
                    self.states.bind(group)
                    self.follows = True
            refuse(self.clip_groups)
            if self.record is not None:
                self.record.check(self.clip_groups)
        except Exception as error:
            spread = [group.gradients for group in lists if group.is_spread]
            for gradients in spread:
                gradients.reject_(error)
            if not spread:
                raise
            return error
        return None

    def nonfinite(self) -> Flag:
        """Whether a gradient is NaN or inf, or a norm overflows its dtype; waits for no device."""
        flags = []
        for group in self.clip_groups:
            if group.norms is None:
                continue
            numbers = group.norms.numbers()
            if numbers is None:
                flags.append(~group.norms.is_finite())
                continue
            numbers = numbers if isinstance(numbers, list) else [numbers]
            # Rules by unit read weights too, which may be NaN.
            if not all(map(isfinite, numbers)) or (
                group.rule.per_unit and not bool(group.norms.is_finite())
            ):
                return True
        if not flags:
            return False
        device = flags[0].device
        return flags[0] if len(flags) == 1 else torch.stack([f.to(device) for f in flags]).any()

    def judge(self, overflow: Flag) -> None:
        """Finds the verdict on a measured step; waits for the device unless the device decides.

        `overflow` comes from a GradScaler. The policy or the test for outliers may skip the step.
        """
        self.is_judged = True
        skip = self._unfit() if self.policy.skips else False
        if self.states.skip_above is not None:
            norm, dtype = global_norm_of(self.clip_groups, self.grad_scale)
            is_outlier, self.judged = self.states.judge(norm, dtype)
            skip = either(skip, is_outlier)
        if overflow is False and skip is False:
            return
        if skip is True:
            # A step that overflows counts as left out by the GradScaler, not as skipped by us.
            overflow, skip = (overflow, False) if overflow else (False, True)
        verdict = Verdict(either(overflow, skip), overflow, skip)
        if isinstance(verdict.left_out, Tensor) and not takes_found_inf(
            self.states.grouping.optimizer
        ):
            verdict = verdict.read()
        self.verdict = verdict

    def raise_if_nonfinite(self) -> None:
        """Raises RuntimeError that names the parameters with NaN or inf; waits for the device."""
        if bool(self._unfit()):
            refuse_nonfinite(self.clip_groups)

    def _unfit(self) -> Flag:
        """Whether the step is nonfinite, or a limit, once asked for, is no number of 0 or more."""
        flag = self.nonfinite()
        if flag is True or not self.limited:
            return flag
        self.ask_limits()
        return self.nonfinite()

    def ask_limits(self) -> None:
        """Asks users' rules for limits, which may raise, before anything is written."""
        asked, self.limited = self.limited, ()
        spread = [(g.rule, g.norms) for g in asked if g.is_spread and has_user_limit(g.rule)]
        if spread:
            ask_limits(spread)  # type: ignore[arg-type]  # bound, and measured
        for group in asked:
            assert group.norms is not None
            limit_of(group.rule, group.norms)

    def clip_(self) -> None:
        """Clips all groups once; keeps norms before clipping, 0-d, and coefficients as outcomes.

        A rule per gradient keeps its largest norm and least coefficient; a rule that clamps keeps
        None. Gradients that no rule holds for are written only to divide them by the loss scale.
        """
        for group in self.clip_groups:
            if not group.unclipped:
                self.outcomes[group.index] = group.clip_(
                    self.grad_scale, zero_nonfinite=self.policy.zeroes
                )
            elif self.is_scaled and group.norms is not None:
                group.rule = UNBOUNDED
                group.clip_(self.grad_scale, zero_nonfinite=False)

    @torch.compiler.disable
    def finish(self, stats: ClipStats) -> None:
        """Counts the step by its verdict, then remembers and records its norms.

        Tests for outliers remember the norm of an outlier, but not that of an overflow.
        """
        states, verdict = self.states, self.verdict
        if self.is_counted:
            states.steps += 1
            if self.follows:
                for group in self.clip_groups:
                    if isinstance(group.rule, BoundRule):
                        group.rule.commit(verdict.left_out)
            for state, values in self.judged:
                # Skipped steps are remembered too, but not those that overflowed.
                state.commit(values, verdict.overflow)
            stats.record_(self.outcomes, verdict, follows=self.follows)
            if self.record is not None:
                self.record.add(self.outcomes, verdict.left_out, states.loss)
        states.loss = None
        if verdict.skip is not False:
            self.watch.look(stats.consecutive_skips, synced=verdict.skip is True)


def _error_of(groups: Sequence[ClipGroup]) -> Exception | None:
    """Returns the first error for which a list was rejected."""
    return next((e for group in groups if (e := group.gradients.error) is not None), None)
