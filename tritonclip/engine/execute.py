"""Runs one call on a gradient list that has its plan: measures, asks for the limit, writes.

The functions here compose the verbs of the backends. Their arguments are checked already.
"""

import math
from collections.abc import Sequence
from functools import partial
from types import GeneratorType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonclip.backends import choose
from tritonclip.backends.interface import Clip, Limit
from tritonclip.backends.operators import coefficient_of, wide_dtype
from tritonclip.distributed.agreement import agree
from tritonclip.distributed.domain import all_reduce
from tritonclip.engine import units, verify
from tritonclip.engine.checks import (
    REMEDY,
    TORCH_REMEDY,
    check,
    raise_if_nonfinite,
    raise_if_unlimited,
    refuse_read_only,
    warn_if_no_parameters,
)
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.norms import Norms, measure
from tritonclip.engine.plan import Group
from tritonclip.messages import warn_user
from tritonclip.modes import is_pre_dispatch, refuse_tracer, without_grad
from tritonclip.rules import Norm, Rule, has_user_limit
from tritonclip.rules.arguments import as_number, local_number


class Outcome(NamedTuple):
    """The result of one clip.

    Attributes:
        norm: the norm before clipping, 0-d; 1-d in the order of the list for a rule that is per
            gradient; None for a rule that clamps.
        by_group: the norm and the coefficient of each group, on the group's device. A coefficient
            may be a number.
        limit: the limit of the rule, a number or 0-d; NaN if each gradient has its own.
    """

    norm: Tensor | None
    by_group: Sequence[tuple[Tensor, float | Tensor]]
    limit: float | Tensor = math.nan


def clip_(
    gradients: Gradients,
    rule: Rule,
    nonfinite: str = "propagate",
    grad_scale: float | Tensor = 1.0,
    *,
    remedy: str = REMEDY,
) -> Tensor | None:
    """Clips a gradient list; returns its norm, or None for a rule that clamps.

    `remedy` ends the message of nonfinite="error".
    """
    plan, spec = gradients.plan, None
    if plan is None:
        check(gradients, rule)
        is_empty = gradients.sources is not None and not gradients.sources
        if is_empty and isinstance(gradients.argument, GeneratorType):
            # torch warns of empty generators, and of no other iterators.
            warn_user("`parameters` is an empty generator, no gradient clipping will occur.")
        warn_if_no_parameters(gradients.sources or ())
        return None if rule.clamps else no_norm(gradients, per_gradient=rule.per_gradient)
    if plan.requires_grad and torch.is_grad_enabled():
        return _clip_without_grad_(gradients, rule, nonfinite, grad_scale, remedy=remedy)
    if not plan.ordinary:
        spec = _check(gradients, rule)
    if plan.only_group is not None and nonfinite == "propagate":
        limit = rule.known_limit
        if type(limit) is float:
            return _clip_only_group_(gradients, plan.only_group, rule, limit, grad_scale)
    if plan.verifying:
        verify.agree_on(gradients, "clip", rule, grad_scale, nonfinite)
    norms = None
    if nonfinite != "propagate" or not rule.clamps:
        # A policy of ClipByValue looks at the elements before the loss scale is divided out.
        norms = measure(
            gradients,
            spec or rule.norm,
            # This is 1, or NaN for a loss scale of 0, inf or NaN, which the policy has to see.
            grad_scale / grad_scale if rule.clamps else grad_scale,
            names_culprits=nonfinite == "error",
        )
        if nonfinite == "error":
            raise_if_nonfinite(norms, remedy, rule)
        if plan.domain is not None and has_user_limit(rule):
            # A user's limit may raise on one process alone.
            ask_limits([(rule, norms)])
        if nonfinite == "error" and (rule.per_unit or has_user_limit(rule)):
            limit_of(rule, norms)
            raise_if_unlimited(rule, norms, remedy)
    elif gradients.error is not None:
        # Clamping measures no norms, so that no other process waits.
        raise gradients.error
    zero = nonfinite == "zero"
    return write_(gradients, rule, norms, grad_scale, zero_nonfinite=zero).norm


_clip_without_grad_ = without_grad(clip_)


def _check(gradients: Gradients, rule: Rule) -> Norm:
    """Checks a list; an error of one over processes is kept until all of them know.

    Returns the norm that the processes then measure together, of any order if the rule has none.
    """
    order = rule.norm_type
    spec = Norm(order if type(order) is float else 2.0, rule.per_gradient)
    try:
        spec = rule.norm
        check(gradients, rule)
    except Exception as error:
        gradients.reject_(error)
    return spec


