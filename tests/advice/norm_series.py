"""The norms of a run for the suggestion of a limit: with spikes, and with a drift."""

from typing import Any

import numpy as np


def norms_of(
    n: int = 1000,
    *,
    spread: float = 0.2,
    spikes: float = 0.0,
    height: float = 10.0,
    drift: float = 1.0,
    seed: int = 0,
) -> np.ndarray[Any, Any]:
    """Log-normal norms around 1, some of them spikes, that change by a factor over the run."""
    random = np.random.default_rng(seed)
    norms = np.exp(spread * random.standard_normal(n).clip(-3, 3))
    norms[random.permutation(n)[: round(spikes * n)]] *= height
    return norms * drift ** np.linspace(0, 1, n)
