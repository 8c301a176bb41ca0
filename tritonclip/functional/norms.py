"""Norms as fast as those of the in-place calls: by the engine, where tensors can be read.

Their derivative is a registered formula. Tensors inside torch.func, forward-mode derivatives and
compiled graphs take the formulas in PyTorch operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tritonclip.backends import choose
from tritonclip.backends.operators import PIECE, wide_dtype
from tritonclip.engine import execute
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.memory import OverlapError
from tritonclip.functional import formulas
from tritonclip.tracing import is_traced

_get_requires_grad = attrgetter("requires_grad")


def is_readable(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors have memory to read now; says once where kernels would have served them."""
    if is_traced():
        return False
    transformed = torch._C._are_functorch_transforms_active()
    if not transformed and forward_ad._current_level < 0:
        return True
    for device, dtype in {(x.device, x.dtype) for x in tensors}:
        choose.warn_without_kernels(device, dtype, "inside torch.func and forward-mode derivatives")
    return False


def needs_grad(tensors: Sequence[Tensor]) -> bool:
    """Whether autograd records operations on these tensors."""
    return torch.is_grad_enabled() and True in map(_get_requires_grad, tensors)


def norm_of_all(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all tensors, 0-d in the wide dtype on the first one's device."""
    if not is_readable(tensors):
        return formulas.norm_of_all(tensors, 2.0, formulas.result_dtype(tensors))
    if not needs_grad(tensors):
        return _total(tensors)
    norm: Tensor = _Norm.apply(False, *tensors)  # type: ignore[no-untyped-call]
    return norm


def norms_of_each(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of each tensor, 1-d in the wide dtype on the first one's device."""
    if not is_readable(tensors) or (norm_type != 2 and needs_grad(tensors)):
        device, dtype = tensors[0].device, formulas.result_dtype(tensors)
        norms = torch.stack([formulas.norm_of(x, norm_type).to(device) for x in tensors])
        return formulas.within(norms, dtype)
    if needs_grad(tensors):
        each: Tensor = _Norm.apply(True, *tensors)  # type: ignore[no-untyped-call]
        return each
    return _each(tensors, norm_type)


def norms_over(x: Tensor, norm_type: float, dim: tuple[int, ...]) -> Tensor:
    """The norm over some dimensions, whose sizes become 1, in the wide dtype."""
    others = [d for d in range(x.dim()) if d not in dim]
    if (
        not is_readable([x])
        or needs_grad([x])
        or not choose.host_decides(x.device)
        or x.numel() <= PIECE
        or not others
    ):
        return formulas.norm_of(x, norm_type, dim)
    # Temporaries in float64 stay in cache.
    along = max(others, key=lambda d: x.shape[d])
    size = max(1, PIECE * x.shape[along] // x.numel())
    pieces = x.detach().split(size, along)
    return torch.cat([formulas.norm_of(piece, norm_type, dim) for piece in pieces], along)


class _Norm(torch.autograd.Function):
    """2-norms by the engine: of all tensors, or of each."""

    @staticmethod
    def forward(each: bool, *tensors: Tensor) -> Tensor:
        return _each(tensors, 2.0) if each else _total(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.each, *tensors = inputs
        ctx.save_for_backward(output, *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        norm, *tensors = ctx.saved_tensors
        slopes: list[Tensor | None] = [None]
        for i, tensor in enumerate(tensors):
            own = (norm[i], grad[i]) if ctx.each else (norm, grad)
            wanted = ctx.needs_input_grad[1 + i]
            slopes.append(formulas.slope_of(tensor, *own) if wanted else None)
        return tuple(slopes)


def _total(tensors: Sequence[Tensor]) -> Tensor:
    norm = execute.total_norm(_planned(tensors), 2.0)
    return norm.to(wide_dtype(norm.device))


def _each(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    norms = execute.total_norm(_planned(tensors), norm_type, per_gradient=True)
    return norms.to(wide_dtype(norms.device))


def _planned(tensors: Sequence[Tensor]) -> Gradients:
    """A gradient list of these tensors, each of which counts: copies where some share memory."""
    device = tensors[0].device if tensors else torch.device("cpu")
    try:
        gradients = Gradients(list(tensors), device, "tensors[{}]".format)
    except OverlapError:
        gradients = None
    if gradients is None or gradients.distinct is not None:
        copies = [x.detach().clone(memory_format=torch.contiguous_format) for x in tensors]
        gradients = Gradients(copies, device, "tensors[{}]".format)
    return gradients
