"""Rules applied to gradient lists: how the backends' verbs make up a call.

Arguments are checked by now.
"""

import math
import warnings

import torch
from torch import Tensor

from tritonclip import dispatch, verification
from tritonclip.gradient_list import GradientList
from tritonclip.limit import Limit
from tritonclip.rules import ClipByNorm, ClipByValue, Rule

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
    if found.remark:
        warnings.warn(found.remark, UserWarning, stacklevel=4)
    refuse_for_rule(found, rule)
    if not found.groups:
        shape = 0 if isinstance(rule, ClipByNorm) else ()
        return None if isinstance(rule, ClipByValue) else torch.zeros(shape, device=found.device)
    clipping = Clipping(found, rule, grad_scale, look=nonfinite != "propagate")
    if nonfinite == "error":
        clipping.raise_if_nonfinite(remedy)
    return clipping.write_(nonfinite)


class Clipping:
    """One rule on one gradient list that is not empty: measured on construction, written later.

    Several can so be measured and judged before the first of them writes.

    Args:
        found: gradients that the rule has a meaning for.
        rule: what to clip to.
        grad_scale: the loss scale that the gradients still carry.
        look: whether norms will be asked for; ClipByValue needs none to write.
    """

    def __init__(
        self, found: GradientList, rule: Rule, grad_scale: float | Tensor, *, look: bool
    ) -> None:
        self.found, self.rule, self.grad_scale = found, rule, grad_scale
        self._coefficients: list[Tensor] = []
        self._measured: dispatch.Measured | None = None
        if look or not isinstance(rule, ClipByValue):
            each = isinstance(rule, ClipByNorm)
            self._measured = dispatch.measure(found.groups, self._norm_type, each=each)
        else:
            for group in found.groups:
                # Refuses now, while nothing is written anywhere.
                dispatch.backend_of(group, by_sign=True)

    @property
    def _norm_type(self) -> float:
        return math.inf if isinstance(self.rule, ClipByValue) else self.rule.norm_type

    def _limit(self, nonfinite: str) -> Limit:
        erase = nonfinite == "zero"
        dtype = self.found.result_dtype
        if isinstance(self.rule, ClipByValue):
            return Limit(math.inf, math.inf, 0.0, dtype, self.grad_scale, erase)
        rule = self.rule
        return Limit(rule.max_norm, rule.norm_type, rule.eps, dtype, self.grad_scale, erase)

    def _joined(self, results: list[Tensor]) -> Tensor:
        """One result for the list from those of its groups: the first, or all in order."""
        if isinstance(self.rule, ClipByNorm):
            return _in_order(self.found, results)
        return results[0].to(self.found.device)

    def norm(self) -> Tensor:
        """The norm before clipping, in order for ClipByNorm; for ClipByValue of order inf."""
        assert self._measured is not None, "made without look"
        results = self._measured.scale_(self._limit("propagate"), write=False)
        return self._joined([norm for norm, _ in results])

    def raise_if_nonfinite(self, remedy: str) -> None:
        """RuntimeError where a norm is not finite; waits for the device."""
        norm = self.norm()
        if isinstance(self.rule, ClipByValue):
            if not bool(torch.isfinite(norm)):
                places = nonfinite_places(self.found)
                which = f"of {self.found.labels(places)}" if places else "divided by the loss scale"
                raise RuntimeError(
                    f"The gradients {which} are non-finite, so they cannot be clipped by value. "
                    f"{remedy}"
                )
        elif not isinstance(self.rule, ClipByNorm):
            _raise_if_nonfinite(self.found, self._norm_type, norm, remedy)
        elif not bool(torch.isfinite(norm).all()):
            places = (~torch.isfinite(norm)).nonzero().flatten().tolist()
            raise RuntimeError(
                f"The norms of order {self.rule.norm_type} of {self.found.labels(places)} are "
                f"non-finite, so they cannot be clipped. {remedy}"
            )

    def write_(self, nonfinite: str) -> Tensor | None:
        """Clips, once; returns the norm before clipping, None for ClipByValue."""
        expected = verification.Expectation(self.found) if verification.is_on() else None
        norm = None
        if isinstance(self.rule, ClipByValue):
            dispatch.clamp_(self.found.groups, self.rule.min, self.rule.max, self.grad_scale)
            if nonfinite == "zero":
                # Last, for bounds that exclude 0; by now the gradients carry no loss scale.
                assert self._measured is not None, "made without look"
                self._measured.scale_(self._limit(nonfinite)._replace(grad_scale=1.0))
        else:
            assert self._measured is not None
            results = self._measured.scale_(self._limit(nonfinite))
            norm = self._joined([n for n, _ in results])
            self._coefficients = [c for _, c in results]
        self.found.finish_writing()
        if expected is not None:
            expected.check_clip(self.rule, nonfinite, self.grad_scale, norm)
        return norm

    def least_coefficient(self) -> Tensor | None:
        """The least coefficient that was written, 0-d; None for ClipByValue."""
        if not self._coefficients:
            return None
        if not isinstance(self.rule, ClipByNorm):
            return self._coefficients[0].to(self.found.device)
        least = [c.min().to(self.found.device) for c in self._coefficients]
        return least[0] if len(least) == 1 else torch.stack(least).min()


