"""The limits that a rule gives: one number, one tensor, or one for each gradient.

One call on one gradient list: measure, then write.

The only composition of the backends' verbs. Arguments are checked and the list has its plan.

Measuring and scaling a gradient list as two calls, between which a user has the norm.
"""

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.backends.interface import Clip
from tritonclip.backends.operators import coefficient_of, wide_dtype
from tritonclip.distributed.refusals import tell_others
from tritonclip.engine import checks as policies
from tritonclip.engine import misuse, verify
from tritonclip.engine.checks import refuse_for_rule, refuse_read_only, refuse_sparse_minimum
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.norms import (
    Norms,
    in_order,
    is_finite,
    measure_groups,
    measure_pieces,
    measure_units,
    total,
)
from tritonclip.engine.plan import Group, refuse_
from tritonclip.modes import is_pre_dispatch, refuse_tracer, without_grad
from tritonclip.rules import ClipByGlobalNorm, Rule


def limit_of(max_norm: float | Tensor, indices: Sequence[int] | None) -> float | Tensor:
    """The limits of a group, where there is one for each gradient."""
    if not isinstance(max_norm, Tensor) or max_norm.dim() == 0 or indices is None:
        return max_norm
    pieces = max_norm.split(1)
    return torch.cat([pieces[i] for i in indices])


def checked_limit(limit: float | Tensor, norms: Norms) -> float | Tensor:
    """A rule's limit: a number, or a 0-d or contiguous 1-d tensor, one for each gradient here."""
    if not isinstance(limit, Tensor):
        return limit
    if limit.numel() == 1:
        return limit.detach().reshape(())
    n = len(norms.gradients.tensors) if norms.reduced is None else len(norms.reduced)
    if limit.shape != (n,) or not norms.per_gradient:
        raise ValueError(
            "a rule's limit must be a number, one element, or one for each of "
            f"{n if norms.per_gradient else 1} gradients; got shape {tuple(limit.shape)}"
        )
    plan = norms.gradients.plan
    assert plan is not None
    if plan.reduction is None:
        return limit.detach().contiguous()
    return limit.detach()[plan.reduction.places.on(limit.device)]


class Outcome(NamedTuple):
    """The result of one clip.

    Attributes:
        norm: before clipping: 0-d, or 1-d in order for a rule that is per gradient; None for a rule
            that clamps.
        by_group: of each group norm and coefficient, on the group's device; a coefficient may be a
            number.
        limit: the rule's, a number or 0-d; NaN where each gradient has its own.
    """

    norm: Tensor | None
    by_group: Sequence[tuple[Tensor, float | Tensor]]
    limit: float | Tensor = math.nan


_CLAMPED = Outcome(None, ())


def clip_(
    gradients: Gradients,
    rule: Rule,
    nonfinite: str = "propagate",
    grad_scale: float | Tensor = 1.0,
    *,
    remedy: str = policies.REMEDY,
) -> Tensor | None:
    """Clips a gradient list; `remedy` ends the message of nonfinite="error"."""
    plan = gradients.plan
    if plan is None:
        refuse_for_rule(gradients, rule)
        misuse.warn_of_nothing(gradients)
        shape = 0 if rule.per_gradient else ()
        return (
            None
            if rule.clamps
            else torch.zeros(shape, dtype=torch.float32, device=gradients.device)
        )
    if not plan.ordinary:
        refuse_or_tell(gradients, rule, nonfinite)
    if plan.requires_grad and torch.is_grad_enabled():
        return without_grad(clip_)(gradients, rule, nonfinite, grad_scale, remedy=remedy)
    if plan.only_group is not None and nonfinite == "propagate":
        limit = rule.known_limit
        if type(limit) is float:
            return _clip_only_group_(gradients, plan.only_group, rule, limit, grad_scale)
    norms = None
    if nonfinite != "propagate" or not rule.clamps:
        # By value, an element counts as it came, before the loss scale is divided out.
        scale = 1.0 if rule.clamps else grad_scale
        if rule.per_unit:
            norms = measure_by(gradients, rule, scale, names_culprits=nonfinite == "error")
        else:
            norms = measure(gradients, rule.norm_type, rule.per_gradient, scale)
        if nonfinite == "error":
            norm = total(norms)
            policies.raise_if_nonfinite(gradients, rule, norm, remedy, is_finite(norms))
    return write_(gradients, rule, norms, grad_scale, zero_nonfinite=nonfinite == "zero").norm


