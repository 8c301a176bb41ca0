"""A wrapper around an optimizer: how it makes the clipping of a step."""

from __future__ import annotations

from operator import is_

import torch
from torch import Tensor

from tritonclip.flat.flat_gradients import FlatGradients
from tritonclip.optim.observation import Observation
from tritonclip.optim.param_groups import rules_of
from tritonclip.optim.step import StepClipping
from tritonclip.optim.wrapper import ClippingWrapper


class MeasuringWrapper(ClippingWrapper):
    """Measures the gradients of its optimizer."""

    @torch.compiler.disable
    def _measure(
        self,
        grad_scale: Tensor | float | None = None,
        *,
        check_finite: bool = False,
        refusal: Exception | None = None,
    ) -> StepClipping:
        """Measures a step, unless it is refused; other processes, which may wait, are told why.

        Args:
            grad_scale: the loss scale that all gradients still carry; None for none.
            check_finite: whether every gradient is finite will be asked for.
            refusal: is raised.

        Raises:
            TypeError, ValueError, RuntimeError: the refusal, and as for `clip_`.
        """
        groups, flat, recorder = self.optimizer.param_groups, self._flat, self._log.recorder
        if self._own_rules or any("clip" in group for group in groups):
            refusal = refusal or self._read_rules()
        if flat is not None:
            refusal = refusal or self._check_flat(flat)
        observation = None
        if recorder is not None:
            tells = self._holders is not None
            observation = Observation(recorder, groups, flat, grad_scale, tells=tells)
            refusal = refusal or observation.refusal
        return StepClipping(
            groups,
            self._rule,
            self._own_rules,
            self._nonfinite,
            grad_scale,
            check_finite=check_finite or self._nonfinite in ("skip", "error"),
            plans=self._plans,
            memory=self._log.memory,
            flat=flat,
            not_in_buffers=self._not_in_buffers,
            holders=self._holders,
            observation=observation,
            refusal=refusal,
            # Under a GradScaler, a step that is not finite is an overflow.
            names_culprits=None if check_finite else self._raises_if_nonfinite,
        )

    def _raises_if_nonfinite(self) -> bool:
        """Whether a step that is not finite raises, and is no overflow."""
        found_inf = self.found_inf
        overflows = isinstance(found_inf, Tensor) and bool(found_inf > 0)
        return self._nonfinite == "error" and not overflows

    def _measure_scaled(self, grad_scale: Tensor) -> Tensor:
        """Measures for the step to come, and says whether it overflows: float32, 0-d, 0 or 1."""
        self._clipping = self._measure(grad_scale, check_finite=True)
        found_inf: Tensor = self._clipping.nonfinite()
        return found_inf.to(torch.float32)

    def _read_rules(self) -> Exception | None:
        """Reads the rules of groups; where one is no rule, they stay those of the step before."""
        try:
            self._own_rules = rules_of(self.optimizer.param_groups)
        except (TypeError, ValueError) as error:
            return error
        return None

    def _check_flat(self, flat: FlatGradients) -> Exception | None:
        """Refuses parameters that came from outside; an error that other processes are told."""
        try:
            if self._groups_changed():
                self.flat = flat
        except (TypeError, ValueError, RuntimeError) as error:
            if self._holders is None:
                raise
            return error
        return None

    def _groups_changed(self) -> bool:
        """Whether the groups hold other parameters than those that were compared with `flat`."""
        groups, known = self.optimizer.param_groups, self._known_params
        return len(groups) != len(known) or not all(
            len(group["params"]) == len(params) and all(map(is_, group["params"], params))
            for group, params in zip(groups, known, strict=True)
        )
