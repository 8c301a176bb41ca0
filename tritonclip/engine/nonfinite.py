"""NaN and inf: which gradients are to blame, and the errors that name them."""

import torch
from torch import Tensor

from tritonclip.distributed.collectives import everyones
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.refusals import some
from tritonclip.rules import Rule

POLICIES = ("propagate", "error", "zero")
REMEDY = "No gradient was changed. To go on, pass nonfinite='propagate' or 'zero'"
TORCH_REMEDY = (
    "To disable this error and scale the gradients by the non-finite norm anyway, set "
    "`error_if_nonfinite=False`"
)


def unknown_policy(nonfinite: object) -> ValueError:
    """The error for a policy that is none of them."""
    remedy = "as torch's error_if_nonfinite=True, 'error' raises"
    if nonfinite == "skip":
        remedy = "only a ClippedOptimizer can skip a step"
    return ValueError(
        f"nonfinite must be 'propagate', 'error' or 'zero', got {nonfinite!r}; {remedy}"
    )


def raise_if_nonfinite(
    gradients: Gradients, rule: Rule, norm: Tensor, remedy: str, finite: Tensor | None = None
) -> None:
    """RuntimeError where a norm is not finite; waits for the device.

    Args:
        gradients: not written yet.
        rule: that is going to clip.
        norm: before clipping: 0-d, or 1-d for a rule that is per gradient.
        remedy: ends the message.
        finite: whether every norm is, of other processes too; None to ask `norm`.
    """
    if bool(torch.isfinite(norm).all() if finite is None else finite):
        return
    if rule.clamps:
        labels = _blamed(gradients, nonfinite_indices(gradients))
        raise RuntimeError(
            f"The gradients of {labels} are non-finite, so they cannot be "
            f"clipped by value. {remedy}"
        )
    if rule.per_gradient:
        places = (~torch.isfinite(norm)).nonzero().flatten().tolist()
        raise RuntimeError(
            f"The norms of order {rule.norm_type} of {_blamed(gradients, places)} are non-finite, "
            f"so they cannot be clipped. {remedy}"
        )
    labels = _blamed(gradients, nonfinite_indices(gradients))
    blame = (
        f"Non-finite gradients: {labels}"
        if labels
        else f"Every gradient is finite, but their norm does not fit {norm.dtype}"
    )
    raise RuntimeError(
        f"The total norm of order {rule.norm_type} for gradients from `parameters` is non-finite, "
        f"so it cannot be clipped. {remedy}. {blame}"
    )


def raise_if_any_nonfinite(gradients: Gradients, remedy: str) -> None:
    """RuntimeError for gradients with NaN or inf, which not every norm shows."""
    labels = _blamed(gradients, nonfinite_indices(gradients))
    if labels:
        raise RuntimeError(
            f"Some gradients are non-finite. {remedy}. Non-finite gradients: {labels}"
        )


def _blamed(gradients: Gradients, places: list[int]) -> str:
    """Some of the gradients to blame, of every process that shares the norm; "" for none."""
    plan = gradients.plan
    if plan is None or plan.reduction is None:
        return gradients.labels(places)
    ranks: dict[str, list[int]] = {}
    own = [gradients.label(i) for i in places]
    for rank, labels in everyones(own, plan.reduction.sharding.domain).items():
        for label in labels:
            ranks.setdefault(label, []).append(rank)
    return some([f"{label} (on rank {', '.join(map(str, at))})" for label, at in ranks.items()])


def nonfinite_indices(gradients: Gradients) -> list[int]:
    """Which gradients have a NaN or inf; waits for the device."""
    return gradients.indices_where(lambda g: not bool(torch.isfinite(_elements(g)).all()))


def _elements(grad: Tensor) -> Tensor:
    """A gradient's elements, in a dtype that can be asked for NaN; float8 cannot."""
    grad = grad.coalesce()._values() if grad.layout == torch.sparse_coo else grad
    return grad.float() if grad.dtype.itemsize == 1 else grad
