"""Helpers for all trainers: metrics to log, and the error for a trainer that is missing."""

import math
from typing import Any

from tritonclip.optim.clipped_optimizer import ClippedOptimizer


def metrics_of(optimizer: ClippedOptimizer, prefix: str = "clip/") -> dict[str, float]:
    """Norm, coefficient and limit of the last step, and counts; waits for the device.

    Groups with a rule of their own add norm and coefficient. NaN if the step was skipped. None of
    these where nothing was measured, as before the first step and with ClipByValue.
    """
    summary = optimizer.stats.summary()
    share = summary.pop("clipped_share")
    metrics: dict[str, float] = {}
    if not math.isnan(share):
        # Counts are integers. The limit is NaN if each gradient has its own.
        numbers = {name: n for name, n in summary.items() if isinstance(n, float)}
        if math.isnan(numbers["limit"]):
            del numbers["limit"]
        metrics = dict.fromkeys(numbers, math.nan) if summary["consecutive_skips"] else numbers
        metrics["clipped_share"] = share
    if optimizer.nonfinite == "skip":
        metrics["skipped_steps"] = summary["skipped_steps"]
    return {prefix + name: value for name, value in metrics.items()}


def wrapper_in(optimizer: Any) -> ClippedOptimizer | None:
    """The ClippedOptimizer inside the wrappers of a trainer, or itself; None without any."""
    while optimizer is not None:
        if isinstance(optimizer, ClippedOptimizer):
            return optimizer
        optimizer = getattr(optimizer, "optimizer", None)
    return None


def needs(package: str, error: ImportError) -> ImportError:
    """The error in place of another, which is its cause."""
    return type(error)(
        f"tritonclip.integrations needs {package}, which could not be imported: {error}; expected "
        'the extra: pip install "tritonclip[integrations]"',
        name=error.name,
        path=error.path,
    )
