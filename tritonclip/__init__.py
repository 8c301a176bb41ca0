"""Gradient clipping for PyTorch at the speed of memory."""

from tritonclip.clip import (
    clip_,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)
from tritonclip.dispatch import use_backend
from tritonclip.optimizer import ClippedOptimizer
from tritonclip.rules import ClipByGlobalNorm, ClipByNorm, ClipByValue
from tritonclip.scaler import GradScaler
from tritonclip.stats import ClipStats
from tritonclip.verification import VerificationError, verify

__version__ = "0.1.0"

__all__ = [
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "ClipStats",
    "ClippedOptimizer",
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
