"""Names in a summary, the norm of torch, and a wrapper with a rule for one group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from helpers.training import sgd
from tritonclip import ClippedOptimizer

COUNTS = {"steps", "clipped_steps", "skipped_steps", "overflowed_steps", "consecutive_skips"}
KEYS = {"norm", "coefficient", "limit", "clipped_share", *COUNTS}


def torch_norm(grads: Sequence[Tensor], norm_type: float = 2.0) -> float:
    """torch's own norm, in float64."""
    twins = [torch.nn.Parameter(torch.zeros_like(grad, dtype=torch.float64)) for grad in grads]
    for twin, grad in zip(twins, grads, strict=True):
        twin.grad = grad.double()
    return float(torch.nn.utils.clip_grad_norm_(twins, 1.0, norm_type))


def grouped(params: Sequence[Tensor]) -> ClippedOptimizer:
    """Groups 0 and 2 share the wrapper's rule, group 1 has its own."""
    groups: list[dict[str, Any]] = [
        {"params": [params[0]]},
        {"params": [params[1]], "clip": 0.25},
        {"params": [params[2]]},
    ]
    return ClippedOptimizer(sgd(groups), 1.0)