def no_norm(gradients: Gradients, *, per_gradient: bool) -> Tensor:
    """The result for an empty list: a norm of 0, 0-d, or no norms, 1-d."""
    shape = 0 if per_gradient else ()
    return torch.zeros(shape, dtype=torch.float32, device=gradients.device)


def _clip_only_group_(
    gradients: Gradients, group: Group, rule: Rule, limit: float, grad_scale: float | Tensor
) -> Tensor | None:
    """Clips a list of one group by a limit that is known before the norm is measured.

    Small lists take up to a quarter less time here than with `measure` and `write_`.
    """
    if rule.per_unit:
        (batch,) = units.batches_of(gradients)
        clip = Clip(2.0, rule.eps, limit, grad_scale, of="rows")
        return batch.scale_(batch.norm(2.0, "rows"), clip)[0]
    batch = group.layout.bind(gradients.readable, gradients.addresses)
    if rule.clamps:
        low, high = rule.bounds[group.dtype]
        batch.clamp_(low, high, grad_scale)
        return None
    if not rule.per_gradient:
        return batch.clip_(rule.norm_type, rule.eps, limit, grad_scale)
    if is_pre_dispatch():
        refuse_tracer()
    clip = Clip(rule.norm_type, rule.eps, limit, grad_scale, of="each")
    return batch.scale_(batch.norm(rule.norm_type, "each"), clip)[0]


def write_(
    gradients: Gradients,
    rule: Rule,
    norms: Norms | None,
    grad_scale: float | Tensor,
    *,
    zero_nonfinite: bool,
) -> Outcome:
    """Clips a list that is measured and checked, and not empty; to be called once.

    `zero_nonfinite` writes zeros to all gradients if a norm is not finite. A rule that clamps needs
    norms for this alone.
    """
    plan = gradients.plan
    assert plan is not None
    reference = verify.Reference(gradients) if plan.verifying else None
    if rule.clamps:
        # All groups are bound before the first write, because an upload of addresses may fail.
        for group, batch in zip(plan.groups, gradients.batches(), strict=True):
            low, high = rule.bounds[group.dtype]
            batch.clamp_(low, high, grad_scale)
        outcome = Outcome(None, ())
        if zero_nonfinite:
            # Zeros come after clamping, as the bounds may exclude 0. Clamping has divided out the
            # loss scale, so that these norms carry 1 in its place, or NaN.
            assert norms is not None
            _scale_groups_(rule, norms, norms.grad_scale, zero_nonfinite=True)
    else:
        assert norms is not None
        outcome = _scale_groups_(rule, norms, grad_scale, zero_nonfinite=zero_nonfinite)
    if not plan.ordinary:
        # The backends write nothing where all factors are the number 1.
        factors = [grad_scale, *(coefficient for _, coefficient in outcome.by_group)]
        wrote = rule.clamps or any(isinstance(f, Tensor) or f != 1 for f in factors)
        gradients.finish_writing(wrote=wrote)
    if reference is not None:

        def write(twin: Gradients) -> Tensor | None:
            own = None
            if norms is not None:
                own = measure(twin, rule.norm, norms.grad_scale)
                # The user's limit is not computed twice: it may have side effects.
                own.limit = norms.limit if has_user_limit(rule) else None
            return write_(twin, rule, own, grad_scale, zero_nonfinite=zero_nonfinite).norm

        reference.check(write, outcome.norm, rule, grad_scale)
    return outcome


