"""Breaks the graph of torch.compile at calls that the custom operator does not serve.

This module is imported only while a graph is traced: `torch.compiler.disable` imports the compiler,
which imports triton.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tritonclip.modes import refuse_tracer

# The text that fullgraph=True shows.
_REASON = (
    "a graph takes tritonclip's clip_, clip_grad_norm_ and clip_grad_value_ by global norm or by "
    "value, with limits that are numbers, of plain gradients, and without grad_scale, state or "
    "process_group. Make other calls outside of the compiled region, or compile without "
    "fullgraph=True"
)


@partial(torch.compiler.disable, reason=_REASON)
def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Makes the user's call again, eagerly."""
    refuse_tracer()
    return function(*arguments, **options)
