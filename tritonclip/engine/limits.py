"""The limits that a rule gives: one number, one tensor, or one for each gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonclip.engine.norms import Norms


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
