"""Gradient clipping for PyTorch at the speed of memory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tritonclip.clip import (
    clip_,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)
from tritonclip.dispatch import use_backend
from tritonclip.flat import FlatGradients
from tritonclip.rules import ClipByGlobalNorm, ClipByNorm, ClipByValue
from tritonclip.verification import VerificationError, verify

if TYPE_CHECKING:
    from tritonclip.optimizer import ClippedOptimizer
    from tritonclip.scaler import GradScaler
    from tritonclip.stats import ClipStats

__version__ = "0.1.0"

__all__ = [
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "ClipStats",
    "ClippedOptimizer",
    "FlatGradients",
    "GradScaler",
    "VerificationError",
    "clip_",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "use_backend",
    "verify",
]

# Imported when first asked for: marking what torch.compile leaves out imports the compiler and
# Triton, as every torch optimizer does when it is made.
_LAZY = {"ClipStats": "stats", "ClippedOptimizer": "optimizer", "GradScaler": "scaler"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
