"""Clipping as functions of tensors: out of place, and differentiable.

Example:
    >>> import torch
    >>> from tritonclip import functional
    >>> weight = torch.tensor([3.0, 4.0])
    >>> for step in range(2):
    ...     gradient, norm = functional.clip_by_global_norm(2 * weight, 1.0)
    ...     weight = weight - gradient
    >>> gradient, norm
    (tensor([0.6000, 0.8000]), tensor(8.))
"""

import importlib
from typing import TYPE_CHECKING, Any

from tritonclip.functional.by_global_norm import clip_by_global_norm, global_norm
from tritonclip.functional.by_norm import clip_by_average_norm, clip_by_norm, clip_by_rms
from tritonclip.functional.by_value import clip_by_value
from tritonclip.functional.per_example import clip_per_example
from tritonclip.hints import missing

__all__ = [
    "clip_by_average_norm",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_rms",
    "clip_by_value",
    "clip_per_example",
    "global_norm",
]


# Hidden from type checkers, which would otherwise accept every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise missing(importlib.import_module(__name__), name)


def __dir__() -> list[str]:
    return __all__
