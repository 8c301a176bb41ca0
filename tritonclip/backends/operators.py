"""Norms, coefficients and products in PyTorch's operators, on any device."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from ctypes import c_float
from itertools import cycle

import torch
from torch import Tensor

from tritonclip.backends.interface import PartialNorms

# Elements of a tensor that is read at a time, to bound temporaries: 1 MiB of float64.
PIECE = 131072
# Elements of a tensor up to which two operators clamp ten in 27 us, and one for each in 30. (As
# above, and Xeon.)
SMALL = 8192
# Powers of float32, at most, whose sums are normal numbers of float64: from 2^(-149 * 6) on.
MOST_IN_FLOAT64 = 6
# The dtypes whose norms are float64.
WIDE = frozenset({torch.float64, torch.complex128})
# Dtypes that loops and kernels have arithmetic for.
ARITHMETIC = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Of arrays of numbers, each rounded as a tensor of the dtype rounds it.
TYPECODES = {torch.float32: "f", torch.float64: "d"}


# Norms.


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest floating-point dtype that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def moduli_of(pairs: Tensor) -> Tensor:
    """The moduli of a complex gradient that is read as pairs, 1-d, in new memory."""
    # Moduli of finite float32 pairs may be over its largest number.
    wide = pairs.to(wide_dtype(pairs.device))
    return torch.view_as_complex(wide.reshape(-1, 2)).abs()


def as_tensor(norms: PartialNorms) -> Tensor:
    """Partial norms as a tensor: floats of the host as float64[n]."""
    if isinstance(norms, Tensor):
        return norms
    return torch.tensor(norms, dtype=torch.float64, device="cpu")


def norm_of(tensors: list[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    """The norm of tensors, 0-d, for any device, norm type and magnitude.

    Args:
        tensors: at least one.
        norm_type: p of the p-norm.
        dtype: of the result: the widest of the device.
    """
    norms = [_norm_of_piece(piece, norm_type, dtype) for piece in _pieces(tensors)]
    if not norms:
        return torch.zeros((), dtype=dtype, device=tensors[0].device)
    return norms[0] if len(norms) == 1 else combine(torch.stack(norms), norm_type)


def _pieces(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yields every element once, in 1-d pieces of at most `PIECE`; small tensors end to end."""
    small: list[Tensor] = []
    n = 0
    for tensor in tensors:
        if tensor.numel() > SMALL:
            yield from split_flat(tensor, PIECE)
            continue
        if n + tensor.numel() > PIECE:
            yield torch.cat(small)
            small, n = [], 0
        small.append(tensor.reshape(-1))
        n += tensor.numel()
    if n:
        yield small[0] if len(small) == 1 else torch.cat(small)


def _norm_of_piece(x: Tensor, norm_type: float, dtype: torch.dtype) -> Tensor:
    """The norm of a small 1-d tensor, 0-d, in `dtype`; no power overflows or underflows."""
    if norm_type == math.inf:
        return x.abs().max().to(dtype)
    fits_float64 = dtype == torch.float64 != x.dtype and norm_type <= MOST_IN_FLOAT64
    if norm_type == 1 or (fits_float64 and norm_type == 2):
        norm: Tensor = torch.linalg.vector_norm(x, norm_type, dtype=dtype)
        return norm
    magnitudes = x.to(dtype, copy=True).abs_()
    if fits_float64:
        # `vector_norm` finds powers one at a time.
        return magnitudes.pow_(norm_type).sum().pow(1 / norm_type)
    largest = magnitudes.max()
    # Dividing by 1 instead of 0, inf and NaN gives just these.
    scale = torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
    return scale * magnitudes.div_(scale).pow_(norm_type).sum().pow(1 / norm_type)


def combine(norms: Tensor, norm_type: float) -> Tensor:
    """The norm of a whole from the norms of its parts, 0-d."""
    if norms.numel() == 1:
        return norms.reshape(())
    return _norm_of_piece(norms, norm_type, norms.dtype)


def results_of(norms: list[float], grad_scale: float | Tensor, dtype: torch.dtype) -> array[float]:
    """Norms as results of a dtype have them: without the loss scale, and rounded."""
    scale = float(grad_scale)
    return array(TYPECODES[dtype], [norm / scale for norm in norms] if scale != 1 else norms)


