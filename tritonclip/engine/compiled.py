"""Calls that are traced: they collect the gradients, and one custom operator does the rest.

Addresses and pointer tables cannot be traced. An operator finds them at run time, eagerly, with the
same checks and the same code as a call outside of a graph, and checks numbers that change from call
to call.

Operators take no DTensors, no process groups and no state: lists over several processes and limits
that change break the graph of torch.compile, see `graph_break.py`, and are refused by others.
"""

from collections.abc import Callable, Sequence, Sized
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from tritonclip import rules
from tritonclip.engine import execute
from tritonclip.engine.arguments import (
    checked_parameters,
    needs_clip,
    refuse_parameters,
    tensors_in,
)
from tritonclip.engine.checks import refuse_negative
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.plan import result_dtype
from tritonclip.modes import WHOLE
from tritonclip.rules import ClipByGlobalNorm, Rule, rule_of
from tritonclip.rules.arguments import as_grad_scale, as_norm_type


@lru_cache(maxsize=64)
def _read_rule(text: str) -> Rule:
    rule: Rule = _kind_of(text)(*map(float, text.split()[1:]))
    return rule


def _kind_of(text: str) -> Any:
    return getattr(rules, text.partition(" ")[0])


def _gradients(grads: list[Tensor], names: str) -> Gradients:
    label_of = names.split("\n").__getitem__ if names else "gradients[{}]".format
    return Gradients(grads, grads[0].device, label_of)


def _clip(
    grads: list[Tensor],
    names: str,
    text: str,
    nonfinite: str,
    constant_scale: float,
    grad_scale: Tensor | None = None,
    weights: Sequence[Tensor] | None = None,
    numbers: Tensor | None = None,
) -> Tensor:
    """Clips distinct gradients by a fixed rule; returns the norm, empty for a rule that clamps.

    `names` are theirs, line by line, "" without any. `text` has the numbers of the rule, unless
    they are inputs of the graph, in `numbers`; the loss scale is a constant, or the input
    `grad_scale`. A rule by unit comes with the weights of all gradients.
    """
    gradients = _gradients(grads, names)
    rule = _read_rule(text) if numbers is None else _kind_of(text)(*numbers.tolist())
    gradients.parameters = weights
    if rule.per_gradient and gradients.distinct is not None:
        again = min(set(range(len(grads))).difference(gradients.distinct))
        raise ValueError(
            f"the gradient of {gradients.label_of(again)} has the memory of an earlier one, and a "
            f"compiled graph expects a norm for each of {len(grads)}; expected each gradient once: "
            "pass one of the two, or clip outside of the compiled region"
        )
    scale = constant_scale if grad_scale is None else as_grad_scale(grad_scale)
    norm = execute.clip_(gradients, rule, nonfinite, scale)
    return grads[0].new_empty(0) if norm is None else norm


def _simulate_clip(grads: Sequence[Tensor], names: str, text: str, *_: object) -> Tensor:
    rule = _kind_of(text)
    if rule.clamps:
        return grads[0].new_empty(0)
    shape = (len(grads),) if rule.per_gradient else ()
    return grads[0].new_empty(shape, dtype=result_dtype(grads))


def _norm(
    tensors: list[Tensor], norm_type: float, raises: bool = False, order: Tensor | None = None
) -> Tensor:
    """The norm of all tensors; an order that is an input of the graph is in a tensor."""
    if order is not None:
        norm_type = as_norm_type("norm_type", order.item())
    gradients = Gradients(tensors, tensors[0].device, "tensors[{}]".format)
    return execute.total_norm(gradients, norm_type, raises)


def _scale(
    grads: list[Tensor],
    names: str,
    total_norm: Tensor,
    numbers: Sequence[float],
    changing: Tensor | None = None,
) -> None:
    """Scales by a norm that was measured before; `numbers` of the rule, or those that change."""
    refuse_negative(total_norm)
    rule = rule_of(ClipByGlobalNorm, *(numbers if changing is None else changing.tolist()))
    execute.scale_(_gradients(grads, names), rule, total_norm)


_LIBRARY = torch.library.Library("tritonclip", "FRAGMENT")


def _operator(name: str, schema: str, run: Callable[..., Any], simulate: Callable[..., Any]) -> Any:
    """Registers an operator.

    No CUDA graph of torch.compile captures it: the tables of a list would lie in the memory of the
    graph, and outlive it. `torch.library.custom_op` would wrap it in layers of Python that take
    longer than a small list. Two of them are not needed: no operator has a derivative, and each
    counts versions where it writes.
    """
    tags = torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe
    _LIBRARY.define(name + schema, tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    for key in ("Autograd", "ADInplaceOrView"):
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, key)
    torch.library.register_fake(f"tritonclip::{name}", simulate, lib=_LIBRARY)
    return getattr(torch.ops.tritonclip, name).default


_clip_op = _operator(
    "clip_",
    "(Tensor(a!)[] grads, str names, str rule, str nonfinite, float constant_scale,"
    " Tensor? grad_scale=None, Tensor[]? weights=None, Tensor? numbers=None)"
    " -> Tensor",
    _clip,
    _simulate_clip,
)
_norm_op = _operator(
    "total_norm",
    "(Tensor[] tensors, float norm_type, bool raises=False, Tensor? order=None) -> Tensor",
    _norm,
    lambda tensors, *_: tensors[0].new_empty((), dtype=result_dtype(tensors)),
)
_scale_op = _operator(
    "scale_to_norm_",
    "(Tensor(a!)[] grads, str names, Tensor total_norm, float[] numbers, Tensor? changing=None)"
    " -> ()",
    _scale,
    lambda *_: None,
)


