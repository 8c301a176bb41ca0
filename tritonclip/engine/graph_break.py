"""Calls at which torch.compile breaks the graph: over several processes, or with a state.

Each makes the user's call once more, eagerly, so that it refuses and tells others as any call does.
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
def clip_(
    eager: Callable[..., Tensor | None],
    parameters: object,
    rule: Any,
    nonfinite: str,
    grad_scale: float | Tensor | None,
    state: object,
    process_group: object,
    copies: object,
) -> Tensor | None:
    """`clip_`, eagerly."""
    refuse_tracer()
    if _has_tensors(rule):
        # It was made in the compiled region, and reads them now.
        rule = replace(rule)
    return eager(
        parameters,
        rule,
        nonfinite=nonfinite,
        grad_scale=grad_scale,
        state=state,
        process_group=process_group,
        copies=copies,
    )


@torch.compiler.disable
def total_norm(
    eager: Callable[..., Tensor],
    tensors: list[Tensor],
    norm_type: float,
    error_if_nonfinite: bool,
    process_group: object,
    copies: object,
) -> Tensor:
    """`get_total_norm`, eagerly."""
    refuse_tracer()
    return eager(tensors, norm_type, error_if_nonfinite, process_group=process_group, copies=copies)


@torch.compiler.disable
def scale_(
    eager: Callable[..., None],
    parameters: object,
    max_norm: object,
    norm: Tensor,
    eps: float,
) -> None:
    """`clip_grads_with_norm_`, eagerly."""
    refuse_tracer()
    eager(parameters, max_norm, norm, eps=eps)


def _has_tensors(rule: Rule) -> bool:
    return any(isinstance(getattr(rule, name), Tensor) for name in rule.__match_args__)