def _scale_groups_(
    rule: Rule, norms: Norms, grad_scale: float | Tensor, *, zero_nonfinite: bool
) -> Outcome:
    """Scales every group of a measured list, with the arguments of `write_`."""
    plan, known = norms.plan, rule.known_limit
    is_known = type(known) is float and not (zero_nonfinite and rule.per_unit)
    limit: Limit = known if is_known else limit_of(rule, norms)
    if zero_nonfinite and isinstance(limit, Tensor):
        # A NaN becomes the limit 0, and with it the coefficient 0.
        limit = torch.where(limit >= 0, limit, 0.0)
    clip = Clip(rule.norm_type, rule.eps, limit, grad_scale, zero_nonfinite, norms.of)
    # One norm that is not finite erases all gradients, so all norms come before the first write.
    finite = norms.is_finite() if zero_nonfinite and norms.of != "all" else None
    results: list[tuple[Tensor, float | Tensor]] = []
    for group, batch, partials in zip(plan.groups, norms.batches, norms.partials, strict=True):
        if group.indices is not None and norms.of != "all":
            clip = clip._replace(limit=_limit_of_group(limit, group.indices))
        if finite is not None:
            clip = clip._replace(erase=~finite.to(group.device))
        results.append(batch.scale_(partials, clip))
    if not results and norms.of == "all":
        norm = norms.norm_here()
        results = [(norm, coefficient_of(norm, limit, rule.eps))]
    if norms.of == "all":
        norm = results[0][0]
    else:
        # Norms over processes were reduced before.
        found = [one for one, _ in results]
        norm = norms.in_order(found) if norms.reduced is None else norms.norm_here()
    norm = norm if norm.device == plan.device else norm.to(plan.device)
    is_shared = is_known or not _is_each(limit)
    return Outcome(norm, results, limit if is_shared and not rule.per_unit else math.nan)