def _clip_only_group_(
    gradients: Gradients, group: Group, rule: Rule, limit: float, grad_scale: float | Tensor
) -> Tensor | None:
    """Clips a list of one group by a limit that no norm decides.

    Small lists take up to a quarter less time than by `measure` and `write_`, which serve all.
    """
    layout = group.clamping if rule.clamps else group.layout
    batch = layout.bind(gradients.readable, gradients.addresses)
    norm: Tensor | None = None
    if rule.clamps:
        low, high = rule.bounds[group.dtype]
        batch.clamp_(low, high, grad_scale)
    elif rule.per_gradient:
        if is_pre_dispatch():
            refuse_tracer()
        norms = batch.norm(rule.norm_type, per_gradient=True)
        norm, _ = batch.scale_each_(norms, Clip(rule.norm_type, rule.eps, limit, grad_scale))
    else:
        norms = batch.norm(rule.norm_type, per_gradient=False)
        norm, _ = batch.scale_(norms, Clip(rule.norm_type, rule.eps, limit, grad_scale))
    if not batch.counts_versions:
        torch.autograd.graph.increment_version(gradients.versions or gradients.readable)
    return norm


def refuse_or_tell(gradients: Gradients, rule: Rule, nonfinite: str) -> None:
    """Refuses gradients that a rule has no meaning for; where others wait, they are told before."""
    if gradients.refusal is None:
        try:
            refuse_read_only(gradients)
            refuse_for_rule(gradients, rule)
        except (TypeError, ValueError, RuntimeError) as error:
            if not refuse_(gradients, error):
                raise
    if gradients.refusal is not None:
        if rule.clamps and nonfinite == "propagate":
            raise gradients.refusal
        names_culprits = nonfinite == "error"
        again = partial(measure_by, gradients, rule, names_culprits=names_culprits)
        tell_others(gradients, rule, again, names_culprits=names_culprits)


def measure_by(
    gradients: Gradients,
    rule: Rule,
    grad_scale: float | Tensor = 1.0,
    *,
    names_culprits: bool = False,
) -> Norms:
    """Measures the norms that a rule asks for; `names_culprits` where nonfinite="error" follows."""
    if rule.per_unit:
        return measure_units(gradients, rule, grad_scale, names_culprits=names_culprits)
    return measure(gradients, rule.norm_type, rule.per_gradient, grad_scale)


def measure(
    gradients: Gradients, norm_type: float, per_gradient: bool, grad_scale: float | Tensor = 1.0
) -> Norms:
    """Measures the groups of a list that is not empty: one launch each on a GPU."""
    plan = gradients.plan
    assert plan is not None
    if per_gradient:
        # The host decides by numbers that no operator reads: a trace would not notice.
        refuse_tracer()
    if plan.reduction is not None:
        return measure_pieces(gradients, norm_type, per_gradient, grad_scale)
    if len(plan.groups) == 1 and not ((plan.pairs or plan.empty) and norm_type != 2.0):
        batch = plan.groups[0].layout.bind(gradients.readable, gradients.addresses)
        partials = batch.norm(norm_type, per_gradient=per_gradient)
        return Norms([batch], [partials], norm_type, per_gradient, grad_scale, gradients)
    return measure_groups(gradients, norm_type, per_gradient, grad_scale)


def write_(
    gradients: Gradients,
    rule: Rule,
    norms: Norms | None,
    grad_scale: float | Tensor,
    *,
    zero_nonfinite: bool,
) -> Outcome:
    """Clips a measured list, once; a rule that clamps needs norms only to zero NaN and inf.

    Args:
        gradients: not empty, and the rule has a meaning for it.
        rule: that holds for it.
        norms: of the rule's norm type.
        grad_scale: the loss scale that the gradients still carry.
        zero_nonfinite: write zeros everywhere where a norm is not finite.
    """
    plan = gradients.plan
    assert plan is not None
    expected = verify.Expectation(gradients) if plan.verifying else None
    if rule.clamps:
        _clamp_(gradients, rule, grad_scale)
        outcome = _CLAMPED
        if zero_nonfinite:
            # Last, for bounds that exclude 0; the gradients no longer carry a loss scale.
            assert norms is not None
            scale_groups_(gradients, rule, norms, 1.0, zero_nonfinite=True)
    else:
        assert norms is not None
        outcome = scale_groups_(gradients, rule, norms, grad_scale, zero_nonfinite=zero_nonfinite)
    if not plan.ordinary:
        gradients.finish_writing(wrote=_wrote(rule, grad_scale, outcome))
    if expected is not None:
        finite = None if norms is None else bool(is_finite(norms))
        expected.check_clip(rule, zero_nonfinite, grad_scale, outcome.norm, finite)
    return outcome


