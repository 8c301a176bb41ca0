"""Adaptive gradient clipping: a limit of each unit's gradient from that unit's weights."""

from operator import attrgetter
from typing import ClassVar

from tritonclip.rules.arguments import Schedule, as_eps, as_limit_or_schedule
from tritonclip.rules.rule import Rule, checked, rule


@rule
class ClipByUnitNorm(Rule):
    """Scales each unit of a gradient whose norm is large relative to that of its weights (AGC).

    Adaptive gradient clipping. For each unit, with weights w and gradient g::

        g = g * min(1, ratio * max(norm(w), eps) / norm(g))

    The units of a parameter are its slices along the first dimension: the rows of a linear layer,
    the filters of a convolution, the vectors of an embedding. A parameter with fewer than two
    dimensions is one unit.

    Example:
        >>> import torch, tritonclip
        >>> layer = torch.nn.Linear(2, 2, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([[3.0, 4.0], [0.6, 0.8]]))
        >>> inner = torch.optim.SGD(layer.parameters(), lr=1.0)
        >>> optimizer = tritonclip.ClippedOptimizer(inner, tritonclip.ClipByUnitNorm(0.1))
        >>> for step in range(2):
        ...     optimizer.zero_grad()
        ...     (0.5 * layer.weight).sum().backward()
        ...     optimizer.step()
        >>> layer.weight.grad.norm(dim=1)
        tensor([0.4506, 0.0901])

    Args:
        ratio: the largest norm of a unit's gradient, as a multiple of the norm of its weights; 0 or
            more, inf clips nothing. Or a function of the step; :class:`ClipState` has an example.
        eps: the smallest norm used for weights, so that weights that start at 0 can grow; 0 or
            more, finite.

    Raises:
        ValueError: a ratio or `eps` that is negative or NaN, an infinite `eps`.
        TypeError: an argument of another kind.

    Notes:
        A NaN spreads to all elements of its unit, and to no other unit. An inf becomes NaN, and the
        finite elements of its unit become 0. A unit whose gradient is 0 stays 0. Weights that are
        NaN count as a norm that is NaN, except over several processes. Norms and coefficients are
        computed in float64; nothing waits for the device. timm has the same units.
        optax expects the output dimension last, and takes a matrix of one row or column for one
        unit.

    References:
        Brock, De, Smith, Simonyan, `High-performance large-scale image recognition without
        normalization <https://arxiv.org/abs/2102.06171>`_, 2021
    """

    ratio: float | Schedule = checked(as_limit_or_schedule, default=0.01)
    eps: float = checked(as_eps, default=1e-3)

    known_limit = property(attrgetter("ratio"))
    schedules: ClassVar[tuple[str, ...]] = ("ratio",)
    per_gradient: ClassVar[bool] = True
    per_unit: ClassVar[bool] = True
