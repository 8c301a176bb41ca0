"""Custom operators that mutate a list of gradients: how a compiled graph holds a call.

Addresses and pointer tables cannot be traced. An operator finds them at run time, eagerly, with the
same checks and the same code as a call outside of a graph. So are numbers checked that change from
call to call.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonclip import rules
from tritonclip.engine import apart, execute
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.planner import plan_
from tritonclip.engine.refusals import refuse_negative, refuse_repeated
from tritonclip.engine.tensors import of_tensors
from tritonclip.rules import Rule
from tritonclip.rules.arguments import as_grad_scale, as_norm_type


def _result_dtype(grads: Sequence[Tensor]) -> torch.dtype:
    wide = any(g.dtype in (torch.float64, torch.complex128) for g in grads)
    return torch.float64 if wide else torch.float32


@torch.library.custom_op("tritonclip::clip_", mutates_args={"grads"})
def clip_op(
    grads: Sequence[Tensor],
    kind: str,
    numbers: Sequence[float],
    changing: Tensor | None,
    nonfinite: str,
    grad_scale: float,
    grad_scale_tensor: Tensor | None,
    names: str,
) -> Tensor:
    """Clips by a fixed rule; the norm, empty for a rule that clamps."""
    rule = getattr(rules, kind)(*_read(numbers, changing))
    scale = as_grad_scale(grad_scale if grad_scale_tensor is None else grad_scale_tensor)
    gradients = _gradients(grads, names)
    if rule.per_gradient:
        refuse_repeated(gradients, len(grads))
    norm = execute.clip_(gradients, rule, nonfinite, scale)
    return grads[0].new_empty(0, dtype=_result_dtype(grads)) if norm is None else norm.clone()


@clip_op.register_fake
def _(
    grads: Sequence[Tensor],
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


@torch.library.custom_op("tritonclip::clip_units_", mutates_args={"grads"})
def clip_units_op(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    kind: str,
    exempt: Sequence[bool],
    numbers: Sequence[float],
    changing: Tensor | None,
    nonfinite: str,
    grad_scale: float,
    grad_scale_tensor: Tensor | None,
    names: str,
) -> Tensor:
    """Clips by a rule by unit; the norm of each gradient."""
    exclude = [weight for weight, free in zip(weights, exempt, strict=True) if free]
    rule = getattr(rules, kind)(*_read(numbers, changing), exclude=exclude)
    scale = as_grad_scale(grad_scale if grad_scale_tensor is None else grad_scale_tensor)
    gradients = _gradients(grads, names).beside(list(weights))
    refuse_repeated(gradients, len(grads))
    norm = execute.clip_(gradients, rule, nonfinite, scale)
    assert norm is not None
    return norm.clone()


@clip_units_op.register_fake
def _(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    kind: str,
    exempt: Sequence[bool],
    numbers: Sequence[float],
    changing: Tensor | None,
    nonfinite: str,
    grad_scale: float,
    grad_scale_tensor: Tensor | None,
    names: str,
) -> Tensor:
    return grads[0].new_empty((len(grads),), dtype=_result_dtype(grads))


@torch.library.custom_op("tritonclip::total_norm", mutates_args=())
def norm_op(
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    changing: Tensor | None,
    error_if_nonfinite: bool,
) -> Tensor:
    """The norm of all tensors; the only number is its order."""
    gradients = plan_(of_tensors(list(tensors)))
    norm_type = as_norm_type(*_read(numbers, changing))
    return apart.total_norm(gradients, norm_type, error_if_nonfinite).clone()


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
    apart.scale_(_gradients(grads, names), rule, total_norm)


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


def _gradients(grads: Sequence[Tensor], names: str) -> Gradients:
    """The gradient list inside an operator."""
    label_of = names.split("\n").__getitem__ if names else "gradients[{}]".format
    return plan_(of_tensors(list(grads), label_of))
