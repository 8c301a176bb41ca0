"""One step of an optimizer: its gradients are measured, judged, and clipped once.

All clip groups are measured before the first gradient is written, so that a step can still be
refused. A step that fails after that is kept: the next one goes on with the gradients that it left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from math import inf

import torch
from torch import Tensor

from tritonclip import settings
from tritonclip.distributed.agreement import (
    ask_limits,
    describe_rule,
    describe_state,
    has_user_limit,
    limited,
)
from tritonclip.distributed.process_groups import Processes
from tritonclip.engine.checks import nonfinite_indices
from tritonclip.engine.norms import measure
from tritonclip.modes import is_captured, without_grad
from tritonclip.monitor.stats import Outcomes
from tritonclip.monitor.verdict import TAKEN, Flag, either
from tritonclip.optim.clip_groups import (
    ClipGroup,
    global_norm_of,
    hides_nonfinite,
    measure_requests,
    nonfinite_of,
    recorded_requests,
    requests,
)
from tritonclip.optim.outliers import Judgement
from tritonclip.optim.param_groups import Groups
from tritonclip.optim.policy import Policy
from tritonclip.optim.refusals import (
    NONFINITE_REMEDY,
    nearest_finite,
    refuse,
    refuse_nonfinite,
    refused,
    verify_agreement,
)
from tritonclip.optim.states import RuleStates
from tritonclip.optim.step_record import StepRecord
from tritonclip.rules import Numbering, Outlier, Rule
from tritonclip.rules.rule import Adaptive


class Step:
    """The gradients of one step, in clip groups that `measure` measures and `clip_` clips.

    Args:
        clip_groups: of all gradients; none is measured.
        param_groups: of the optimizer.
        states: of its rules whose limit changes from step to step.
        grad_scale: the loss scale that all gradients still carry; None for none.
        policy: for NaN and inf.
        record: for a recorder; None without one.
        check_finite: `nonfinite` will be read, whatever the policy. It covers every gradient, also
            those that no rule holds for.
        by_gradient: which gradients are finite is measured, for an error some steps later.

    Attributes:
        clip_groups: as handed over.
        param_groups: as handed over.
        policy: as handed over.
        by_gradient: as handed over.
        record: as handed over.
        follows: a rule has a limit that changes from step to step.
        outlier: the result of the test for outliers, where there is one.
        verdict: whether the step is left out.
        outcomes: of clipping.
        is_clipped: all gradients are written.
    """

    def __init__(
        self,
        clip_groups: list[ClipGroup],
        param_groups: Groups,
        states: RuleStates,
        grad_scale: Tensor | float | None,
        policy: Policy,
        record: StepRecord | None,
        *,
        check_finite: bool,
        by_gradient: bool,
    ) -> None:
        self.clip_groups, self.param_groups, self._states = clip_groups, param_groups, states
        self.by_gradient, self._check_finite = by_gradient, check_finite
        self._is_scaled = grad_scale is not None
        self._grad_scale = 1.0 if grad_scale is None else grad_scale
        self.policy, self.record, self.follows = policy, record, False
        self.outlier: Judgement | None = None
        self.verdict = TAKEN
        self.outcomes: Outcomes = {}
        self.is_clipped = False
        # Clip groups over processes whose limits are asked before the first write.
        self._user_limited: Sequence[ClipGroup] = ()
        # The clip group that is written, or was last.
        self._writing: ClipGroup | None = None
        # Of a step that failed: its gradients and their versions, and whether the next goes on.
        self._left: list[tuple[Tensor, int]] = []

    def measure(
        self,
        refusal: Exception | None,
        processes: Processes | None,
        *,
        raises_if_nonfinite: Callable[[], bool] | None,
    ) -> None:
        """Measures all that the step needs, unless it is refused; other processes get the error.

        Args:
            refusal: the error for gradients that cannot be clipped, if that is known already.
            processes: the processes that the gradients are spread over.
            raises_if_nonfinite: whether `raise_if_nonfinite` comes next where a norm is NaN.

        Raises:
            TypeError, ValueError, RuntimeError: the refusal, and as for `clip_`.
        """
        groups, record, check_finite = self.clip_groups, self.record, self._check_finite
        by_value = check_finite or self.policy.zeroes
        if len(groups) == 1 and refusal is None and self._is_usual(groups[0]):
            (group,) = groups
            rule = group.rule if group.rule.fixed else self._bound(group)
            if record is not None:
                record.check(groups)
            if by_value or not rule.clamps:
                # Raises where a rule of the user set them to anything else, at any time.
                if rule.norm_type != 2.0 or not 0 <= rule.eps < inf:
                    _ = rule.norm
                scale = 1.0 if rule.clamps else self._grad_scale
                if group.by_name:
                    norms = group.gradients.measure(rule.norm, scale)
                    group.keep(rule.norm, norms, of_rule=True)
                else:
                    group.norms = measure(group.gradients, rule.norm_type, rule.per_gradient, scale)
            if self.by_gradient:
                group.measure_finite_()
            if record is not None:
                if group.by_name:
                    measure_requests(recorded_requests(group), self._grad_scale)
                record.measure(groups, self._grad_scale)
            return
        recorded = [] if record is None else record.clip_groups
        refusal = refused(partial(self._check, refusal), [*groups, *recorded])
        # A recorder gets the norm of the wrapper's rule, else that of all clipped gradients.
        has_shared = any(group.has_norm and group.index is None for group in groups)
        needed = requests(
            groups,
            recorded,
            by_value=by_value,
            check_finite=check_finite,
            two_norm=self._states.outliers.skip_above is not None
            or not (record is None or has_shared),
        )
        if settings.current().verifying:
            error = refusal or _error_of([*groups, *recorded])
            verify_agreement(groups, needed, self._describe, error, self.param_groups, processes)
        measure_requests(needed, self._grad_scale)
        if self.by_gradient:
            for group in groups:
                group.measure_finite_()
        refusal = refusal or _error_of([*groups, *recorded])
        if refusal is not None:
            if raises_if_nonfinite is not None and raises_if_nonfinite():
                with suppress(RuntimeError):
                    self.raise_if_nonfinite()
            raise refusal
        if record is not None:
            record.measure(groups, self._grad_scale)
        user_limited = [
            group
            for group in groups
            if group.is_spread and group.norms and has_user_limit(group.rule)
        ]
        for group in user_limited:
            group.rule = limited(group.rule)
        self._user_limited = user_limited

    def _describe(self) -> dict[str, str]:
        """Text of what processes of one step have to agree on, beside rules and gradients."""
        outliers, above = self._states.outliers, self._states.outliers.skip_above
        is_judged = isinstance(above, Outlier) and outliers.loss is not None
        texts = {
            "the policy for NaN and inf": self.policy.name,
            "the loss scale": repr(float(self._grad_scale)),
            "skip_above": describe_rule(above) if isinstance(above, Outlier) else str(above),
            "optimizer.loss": "a loss" if is_judged else "none",
        }
        for owner, state in self._states.state_dict(self.param_groups).items():
            texts[f"the state of {owner}"] = describe_state(state)
        return texts

    def _is_usual(self, group: ClipGroup) -> bool:
        """Whether nothing refuses the only clip group, and no other norm of it is needed yet."""
        plan, rule = group.gradients.plan, group.rule
        return (
            plan is not None
            and plan.ordinary
            and not (rule.per_unit or rule.spectral)
            and not (self._check_finite and hides_nonfinite(rule.norm_type))
        )

    def _check(self, refusal: Exception | None) -> None:
        """Refuses a step that cannot be clipped or recorded; binds changing rules to states."""
        groups = self.clip_groups
        if refusal is not None:
            raise refusal
        refuse(groups, self.param_groups)
        for group in groups:
            if not group.rule.fixed:
                self._bound(group)
        if self.record is not None:
            self.record.check(groups)

    def _bound(self, group: ClipGroup) -> Rule:
        """The rule of a clip group, whose limit changes, bound to its state."""
        self.follows = True
        each = group.rule.per_gradient and isinstance(group.rule, Adaptive)
        self._states.locate(self.param_groups, each=each)
        rows = self._rows_of(group)
        group.bound_rule = self._states.bind(group.index, group.rule, rows)
        group.rule = group.bound_rule
        return group.rule

    def _rows_of(self, group: ClipGroup) -> Numbering:
        """Looks up the rows of a clip group's parameters in the present states."""
        # Without the group, which keeps the gradients and, by its rule, this: a cycle.
        states, flat, parameters = self._states, group.flat, group.gradients.sources
        if parameters is None:
            assert flat is not None
            return lambda: states.rows(flat.parameters, grouped=False)
        return lambda: states.rows(parameters)

    def nonfinite(self) -> Flag:
        """Whether any gradient is NaN or inf, or any norm does not fit its dtype.

        Where the host does not decide, 0-d bool on the device of the first gradient, for which
        nothing waits.
        """
        return nonfinite_of(self.clip_groups)

    def is_unwanted(self) -> Flag:
        """Whether the policy or the test for outliers skips the step; waits for nothing."""
        skip = self.nonfinite() if self.policy.skips else False
        outliers = self._states.outliers
        if outliers.skip_above is not None:
            self.outlier = outliers.judge(*global_norm_of(self.clip_groups, self._grad_scale))
            skip = either(skip, self.outlier.flag)
        return skip

    @torch.compiler.disable
    @without_grad
    def raise_if_nonfinite(self, remedy: str = NONFINITE_REMEDY) -> None:
        """RuntimeError that names the parameters with NaN or inf; waits for the device."""
        if not bool(self.nonfinite()):
            return
        try:
            refuse_nonfinite(self.clip_groups, remedy)
        except RuntimeError as error:
            if not self.policy.is_late:
                raise
            found = []
            for group in self.clip_groups:
                bad = nonfinite_indices(group.gradients)
                n = len(group.gradients.tensors)
                found.append((group.gradients, [i not in bad for i in range(n)]))
            raise RuntimeError(f"{error}{nearest_finite(found, self.param_groups)}") from None

    def clip_(self) -> Outcomes:
        """Clips all groups, once; returns norms before clipping, 0-d, and coefficients.

        For a rule that is per gradient the largest norm and the least coefficient, for one that
        clamps None. Gradients that no rule holds for are written only to divide them by the loss
        scale.
        """
        outcomes: Outcomes = {}
        if self._user_limited:
            ask_limits([(group.rule, group.norms) for group in self._user_limited])  # type: ignore[misc]  # bound
        for group in self.clip_groups:
            self._writing = group
            if not group.unclipped:
                outcomes[group.index] = group.clip_(
                    self._grad_scale, zero_nonfinite=self.policy.zeroes
                )
            elif self._is_scaled and group.norms is not None:
                group.clip_(self._grad_scale, zero_nonfinite=False)
        self.outcomes, self.is_clipped = outcomes, True
        return outcomes

    def commit(self, left_out: Flag) -> None:
        """Makes the rules whose limit changes remember this step; see `BoundRule.commit`."""
        for group in self.clip_groups:
            if group.bound_rule is not None:
                group.bound_rule.commit(left_out)

    @torch.compiler.disable
    def is_idle(self) -> bool:
        """Whether the step had learning rates and gradients of 0; waits for the device."""
        for group in self.param_groups:
            rate = group.get("lr")
            on_host = rate.device.type == "cpu" if isinstance(rate, Tensor) else rate is not None
            if not on_host or rate != 0:
                return False
        # Norms first: one for many gradients, and the same in every process.
        if _has_nonzero(o.norm for o in self.outcomes.values() if o is not None):
            return False
        parameters = [p for group in self.param_groups for p in group["params"]]
        return not _has_nonzero(p.grad for p in parameters if p.grad is not None)

    def written_to(self) -> list[Tensor]:
        """The tensors whose versions tell of a write: gradients, or the buffers that hold them."""
        lists = [group.gradients for group in self.clip_groups]
        return [grad for g in lists for grad in (g.tensors if g.versions is None else g.versions)]

    def fail(self, error: BaseException) -> bool:
        """Whether the failed step may have written gradients, which it then knows from others."""
        is_new = not (self.is_clipped or self._left)
        is_refusal = isinstance(error, TypeError | ValueError)
        if is_new and (
            self._writing is None or (is_refusal and self._writing is self.clip_groups[0])
        ):
            # Before a rule wrote anything.
            return False
        self._left = [(grad, version_of(grad)) for grad in self.written_to()]
        return True

    def refuse_unscaling(self, present: Iterable[Tensor]) -> None:
        """RuntimeError where a GradScaler would divide the gradients that the failed step left."""
        if self.resumes(present):
            raise RuntimeError(
                "the step before ended after it divided or clipped these gradients, and unscale_ "
                "would divide them again; expected another step, which goes on with them, or new "
                "gradients: call zero_grad and backward"
            )

    def resumes(self, present: Iterable[Tensor]) -> bool:
        """Whether the gradients are those that the failed step left, so that none is written again.

        Raises:
            RuntimeError: some are, and would be divided or clipped twice, or not at all.
        """
        here = set(map(id, present))
        same = [id(grad) in here and version_of(grad) == n for grad, n in self._left]
        whole = self.is_clipped
        if not any(same) or (whole and not self._is_scaled and not all(same)):
            return False
        if whole and all(same):
            return True
        raise RuntimeError(
            "the step before ended while it divided or clipped gradients, and some of them are "
            "still there as it left them; expected new gradients: call zero_grad and backward"
        )

    def refuse_other_scale(self, grad_scale: Tensor | float | None, *, scaler: bool) -> None:
        """RuntimeError where the next step, which goes on, is given another loss scale.

        Args:
            grad_scale: of the next step; None for none.
            scaler: it is the step of a GradScaler, which has no scale where it has unscaled.
        """
        if scaler and grad_scale is None and self._is_scaled:
            raise RuntimeError(
                "the step before ended after it divided these gradients by the loss scale, and "
                "unscale_ of a GradScaler has divided them again; expected another step at once, "
                "or new gradients: call zero_grad and backward"
            )
        if scaler or grad_scale is None:
            return
        if float(grad_scale) != float(self._grad_scale):
            raise RuntimeError(
                "the step before ended after it divided these gradients by the loss scale "
                f"{float(self._grad_scale):g}, got grad_scale={float(grad_scale):g}; expected the "
                "same scale, or new gradients: call zero_grad and backward"
            )

    @without_grad
    def remember_in(self, states: RuleStates) -> None:
        """Has the step remembered by other states, of a checkpoint; its limits stay."""
        if states is not self._states:
            self._states = states
            states.locate(self.param_groups)
            for group in self.clip_groups:
                if group.bound_rule is not None:
                    rows = self._rows_of(group)
                    group.bound_rule = states.take_over(group.index, group.bound_rule, rows)
        if self.outlier is not None and states.outliers.skip_above is not None:
            # The step goes on as it was judged.
            again = states.outliers.judge(self.outlier.norm, earlier=self.outlier)
            self.outlier = again._replace(flag=self.outlier.flag)


def _error_of(groups: Sequence[ClipGroup]) -> Exception | None:
    """The first error for which a list was rejected."""
    return next((e for group in groups if (e := group.gradients.error) is not None), None)


def version_of(tensor: Tensor) -> int:
    """How often it was written to; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _has_nonzero(tensors: Iterable[Tensor]) -> bool:
    """Whether any element is not 0, or cannot be read; waits once."""
    flags: list[Tensor] = []
    for x in tensors:
        if is_captured(x.device) or x.is_meta or x.layout != torch.strided:
            return True
        flags.append(x.any())
    return bool(flags) and bool(torch.stack([f.to(flags[0].device) for f in flags]).any())
