"""How torch.compile sees a call: custom operators that mutate a list of gradients.

Addresses and pointer tables cannot be traced, so a traced call only collects the gradients; the
operator does the rest at run time, eagerly, with the same checks and the same code. Nothing of this
is used outside a compiled region.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Module

from tritonclip import apply
from tritonclip.gradient_list import GradientList
from tritonclip.gradients import of_tensors
from tritonclip.rules import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    Rule,
    as_grad_scale,
)

_KINDS: dict[str, type[ClipByGlobalNorm] | type[ClipByNorm] | type[ClipByValue]] = {
    "global_norm": ClipByGlobalNorm,
    "norm": ClipByNorm,
    "value": ClipByValue,
}


def _collect(parameters: object) -> tuple[list[Tensor], str]:
    """Gradients, each once, and their names line by line ("" without any), in traceable code."""
    if isinstance(parameters, Tensor):
        items = [("", parameters)]
    elif isinstance(parameters, Module):
        items = list(parameters.named_parameters())
    else:
        items = [p if isinstance(p, tuple) else ("", p) for p in parameters]  # type: ignore[attr-defined]
    grads: list[Tensor] = []
    names: list[str] = []
    for name, parameter in items:
        grad = parameter.grad
        if (
            grad is not None
            and getattr(parameter, "need_clip", True)
            and all(grad is not g for g in grads)
        ):
            grads.append(grad)
            names.append(name)
    return grads, "\n".join(names) if any(names) else ""


def clip_(
    parameters: object, rule: Rule, nonfinite: str, grad_scale: float | Tensor
) -> Tensor | None:
    """`clip_` in a compiled region."""
    grads, names = _collect(parameters)
    if isinstance(rule, ClipByValue):
        kind, numbers = "value", [rule.min, rule.max]
    else:
        kind = "norm" if isinstance(rule, ClipByNorm) else "global_norm"
        numbers = [rule.max_norm, rule.norm_type, rule.eps]
    if not grads:
        shape = 0 if kind == "norm" else ()
        return None if kind == "value" else torch.zeros(shape)
    scale = grad_scale if isinstance(grad_scale, Tensor) else None
    number = 1.0 if isinstance(grad_scale, Tensor) else grad_scale
    norm = _clip_op(grads, kind, numbers, nonfinite, number, scale, names)
    return None if kind == "value" else norm


def total_norm(tensors: object, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """`get_total_norm` in a compiled region."""
    items = [tensors] if isinstance(tensors, Tensor) else list(tensors)  # type: ignore[call-overload]
    return _norm_op(items, norm_type, error_if_nonfinite) if items else torch.zeros(())


def scale_to_norm_(parameters: object, max_norm: float, norm: Tensor) -> None:
    """`clip_grads_with_norm_` in a compiled region."""
    grads, names = _collect(parameters)
    if grads:
        _scale_op(grads, max_norm, norm, names)


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
    rule = _KINDS[kind](*numbers)
    scale = as_grad_scale(grad_scale if grad_scale_tensor is None else grad_scale_tensor)
    norm = apply.clip_(_found(grads, names), rule, nonfinite, scale)
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
    shape = {"global_norm": (), "norm": (len(grads),), "value": (0,)}[kind]
    return grads[0].new_empty(shape, dtype=_result_dtype(grads))


@torch.library.custom_op("tritonclip::total_norm", mutates_args=())
def _norm_op(tensors: Sequence[Tensor], norm_type: float, error_if_nonfinite: bool) -> Tensor:
    return apply.total_norm(of_tensors(list(tensors)), norm_type, error_if_nonfinite).clone()


@_norm_op.register_fake
def _(tensors: Sequence[Tensor], norm_type: float, error_if_nonfinite: bool) -> Tensor:
    return tensors[0].new_empty((), dtype=_result_dtype(tensors))


@torch.library.custom_op("tritonclip::scale_to_norm_", mutates_args={"grads"})
def _scale_op(grads: Sequence[Tensor], max_norm: float, total_norm: Tensor, names: str) -> None:
    apply.scale_(_found(grads, names), max_norm, total_norm)


@_scale_op.register_fake
def _(grads: Sequence[Tensor], max_norm: float, total_norm: Tensor, names: str) -> None:
    return None


def _found(grads: Sequence[Tensor], names: str) -> GradientList:
    """The gradient list inside an operator."""
    label_of = names.split("\n").__getitem__ if names else "gradients[{}]".format
    return of_tensors(list(grads), label_of)