def combine_numbers(norms: list[float], p: float) -> float:
    """The norm of a whole from the norms of its parts."""
    total, largest = sum(norms), max(norms)
    # NaN stays in a sum, and may be lost in max and hypot.
    if math.isnan(total):
        return total
    # 0 for -0, too.
    if p == math.inf or not 0 < largest < math.inf:
        return largest + 0.0
    if p == 2:
        return math.hypot(*norms)
    unit: float = sum((norm / largest) ** p for norm in norms) ** (1 / p)
    return largest * unit


def unscaled(norms: Tensor, grad_scale: float | Tensor) -> Tensor:
    """Norms divided by the loss scale."""
    is_scaled = isinstance(grad_scale, Tensor) or grad_scale != 1
    return norms / as_scalar(grad_scale, norms) if is_scaled else norms


# Coefficients.


def coefficient_of(norm: Tensor, limit: float | Tensor, eps: float) -> Tensor:
    """Returns min(1, limit / (norm + eps)) in the dtype of norm.

    1 for nothing to clip and for an infinite limit; NaN stays.
    """
    bound = norm + eps
    limit = as_scalar(limit, bound)
    # A quotient would be 0/0 or inf/inf.
    return torch.where((bound <= limit) | (bound == 0), 1.0, limit / bound)


def coefficients_of(
    norms: list[float], limit: float | list[float], eps: float, wide: bool, /
) -> tuple[list[float], float]:
    """`coefficient_of` in numbers, each step rounded to float32, or float64; and the least, or NaN.

    As `coefficients` of the C extension.
    """
    code = "d" if wide else "f"
    limits = array(code, limit if isinstance(limit, list) else [limit])
    (eps,) = array(code, [eps])
    bounds = array(code, [norm + eps for norm in norms])
    # A limit may be NaN.
    ratios = [
        limit / bound if bound and not limit >= bound else 1.0
        for bound, limit in zip(bounds, cycle(limits), strict=False)
    ]
    coefficients = array(code, ratios).tolist()
    least = sum(coefficients)
    # min may miss NaN.
    return coefficients, least if math.isnan(least) else min(coefficients)


