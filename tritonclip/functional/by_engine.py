"""Out-of-place clipping by the engine, where tensors have memory to read.

Two parts: norms, and products of tensors and coefficients. Derivatives are registered formulas.
Tensors inside torch.func, forward-mode derivatives and compiled graphs take the formulas in PyTorch
operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_double, c_float
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tritonclip.backends import choose
from tritonclip.backends.operators import ARITHMETIC, PIECE, wide_dtype
from tritonclip.backends.units import unit_norms
from tritonclip.engine import execute, units, verify
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.memory import OverlapError
from tritonclip.functional import by_loops, formulas
from tritonclip.functional.formulas import coefficient_of
from tritonclip.modes import is_jit_traced, is_traced
from tritonclip.rules import Rule
from tritonclip.rules.arguments import as_limit

_get_requires_grad = attrgetter("requires_grad")


def is_readable(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors have memory to read now; says once where kernels would have served them."""
    if is_traced() or is_jit_traced():
        return False
    transformed = torch._C._are_functorch_transforms_active()
    if not transformed and forward_ad._current_level < 0:
        return True
    for device, dtype in {(x.device, x.dtype) for x in tensors}:
        # For its warning, or its error.
        choose.backend_name(device, dtype)
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


def norms_of_rows(rows: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each row of each matrix, 1-d in the wide dtype, without derivatives."""
    dense = [i for i, x in enumerate(rows) if x.numel() and x.is_contiguous()]
    norms: dict[int, Tensor] = {}
    if dense:
        gradients = _planned([rows[i] for i in dense] if len(dense) < len(rows) else rows)
        found = units.norms_by_unit(gradients)
        if gradients.plan is not None and gradients.plan.verifying:
            verify.Expectation(gradients).check_units(found)
        norms.update(zip(dense, found, strict=True))
    for i in set(range(len(rows))).difference(norms):
        x = rows[i]
        if x.numel():
            norms[i] = unit_norms(x, on_host=choose.host_decides(x.device))
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
        slopes = _slopes_by_loops(tensors, norm, grad)
        if slopes is None:
            n = 1 if norm.dim() else len(tensors)
            owns = ([*v.reshape(-1).unbind()] * n for v in (norm, grad))
            slopes = [formulas.slope_of(*own) for own in zip(tensors, *owns, strict=True)]
        wanted = ctx.needs_input_grad[1:]
        return (None, *[s if w else None for s, w in zip(slopes, wanted, strict=True)])


def _slopes_by_loops(tensors: list[Tensor], norm: Tensor, grad: Tensor) -> list[Tensor] | None:
    """The derivatives of norms; None where loops cannot serve, or these are differentiated."""
    if torch.is_grad_enabled() or not choose.host_decides(norm.device):
        return None
    try:
        numbers = zip(norm.reshape(-1).tolist(), grad.reshape(-1).tolist(), strict=True)
    except RuntimeError:
        # Of several derivatives at once, which have no numbers.
        return None
    factors = [own / n if n else 0.0 for n, own in numbers]
    if not by_loops.are_moderate(factors):
        return None
    slopes: list[Tensor] | None = by_loops.scaled(tensors, factors if norm.dim() else factors[0])
    return slopes


def _total(tensors: Sequence[Tensor]) -> Tensor:
    norm = by_loops.norm_of(list(tensors))
    if norm is None:
        norm = execute.total_norm(_planned(tensors), 2.0)
    return norm.to(wide_dtype(norm.device))


def _each(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    known = by_loops.norms_of(list(tensors), norm_type)
    if known is not None:
        dtype = formulas.result_dtype(tensors)
        return torch.tensor(known, dtype=dtype, device="cpu").to(torch.float64)
    norms = execute.total_norm(_planned(tensors), norm_type, per_gradient=True)
    return norms.to(wide_dtype(norms.device))


def _planned(tensors: Sequence[Tensor]) -> Gradients:
    """A gradient list of these tensors; of copies where some share memory, so that each counts."""
    try:
        gradients = _list_of(tensors)
    except OverlapError:
        gradients = None
    if gradients is None or gradients.distinct is not None:
        copies = [x.detach().clone(memory_format=torch.contiguous_format) for x in tensors]
        gradients = _list_of(copies)
    return gradients


def _list_of(tensors: Sequence[Tensor]) -> Gradients:
    device = tensors[0].device if tensors else torch.device("cpu")
    return Gradients(list(tensors), device, "tensors[{}]".format)


# The least normal number of float32.
_TINY = 2.0**-126
# The factor of one tensor: a number if the host knows it.
Coefficient = float | Tensor


def scaled(tensors: Sequence[Tensor], coefficients: Sequence[Coefficient]) -> list[Tensor]:
    """New tensors, each times its coefficient.

    Args:
        tensors: of any dtypes and devices.
        coefficients: one for each tensor, or one for all: numbers, or tensors in a wide dtype, 0-d
            or of as many dimensions as the tensor.
    """
    numbers = [c for c in coefficients if not isinstance(c, Tensor)]
    if len(numbers) == len(coefficients):
        products = by_loops.scaled(list(tensors), numbers[0] if len(numbers) == 1 else numbers)
        if products is not None:
            return products  # type: ignore[no-any-return]
    if any(dtype.is_complex for dtype in {x.dtype for x in tensors}):
        return _scaled_pairs(tensors, coefficients)
    if is_readable(tensors) and not needs_grad(tensors):
        if len(numbers) == len(coefficients):
            return _multiples(tensors, numbers)
        (one, *others) = coefficients
        if not others and isinstance(one, Tensor) and one.dim() == 0 and not needs_grad([one]):
            return _products_of_all(tensors, one)
    own = list(coefficients) * (len(tensors) if len(coefficients) == 1 else 1)
    return [_scaled_one(x, c) for x, c in zip(tensors, own, strict=True)]


def _scaled_pairs(tensors: Sequence[Tensor], coefficients: Sequence[Coefficient]) -> list[Tensor]:
    """As `scaled`, with complex tensors among the others."""
    pairs = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in tensors]
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
        return _times(x, coefficient)
    if not is_readable([x]):
        return formulas.product_of(x, coefficient)
    if needs_grad([x, coefficient]):
        product: Tensor = _Product.apply(x, coefficient)  # type: ignore[no-untyped-call]
        return product
    return _product(x, coefficient)


class _Product(torch.autograd.Function):
    """A real tensor times a coefficient."""

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
    narrow = formulas.arithmetic_of(x.dtype)
    factor = coefficient.to(x.device, narrow)
    if x.dtype in ARITHMETIC and x.dim():
        # A 0-d factor would be rounded to a half type first.
        factor = factor.reshape(factor.shape or (1,))
        return torch.mul(x, factor, out=torch.empty_like(x))
    return (x.to(narrow) * factor).to(x.dtype)


def _times(x: Tensor, number: float) -> Tensor:
    """As `_product`: torch multiplies half types by a number in float32."""
    if 0 < number < _TINY:
        # Of a list with others of float64: float32 would hold some of its digits.
        return (x.to(torch.float64) * number).to(x.dtype)
    if x.dtype in ARITHMETIC:
        return x * number
    return (x.to(torch.float32) * number).to(x.dtype)


def _products_of_all(tensors: Sequence[Tensor], coefficient: Tensor) -> list[Tensor]:
    """Products with one coefficient on the device, in few calls."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, x in enumerate(tensors):
        groups.setdefault((x.device, x.dtype), []).append(index)
    products: list[Tensor] = list(tensors)
    for indices in groups.values():
        own = _products_of_group([tensors[i] for i in indices], coefficient)
        for i, product in zip(indices, own, strict=True):
            products[i] = product
    return products


def _multiples(tensors: Sequence[Tensor], numbers: Sequence[float]) -> list[Tensor]:
    """Tensors times a number for each, or one for all."""
    one = numbers[0] if len(numbers) == 1 else None
    if not _takes_foreach(tensors) or any(0 < number < _TINY for number in numbers):
        factors = numbers if one is None else [one] * len(tensors)
        return [_times(x, factor) for x, factor in zip(tensors, factors, strict=True)]
    if one is None:
        return list(torch._foreach_mul(list(tensors), numbers))
    return list(torch._foreach_mul(list(tensors), one))


def _takes_foreach(tensors: Sequence[Tensor]) -> bool:
    """Whether torch's foreach functions take tensors: neither float8 nor lazily negated ones."""
    known = {x.dtype for x in tensors}.issubset(ARITHMETIC)
    return known and not any(map(Tensor.is_neg, tensors))


def _products_of_group(tensors: list[Tensor], coefficient: Tensor) -> list[Tensor]:
    """Products of tensors of one device and dtype with a coefficient on the device."""
    device, dtype = tensors[0].device, tensors[0].dtype
    factor = coefficient.to(device, formulas.arithmetic_of(dtype))
    if dtype == factor.dtype and _takes_foreach(tensors):
        return list(torch._foreach_mul(tensors, factor))
    if choose.backend_name(device, dtype) != "triton":
        return [_product(x, factor) for x in tensors]
    # Foreach rounds a factor to a half type first; kernels, which scale in place, do not.
    copies = [torch.empty_like(x) for x in tensors]
    torch._foreach_copy_(copies, [x.resolve_neg() for x in tensors])
    execute.scale_(_list_of(copies), _FixedCoefficient(factor), torch.ones_like(factor))
    return copies


class _FixedCoefficient(Rule):
    """A rule that scales by a given coefficient, as if the norm were 1."""

    norm_type = float("inf")
    eps = 0.0

    def __init__(self, coefficient: Tensor) -> None:
        self._coefficient = coefficient

    def limit(self, norm: object) -> Tensor:
        """The coefficient itself."""
        return self._coefficient


def as_limit_or_tensor(name: str, value: object, *, may_be_nan: bool = False) -> float | Tensor:
    """A limit as a number, or a floating-point tensor, which is checked where it can be read.

    Args:
        name: of the argument, for messages.
        value: handed over by the user.
        may_be_nan: a tensor may be, as a measured norm may.

    Raises:
        TypeError: neither a number nor a floating-point tensor.
        ValueError: negative or NaN.
    """
    if not isinstance(value, Tensor):
        return as_limit(name, value)
    if not value.is_floating_point():
        raise TypeError(
            f"{name} must be a number or a floating-point tensor, got {value.dtype}: convert it "
            "with float()"
        )
    if value.dtype.itemsize == 1:
        # torch does not compare float8.
        value = value.float()
    if value.device.type != "cpu" or not is_readable([]):
        return value
    if not bool(((value >= 0) | (value.isnan() & may_be_nan)).all()):
        raise ValueError(f"{name} must be 0 or more, got {value.detach()}")
    return value


def coefficients_of(
    norms: Tensor, limits: Sequence[float | Tensor], dtype: torch.dtype, name: str
) -> list[Coefficient]:
    """min(1, limit / norm) for each norm: numbers where the host knows all, else in the wide dtype.

    Args:
        norms: in the wide dtype, 0-d or 1-d.
        limits: one for all norms, or one for each: numbers or one-element tensors.
        dtype: of the arithmetic; limits are rounded to it first.
        name: of the limits, for messages.

    Raises:
        ValueError: a limit with several elements.
    """
    numbers = [limit for limit in limits if not isinstance(limit, Tensor)]
    if len(numbers) == len(limits) and _host_knows(norms):
        known = norms.reshape(-1).tolist()
        each = numbers * (len(known) if len(numbers) == 1 else 1)
        return [_number(*pair, dtype) for pair in zip(known, each, strict=True)]
    bounds = [one_element(name, _as_tensor(limit, norms, dtype)) for limit in limits]
    limit = bounds[0] if len(bounds) == 1 else torch.stack(bounds)
    coefficients = coefficient_of(norms, limit)
    return list(coefficients.unbind() if norms.dim() else [coefficients])


def coefficient_over(norms: Tensor, limit: float | Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """As `coefficients_of`, for norms of any shape, to which the limit has to broadcast."""
    bound = _as_tensor(limit, norms, dtype)
    fits = broadcasts(bound.shape, norms.shape)
    if not fits:
        bound = one_element(name, bound, ", or one that broadcasts to the norms over dim")
    return coefficient_of(norms, bound)


def _host_knows(norms: Tensor) -> bool:
    """Whether the host can read norms at no cost, and nothing differentiates them."""
    return is_readable([norms]) and not norms.requires_grad and choose.host_decides(norms.device)


def _number(norm: float, limit: float, dtype: torch.dtype) -> float:
    """The coefficient, rounded as a tensor would round it."""
    rounded = c_double if dtype == torch.float64 else c_float
    limit = rounded(limit).value
    if norm < limit or (norm == limit and limit > 0):
        return 1.0
    return rounded(limit / norm).value if norm else 0.0


def _as_tensor(limit: float | Tensor, norms: Tensor, dtype: torch.dtype) -> Tensor:
    """A limit in the dtype of the norms, rounded to another one."""
    if not isinstance(limit, Tensor):
        limit = filled(limit, norms.dtype, norms.device)
    return limit.to(norms.device, dtype).to(norms.dtype)


def filled(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a 0-d tensor; one that changes becomes an input of a traced graph."""
    if is_traced():
        # torch.compile makes a graph for each value, unless it is the factor of a tensor.
        return torch.ones((), dtype=dtype, device=device) * number
    return torch.full((), number, dtype=dtype, device=device)


def one_element(name: str, limit: Tensor, others: str = "") -> Tensor:
    """A limit as a 0-d tensor; ValueError where it has several elements, and is none of others."""
    if limit.numel() != 1:
        raise ValueError(
            f"{name} must be a number or a one-element tensor{others}; got shape "
            f"{tuple(limit.shape)}"
        )
    return limit.reshape(())


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of one shape can be expanded to another."""
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(own in (1, other) for own, other in pairs)