def refuse_for_rule(found: GradientList, rule: Rule) -> None:
    """Refuses gradients that a rule has no meaning for, and those that cannot be written."""
    _refuse_read_only(found)
    if isinstance(rule, ClipByValue):
        if any(group.pairs for group in found.groups):
            complex_places = found.places_where(Tensor.is_complex)
            raise TypeError(
                f"ClipByValue cannot order complex gradients ({found.labels(complex_places)}); "
                "expected real ones: clip by norm instead"
            )
        if found.has_sparse and not rule.min <= 0 <= rule.max:
            sparse = found.places_where(_is_sparse)
            raise ValueError(
                f"ClipByValue({rule.min}, {rule.max}) would change the implicit zeros of sparse "
                f"gradients ({found.labels(sparse)}); expected bounds that include 0, or dense "
                "gradients"
            )
    elif rule.norm_type == -math.inf:
        _refuse_sparse_minimum(found)


def _refuse_read_only(found: GradientList) -> None:
    if torch.is_inference_mode_enabled() or not any(g.has_inference for g in found.groups):
        return
    raise RuntimeError(
        f"the gradients of {found.labels(found.places_where(Tensor.is_inference))} were made in "
        "inference mode, outside of which they cannot be written in place; no gradient was "
        "changed. Expected gradients made outside: replace these by grad.clone()"
    )


def _refuse_sparse_minimum(found: GradientList) -> None:
    if found.has_sparse:
        sparse = found.places_where(_is_sparse)
        raise ValueError(
            f"norm_type=-inf is not supported for sparse gradients ({found.labels(sparse)}), whose "
            "implicit zeros count; expected another norm_type, or dense gradients"
        )


def _is_sparse(grad: Tensor) -> bool:
    return grad.layout == torch.sparse_coo


def _in_order(found: GradientList, norms: list[Tensor]) -> Tensor:
    """Norms by group as one tensor in the order of the gradient list."""
    if len(norms) == 1:
        return norms[0]
    joined = torch.cat([n.to(found.device) for n in norms])
    places = [place for group in found.groups for place in group.places]
    order = sorted(range(len(places)), key=places.__getitem__)
    # By slices, not by an index tensor: that would be an upload, which no graph can capture.
    pieces = joined.split(1)
    return torch.cat([pieces[i] for i in order])


def _raise_if_nonfinite(found: GradientList, norm_type: float, norm: Tensor, remedy: str) -> None:
    """RuntimeError in torch's words, with the gradients that are to blame; waits for the device."""
    if bool(torch.isfinite(norm)):
        return
    places = nonfinite_places(found)
    blame = (
        f"Non-finite gradients: {found.labels(places)}"
        if places
        else f"Every gradient is finite, but their norm does not fit {norm.dtype}"
    )
    raise RuntimeError(
        f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
        f"cannot be clipped. {remedy}. {blame}"
    )


def nonfinite_places(found: GradientList) -> list[int]:
    """Which gradients have a NaN or inf; waits for the device."""
    return found.places_where(lambda g: not bool(torch.isfinite(_dense_part(g)).all()))


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
    norm, _ = dispatch.measure(found.groups, norm_type).scale_(limit, write=False)[0]
    norm = norm.to(found.device)
    if error_if_nonfinite:
        _raise_if_nonfinite(found, norm_type, norm, TORCH_REMEDY)
    if verification.is_on():
        verification.Expectation(found).check_norm(norm_type, norm)
    return norm


@torch.no_grad()
def scale_(found: GradientList, max_norm: float, norm: Tensor) -> None:
    """Scales a gradient list by the coefficient of a norm that is given."""
    _refuse_read_only(found)
    if not found.groups:
        return
    expected = verification.Expectation(found) if verification.is_on() else None
    # The norm of one given norm is that norm under any order; inf takes it as it is.
    limit = Limit(max_norm, math.inf, 1e-6, found.result_dtype)
    dispatch.given(found.groups, norm).scale_(limit)
    found.finish_writing()
    if expected is not None:
        expected.check_scale(max_norm, norm)
