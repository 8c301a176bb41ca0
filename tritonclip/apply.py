"""Rules applied to gradient lists: how the backends' verbs make up a call.

Arguments are checked by now.
"""

import math
import warnings

import torch
from torch import Tensor

from tritonclip import dispatch, verification
from tritonclip.gradients import GradientList
from tritonclip.limit import Limit
from tritonclip.rules import ClipByGlobalNorm, ClipByNorm, ClipByValue, Rule

TORCH_REMEDY = (
    "To disable this error and scale the gradients by the non-finite norm anyway, set "
    "`error_if_nonfinite=False`"
)


@torch.no_grad()
def clip_(
    found: GradientList,
    rule: Rule,
    nonfinite: str = "propagate",
    grad_scale: float | Tensor = 1.0,
    *,
    remedy: str = "No gradient was changed. To go on, pass nonfinite='propagate' or 'zero'",
) -> Tensor | None:
    """Clips a gradient list; `remedy` ends the message of nonfinite="error"."""
    if found.came_from_empty_generator:
        warnings.warn(
            "`parameters` is an empty generator, no gradient clipping will occur.",
            UserWarning,
            stacklevel=4,
        )
    _refuse_for_rule(found, rule)
    if not found.groups:
        shape = 0 if isinstance(rule, ClipByNorm) else ()
        return None if isinstance(rule, ClipByValue) else torch.zeros(shape, device=found.device)
    expected = verification.Expectation(found) if verification.is_on() else None
    if isinstance(rule, ClipByValue):
        result = None
        _clamp(found, rule, nonfinite, grad_scale, remedy)
    elif isinstance(rule, ClipByNorm):
        result = _scale_each(found, rule, nonfinite, grad_scale, remedy)
    else:
        result = _scale(found, rule, nonfinite, grad_scale, remedy)
    found.finish_writing()
    if expected is not None:
        expected.check_clip(rule, nonfinite, grad_scale, result)
    return result


def _refuse_for_rule(found: GradientList, rule: Rule) -> None:
    """Refuses gradients that a rule has no meaning for."""
    if isinstance(rule, ClipByValue):
        complex_places = found.places_where(Tensor.is_complex)
        if complex_places:
            raise TypeError(
                f"ClipByValue cannot order complex gradients ({found.labels(complex_places)}); "
                "expected real ones: clip by norm instead"
            )
        sparse = found.places_where(_is_sparse)
        if sparse and not rule.min <= 0 <= rule.max:
            raise ValueError(
                f"ClipByValue({rule.min}, {rule.max}) would change the implicit zeros of sparse "
                f"gradients ({found.labels(sparse)}); expected bounds that include 0, or dense "
                "gradients"
            )
    elif rule.norm_type == -math.inf:
        _refuse_sparse_minimum(found)


def _refuse_sparse_minimum(found: GradientList) -> None:
    sparse = found.places_where(_is_sparse)
    if sparse:
        raise ValueError(
            f"norm_type=-inf is not supported for sparse gradients ({found.labels(sparse)}), whose "
            "implicit zeros count; expected another norm_type, or dense gradients"
        )


def _is_sparse(grad: Tensor) -> bool:
    return grad.layout == torch.sparse_coo


def _scale(
    found: GradientList,
    rule: ClipByGlobalNorm,
    nonfinite: str,
    grad_scale: float | Tensor,
    remedy: str,
) -> Tensor:
    """Scales all gradients by one coefficient; returns the global norm."""
    limit = _limit(found, rule, nonfinite, grad_scale)
    measured = dispatch.measure(found.groups, rule.norm_type)
    if nonfinite == "error":
        norm = _first_norm(found, measured.scale_(limit, write=False))
        _raise_if_nonfinite(found, rule.norm_type, norm, remedy)
    return _first_norm(found, measured.scale_(limit))


