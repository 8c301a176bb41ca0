"""Calls at which torch.compile breaks the graph: over several processes, or with a state.

Imported only while it traces, because `torch.compiler.disable` imports the compiler, and that
triton.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tritonclip.modes import refuse_tracer
from tritonclip.rules import Rule


@torch.compiler.disable
def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls a function of the user's once more, eagerly."""
    refuse_tracer()
    # Rules that were made in the compiled region read their tensors now.
    return function(*(replace(a) if _has_tensors(a) else a for a in arguments), **options)


def _has_tensors(argument: Any) -> bool:
    return isinstance(argument, Rule) and any(
        isinstance(getattr(argument, name), Tensor) for name in argument.__match_args__
    )
