"""Candidates for a limit: the share of steps that each clips, and its coefficients for spikes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

# Of the steps after the warm-up. More, and the limit becomes a part of the learning rate; fewer,
# and a limit from some hundred steps hangs on one or two of them.
LEAST_SHARE, MOST_SHARE = 0.01, 0.10
# torch adds it to the norm that it divides by.
EPS = 1e-6
_N_SPIKES = 3


@dataclass(frozen=True)
class Spike:
    """One of the largest norms of a run, after the warm-up.

    Attributes:
        step: its number.
        norm: before clipping.
    """

    step: int
    norm: float


@dataclass(frozen=True)
class Candidate:
    """A limit that might be chosen.

    Attributes:
        max_norm: the limit.
        origin: why it is among the candidates.
        share: of the steps after the warm-up, those that it would clip.
        coefficients: the factors by which it would scale the largest spikes, in their order.
    """

    max_norm: float
    origin: str
    share: float
    coefficients: tuple[float, ...]


def spikes_of(norms: Tensor, steps: Tensor) -> tuple[Spike, ...]:
    """The largest norms, from the largest on."""
    largest = norms.topk(_N_SPIKES)
    return tuple(
        Spike(step, norm)
        for step, norm in zip(steps[largest.indices].tolist(), largest.values.tolist(), strict=True)
    )


def share_over(norms: Tensor, limit: float) -> float:
    """The share of the steps that a limit would clip."""
    return float((norms > limit).double().mean())


def limit_at(norms: Tensor, share: float) -> float:
    """A limit that clips a share of the steps, in as few digits as keep the share."""
    exact = float(norms.quantile(1 - share))
    tolerance = max(share / 2, 1 / len(norms))
    for digits in (2, 3):
        nearest = f"{exact:.{digits - 1}e}"
        last = float(f"1e{nearest.partition('e')[2]}") / 10 ** (digits - 1)
        for change in (0.0, last, -last):
            limit = float(f"{float(nearest) + change:.{digits - 1}e}")
            clipped = share_over(norms, limit)
            if LEAST_SHARE <= clipped <= MOST_SHARE and abs(clipped - share) <= tolerance:
                return limit
    return exact


def candidates_of(
    norms: Tensor,
    spikes: Sequence[Spike],
    recommended: float | None,
    in_use: float | None,
) -> tuple[Candidate, ...]:
    """Limits in ascending order, each once, under the first of its origins."""
    limits: dict[float, str] = {}
    if recommended is not None:
        limits[recommended] = "recommended"
    if in_use is not None:
        limits.setdefault(in_use, "in use")
    # A share of less than one step is none.
    for share in (s for s in (LEAST_SHARE, 0.02, 0.05, MOST_SHARE) if s * len(norms) >= 1):
        limits.setdefault(limit_at(norms, share), f"about {share:.0%}")
    limits.setdefault(1.0, "usual for transformers")
    return tuple(
        Candidate(
            limit,
            origin,
            share_over(norms, limit),
            tuple(min(1.0, limit / (spike.norm + EPS)) for spike in spikes),
        )
        for limit, origin in sorted(limits.items())
    )
