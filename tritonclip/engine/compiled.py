"""How torch.compile sees a call: custom operators that mutate a list of gradients.

Addresses and pointer tables cannot be traced, so a traced call only collects the gradients; the
operator does the rest at run time, eagerly, with the same checks and the same code. Operators take
no DTensors, no process groups and no state: lists over several processes and limits that change
break the graph. Nothing of this is used outside a compiled region.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from tritonclip import rules
from tritonclip.engine import apart, execute
from tritonclip.engine.gradients import Gradients, of_tensors
from tritonclip.engine.modules import check_marks
from tritonclip.engine.planner import plan_
from tritonclip.engine.refusals import refuse_negative, refuse_other_model, refuse_repeated
from tritonclip.rules import Rule
from tritonclip.rules.arguments import as_grad_scale


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
    return any(type(grad) not in (Tensor, Parameter) for grad in grads)


def clip_(
    parameters: object,
    rule: Rule,
    nonfinite: str,
    grad_scale: float | Tensor,
    state: object = None,
    process_group: object = None,
    copies: object = None,
) -> Tensor | None:
    """`clip_` in a compiled region."""
    # Of FlatGradients.
    left_out = getattr(parameters, "left_out", ()) if rule.per_unit else ()
    parameters = _read_once(parameters)
    items = _items(parameters)
    grads, names, owners = _collect(items)
    if rule.per_unit:
        refuse_other_model(rule, [*(parameter for _, parameter in items), *left_out])
    said = state is not None or process_group is not None or copies is not None
    if said or not rule.fixed or _is_spread(grads):
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
        norms: Tensor = _clip_units_op(
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
    norm = _clip_op(grads, kind, numbers, nonfinite, number, scale, names)
    return None if rule.clamps else norm


def total_norm(
    tensors: object,
    norm_type: float,
    error_if_nonfinite: bool,
    process_group: object = None,
    copies: object = None,
) -> Tensor:
    """`get_total_norm` in a compiled region."""
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
    norm: Tensor = _norm_op([item.detach() for item in items], norm_type, error_if_nonfinite)
    return norm


def scale_to_norm_(parameters: object, rule: Rule, norm: Tensor) -> None:
    """`clip_grads_with_norm_` in a compiled region."""
    parameters = _read_once(parameters)
    grads, names, _ = _collect(_items(parameters))
    if _is_spread(grads):
        from tritonclip.engine import graph_break

        graph_break.scale_(parameters, rule, norm)
    elif grads:
        _scale_op(grads, list(rule.numbers), norm, names)


def _result_dtype(grads: Sequence[Tensor]) -> torch.dtype:
    wide = any(g.dtype in (torch.float64, torch.complex128) for g in grads)
    return torch.float64 if wide else torch.float32


@torch.library.custom_op("tritonclip::clip_", mutates_args={"grads"})
def _clip_op(
    grads: Sequence[Tensor],
    kind: str,
    numbers: Sequence[float],
    nonfinite: str,
    grad_scale: float,
    grad_scale_tensor: Tensor | None,
    names: str,
) -> Tensor:
    rule = getattr(rules, kind)(*numbers)
    scale = as_grad_scale(grad_scale if grad_scale_tensor is None else grad_scale_tensor)
    gradients = _gradients(grads, names)
    if rule.per_gradient:
        refuse_repeated(gradients, len(grads))
    norm = execute.clip_(gradients, rule, nonfinite, scale)
    return grads[0].new_empty(0, dtype=_result_dtype(grads)) if norm is None else norm.clone()


@_clip_op.register_fake
def _(
    grads: Sequence[Tensor],
    kind: str,
    numbers: Sequence[float],
    nonfinite: str,
    grad_scale: float,
    grad_scale_tensor: Tensor | None,
    names: str,
) -> Tensor:
    rule: type[Rule] = getattr(rules, kind)
    shape = (0,) if rule.clamps else (len(grads),) if rule.per_gradient else ()
    return grads[0].new_empty(shape, dtype=_result_dtype(grads))


@torch.library.custom_op("tritonclip::clip_units_", mutates_args={"grads"})
def _clip_units_op(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    kind: str,
    exempt: Sequence[bool],
    numbers: Sequence[float],
    nonfinite: str,
    grad_scale: float,
    grad_scale_tensor: Tensor | None,
    names: str,
) -> Tensor:
    exclude = [weight for weight, free in zip(weights, exempt, strict=True) if free]
    rule = getattr(rules, kind)(*numbers, exclude=exclude)
    scale = as_grad_scale(grad_scale if grad_scale_tensor is None else grad_scale_tensor)
    gradients = _gradients(grads, names).beside(list(weights))
    refuse_repeated(gradients, len(grads))
    norm = execute.clip_(gradients, rule, nonfinite, scale)
    assert norm is not None
    return norm.clone()


@_clip_units_op.register_fake
def _(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    kind: str,
    exempt: Sequence[bool],
    numbers: Sequence[float],
    nonfinite: str,
    grad_scale: float,
    grad_scale_tensor: Tensor | None,
    names: str,
) -> Tensor:
    return grads[0].new_empty((len(grads),), dtype=_result_dtype(grads))


@torch.library.custom_op("tritonclip::total_norm", mutates_args=())
def _norm_op(tensors: Sequence[Tensor], norm_type: float, error_if_nonfinite: bool) -> Tensor:
    gradients = plan_(of_tensors(list(tensors)))
    return apart.total_norm(gradients, norm_type, error_if_nonfinite).clone()


@_norm_op.register_fake
def _(tensors: Sequence[Tensor], norm_type: float, error_if_nonfinite: bool) -> Tensor:
    return tensors[0].new_empty((), dtype=_result_dtype(tensors))


@torch.library.custom_op("tritonclip::scale_to_norm_", mutates_args={"grads"})
def _scale_op(
    grads: Sequence[Tensor], numbers: Sequence[float], total_norm: Tensor, names: str
) -> None:
    refuse_negative("total_norm", total_norm)
    rule = rules.ClipByGlobalNorm(*numbers)
    apart.scale_(_gradients(grads, names), rule, total_norm)


@_scale_op.register_fake
def _(grads: Sequence[Tensor], numbers: Sequence[float], total_norm: Tensor, names: str) -> None:
    return None


def _gradients(grads: Sequence[Tensor], names: str) -> Gradients:
    """The gradient list inside an operator."""
    label_of = names.split("\n").__getitem__ if names else "gradients[{}]".format
    return plan_(of_tensors(list(grads), label_of))
