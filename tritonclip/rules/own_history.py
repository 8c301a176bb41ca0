"""A limit of each gradient from its own earlier norms."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tritonclip.rules.arguments import (
    Schedule,
    as_count,
    as_limit_or_schedule,
    as_number,
    as_positive,
    as_share,
)
from tritonclip.rules.rule import AdaptiveRule, counts
from tritonclip.signatures import explains_misfits


@explains_misfits
@dataclass(frozen=True, slots=True)
class ClipByOwnHistory(AdaptiveRule):
    r"""Clips each gradient by the moving average of its own norms after clipping.

    .. math::
        g_i \leftarrow g_i \cdot \min(1, \text{ratio} \cdot \gamma_i / \|g_i\|), \qquad
        \gamma_i \leftarrow \text{decay} \cdot \gamma_i + (1 - \text{decay}) \|g_i\|

    For its first `warmup` norms a gradient is scaled as clipping by global norm to `max_norm` would
    scale it, and :math:`\gamma_i` is the least of its norms after that.

    Args:
        ratio: largest norm of a gradient, in units of its average; positive.
        decay: of the average, between 0 and 1.
        warmup: norms of a gradient before it is clipped by its average; 1 or more. NaN, inf and 0
            do not count: an expert that was idle, or a LoRA matrix whose first gradient is 0, is
            clipped right from its first norm on. AdaGC counts steps, and leaves a gradient that was
            once 0 at 0 for ever.
        max_norm: largest global norm in the warm-up, and largest limit of a gradient after it; 0 or
            more. AdaGC has the first only. Or a function of the step; see :class:`ClipState`.

    Raises:
        ValueError, TypeError: an argument that is out of range, or no number.

    Notes:
        In :func:`clip_` it needs a :class:`ClipState`, and the same parameters in one order.

    Example:
        >>> ClipByOwnHistory(warmup=50)
        ClipByOwnHistory(ratio=1.05, decay=0.98, warmup=50, max_norm=1.0)

    References:
        Wang, Xu, Jia et al., `AdaGC: Improving Training Stability for Large Language Model
        Pretraining <https://arxiv.org/abs/2502.11034>`_, 2025
    """

    ratio: float = 1.05
    decay: float = 0.98
    warmup: int = 100
    max_norm: float | Schedule = 1.0

    schedules: ClassVar[tuple[str, ...]] = ("max_norm",)
    per_gradient: ClassVar[bool] = True
    norm_type: ClassVar[float] = 2.0  # type: ignore[misc]  # a constant here
    eps: ClassVar[float] = 0.0  # type: ignore[misc]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", as_positive("ratio", self.ratio))
        object.__setattr__(self, "decay", as_share("decay", self.decay))
        object.__setattr__(self, "warmup", as_count("warmup", self.warmup, 1))
        object.__setattr__(self, "max_norm", as_limit_or_schedule("max_norm", self.max_norm))

    def start(self) -> Sequence[float]:
        """Average, inf for none yet, and the number of norms."""
        return (math.inf, 0.0)

    def advance(self, state: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The limits by averages, or in the warm-up by the global norm."""
        average, n = state.unbind(-1)
        warm = n >= self.warmup
        max_norm = as_number("max_norm", self.max_norm)
        together = norm * (max_norm / torch.linalg.vector_norm(norm))
        # Of an inf, any finite limit gives the coefficient 0.
        together = torch.where(norm.isinf(), max_norm, together)
        limit = torch.where(warm, (self.ratio * average).clamp(max=max_norm), together)

        clipped = torch.minimum(norm, limit)
        moving = self.decay * average + (1 - self.decay) * clipped
        moving = torch.where(warm, moving, torch.minimum(average, clipped))
        after = torch.stack([moving, n + 1], dim=-1)
        return limit, torch.where((counts(norm) & counts(clipped))[..., None], after, state)
