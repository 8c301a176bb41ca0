"""A limit of each matrix's singular values."""

import math
from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor
from torch.nn import Module

from tritonclip.rules.arguments import Schedule, as_flag, as_limit_or_schedule
from tritonclip.rules.exclusion import Excluded, ExcludingRule, as_excluded
from tritonclip.rules.rule import Measured, checked, number_of, rule


@rule("ClipBySpectralNorm(1.0)", {"c beta clip_value": "max_norm"})
class ClipBySpectralNorm(ExcludingRule):
    """Brings the singular values of each gradient that exceed `max_norm` before clipping to it.

    For each singular value s of a gradient::

        s = min(s, max_norm)  # soft=False
        s = s / sqrt(1 + (s / max_norm) ** 2)  # soft=True

    Unlike a coefficient, this changes the direction of a gradient: few large singular values are
    cut, and the others stay. A gradient is the matrix [out, rest], as that of a convolution is. A
    vector, and a matrix of one row or column, has one singular value, its 2-norm.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 0.0], [0.0, 0.25]]))
        >>> inner = torch.optim.SGD([weight], lr=0.1)
        >>> optimizer = tritonclip.ClippedOptimizer(inner, tritonclip.ClipBySpectralNorm(1.0))
        >>> for step in range(2):
        ...     optimizer.zero_grad()
        ...     (weight * weight).sum().backward()
        ...     optimizer.step()
        >>> weight.grad
        tensor([[1.0000, 0.0000],
                [0.0000, 0.4000]])

    Args:
        max_norm: the largest singular value of a gradient after clipping; 0 or more, inf clips
            nothing. Or a function of the step; :class:`ClipState` has an example.
        soft: the second formula, which changes every singular value a little.
        exclude: parameters without a limit, such as embeddings: a module (for its present
            parameters), a parameter, or an iterable of these, as for :class:`ClipByUnitNorm`.

    Raises:
        ValueError: a limit that is negative or NaN.
        TypeError: an argument of another kind.

    Notes:
        A call returns the largest singular values before clipping, in order, by a power iteration:
        at most 1% too small, and never too large but for rounding. Exact are the norms of vectors.
        docs/spectral.md has the accuracy of the gradients, and says which of them keep all bits.
        They cost matrix products in every call; the host waits for a GPU.
        Complex and sparse gradients are refused. So are DTensors, whose shards have other singular
        values than the matrix. Plain tensors that are shards of one matrix, as Megatron's, cannot
        be told from whole ones: each would be clipped by itself.

        NaN and inf count as in :class:`ClipByNorm`: a NaN spreads to its gradient, an inf makes
        its finite elements 0, unless a policy says otherwise.

    References:
        `Gradient clipping beyond vector norms <https://arxiv.org/abs/2605.11838>`_, 2026; Jiang,
        Semenov, Stich, `Enhancing LLM training via spectral clipping
        <https://arxiv.org/abs/2603.14315>`_, 2026
    """

    max_norm: float | Schedule = checked(as_limit_or_schedule)
    soft: bool = checked(as_flag, default=False)
    exclude: Module | Tensor | Iterable[Module | Tensor] | Excluded | None = checked(
        as_excluded, default=None
    )

    schedules: ClassVar[tuple[str, ...]] = ("max_norm",)
    per_gradient: ClassVar[bool] = True
    spectral: ClassVar[bool] = True
    norm_type: ClassVar[float] = math.inf  # type: ignore[misc]  # a constant here

    def limit(self, measured: Measured) -> float:
        return number_of(self, "max_norm")

    @property
    def numbers(self) -> tuple[float, ...]:
        return number_of(self, "max_norm"), float(self.soft)
