"""Calls that are traced: they collect the gradients, and one operator does the rest.

Operators take no DTensors, no process groups and no state: lists over several processes and limits
that change break the graph of torch.compile, and are refused by others. See `operators.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from tritonclip.engine import operators
from tritonclip.engine.modules import check_marks
from tritonclip.engine.refusals import refuse_other_model
from tritonclip.rules import Rule
from tritonclip.tracing import WHOLE


def _items(parameters: object) -> list[tuple[str, Tensor]]:
    """Names, "" where there are none, and parameters."""
    if isinstance(parameters, Tensor):
        return [("", parameters)]
    if isinstance(parameters, Module):
        check_marks(parameters)
        return list(parameters.named_parameters())
    return [p if isinstance(p, tuple) else ("", p) for p in parameters]  # type: ignore[attr-defined]


def _collect(items: Sequence[tuple[str, Tensor]]) -> tuple[list[Tensor], str, list[Tensor]]:
    """Gradients, each once, their names line by line ("" without any), and their parameters.

    In traceable code.
    """
    grads: list[Tensor] = []
    names: list[str] = []
    owners: list[Tensor] = []
    for name, parameter in items:
        grad = parameter.grad
        if (
            grad is not None
            and getattr(parameter, "need_clip", True)
            and all(grad is not g for g in grads)
        ):
            grads.append(grad)
            names.append(name)
            owners.append(parameter)
    return grads, "\n".join(names) if any(names) else "", owners


def _read_once(parameters: object) -> Any:
    """The argument, so that it can be read twice."""
    return parameters if isinstance(parameters, Tensor | Module) else list(parameters)  # type: ignore[call-overload]


def _is_spread(grads: Sequence[Tensor]) -> bool:
    """Whether some gradients are no plain tensors, as DTensors are not."""
    return any(type(grad) not in WHOLE for grad in grads)


def clip_(
    parameters: object,
    rule: Rule,
    nonfinite: str,
    grad_scale: float | Tensor,
    state: object = None,
    process_group: object = None,
    copies: object = None,
) -> Tensor | None:
    """`clip_` where it is traced."""
    # Of FlatGradients.
    left_out = getattr(parameters, "left_out", ()) if rule.per_unit else ()
    parameters = _read_once(parameters)
    items = _items(parameters)
    grads, names, owners = _collect(items)
    if rule.per_unit:
        refuse_other_model(rule, [*(parameter for _, parameter in items), *left_out])
    said = state is not None or process_group is not None or copies is not None
    # Processes that have gradients of a DTensor wait for one that has none.
    spread = any(hasattr(parameter, "_spec") for _, parameter in items)
    if said or not rule.fixed or spread or _is_spread(grads):
        from tritonclip.engine import graph_break

        result: Tensor | None = graph_break.clip_(
            parameters, rule, nonfinite, grad_scale, state, process_group, copies
        )
        return result
    if not grads:
        shape = 0 if rule.per_gradient else ()
        return None if rule.clamps else torch.zeros(shape, dtype=torch.float32)
    kind = type(rule).__name__
    scale = grad_scale if isinstance(grad_scale, Tensor) else None
    number = 1.0 if isinstance(grad_scale, Tensor) else grad_scale
    if rule.per_unit:
        weights = [owner.detach() for owner in owners]
        norms: Tensor = operators.clip_units_op(
            grads,
            weights,
            kind,
            rule.exempt(owners),
            list(rule.numbers),
            nonfinite,
            number,
            scale,
            names,
        )
        return norms
    numbers = list(rule.numbers)
    norm = operators.clip_op(grads, kind, numbers, nonfinite, number, scale, names)
    return None if rule.clamps else norm


def total_norm(
    tensors: object,
    norm_type: float,
    error_if_nonfinite: bool,
    process_group: object = None,
    copies: object = None,
) -> Tensor:
    """`get_total_norm` where it is traced."""
    items = [tensors] if isinstance(tensors, Tensor) else list(tensors)  # type: ignore[call-overload]
    items = [item for item in items if item is not None]
    if process_group is not None or copies is not None or _is_spread(items):
        from tritonclip.engine import graph_break

        total: Tensor = graph_break.total_norm(
            items, norm_type, error_if_nonfinite, process_group, copies
        )
        return total
    if not items:
        return torch.zeros((), dtype=torch.float32)
    norm: Tensor = operators.norm_op(
        [item.detach() for item in items], norm_type, error_if_nonfinite
    )
    return norm


def scale_to_norm_(parameters: object, rule: Rule, norm: Tensor) -> None:
    """`clip_grads_with_norm_` where it is traced."""
    parameters = _read_once(parameters)
    grads, names, _ = _collect(_items(parameters))
    if _is_spread(grads):
        from tritonclip.engine import graph_break

        graph_break.scale_(parameters, rule, norm)
    elif grads:
        operators.scale_op(grads, list(rule.numbers), norm, names)
