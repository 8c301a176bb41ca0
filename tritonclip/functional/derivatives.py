"""Clipping by 2-norms as one function of autograd, by limits that are numbers.

Composed of norms, coefficients and products, a clip of one small tensor takes 80 operators forward
and backward. Here backward takes two calls into the C loops, or the formulas in PyTorch operators
where these are differentiated again, and off the CPU.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from ctypes import c_double, c_float
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tritonclip.engine.plan import result_dtype
from tritonclip.functional import c_loops, formulas
from tritonclip.functional.coefficients import coefficients_of
from tritonclip.functional.norms import is_readable, needs_grad, norm_of_all, norms_of_each
from tritonclip.functional.products import scaled


def are_recorded(tensors: Sequence[Tensor], limits: Sequence[object]) -> bool:
    """Whether a clip has derivatives in its tensors, and its limits are numbers."""
    are_numbers = all(type(limit) is float for limit in limits)
    return are_numbers and is_readable(tensors) and needs_grad(tensors)


def clip(
    tensors: Sequence[Tensor], limits: Sequence[Any], name: str, *, each: bool
) -> tuple[list[Tensor], Tensor]:
    """Tensors clipped by the norm of all, or each by its own; and the norms in the wide dtype."""
    *clipped, norms = _Clip.apply(limits, name, each, *tensors)  # type: ignore[no-untyped-call]
    return clipped, norms


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, limits: Sequence[float], name: str, each: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        dtype = result_dtype(tensors)
        clipped, norms = _clipped(list(tensors), limits, dtype, name, each=each)
        rounded = c_double if dtype == torch.float64 else c_float
        numbers = [rounded(limit).value for limit in limits]
        ctx.limits, ctx.each = numbers * (norms.numel() if len(numbers) == 1 else 1), each
        ctx.save_for_backward(norms, *tensors)
        ctx.set_materialize_grads(False)
        return (*clipped, norms)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *of_clipped, of_norms = grads
        norms, *tensors = ctx.saved_tensors
        whole = [
            torch.zeros_like(x) if g is None else g
            for x, g in zip(tensors, of_clipped, strict=True)
        ]
        slopes = _slopes_by_loops(tensors, whole, norms, of_norms, ctx.limits, each=ctx.each)
        if slopes is None:
            slopes = _slopes_by_formulas(tensors, whole, norms, of_norms, ctx.limits, each=ctx.each)
        wanted = ctx.needs_input_grad[3:]
        return (None, None, None, *[s if w else None for s, w in zip(slopes, wanted, strict=True)])


def _clipped(
    tensors: list[Tensor], limits: Sequence[float], dtype: torch.dtype, name: str, *, each: bool
) -> tuple[list[Tensor], Tensor]:
    """As `clip`, where autograd records nothing."""
    if each:
        found = c_loops.clipped_each(tensors, limits[0] if len(limits) == 1 else list(limits))
        if found is not None:
            code = "d" if dtype == torch.float64 else "f"
            return found[0], torch.frombuffer(array(code, found[1]), dtype=dtype).double()
    else:
        made = c_loops.clipped(tensors, limits[0])
        if made is not None:
            return made[0], made[1].double()
    norms = norms_of_each(tensors, 2.0) if each else norm_of_all(tensors)
    return scaled(tensors, coefficients_of(norms, limits, dtype, name)), norms


def _slopes_by_loops(
    tensors: list[Tensor],
    grads: list[Tensor],
    norms: Tensor,
    of_norms: Tensor | None,
    limits: Sequence[float],
    *,
    each: bool,
) -> list[Tensor] | None:
    """The derivatives in plain tensors; None for others, and where they are differentiated."""
    if torch.is_grad_enabled() or norms.device.type != "cpu" or not c_loops.serve():
        return None
    numbers = norms.tolist() if each else [norms.item()]
    try:
        outer = [0.0] * len(numbers) if of_norms is None else of_norms.reshape(-1).tolist()
    except RuntimeError:
        # Of several derivatives at once, which have no numbers.
        return None
    found = [_coefficient(*pair) for pair in zip(numbers, limits, strict=True)]
    coefficients = [coefficient for coefficient, _ in found]
    if not any(outer) and all(pair == (1.0, 0.0) for pair in found):
        return grads
    grads = [g if g.is_contiguous() else g.contiguous() for g in grads]
    products = c_loops.dots(tensors, grads)
    if products is None:
        return None
    factors = [
        (slope * product + term) / norm if norm else 0.0
        for norm, (_, slope), product, term in zip(
            numbers, found, products if each else [sum(products)], outer, strict=True
        )
    ]
    if not c_loops.are_moderate([*coefficients, *factors]):
        return None
    if each:
        return c_loops.combined(tensors, grads, factors, coefficients)
    return c_loops.combined(tensors, grads, factors[0], coefficients[0])


def _coefficient(norm: float, limit: float) -> tuple[float, float]:
    """The coefficient of a norm, as `formulas.coefficient_of`, and its derivative in the norm."""
    if norm < limit or norm == limit == math.inf:
        return 1.0, 0.0
    if norm == 0:
        return 0.0, 0.0
    ratio = limit / norm
    return ratio, -ratio / norm / (2 if norm == limit else 1)


def _slopes_by_formulas(
    tensors: list[Tensor],
    grads: list[Tensor],
    norms: Tensor,
    of_norms: Tensor | None,
    limits: Sequence[float],
    *,
    each: bool,
) -> list[Tensor]:
    """The derivatives by operators of PyTorch, which can be differentiated."""
    # Filled in on the device: a copy to it could not be captured in a graph.
    fill = partial(torch.full, dtype=norms.dtype, device=norms.device)
    limit = fill(norms.shape, limits[0])
    if len(set(limits)) > 1:
        limit = torch.stack([fill((), number) for number in limits])
    coefficients = formulas.coefficient_of(norms, limit)
    products = [
        formulas.inner_product(x, g).to(norms.device) for x, g in zip(tensors, grads, strict=True)
    ]
    inner = torch.stack(products) if each else torch.stack(products).sum()
    slopes = formulas.slope_of_coefficient(norms, limit)
    # Of elements that are inf, a product may be NaN that does not count.
    totals = slopes * torch.where(slopes == 0, 0.0, inner)
    if of_norms is not None:
        totals = totals + of_norms
    n = 1 if each else len(tensors)
    each_of = ([*v.reshape(-1).unbind()] * n for v in (norms, totals, coefficients))
    return [
        formulas.product_of(g, coefficient) + formulas.slope_of(x, norm, total)
        for x, g, norm, total, coefficient in zip(tensors, grads, *each_of, strict=True)
    ]
