"""What callbacks of all trainers need: metrics to log, and the error where a trainer is missing."""

import math
from typing import Any

from tritonclip.optim.clipped_optimizer import ClippedOptimizer


def metrics_of(optimizer: ClippedOptimizer, prefix: str = "clip/") -> dict[str, float]:
    """Norm, coefficient and limit of the last step, and the share of clipped steps.

    Waits for the device.

    Groups with a rule of their own add norm and coefficient. Empty where nothing was measured, as
    before the first step and with ClipByValue.
    """
    summary = optimizer.stats.summary()
    if math.isnan(summary["limit"]):
        # Each gradient has its own.
        del summary["limit"]
    if math.isnan(summary["clipped_share"]):
        return {}
    counts = ("steps", "clipped_steps", "skipped_steps")
    return {prefix + name: value for name, value in summary.items() if name not in counts}


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