def _items(parameters: object) -> list[tuple[str, Tensor]]:
    """Names, "" where there are none, and parameters."""
    if isinstance(parameters, Tensor):
        return [("", parameters)]
    if isinstance(parameters, Module):
        return list(parameters.named_parameters())
    return [p if isinstance(p, tuple) else ("", p) for p in parameters]  # type: ignore[attr-defined]


def _collect(
    items: Sequence[tuple[str, Tensor]], *, are_gradients: bool = False
) -> tuple[list[Tensor], str, list[Tensor]]:
    """Gradients, each once, their names line by line ("" without any), and their parameters.

    In traceable code. Items are named parameters, or the gradients themselves.
    """
    grads: list[Tensor] = []
    names: list[str] = []
    owners: list[Tensor] = []
    # Tensors are hashed by identity.
    seen: set[Tensor] = set()
    for name, item in items:
        grad = item if are_gradients else item.grad
        if grad is not None and grad not in seen and (are_gradients or needs_clip(item)):
            seen.add(grad)
            grads.append(grad)
            names.append(name)
            owners.append(item)
    return grads, "\n".join(names) if any(names) else "", owners


def _read_once(parameters: object) -> Any:
    """The argument, so that it can be read twice."""
    # Iterators have no size.
    return parameters if isinstance(parameters, (Module, Sized)) else list(parameters)  # type: ignore[call-overload]


def _is_spread(grads: Sequence[Tensor]) -> bool:
    """Whether some gradients are no plain tensors, as DTensors are not."""
    return any(type(grad) not in WHOLE for grad in grads)


def break_graph(eager: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
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
    call: Callable[..., Any],
    argument: Any,
    rule: Rule,
    nonfinite: str,
    grad_scale: float | Tensor | None = None,
    state: object = None,
    process_group: object = None,
    copies: object = None,
    *,
    are_gradients: bool = False,
) -> Tensor | None:
    """The body of the functions that clip where it is traced; arguments as of `clip_gradients_`."""
    argument = _read_once(argument)
    if are_gradients:
        tensors, label_of = tensors_in(argument, "tensors[{}]".format)
        refuse_parameters(tensors, label_of)
        items = [(label_of(i), tensor) for i, tensor in enumerate(tensors)]
    else:
        items = _items(argument)
    grads, names, owners = _collect(items, are_gradients=are_gradients)
    if (
        (state is not None or process_group is not None or copies is not None)
        # `_read_rule` would not find it again: it changes, or is of a user's class.
        or not (rule.fixed and getattr(rules, type(rule).__name__, None) is type(rule))
        # Processes that have gradients of a DTensor wait for one that has none. No guard looks for
        # the attribute of plain parameters, whose class is guarded anyway.
        or any(type(item) not in WHOLE and hasattr(item, "_spec") for _, item in items)
        or _is_spread(grads)
    ):
        # Nothing was refused before: the call itself raises in all processes.
        return break_graph(  # type: ignore[no-any-return]
            call,
            argument,
            rule,
            nonfinite=nonfinite,
            grad_scale=grad_scale,
            state=state,
            process_group=process_group,
            copies=copies,
        )
    if isinstance(argument, Module):
        checked_parameters(argument)
    return _clip_collected(grads, names, owners, rule, nonfinite, grad_scale)


def _clip_collected(
    grads: list[Tensor],
    names: str,
    owners: Sequence[Tensor],
    rule: Rule,
    nonfinite: str,
    grad_scale: float | Tensor | None,
) -> Tensor | None:
    """Clips distinct gradients by one operator; `owners` are their parameters."""
    scale = as_grad_scale(grad_scale)
    if not grads:
        shape = 0 if rule.per_gradient else ()
        return None if rule.clamps else torch.zeros(shape, dtype=torch.float32)
    numbers, changing = _as_inputs(rule.numbers)
    constant, factor = ([], scale) if isinstance(scale, Tensor) else _as_inputs([scale])
    inputs: list[Any] = [factor]
    if rule.per_unit or changing is not None:
        inputs += [owners if rule.per_unit else None, changing]
    # In traceable code.
    text = " ".join([type(rule).__name__, *[str(number) for number in numbers]])
    # As in eager mode, gradients that have a derivative keep it.
    with torch.no_grad():
        norm: Tensor = _clip_op(
            grads, names, text, nonfinite, constant[0] if constant else 1.0, *inputs
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
        return break_graph(  # type: ignore[no-any-return]
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
    norm: Tensor = _norm_op(items, order[0] if order else 2.0, error_if_nonfinite, changing)
    return norm


def scale_to_norm_(
    eager: Callable[..., Any], parameters: object, rule: ClipByGlobalNorm, norm: Tensor
) -> None:
    """`clip_grads_with_norm_` where it is traced; `eager` as for `clip_`."""
    parameters = _read_once(parameters)
    grads, names, _ = _collect(_items(parameters))
    if _is_spread(grads):
        break_graph(eager, parameters, rule.max_norm, norm, eps=rule.eps)
    elif grads:
        if isinstance(parameters, Module):
            checked_parameters(parameters)
        numbers, changing = _as_inputs(rule.numbers)
        with torch.no_grad():
            _scale_op(grads, names, norm, numbers, changing)
