"""Calls at which torch.compile breaks the graph: all but those that one operator serves.

Imported only while it traces, because `torch.compiler.disable` imports the compiler, and that
triton.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tritonclip.modes import refuse_tracer

# Shown by fullgraph=True.
_REASON = (
    "a graph takes tritonclip's clip_, clip_grad_norm_ and clip_grad_value_ by global norm or by "
    "value, with limits that are numbers, of plain gradients, and without grad_scale, state or "
    "process_group. Make other calls outside of the compiled region, or compile without "
    "fullgraph=True"
)


@partial(torch.compiler.disable, reason=_REASON)
def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls a function of the user's once more, eagerly."""
    refuse_tracer()
    return function(*arguments, **options)