def _wrote(rule: Rule, grad_scale: float | Tensor, outcome: Outcome) -> bool:
    """Whether gradients may have been written: coefficients on the host may say that none was."""
    if rule.clamps or isinstance(grad_scale, Tensor) or grad_scale != 1:
        return True
    return any(isinstance(c, Tensor) or c != 1 for _, c in outcome.by_group)


def scale_groups_(
    gradients: Gradients,
    rule: Rule,
    norms: Norms,
    grad_scale: float | Tensor,
    *,
    zero_nonfinite: bool,
) -> Outcome:
    """Scales every group of a measured list, and counts versions; arguments as for `write_`."""
    plan = gradients.plan
    assert plan is not None
    limit = rule.limit(norms)
    if type(limit) is not float:
        limit = checked_limit(limit, norms)
    results: list[tuple[Tensor, float | Tensor]] = []
    clip = Clip(rule.norm_type, rule.eps, limit, grad_scale, zero_nonfinite)
    if not norms.per_gradient:
        for batch, partials in zip(norms.batches, norms.partials, strict=True):
            results.append(batch.scale_(partials, clip))
        if not results:
            norm = total(norms)
            results = [(norm, coefficient_of(norm, limit, rule.eps))]
        norm = results[0][0]
    else:
        erase: list[Tensor | None] = [None] * len(norms.batches)
        if zero_nonfinite:
            # One gradient's norm decides for all: every norm is known before the first write.
            finite = is_finite(norms)
            erase = [~finite.to(group.device) for group in plan.groups]
        for i, batch in enumerate(norms.batches):
            own = limit_of(limit, plan.groups[i].indices)
            results.append(
                batch.scale_each_(norms.partials[i], clip._replace(limit=own, erase=erase[i]))
            )
        if norms.reduced is not None:
            # A piece without elements has nothing that a backend could scale by the norm.
            norm = total(norms)
        else:
            norm = in_order(gradients, [result[0] for result in results])
    for i, batch in enumerate(norms.batches):
        if not batch.counts_versions:
            gradients.count_versions(plan.groups[i].indices)
    norm = norm if norm.device == plan.device else norm.to(plan.device)
    is_one = not isinstance(limit, Tensor) or limit.dim() == 0
    return Outcome(norm, results, limit if is_one and not rule.per_unit else math.nan)


def _clamp_(gradients: Gradients, rule: Rule, grad_scale: float | Tensor) -> None:
    """Clamps every group."""
    plan = gradients.plan
    assert plan is not None
    # Every step that may fail, such as an upload of addresses, comes before the first write.
    if len(plan.groups) == 1:
        # It holds all gradients: without gathering them, short lists take less time.
        batches = [plan.groups[0].clamping.bind(gradients.readable, gradients.addresses)]
    else:
        batches = [group.clamping.bind(*gradients.of(group.indices)) for group in plan.groups]
    for i, batch in enumerate(batches):
        group = plan.groups[i]
        low, high = rule.bounds[group.dtype]
        batch.clamp_(low, high, grad_scale)
        if not batch.counts_versions:
            gradients.count_versions(group.indices)


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
        verify.Expectation(gradients).check_norm(norm_type, norm)
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
    expected = verify.Expectation(gradients) if plan.verifying else None
    given = norm.detach().abs().reshape(1)
    # An upload need not be waited for; a download must be.
    uploaded = given.device.type == "cpu"
    batches = [group.layout.bind(*gradients.of(group.indices)) for group in plan.groups]
    partials = [
        given.to(group.device, non_blocking=uploaded).to(wide_dtype(group.device))
        for group in plan.groups
    ]
    norms = Norms(batches, partials, rule.norm_type, False, 1.0, gradients)
    scale_groups_(gradients, rule, norms, 1.0, zero_nonfinite=False)
    gradients.finish_writing()
    if expected is not None:
        expected.check_scale(rule, norm)
