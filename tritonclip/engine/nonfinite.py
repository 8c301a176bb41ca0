"""NaN and inf: which gradients are to blame, and the errors that name them."""

import torch
from torch import Tensor

from tritonclip.engine.gradients import Gradients
from tritonclip.rules import Rule

REMEDY = "No gradient was changed. To go on, pass nonfinite='propagate' or 'zero'"
TORCH_REMEDY = (
    "To disable this error and scale the gradients by the non-finite norm anyway, set "
    "`error_if_nonfinite=False`"
)


def raise_if_nonfinite(gradients: Gradients, rule: Rule, norm: Tensor, remedy: str) -> None:
    """RuntimeError where a norm is not finite; waits for the device.

    Args:
        gradients: not written yet.
        rule: that is going to clip.
        norm: before clipping: 0-d, or 1-d for a rule that is per gradient.
        remedy: ends the message.
    """
    if bool(torch.isfinite(norm).all()):
        return
    if rule.clamps:
        places = nonfinite_indices(gradients)
        raise RuntimeError(
            f"The gradients of {gradients.labels(places)} are non-finite, so they cannot be "
            f"clipped by value. {remedy}"
        )
    if rule.per_gradient:
        places = (~torch.isfinite(norm)).nonzero().flatten().tolist()
        raise RuntimeError(
            f"The norms of order {rule.norm_type} of {gradients.labels(places)} are non-finite, so "
            f"they cannot be clipped. {remedy}"
        )
    places = nonfinite_indices(gradients)
    blame = (
        f"Non-finite gradients: {gradients.labels(places)}"
        if places
        else f"Every gradient is finite, but their norm does not fit {norm.dtype}"
    )
    raise RuntimeError(
        f"The total norm of order {rule.norm_type} for gradients from `parameters` is non-finite, "
        f"so it cannot be clipped. {remedy}. {blame}"
    )


def raise_if_any_nonfinite(gradients: Gradients, remedy: str) -> None:
    """RuntimeError for gradients with NaN or inf, which not every norm shows."""
    places = nonfinite_indices(gradients)
    if places:
        raise RuntimeError(f"{remedy}. Non-finite gradients: {gradients.labels(places)}")


def nonfinite_indices(gradients: Gradients) -> list[int]:
    """Which gradients have a NaN or inf; waits for the device."""
    return gradients.indices_where(lambda g: not bool(torch.isfinite(_elements(g)).all()))


def _elements(grad: Tensor) -> Tensor:
    """A gradient's elements, in a dtype that can be asked for NaN; float8 cannot."""
    grad = grad.coalesce()._values() if grad.layout == torch.sparse_coo else grad
    return grad.float() if grad.dtype.itemsize == 1 else grad
