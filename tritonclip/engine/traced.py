"""Calls that are traced: they collect the gradients, and one custom operator does the rest.

Addresses and pointer tables cannot be traced. An operator finds them at run time, eagerly, with the
same checks and the same code as a call outside of a graph, and checks numbers that change from call
to call.

Operators take no DTensors, no process groups and no state: lists over several processes and limits
that change break the graph of torch.compile, see `graph_break.py`, and are refused by others.
"""

from collections.abc import Callable, Sequence, Sized
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from tritonclip import rules
from tritonclip.engine import execute
from tritonclip.engine.arguments import (
    LabelOf,
    check_marks,
    needs_clip,
    refuse_parameters,
    tensors_in,
)
from tritonclip.engine.checks import refuse_negative, refuse_other_model, refuse_repeated
from tritonclip.engine.gradients import Gradients
from tritonclip.modes import WHOLE
from tritonclip.rules import ClipByGlobalNorm, Rule
from tritonclip.rules.arguments import as_grad_scale, as_norm_type


class _Call(NamedTuple):
    """What is constant about a call in a graph.

    Attributes:
        kind: the class of the rule.
        numbers: the arguments of its constructor; none where they are an input of the graph.
        rule: made of them, or None.
        nonfinite: the policy.
        grad_scale: the loss scale, unless it is an input.
        exempt: whether the rule leaves out each of the weights.
        label_of: names the i-th gradient in messages.
    """

    kind: type[Rule]
    numbers: Sequence[float]
    rule: Rule | None
    nonfinite: str
    grad_scale: float
    exempt: Sequence[bool]
    label_of: LabelOf


def _write_call(
    rule: Rule,
    numbers: Sequence[float],
    names: str,
    nonfinite: str = "propagate",
    grad_scale: float = 1.0,
    exempt: Sequence[bool] = (),
) -> str:
    """The constants as one text: each argument of an operator takes time. In traceable code."""
    own = " ".join([str(number) for number in numbers])
    free = "".join(["1" if one else "0" for one in exempt])
    return "\n".join([type(rule).__name__, own, nonfinite, str(grad_scale), free, names])


def _is_written(rule: Rule) -> bool:
    """Whether `_read_call` finds a rule again: not one that changes, or of a user's class."""
    return rule.fixed and getattr(rules, type(rule).__name__, None) is type(rule)


@lru_cache(maxsize=64)
def _read_call(text: str) -> _Call:
    name, own, nonfinite, grad_scale, free, names = text.split("\n", 5)
    kind: type[Rule] = getattr(rules, name)
    numbers = [float(number) for number in own.split()]
    rule = kind(*numbers) if numbers else None
    exempt = [digit == "1" for digit in free]
    return _Call(kind, numbers, rule, nonfinite, float(grad_scale), exempt, _label_of(names))


def _label_of(names: str) -> LabelOf:
    return names.split("\n").__getitem__ if names else "gradients[{}]".format


def _rule_of(call: _Call, numbers: Tensor | None, weights: Sequence[Tensor] = ()) -> Rule:
    """The rule, with numbers and weights that are inputs of the graph."""
    if call.rule is not None and not weights:
        return call.rule
    own = call.numbers if numbers is None else numbers.tolist()
    free = [weight for weight, one in zip(weights, call.exempt, strict=True) if one]
    return call.kind(*own, **({"exclude": free} if weights else {}))


def _clip(
    grads: list[Tensor],
    text: str,
    weights: Sequence[Tensor] = (),
    grad_scale: Tensor | None = None,
    numbers: Tensor | None = None,
) -> Tensor:
    """Clips by a fixed rule; returns the norm, empty for a rule that clamps.

    A rule by unit, or with `exclude`, has the weights of all gradients.
    """
    call = _read_call(text)
    rule = _rule_of(call, numbers, weights)
    scale = call.grad_scale if grad_scale is None else as_grad_scale(grad_scale)
    gradients = Gradients(grads, grads[0].device, call.label_of)
    if weights:
        gradients = gradients.with_parameters(weights)
    if rule.per_gradient:
        refuse_repeated(gradients, len(grads))
    norm = execute.clip_(gradients, rule, call.nonfinite, scale)
    return grads[0].new_empty(0) if norm is None else norm


def _simulate_clip(grads: Sequence[Tensor], text: str, *_: object) -> Tensor:
    kind = _read_call(text).kind
    if kind.clamps:
        return grads[0].new_empty(0)
    shape = (len(grads),) if kind.per_gradient else ()
    return grads[0].new_empty(shape, dtype=_result_dtype(grads))


def _norm(
    tensors: list[Tensor], norm_type: float, raises: bool = False, order: Tensor | None = None
) -> Tensor:
    """The norm of all tensors; an order that changes is in a tensor."""
    if order is not None:
        norm_type = as_norm_type("norm_type", order.item())
    gradients = Gradients(tensors, tensors[0].device, "tensors[{}]".format)
    return execute.total_norm(gradients, norm_type, raises)


def _simulate_norm(tensors: Sequence[Tensor], *_: object) -> Tensor:
    return tensors[0].new_empty((), dtype=_result_dtype(tensors))


def _scale(
    grads: list[Tensor], text: str, total_norm: Tensor, numbers: Tensor | None = None
) -> None:
    """Scales by a norm that was measured before."""
    refuse_negative("total_norm", total_norm)
    call = _read_call(text)
    gradients = Gradients(grads, grads[0].device, call.label_of)
    execute.scale_(gradients, _rule_of(call, numbers), total_norm)


