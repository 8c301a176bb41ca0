"""Helpers for all trainers: metrics to log, and the error for a trainer that is not installed."""

import math
from typing import Any

from tritonclip.optim.clipped_optimizer import ClippedOptimizer


def metrics_of(optimizer: ClippedOptimizer, prefix: str = "clip/") -> dict[str, float]:
    """Norm, coefficient and limit of the last step, and counts; waits for the device.

    Groups with a separate rule add norm and coefficient. Values are NaN if the step was skipped,
    and left out if nothing was measured, as before the first step and with ClipByValue.
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
    """Finds the ClippedOptimizer in an optimizer or its wrappers; None if there is none."""
    while optimizer is not None:
        if isinstance(optimizer, ClippedOptimizer):
            return optimizer
        optimizer = getattr(optimizer, "optimizer", None)
    return None


def needs(package: str, error: ImportError) -> ImportError:
    """The error to raise from `error`, with the extra to install."""
    return type(error)(
        f"tritonclip.integrations needs {package}, which could not be imported: {error}; expected "
        'the extra: pip install "tritonclip[integrations]"',
        name=error.name,
        path=error.path,
    )
