"""Measuring and scaling a gradient list as two calls, between which a user has the norm."""

from functools import lru_cache, partial

import torch
from torch import Tensor

from tritonclip.backends.torch_backend import wide_dtype
from tritonclip.engine import misuse, verification
from tritonclip.engine import nonfinite as policies
from tritonclip.engine.building import refuse_
from tritonclip.engine.execute import measure, scale_groups_
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.norms import Norms, total
from tritonclip.engine.refusals import refuse_read_only, refuse_sparse_minimum
from tritonclip.engine.together import tell_others
from tritonclip.grad_mode import without_grad
from tritonclip.rules import ClipByGlobalNorm, Rule


@lru_cache
def _unlimited(norm_type: float) -> Rule:
    return ClipByGlobalNorm(float("inf"), norm_type, eps=0.0)


@without_grad
def total_norm(
    gradients: Gradients,
    norm_type: float,
    error_if_nonfinite: bool = False,
    *,
    per_gradient: bool = False,
) -> Tensor:
    """The norm of a gradient list, 0-d, or, `per_gradient`, the norm of each, 1-d."""
    if gradients.plan is None:
        shape = 0 if per_gradient else ()
        return torch.zeros(shape, dtype=torch.float32, device=gradients.device)
    if gradients.refusal is None:
        try:
            refuse_sparse_minimum(gradients, norm_type)
        except ValueError as error:
            if not refuse_(gradients, error):
                raise
    if gradients.refusal is not None:
        again = partial(measure, gradients, norm_type, per_gradient)
        tell_others(gradients, _unlimited(norm_type), again, names_culprits=error_if_nonfinite)
    norm = total(measure(gradients, norm_type, per_gradient))
    if error_if_nonfinite:
        policies.raise_if_nonfinite(gradients, _unlimited(norm_type), norm, policies.TORCH_REMEDY)
    if gradients.plan.verifying and gradients.plan.reduction is None:
        verification.Expectation(gradients).check_norm(norm_type, norm)
    return norm


@without_grad
def scale_(gradients: Gradients, rule: Rule, norm: Tensor) -> None:
    """Scales a gradient list by the coefficient of a norm that is given.

    Args:
        gradients: the list.
        rule: of norm type inf: under any order, the norm of one given norm is that norm, and inf
            takes it as it is.
        norm: one element, on any device.
    """
    plan = gradients.plan
    if plan is None:
        misuse.warn_of_nothing(gradients)
        return
    if not plan.groups:
        return
    refuse_read_only(gradients)
    expected = verification.Expectation(gradients) if plan.verifying else None
    given = norm.detach().abs().reshape(1)
    # An upload need not be waited for; a download must be.
    uploaded = given.device.type == "cpu"
    batches = [group.layout.bind(*gradients.of(group.indices)) for group in plan.groups]
    partials = [
        given.to(group.device, non_blocking=uploaded).to(wide_dtype(group.device))
        for group in plan.groups
    ]
    starts = [0] * len(batches)
    norms = Norms(batches, partials, starts, rule.norm_type, False, 1.0, gradients)
    scale_groups_(gradients, rule, norms, 1.0, zero_nonfinite=False)
    gradients.finish_writing()
    if expected is not None:
        expected.check_scale(rule, norm)