def _simulate_scale(*_: object) -> None:
    return None


def _result_dtype(grads: Sequence[Tensor]) -> torch.dtype:
    wide = any(g.dtype in (torch.float64, torch.complex128) for g in grads)
    return torch.float64 if wide else torch.float32


_LIBRARY = torch.library.Library("tritonclip", "FRAGMENT")


def _operator(
    name: str, schema: str, run: Callable[..., Any], simulate: Callable[..., Any], *tags: torch.Tag
) -> Any:
    """Registers an operator.

    `torch.library.custom_op` would wrap it in layers of Python that take longer than a small list.
    Two of them are not needed: no operator has a derivative, and each counts versions where it
    writes.
    """
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    for key in ("Autograd", "ADInplaceOrView"):
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, key)
    torch.library.register_fake(f"tritonclip::{name}", simulate, lib=_LIBRARY)
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.tritonclip, packet), overload or "default")


# A graph calls the overload with the fewest arguments. No CUDA graph captures those by which the
# host reads a value.
_READS = torch.Tag.cudagraph_unsafe
_INPUTS = "(Tensor(a!)[] grads, str call, Tensor[] weights, Tensor? grad_scale"
_clip_op = _operator("clip_", "(Tensor(a!)[] grads, str call) -> Tensor", _clip, _simulate_clip)
_clip_inputs = _operator("clip_.inputs", f"{_INPUTS}) -> Tensor", _clip, _simulate_clip)
_clip_reads = _operator(
    "clip_.reads", f"{_INPUTS}, Tensor? numbers) -> Tensor", _clip, _simulate_clip, _READS
)
_norm_op = _operator(
    "total_norm", "(Tensor[] tensors, float norm_type) -> Tensor", _norm, _simulate_norm
)
_norm_reads = _operator(
    "total_norm.reads",
    "(Tensor[] tensors, float norm_type, bool raises, Tensor? order) -> Tensor",
    _norm,
    _simulate_norm,
    _READS,
)
_scale_op = _operator(
    "scale_to_norm_",
    "(Tensor(a!)[] grads, str call, Tensor total_norm) -> ()",
    _scale,
    _simulate_scale,
)
_scale_reads = _operator(
    "scale_to_norm_.reads",
    "(Tensor(a!)[] grads, str call, Tensor total_norm, Tensor? numbers) -> ()",
    _scale,
    _simulate_scale,
    _READS,
)


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


def _collect_tensors(tensors: object) -> tuple[list[Tensor], str]:
    """Tensors that are gradients themselves, each once, and their names; in traceable code."""
    items, label_of = tensors_in(tensors, "tensors[{}]".format)
    refuse_parameters(items, label_of)
    grads: list[Tensor] = []
    names: list[str] = []
    known: set[Tensor] = set()
    for index, tensor in enumerate(items):
        if tensor not in known:
            known.add(tensor)
            grads.append(tensor)
            names.append(label_of(index))
    return grads, "\n".join(names)


def _read_once(parameters: object) -> Any:
    """The argument, so that it can be read twice."""
    # FlatGradients have a size, as lists do; iterators have none.
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


def _is_on_host(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.device.type == "cpu"


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
    items: list[tuple[str, Tensor]] = []
    owners: Sequence[Tensor] = ()
    spread = False
    if are_gradients:
        grads, names = _collect_tensors(argument)
    else:
        items = _items(argument)
        grads, names, owners = _collect(items)
        # Processes that have gradients of a DTensor wait for one that has none. No guard looks for
        # the attribute of plain parameters, whose class is guarded anyway.
        spread = any(type(p) not in WHOLE and hasattr(p, "_spec") for _, p in items)
    if (
        (state is not None or process_group is not None or copies is not None)
        or not _is_written(rule)
        or spread
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
        check_marks(argument)
    if rule.excludes:
        # Of FlatGradients.
        left_out = getattr(argument, "left_out", ())
        refuse_other_model(rule, [*(parameter for _, parameter in items), *left_out])
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
    weights: Sequence[Tensor] = ()
    exempt: Sequence[bool] = ()
    if rule.per_unit or rule.excludes:
        weights, exempt = owners, rule.exempt(owners)
    number = constant[0] if constant else 1.0
    call = _write_call(rule, numbers, names, nonfinite, number, exempt)
    norm: Tensor
    # As in eager mode, gradients that have a derivative keep it.
    with torch.no_grad():
        if nonfinite == "error" or rule.spectral or changing is not None or _is_on_host(factor):
            norm = _clip_reads(grads, call, weights, factor, changing)
        elif weights or factor is not None:
            norm = _clip_inputs(grads, call, weights, factor)
        else:
            norm = _clip_op(grads, call)
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
    norm: Tensor
    if error_if_nonfinite or changing is not None:
        norm = _norm_reads(items, order[0] if order else 2.0, error_if_nonfinite, changing)
    else:
        norm = _norm_op(items, order[0])
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
            check_marks(parameters)
        numbers, changing = _as_inputs(rule.numbers)
        call = _write_call(rule, numbers, names)
        with torch.no_grad():
            if changing is not None or _is_on_host(norm):
                _scale_reads(grads, call, norm, changing)
            else:
                _scale_op(grads, call, norm)