def factor_of(coefficient: Tensor, grad_scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Returns coefficient / grad_scale, as elements of a dtype are multiplied by it."""
    if isinstance(grad_scale, Tensor) or grad_scale != 1:
        coefficient = coefficient / as_scalar(grad_scale, coefficient)
    return coefficient.to(torch.float64 if dtype == torch.float64 else torch.float32)


def as_scalar(number: float | Tensor, like: Tensor) -> Tensor:
    """A number as a tensor of another one's dtype, filled in on the device: no upload, no sync."""
    if isinstance(number, Tensor):
        number = number.to(like.device, like.dtype)
        return number.reshape(()) if number.numel() == 1 else number
    if like.dtype == torch.float32:
        # inf beyond its range, where torch.full raises.
        number = c_float(number).value
    return torch.full((), number, dtype=like.dtype, device=like.device)


# Writes.


def multiply_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies in place by a 0-d factor; half types in float32."""
    # Elsewhere than on a CPU, foreach rounds a factor to the tensors' dtype first.
    if tensors[0].device.type == "cpu" or tensors[0].dtype == factor.dtype:
        torch._foreach_mul_(tensors, factor)
        return
    for piece in _writable_pieces(tensors):
        piece.copy_(piece.to(factor.dtype).mul_(factor))


def unscale_and_clamp_(
    tensors: list[Tensor], low: float, high: float, grad_scale: float | Tensor
) -> None:
    """Divides by the loss scale and clamps, both in float32 or wider, rounding once."""
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    one = torch.ones((), dtype=wide, device=tensors[0].device)
    factor = one / as_scalar(grad_scale, one)
    for piece in _writable_pieces(tensors):
        piece.copy_(piece.to(wide, copy=True).mul_(factor).clamp_(low, high))


# Tensors in pieces.


def as_contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors as they are; views of all elements of others that are dense in memory."""
    return [t if t.is_contiguous() else t.as_strided((t.numel(),), (1,)) for t in tensors]


def split_flat(tensor: Tensor, size: int, *, writable: bool = False) -> Iterator[Tensor]:
    """Yields every element once, in pieces of at most `size` elements; none for an empty tensor.

    Pieces are 1-d: views where strides allow it, else copies. Writable pieces are always views, of
    any shape.
    """
    if not tensor.numel():
        # A write to it would be seen by autograd.
        return
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(size)
    elif tensor.numel() <= size:
        yield tensor if writable else tensor.reshape(-1)
    else:
        rows = max(1, size * tensor.shape[0] // tensor.numel())
        for part in tensor.split(rows) if tensor.shape[0] > 1 else tensor.unbind():
            yield from split_flat(part, size, writable=writable)


def _writable_pieces(tensors: list[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield from split_flat(tensor, PIECE, writable=True)


# Rows: slices along the first dimension, the units of a rule.


def count_rows(tensor: Tensor) -> int:
    """The units of a parameter; one of length 0 where it has no elements."""
    return max(1, tensor.shape[0]) if tensor.dim() > 1 else 1


def has_dense_units(tensor: Tensor) -> bool:
    """Whether the slices along the first dimension lie end to end, each dense in any order."""
    if tensor.is_contiguous():
        return True
    unit = tensor[0]
    order = sorted(range(unit.dim()), key=unit.stride, reverse=True)
    dense = unit.permute(order).is_contiguous()
    return dense and (len(tensor) == 1 or tensor.stride(0) == unit.numel())


def norms_of_units(tensor: Tensor) -> Tensor:
    """The 2-norm of each unit, 1-d, in the widest dtype of the device; by modulus if complex.

    Large tensors are converted piece by piece.
    """
    wide = wide_dtype(tensor.device)
    rows = as_real_rows(tensor)
    n, length = len(rows), rows[0].numel()
    if not length:
        return torch.zeros(n, dtype=wide, device=tensor.device)
    if length > PIECE:
        return torch.stack([norm_of([row], 2.0, wide) for row in rows])
    pieces = rows.split(PIECE // length) if rows.numel() > PIECE else [rows]
    norms = [norms_of_rows(piece, wide) for piece in pieces]
    return norms[0] if len(norms) == 1 else torch.cat(norms)


def norms_of_rows(rows: Tensor, wide: torch.dtype) -> Tensor:
    """The 2-norm of each slice of a small tensor."""
    x = rows.to(wide).reshape(len(rows), -1)
    if wide == torch.float64 and rows.dtype != wide:
        # Squares of narrower numbers fit float64, whatever they are.
        norms: Tensor = torch.linalg.vector_norm(x, dim=1)
        return norms
    largest = x.abs().amax(1)
    # Dividing by 1 instead of 0, inf and NaN gives just these.
    scale = torch.where((largest > 0) & (largest < torch.inf), largest, 1.0)
    rest: Tensor = torch.linalg.vector_norm(x / scale[:, None], dim=1)
    return scale * rest


def as_real_rows(tensor: Tensor) -> Tensor:
    """A tensor whose slices along the first dimension are the units.

    A complex one as pairs of reals, of a conjugated one those of the memory.
    """
    real = tensor.detach()
    if real.is_complex():
        real = torch.view_as_real(real.conj() if real.is_conj() else real)
    return real.unsqueeze(0) if tensor.dim() < 2 or not len(tensor) else real


def multiply_units_(grad: Tensor, factors: Tensor) -> None:
    """Multiplies the units of a gradient in place by 1-d factors, rounding once."""
    rows = as_real_rows(grad)
    column = factors.view(-1, *(1,) * (rows.dim() - 1))
    if rows.dtype == factors.dtype:
        rows.mul_(column)
        return
    length = max(1, rows[0].numel())
    if length > PIECE:
        for row, factor in zip(rows, factors.unbind(), strict=True):
            multiply_([row], factor)
        return
    n = PIECE // length
    for piece, part in zip(rows.split(n), column.split(n), strict=True):
        piece.copy_(piece.to(factors.dtype).mul_(part))
