"""Faster and more accurate gradient clipping for PyTorch, on GPUs and CPUs.

Call one of these after `loss.backward()` and before `optimizer.step()`, or once before training:

    norm = tritonclip.clip_(model, 1.0)
    optimizer = tritonclip.ClippedOptimizer(optimizer, 1.0)  # clips in each step
    tritonclip.patch_torch()  # torch.nn.utils.clip_grad_norm_ then calls tritonclip

`python -m tritonclip doctor` tests each device. docs/api.rst lists the names below by task.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tritonclip import functional as functional
from tritonclip import rules
from tritonclip.backward.on_arrival import clip_on_backward_
from tritonclip.clipping import clip_, clip_tensors_
from tritonclip.engine.verify import VerificationError
from tritonclip.flat.flat_gradients import FlatGradients
from tritonclip.functional.activations import clip_backward
from tritonclip.hints import missing
from tritonclip.messages import ClippingWarning
from tritonclip.rules import *  # noqa: F403
from tritonclip.settings import use_backend, verify
from tritonclip.torch_compat import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)

if TYPE_CHECKING:
    from tritonclip.advice.finder import find_max_norm
    from tritonclip.advice.suggestion import suggest_max_norm
    from tritonclip.integrations.patching import patch_torch
    from tritonclip.monitor.recorder import record
    from tritonclip.named_norms import norms_by_name, statistics_by_name
    from tritonclip.optim.clipped_optimizer import ClippedOptimizer
    from tritonclip.optim.grad_scaler import GradScaler

__version__ = "0.1.0"

__all__ = [
    "ClippedOptimizer",
    "ClippingWarning",
    "FlatGradients",
    "GradScaler",
    "VerificationError",
    "clip_",
    "clip_backward",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "clip_on_backward_",
    "clip_tensors_",
    "find_max_norm",
    "functional",
    "get_total_norm",
    "norms_by_name",
    "patch_torch",
    "record",
    "statistics_by_name",
    "suggest_max_norm",
    "use_backend",
    "verify",
]
__all__ += rules.__all__

# These modules are imported on first use. They exclude functions from torch.compile, which imports
# the compiler and Triton (every torch optimizer does so too, when it is made).
_LAZY = {
    "ClippedOptimizer": "optim.clipped_optimizer",
    "GradScaler": "optim.grad_scaler",
    "find_max_norm": "advice.finder",
    "load_ipython_extension": "integrations.patching",
    "norms_by_name": "named_norms",
    "patch_torch": "integrations.patching",
    "record": "monitor.recorder",
    "statistics_by_name": "named_norms",
    "suggest_max_norm": "advice.suggestion",
    "unload_ipython_extension": "integrations.patching",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise missing(importlib.import_module(__name__), name)
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
