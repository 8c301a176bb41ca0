"""The clipping of one gradient as a formula of torch operators.

Slower than the engine, which writes in place through addresses. It serves where there are none, as
inside torch.func and torch.compile, and where the clipping itself is differentiated.
"""

import math

import torch
from torch import Tensor

from tritonclip.engine.checks import REMEDY
from tritonclip.functional.formulas import norm_of, result_dtype
from tritonclip.functional.limits import filled
from tritonclip.rules import ClipByNorm, ClipByValue
from tritonclip.rules.arguments import as_number
from tritonclip.tracing import is_traced


def clipped(grad: Tensor, rule: ClipByNorm | ClipByValue, nonfinite: str) -> Tensor:
    """A gradient after clipping, as a new tensor.

    Args:
        grad: floating-point, for ClipByNorm also complex; any size.
        rule: that holds for it.
        nonfinite: as for `clip_`; "error" waits for the device.
    """
    if not grad.numel():
        return grad
    if isinstance(rule, ClipByValue):
        norm, result = grad, _clamped(grad, rule)
    else:
        norm = norm_of(grad, rule.norm_type).to(result_dtype([grad]))
        result = (grad.to(_at_least_single(grad)) * _coefficient(norm, rule)).to(grad.dtype)
    if nonfinite == "propagate":
        return result
    finite = torch.isfinite(norm).all()
    if nonfinite == "error":
        if not bool(finite):
            raise RuntimeError(
                f"a gradient in backward is non-finite, so {rule} cannot clip it. {REMEDY}"
            )
        return result
    return torch.where(finite, result, torch.zeros_like(result))


def _clamped(grad: Tensor, rule: ClipByValue) -> Tensor:
    """The gradient within its bounds; a finite bound stays finite in its dtype."""
    largest = torch.finfo(grad.dtype).max
    low, high = (
        bound if abs(bound) == math.inf else min(max(bound, -largest), largest)
        for bound in rule.interval()
    )
    wide = grad.to(_at_least_single(grad))
    if is_traced():
        least, most = (filled(bound, wide.dtype, wide.device) for bound in (low, high))
        return wide.clamp(least, most).to(grad.dtype)
    return wide.clamp(low, high).to(grad.dtype)


def _coefficient(norm: Tensor, rule: ClipByNorm) -> Tensor:
    """min(1, max_norm / (norm + eps)); NaN stays NaN, and no derivative is taken of a kept 1."""
    one = torch.ones_like(norm)
    max_norm = as_number("max_norm", rule.max_norm)
    limit, bound = one * max_norm, norm + rule.eps
    keep = (bound <= limit) | (bound == 0)
    if type(max_norm) is float and max_norm == math.inf:
        keep = norm == norm
    return torch.where(keep, one, limit / torch.where(keep, one, bound))


def _at_least_single(grad: Tensor) -> torch.dtype:
    """The dtype that a gradient is multiplied in: float32 for half types."""
    return torch.promote_types(grad.dtype, torch.float32)
