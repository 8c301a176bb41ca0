"""Calls that are traced: they collect the gradients, and one custom operator does the rest.

Addresses and pointer tables cannot be traced. An operator finds them at run time, eagerly, with the
same checks and the same code as a call outside of a graph, and checks numbers that change from call
to call.

Operators take no DTensors, no process groups and no state: lists over several processes and limits
that change break the graph of torch.compile, see `graph_break.py`, and are refused by others.
"""

from collections.abc import Callable, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from tritonclip import rules
from tritonclip.engine import execute
from tritonclip.engine.arguments import check_marks, needs_clip
from tritonclip.engine.checks import refuse_negative, refuse_other_model, refuse_repeated
from tritonclip.engine.gradients import Gradients
from tritonclip.modes import WHOLE
from tritonclip.rules import ClipByGlobalNorm, Rule
from tritonclip.rules.arguments import as_grad_scale, as_norm_type


def _result_dtype(grads: Sequence[Tensor]) -> torch.dtype:
    wide = any(g.dtype in (torch.float64, torch.complex128) for g in grads)
    return torch.float64 if wide else torch.float32


@torch.library.custom_op("tritonclip::clip_", mutates_args={"grads"})
def clip_op(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    exempt: Sequence[bool],
    kind: str,
    numbers: Sequence[float],
    changing: Tensor | None,
    nonfinite: str,
    grad_scale: float,
    grad_scale_tensor: Tensor | None,
    names: str,
) -> Tensor:
    """Clips by a fixed rule; returns the norm, empty for a rule that clamps.

    A rule by unit has the weights of all gradients, and says which of them are exempt.
    """
    options = {}
    if weights:
        options = {"exclude": [w for w, free in zip(weights, exempt, strict=True) if free]}
    rule = getattr(rules, kind)(*_read(numbers, changing), **options)
    scale = as_grad_scale(grad_scale if grad_scale_tensor is None else grad_scale_tensor)
    gradients = _gradients(grads, names)
    if weights:
        gradients = gradients.with_parameters(list(weights))
    if rule.per_gradient:
        refuse_repeated(gradients, len(grads))
    norm = execute.clip_(gradients, rule, nonfinite, scale)
    return grads[0].new_empty(0, dtype=_result_dtype(grads)) if norm is None else norm.clone()


@clip_op.register_fake
def _(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    exempt: Sequence[bool],
    kind: str,
    numbers: Sequence[float],
    changing: Tensor | None,
    nonfinite: str,
    grad_scale: float,
    grad_scale_tensor: Tensor | None,
    names: str,
) -> Tensor:
    rule: type[Rule] = getattr(rules, kind)
    shape = (0,) if rule.clamps else (len(grads),) if rule.per_gradient else ()
    return grads[0].new_empty(shape, dtype=_result_dtype(grads))


@torch.library.custom_op("tritonclip::total_norm", mutates_args=())
def norm_op(
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    changing: Tensor | None,
    error_if_nonfinite: bool,
) -> Tensor:
    """The norm of all tensors; the only number is its order."""
    gradients = _gradients(tensors, "", "tensors")
    norm_type = as_norm_type(*_read(numbers, changing))
    return execute.total_norm(gradients, norm_type, error_if_nonfinite).clone()


@norm_op.register_fake
def _(
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    changing: Tensor | None,
    error_if_nonfinite: bool,
) -> Tensor:
    return tensors[0].new_empty((), dtype=_result_dtype(tensors))


@torch.library.custom_op("tritonclip::scale_to_norm_", mutates_args={"grads"})
def scale_op(
    grads: Sequence[Tensor],
    numbers: Sequence[float],
    changing: Tensor | None,
    total_norm: Tensor,
    names: str,
) -> None:
    """Scales by a norm that was measured before."""
    refuse_negative("total_norm", total_norm)
    rule = rules.ClipByGlobalNorm(*_read(numbers, changing))
    execute.scale_(_gradients(grads, names), rule, total_norm)


@scale_op.register_fake
def _(
    grads: Sequence[Tensor],
    numbers: Sequence[float],
    changing: Tensor | None,
    total_norm: Tensor,
    names: str,
) -> None:
    return None


def _read(numbers: Sequence[float], changing: Tensor | None) -> Sequence[float]:
    """The numbers of a rule, which are all constants of the graph, or all in a tensor."""
    if changing is None:
        return numbers
    read: list[float] = changing.tolist()
    return read


def _gradients(grads: Sequence[Tensor], names: str, noun: str = "gradients") -> Gradients:
    """The gradient list inside an operator."""
    label_of = names.split("\n").__getitem__ if names else f"{noun}[{{}}]".format
    return Gradients(list(grads), grads[0].device, label_of)


def _items(parameters: object) -> list[tuple[str, Tensor]]:
    """Names, "" where there are none, and parameters."""
    if isinstance(parameters, Tensor):
        return [("", parameters)]
    if isinstance(parameters, Module):
        return list(parameters.named_parameters())
    return [p if isinstance(p, tuple) else ("", p) for p in parameters]  # type: ignore[attr-defined]