def _first_norm(found: GradientList, results: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The norm as the first gradient's device has it."""
    return results[0][0].to(found.device)


def _scale_each(
    found: GradientList, rule: ClipByNorm, nonfinite: str, grad_scale: float | Tensor, remedy: str
) -> Tensor:
    """Scales each gradient by a coefficient of its own; returns the norms in order."""
    limit = _limit(found, rule, nonfinite, grad_scale)
    measured = dispatch.measure(found.groups, rule.norm_type, each=True)
    if nonfinite == "error":
        norms = _in_order(found, measured.scale_(limit, write=False))
        if not bool(torch.isfinite(norms).all()):
            places = (~torch.isfinite(norms)).nonzero().flatten().tolist()
            raise RuntimeError(
                f"The norms of order {rule.norm_type} of {found.labels(places)} are non-finite, "
                f"so they cannot be clipped. {remedy}"
            )
    return _in_order(found, measured.scale_(limit))


def _in_order(found: GradientList, results: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Norms by group as one tensor in the order of the gradient list."""
    if len(results) == 1:
        return results[0][0]
    norms = torch.cat([norms.to(found.device) for norms, _ in results])
    places = [place for group in found.groups for place in group.places]
    order = sorted(range(len(places)), key=places.__getitem__)
    # By slices, not by an index tensor: that would be an upload, which no graph can capture.
    pieces = norms.split(1)
    return torch.cat([pieces[i] for i in order])


def _clamp(
    found: GradientList, rule: ClipByValue, nonfinite: str, grad_scale: float | Tensor, remedy: str
) -> None:
    """Clamps every element; with a policy, after a look at the largest magnitude."""
    if nonfinite == "propagate":
        dispatch.clamp_(found.groups, rule.min, rule.max, grad_scale)
        return
    erase = nonfinite == "zero"
    limit = Limit(math.inf, math.inf, 0.0, found.result_dtype, erase_nonfinite=erase)
    measured = dispatch.measure(found.groups, math.inf)
    if not erase:
        norm = _first_norm(found, measured.scale_(limit, write=False))
        _raise_if_nonfinite(found, math.inf, norm, remedy)
    dispatch.clamp_(found.groups, rule.min, rule.max, grad_scale)
    if erase:
        # Last, for bounds that exclude 0.
        measured.scale_(limit)


def _limit(
    found: GradientList,
    rule: ClipByGlobalNorm | ClipByNorm,
    nonfinite: str,
    grad_scale: float | Tensor,
) -> Limit:
    return Limit(
        max_norm=rule.max_norm,
        norm_type=rule.norm_type,
        eps=rule.eps,
        dtype=found.result_dtype,
        grad_scale=grad_scale,
        erase_nonfinite=nonfinite == "zero",
    )


def _raise_if_nonfinite(found: GradientList, norm_type: float, norm: Tensor, remedy: str) -> None:
    """RuntimeError in torch's words, with the gradients that are to blame; waits for the device."""
    if bool(torch.isfinite(norm)):
        return
    places = found.places_where(lambda g: not bool(torch.isfinite(_dense_part(g)).all()))
    blame = (
        f"Non-finite gradients: {found.labels(places)}"
        if places
        else f"Every gradient is finite, but their norm does not fit {norm.dtype}"
    )
    raise RuntimeError(
        f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
        f"cannot be clipped. {remedy}. {blame}"
    )


def _dense_part(grad: Tensor) -> Tensor:
    """A gradient's elements, in a dtype that can be asked for NaN; float8 cannot."""
    grad = grad.coalesce()._values() if _is_sparse(grad) else grad
    return grad.float() if grad.dtype.itemsize == 1 else grad


@torch.no_grad()
def total_norm(found: GradientList, norm_type: float, error_if_nonfinite: bool = False) -> Tensor:
    """The norm of a gradient list."""
    if not found.groups:
        return torch.zeros((), device=found.device)
    if norm_type == -math.inf:
        _refuse_sparse_minimum(found)
    limit = Limit(math.inf, norm_type, 0.0, found.result_dtype)
    norm = _first_norm(found, dispatch.measure(found.groups, norm_type).scale_(limit, write=False))
    if error_if_nonfinite:
        _raise_if_nonfinite(found, norm_type, norm, TORCH_REMEDY)
    if verification.is_on():
        verification.Expectation(found).check_norm(norm_type, norm)
    return norm


@torch.no_grad()
def scale_(found: GradientList, max_norm: float, norm: Tensor) -> None:
    """Scales a gradient list by the coefficient of a norm that is given."""
    if not found.groups:
        return
    expected = verification.Expectation(found) if verification.is_on() else None
    # The norm of one given norm is that norm under any order; inf takes it as it is.
    limit = Limit(max_norm, math.inf, 1e-6, found.result_dtype)
    dispatch.given(found.groups, norm).scale_(limit)
    found.finish_writing()
    if expected is not None:
        expected.check_scale(max_norm, norm)