@without_grad
def measured_norm(
    gradients: Gradients,
    norm: Norm,
    grad_scale: float | Tensor = 1.0,
    *,
    call: str = "get_total_norm",
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Measures the norm of a list, 0-d, or of each gradient, 1-d; `call` names the user's call."""
    plan = gradients.plan
    if plan is None:
        return no_norm(gradients, per_gradient=norm.each)
    if plan.verifying:
        policy = "error" if error_if_nonfinite else "propagate"
        verify.agree_on(gradients, call, norm, grad_scale, policy)
    norms = measure(gradients, norm, grad_scale, names_culprits=error_if_nonfinite)
    result = norms.norm_here()
    if error_if_nonfinite:
        raise_if_nonfinite(norms, TORCH_REMEDY)
    if plan.verifying:
        verify.Reference(gradients).check(
            lambda twin: measure(twin, norm, grad_scale).norm_here(), result
        )
    return result


@without_grad
def scale_(gradients: Gradients, rule: Rule, norm: Tensor) -> None:
    """Scales a gradient list by the coefficient of a given norm, one element on any device.

    The rule has the norm type inf: the given norm serves as the only partial norm, and the inf-norm
    of one number is that number.
    """
    plan = gradients.plan
    if plan is None:
        return
    if plan.verifying:
        verify.agree_on(gradients, "clip_grads_with_norm_", rule, total_norm=norm)
    if gradients.error is not None:
        # Nothing is measured here, so that no other process waits.
        raise gradients.error
    if not plan.groups:
        return
    refuse_read_only(gradients)
    reference = verify.Reference(gradients) if plan.verifying else None
    given = norm.detach().abs().reshape(1)
    # The host must not wait for an upload, but has to wait for a download.
    uploaded = given.device.type == "cpu"
    partials = [
        given.to(group.device, non_blocking=uploaded).to(wide_dtype(group.device))
        for group in plan.groups
    ]
    norms = Norms(gradients.batches(), partials, rule.norm_type, "all", 1.0, gradients, plan)
    _scale_groups_(rule, norms, 1.0, zero_nonfinite=False)
    gradients.finish_writing()
    if reference is not None:
        reference.check(partial(scale_, rule=rule, norm=norm), None)


def ask_limits(measured: Sequence[tuple[Rule, Norms]]) -> None:
    """Asks the rules for their limits; if one raises on one process, all processes raise.

    On an accelerator, a limit that is NaN on one process becomes NaN on all.

    Raises:
        ValueError: the processes would clip by other limits.
    """
    error: Exception | None = None
    for rule, norms in measured:
        try:
            limit_of(rule, norms)
        except Exception as found:
            error = error or found
    _, first = measured[0]
    device = first.gradients.device
    domain = first.plan.domain
    assert domain is not None
    flags = torch.full((2,), float(error is not None), dtype=torch.float32, device=device)
    for _, norms in measured:
        if isinstance(norms.limit, Tensor):
            flags[1:] += (~(norms.limit >= 0)).sum().to(flags)
    # Of each gradient, a process has the limits of those that are there.
    shared = [(rule, norms.limit) for rule, norms in measured if not norms.per_gradient]
    limits = []
    for _, limit in shared:
        if not isinstance(limit, Tensor):
            # float64: a float may be too large for the dtype of the flags, in which it is inf.
            limit = torch.tensor(limit or 0.0, dtype=torch.float64, device="cpu")
        limits.append(limit.to(flags).reshape(1))
    sent = torch.cat([flags, *limits, *map(torch.neg, limits)])
    # Unless there is an error, these numbers are all that a process sends.
    failed, unlimited, *ends = all_reduce(sent, domain.groups, largest=True).tolist()
    if failed:
        agree({}, error, domain)
    for _, norms in measured if unlimited else ():
        norms.limit = torch.full((), math.nan, device=device)
    for at, (rule, _) in enumerate(shared):
        largest, least = ends[at], -ends[at + len(shared)]
        if not unlimited and largest > least and not math.isclose(largest, least, rel_tol=1e-5):
            raise ValueError(
                f"the limit of {rule.name} must be the same on all processes that share a norm, "
                f"got {least:.6g} to {largest:.6g}; expected one of measured.norm(), or of numbers "
                "that all of them have"
            )


def limit_of(rule: Rule, norms: Norms) -> Limit:
    """The limit of a rule for these norms; the rule is asked once.

    It is a number or a 0-d tensor; or a list or a contiguous 1-d tensor with the limit of each
    gradient on this process. Limits are 0 or more, or NaN where a norm is not finite. On a device
    the host does not read them: there, an invalid limit of a user's rule becomes NaN, and
    `Norms.is_finite` is false.
    """
    if norms.limit is None:
        limit = rule.limit(norms)
        # Users write rules, too; the comparison is false for NaN.
        if type(limit) is not float or not limit >= 0:
            limit = _checked_limit(rule, limit, norms)
        norms.limit = limit
    return norms.limit


def _checked_limit(rule: Rule, limit: Any, norms: Norms) -> Limit:
    name = f"the limit of {rule.name}"
    is_read = not isinstance(limit, Tensor) or choose.host_decides(limit.device)
    if isinstance(limit, list):
        numbers = [as_number(name, number) for number in limit]
        limit = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    if type(limit) is Tensor and limit.numel() == 1 and is_read:
        limit = limit.item()
    if not isinstance(limit, Tensor):
        number = as_number(name, limit)
        if number >= 0:
            return number
        limit = torch.tensor(number, dtype=torch.float64, device="cpu")
    if type(limit) is not Tensor:
        limit = local_number(name, limit)
    if limit.is_complex() or limit.dtype == torch.bool:
        raise TypeError(f"{name} must be a number, got a tensor of {limit.dtype}")
    if limit.is_meta and norms.gradients.device.type != "meta":
        raise TypeError(f"{name} must have a value, got a tensor on meta, which has none")
    if limit.numel() != 1 and not norms.per_gradient:
        raise ValueError(
            f"{name} must be a number or one element, got shape {tuple(limit.shape)}; for a limit "
            "for each gradient, set per_gradient = True"
        )
    if limit.numel() != 1 and limit.shape != (norms.n_norms,):
        raise ValueError(
            f"{name} must be a number, one element, or one for each of {norms.n_norms} gradients; "
            f"got shape {tuple(limit.shape)}"
        )
    limit = limit.detach()
    if not bool((limit >= 0).all()) if is_read else has_user_limit(rule):
        norm = norms.norm().to(limit.device)
        # A rule may divide by a norm of 0, where nothing is clipped.
        spared = torch.where(norm == 0, 0.0, math.nan)
        fits = limit >= 0
        if is_read:
            wrong = (~fits & ~(limit.isnan() & (norm == 0))).expand_as(spared)
            if bool(wrong.any()) and bool(norms.is_finite()):
                got = limit.expand_as(spared)[wrong][0].item()
                raise ValueError(f"{name} must be 0 or more, got {got}")
        limit = torch.where(fits, limit, spared)
    if limit.numel() == 1:
        return limit.item() if is_read else limit.reshape(())
    limit = norms.here(limit).contiguous()
    are_lists = {list}.issuperset(map(type, norms.partials))
    return limit.tolist() if is_read and are_lists and len(limit) > 1 else limit


def _is_each(limit: Limit) -> bool:
    return isinstance(limit, list) or (isinstance(limit, Tensor) and limit.dim() > 0)


def _limit_of_group(limit: Limit, indices: Sequence[int] | None) -> Limit:
    """The limits of a group's gradients; a limit for all of them stays."""
    if indices is None or not _is_each(limit):
        return limit
    if isinstance(limit, list):
        return [limit[i] for i in indices]
    slices = limit.split(1)
    return torch.cat([slices[i] for i in indices])