def _collect(items: Sequence[tuple[str, Tensor]]) -> tuple[list[Tensor], str, list[Tensor]]:
    """Gradients, each once, their names line by line ("" without any), and their parameters.

    In traceable code.
    """
    grads: list[Tensor] = []
    names: list[str] = []
    owners: list[Tensor] = []
    # Tensors are hashed by identity.
    known: set[Tensor] = set()
    for name, parameter in items:
        grad = parameter.grad
        if grad is not None and needs_clip(parameter) and grad not in known:
            known.add(grad)
            grads.append(grad)
            names.append(name)
            owners.append(parameter)
    return grads, "\n".join(names) if any(names) else "", owners


def _read_once(parameters: object) -> Any:
    """The argument, so that it can be read twice."""
    # FlatGradients have a size, as lists do; iterators have none.
    return parameters if isinstance(parameters, (Module, Sized)) else list(parameters)  # type: ignore[call-overload]


def _is_spread(grads: Sequence[Tensor]) -> bool:
    """Whether some gradients are no plain tensors, as DTensors are not."""
    return any(type(grad) not in WHOLE for grad in grads)


def _break_graph(eager: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Makes the user's call once more, eagerly, outside of the graph."""
    from tritonclip.engine import graph_break

    return graph_break.call(eager, *arguments, **options)


def _as_inputs(numbers: Sequence[float | Tensor]) -> tuple[list[float], Tensor | None]:
    """Numbers as operators take them: constants of the graph, or all in one float64 tensor."""
    # Not before: it imports sympy.
    from torch.fx.experimental.symbolic_shapes import has_static_value

    if all(not isinstance(n, Tensor) and has_static_value(n) for n in numbers):
        return list(numbers), None  # type: ignore[arg-type]
    # On a CPU, where the operator reads them.
    return [], torch.stack([as_tensor(n).cpu() for n in numbers])


def as_tensor(number: float | Tensor) -> Tensor:
    """A number as a 0-d float64 tensor: one that changes becomes an input of the graph.

    torch.compile makes a graph for each value of a float, unless it is the factor of a tensor.
    """
    return torch.ones((), dtype=torch.float64, device="cpu") * number


def clip_(
    eager: Callable[..., Any],
    parameters: object,
    rule: Rule,
    nonfinite: str,
    grad_scale: float | Tensor | None = None,
    state: object = None,
    process_group: object = None,
    copies: object = None,
) -> Tensor | None:
    """`clip_` where it is traced; `eager` is the function itself, for where the graph breaks."""
    parameters = _read_once(parameters)
    items = _items(parameters)
    grads, names, owners = _collect(items)
    has_more = state is not None or process_group is not None or copies is not None
    # Processes that have gradients of a DTensor wait for one that has none.
    spread = any(hasattr(parameter, "_spec") for _, parameter in items)
    if has_more or not rule.fixed or spread or _is_spread(grads):
        # Nothing was refused before: the call itself raises in all processes.
        return _break_graph(  # type: ignore[no-any-return]
            eager,
            parameters,
            rule,
            nonfinite=nonfinite,
            grad_scale=grad_scale,
            state=state,
            process_group=process_group,
            copies=copies,
        )
    if isinstance(parameters, Module):
        check_marks(parameters)
    scale = as_grad_scale(grad_scale)
    if rule.per_unit:
        # Of FlatGradients.
        left_out = getattr(parameters, "left_out", ())
        refuse_other_model(rule, [*(parameter for _, parameter in items), *left_out])
    if not grads:
        shape = 0 if rule.per_gradient else ()
        return None if rule.clamps else torch.zeros(shape, dtype=torch.float32)
    kind = type(rule).__name__
    numbers, changing = _as_inputs(rule.numbers)
    constant, factor = ([], scale) if isinstance(scale, Tensor) else _as_inputs([scale])
    number = constant[0] if constant else 1.0
    weights, exempt = [], []
    if rule.per_unit:
        weights, exempt = [owner.detach() for owner in owners], rule.exempt(owners)
    norm: Tensor = clip_op(
        grads, weights, exempt, kind, numbers, changing, nonfinite, number, factor, names
    )
    return None if rule.clamps else norm


def total_norm(
    eager: Callable[..., Any],
    tensors: object,
    norm_type: float,
    error_if_nonfinite: bool,
    process_group: object = None,
    copies: object = None,
) -> Tensor:
    """`get_total_norm` where it is traced; `eager` as for `clip_`."""
    items = [tensors] if isinstance(tensors, Tensor) else list(tensors)  # type: ignore[call-overload]
    items = [item for item in items if item is not None]
    if process_group is not None or copies is not None or _is_spread(items):
        return _break_graph(  # type: ignore[no-any-return]
            eager,
            items,
            norm_type,
            error_if_nonfinite,
            process_group=process_group,
            copies=copies,
        )
    if not items:
        return torch.zeros((), dtype=torch.float32)
    order, changing = _as_inputs([norm_type])
    norm: Tensor = norm_op([item.detach() for item in items], order, changing, error_if_nonfinite)
    return norm


def scale_to_norm_(
    eager: Callable[..., Any], parameters: object, rule: ClipByGlobalNorm, norm: Tensor
) -> None:
    """`clip_grads_with_norm_` where it is traced; `eager` as for `clip_`."""
    parameters = _read_once(parameters)
    grads, names, _ = _collect(_items(parameters))
    if _is_spread(grads):
        _break_graph(eager, parameters, rule.max_norm, norm, eps=rule.eps)
    elif grads:
        if isinstance(parameters, Module):
            check_marks(parameters)
        numbers, changing = _as_inputs(rule.numbers)
        scale_op(grads, numbers, changing, norm, names)
