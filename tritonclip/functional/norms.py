"""Norms out of place: by the engine, where tensors have memory to read.

Derivatives are registered formulas. Tensors inside torch.func, forward-mode derivatives and
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
from tritonclip.backends.units import unit_norms
from tritonclip.engine import execute, units, verify
from tritonclip.engine.arguments import device_of
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.memory import OverlapError
from tritonclip.engine.plan import result_dtype
from tritonclip.functional import c_loops, formulas
from tritonclip.modes import is_jit_traced, is_traced

_get_requires_grad = attrgetter("requires_grad")


def is_readable(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors have memory to read now; says once where kernels would have served them."""
    if is_traced() or is_jit_traced():
        return False
    transformed = torch._C._are_functorch_transforms_active()
    if not transformed and forward_ad._current_level < 0:
        return True
    for device in {x.device for x in tensors}:
        # For its warning, or its error.
        choose.backend_name(device)
    return False


def needs_grad(tensors: Sequence[Tensor]) -> bool:
    """Whether autograd records operations on these tensors."""
    return torch.is_grad_enabled() and True in map(_get_requires_grad, tensors)


def norm_of_all(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all tensors, 0-d in the wide dtype on the first one's device; 0 of none."""
    if not tensors:
        return torch.zeros(())
    if not is_readable(tensors):
        return formulas.norm_of_all(tensors, 2.0, result_dtype(tensors))
    if not needs_grad(tensors):
        return _total(tensors)
    norm: Tensor = _Norm.apply(False, *tensors)  # type: ignore[no-untyped-call]
    return norm


def norms_of_each(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of each tensor, 1-d in the wide dtype on the first one's device."""
    if not is_readable(tensors) or (norm_type != 2 and needs_grad(tensors)):
        device, dtype = tensors[0].device, result_dtype(tensors)
        norms = torch.stack([formulas.norm_of(x, norm_type).to(device) for x in tensors])
        return formulas.within(norms, dtype)
    if needs_grad(tensors):
        each: Tensor = _Norm.apply(True, *tensors)  # type: ignore[no-untyped-call]
        return each
    return _each(tensors, norm_type)


def norms_of_rows(rows: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each row of each matrix, 1-d in the wide dtype, without derivatives."""
    dense = [i for i, x in enumerate(rows) if x.numel() and x.is_contiguous()]
    norms: dict[int, Tensor] = {}
    if dense:
        gradients = _planned([rows[i] for i in dense] if len(dense) < len(rows) else rows)
        found = units.norms_by_unit(gradients)
        if gradients.plan is not None and gradients.plan.verifying:
            verify.Reference(gradients).check_units(found)
        norms.update(zip(dense, found, strict=True))
    for i in set(range(len(rows))).difference(norms):
        x = rows[i]
        if x.numel():
            norms[i] = unit_norms(x)
        else:
            norms[i] = torch.zeros(len(x), dtype=wide_dtype(x.device), device=x.device)
    return [norms[i] for i in range(len(rows))]


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


# Without `setup_context`, which torch.func alone needs, a call of a function takes 8 us less.
class _Norm(torch.autograd.Function):
    """2-norms by the engine: of all tensors, or of each."""

    @staticmethod
    def forward(ctx: Any, each: bool, *tensors: Tensor) -> Tensor:
        norm = _each(tensors, 2.0) if each else _total(tensors)
        ctx.save_for_backward(norm, *tensors)
        return norm

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        norm, *tensors = ctx.saved_tensors
        slopes = _slopes_c_loops(tensors, norm, grad)
        if slopes is None:
            n = 1 if norm.dim() else len(tensors)
            numbers_of = ([*v.reshape(-1).unbind()] * n for v in (norm, grad))
            slopes = [
                formulas.slope_of(*arguments)
                for arguments in zip(tensors, *numbers_of, strict=True)
            ]
        wanted = ctx.needs_input_grad[1:]
        return (None, *[s if w else None for s, w in zip(slopes, wanted, strict=True)])


def _slopes_c_loops(tensors: list[Tensor], norm: Tensor, grad: Tensor) -> list[Tensor] | None:
    """The derivatives of norms; None where loops cannot serve, or these are differentiated."""
    if torch.is_grad_enabled() or not choose.host_decides(norm.device):
        return None
    try:
        numbers = zip(norm.reshape(-1).tolist(), grad.reshape(-1).tolist(), strict=True)
    except RuntimeError:
        # Of several derivatives at once, which have no numbers.
        return None
    factors = [slope / n if n else 0.0 for n, slope in numbers]
    if not c_loops.are_moderate(factors):
        return None
    slopes: list[Tensor] | None = c_loops.scaled(tensors, factors if norm.dim() else factors[0])
    return slopes


def _total(tensors: Sequence[Tensor]) -> Tensor:
    norm = c_loops.norm_of(list(tensors))
    if norm is None:
        norm = execute.total_norm(_planned(tensors), 2.0)
    return norm.to(wide_dtype(norm.device))


def _each(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    numbers = c_loops.norms_of(list(tensors), norm_type)
    if numbers is not None:
        dtype = result_dtype(tensors)
        return torch.tensor(numbers, dtype=dtype, device="cpu").to(torch.float64)
    norms = execute.total_norm(_planned(tensors), norm_type, per_gradient=True)
    return norms.to(wide_dtype(norms.device))


def _planned(tensors: Sequence[Tensor]) -> Gradients:
    """A gradient list of these tensors; of copies where some share memory, so that each counts."""
    try:
        gradients = list_of(tensors)
    except OverlapError:
        gradients = None
    if gradients is None or gradients.distinct is not None:
        copies = [x.detach().clone(memory_format=torch.contiguous_format) for x in tensors]
        gradients = list_of(copies)
    return gradients


def list_of(tensors: Sequence[Tensor]) -> Gradients:
    """A gradient list of these tensors; raises as :class:`Gradients`."""
    return Gradients(list(tensors), device_of(tensors), "tensors[{}]".format)
