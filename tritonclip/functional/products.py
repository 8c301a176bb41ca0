"""Products of tensors and coefficients, in new memory; derivatives as for norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonclip.backends import choose
from tritonclip.backends.interface import arithmetic_of
from tritonclip.backends.operators import wide_dtype
from tritonclip.engine import execute
from tritonclip.functional import c_loops, formulas
from tritonclip.functional.norms import is_readable, list_of, needs_grad
from tritonclip.rules import Rule

# The factor of one tensor: a number if the host knows it.
Coefficient = float | Tensor


def scaled(tensors: Sequence[Tensor], coefficients: Sequence[Coefficient]) -> list[Tensor]:
    """New tensors, each times its coefficient, or all times one.

    A coefficient is a number, or in a wide dtype, 0-d or of as many dimensions as the tensor.
    """
    numbers = [c for c in coefficients if not isinstance(c, Tensor)]
    if len(numbers) == len(coefficients):
        products = c_loops.scaled(list(tensors), numbers[0] if len(numbers) == 1 else numbers)
        if products is not None:
            return products  # type: ignore[no-any-return]
    if any(dtype.is_complex for dtype in {x.dtype for x in tensors}):
        return _scaled_pairs(tensors, coefficients)
    if is_readable(tensors) and not needs_grad(tensors):
        (c, *others) = coefficients
        if not others and isinstance(c, Tensor) and c.dim() == 0 and not needs_grad([c]):
            return _products_of_all(tensors, c)
    factors = list(coefficients) * (len(tensors) if len(coefficients) == 1 else 1)
    return [_scaled_one(x, c) for x, c in zip(tensors, factors, strict=True)]


def _scaled_pairs(tensors: Sequence[Tensor], coefficients: Sequence[Coefficient]) -> list[Tensor]:
    """As `scaled`, with complex tensors among the others."""
    pairs = list(map(formulas.real_of, tensors))
    if len(coefficients) == len(tensors):
        coefficients = [
            c.unsqueeze(-1) if x.is_complex() and isinstance(c, Tensor) and c.dim() else c
            for c, x in zip(coefficients, tensors, strict=True)
        ]
    return [
        torch.view_as_complex(product) if x.is_complex() else product
        for product, x in zip(scaled(pairs, coefficients), tensors, strict=True)
    ]


def _scaled_one(x: Tensor, coefficient: Coefficient) -> Tensor:
    if not isinstance(coefficient, Tensor):
        # torch multiplies half types by a number in float32.
        return x * coefficient
    if not is_readable([x]):
        return formulas.product_of(x, coefficient)
    if needs_grad([x, coefficient]):
        product: Tensor = _Product.apply(x, coefficient)  # type: ignore[no-untyped-call]
        return product
    return _product(x, coefficient)


class _Product(torch.autograd.Function):
    """Keeps a tensor for backward, and no float64 copy of it, as the formula would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, coefficient: Tensor) -> Tensor:
        ctx.save_for_backward(x, coefficient)
        return _product(x, coefficient)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, coefficient = ctx.saved_tensors
        of_x, of_coefficient = None, None
        if ctx.needs_input_grad[0]:
            # By operators that torch can batch, as for is_grads_batched=True.
            of_x = formulas.product_of(grad, coefficient)
        if ctx.needs_input_grad[1]:
            wide = wide_dtype(x.device)
            total = (grad.to(wide) * x.to(wide)).sum_to_size(coefficient.shape)
            of_coefficient = total.to(coefficient.device)
        return of_x, of_coefficient


def _product(x: Tensor, coefficient: Tensor) -> Tensor:
    """As `formulas.product_of`, in the narrowest dtype that gives its bits."""
    narrow = arithmetic_of(x.dtype)
    factor = coefficient.to(x.device, narrow)
    if x.dim():
        # A 0-d factor would be rounded to a half type first.
        factor = factor.reshape(factor.shape or (1,))
        return torch.mul(x, factor, out=torch.empty_like(x))
    return (x.to(narrow) * factor).to(x.dtype)


def _products_of_all(tensors: Sequence[Tensor], coefficient: Tensor) -> list[Tensor]:
    """Products with one coefficient on the device, in few calls."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, x in enumerate(tensors):
        groups.setdefault((x.device, x.dtype), []).append(index)
    products: dict[int, Tensor] = {}
    for (device, dtype), indices in groups.items():
        group = [tensors[i] for i in indices]
        factor = coefficient.to(device, arithmetic_of(dtype))
        if dtype == factor.dtype and not any(map(Tensor.is_neg, group)):
            made: Sequence[Tensor] = torch._foreach_mul(group, factor)
        elif choose.backend_name(device) != "triton":
            made = [_product(x, factor) for x in group]
        else:
            # Foreach rounds a factor to a half type first; kernels, which scale in place, do not.
            made = [torch.empty_like(x) for x in group]
            torch._foreach_copy_(made, [x.resolve_neg() for x in group])
            execute.scale_(list_of(made), _FixedCoefficient(factor), torch.ones_like(factor))
        products.update(zip(indices, made, strict=True))
    return [products[i] for i in range(len(tensors))]


class _FixedCoefficient(Rule):
    """A rule that scales by a given coefficient, as if the norm were 1."""

    norm_type = float("inf")
    eps = 0.0

    def __init__(self, coefficient: Tensor) -> None:
        self._coefficient = coefficient

    def limit(self, norm: object) -> Tensor:
        """The coefficient itself."""
        return self._coefficient
