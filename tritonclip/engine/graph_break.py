"""Calls at which torch.compile breaks the graph: over several processes, or with a state.

Imported only while it traces, because `torch.compiler.disable` imports the compiler, and that
triton.
"""

import torch
from torch import Tensor

from tritonclip.distributed.domain import check_holders
from tritonclip.engine import apart, execute, misuse
from tritonclip.engine.building import refuse_
from tritonclip.engine.gradients import of_parameters
from tritonclip.engine.planner import plan_
from tritonclip.engine.tensors import of_tensors
from tritonclip.rules import Rule, follow
from tritonclip.tracing import refuse_tracer


@torch.compiler.disable
def clip_(
    parameters: object,
    rule: Rule,
    nonfinite: str,
    grad_scale: float | Tensor,
    state: object,
    process_group: object,
    copies: object,
) -> Tensor | None:
    """`clip_`, eagerly."""
    refuse_tracer()
    holders = check_holders(process_group, copies)
    gradients = plan_(of_parameters(parameters, holders=holders, tells=True))
    following = None
    try:
        if state is not None:
            rule = following = follow(rule, state)
            if gradients.refusal is None:
                following.meet(gradients.first, gradients.n_parameters)
    except (TypeError, ValueError) as error:
        # Of this process alone; others may wait for the norm.
        if not refuse_(gradients, error):
            raise
    norm = execute.clip_(gradients, rule, nonfinite, grad_scale)
    if following is not None:
        following.commit()
    if misuse.calls:
        misuse.look(gradients, rule)
    return norm


@torch.compiler.disable
def total_norm(
    tensors: list[Tensor],
    norm_type: float,
    error_if_nonfinite: bool,
    process_group: object,
    copies: object,
) -> Tensor:
    """`get_total_norm`, eagerly."""
    refuse_tracer()
    holders = check_holders(process_group, copies)
    gradients = plan_(of_tensors(tensors, holders=holders, tells=True))
    return apart.total_norm(gradients, norm_type, error_if_nonfinite)


@torch.compiler.disable
def scale_(parameters: object, rule: Rule, norm: Tensor) -> None:
    """`clip_grads_with_norm_`, eagerly."""
    refuse_tracer()
    apart.scale_(plan_(of_parameters(parameters)), rule, norm)
