"""The torch backend: the verbs in PyTorch's operators, on any device.

On a CPU the host reads norms and decides in numbers what need not be written; elsewhere every
decision is left to the device.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from ctypes import c_float
from itertools import compress, cycle

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from tritonclip.backends.interface import Clip, Limit, PartialNorms

# Elements of a tensor that is read at a time, to bound temporaries: 1 MiB of float64.
PIECE = 131072
# The same for half types by rows: the 2^20 elements took 390 us at once, and 270 us in pieces whose
# copies in float32 stay in cache. (torch 2.13, EPYC, 1 thread.)
LONG_PIECE = 2**18
# Elements of a tensor that is measured together with others: a call for each took 30 us in a list
# of ten, one for all 11 us; ResNet-20 each by its norm 298, 290 and 363 us with 4096, 8192 and
# 16384. Up to here two operators clamp ten in 27 us, and one for each in 30. (As above, and Xeon.)
SMALL = 8192
# The same for one norm: ResNet-20 took 182, 163 and 161 us with 8192, 16384 and 32768. (EPYC.)
TOGETHER = 16384
# Tensors, and their elements, that one operator in float64 measures each: LeNet-5 clips in 89 us
# and not 133, ten small ones in 78 and not 92, 30 in 160 and not 127. (As above.)
_FEW, _FEW_ELEMENTS = 10, 2**16
# Powers of float32, at most, whose sums are normal numbers of float64: from 2^(-149 * 6) on.
MOST_IN_FLOAT64 = 6
# Elements of a row whose squares are added up in float32, so few that no norm can be wrong by 1e-6.
# With u = 2^-24, torch adds up a row of n elements in w lanes, n / w + w - 1 roundings each: the
# root is off by half of as many u, and the roundings of root and result add 2u. With w = 8 (x86)
# and 4 (NEON) these are 5.7e-7 and 6.9e-7. In float64 as many rows as add 2e-13.
ROW = 64
_ROW_OF_DOUBLES = 4096
# A norm of rows that is smaller may have lost squares to underflow; one that is not finite may have
# overflowed. From there on the sum of squares is 2^-60 or more, of which 2^31 elements that lose
# 2^-126 each are 2^-35. In float64 they lose 2^-1022 each.
_TRUSTED = 2.0**-30
_TRUSTED_DOUBLE = 2.0**-478
# The dtypes whose norms are float64.
WIDE = frozenset({torch.float64, torch.complex128})
# Dtypes that loops and kernels have arithmetic for.
ARITHMETIC = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class TorchLayout:
    """Knows the dtype of results, and whether the host decides.

    Args:
        on_host: the device's values can be read without waiting for it.
    """

    by_address = False

    def __init__(self, *, on_host: bool) -> None:
        self.dtype = torch.float32
        self.n_bytes = 0
        self._on_host = on_host

    def bind(self, tensors: list[Tensor], addresses: list[int] | None) -> TorchBatch:
        """The gradients of a call."""
        return TorchBatch(tensors, self.dtype, on_host=self._on_host)


class TorchBatch:
    """Verbs in PyTorch; see :class:`tritonclip.backends.interface.Batch`.

    On the host, a gradient whose coefficient is 1 is not written.
    """

    def __init__(self, tensors: list[Tensor], dtype: torch.dtype, *, on_host: bool) -> None:
        self.tensors, self.dtype = tensors, dtype
        self._on_host = on_host

    def norm(self, norm_type: float, *, per_gradient: bool) -> PartialNorms:
        """Measures the gradients: numbers on the host; a partial norm a gradient, if asked for."""
        tensors, wide = self.tensors, wide_dtype(self.tensors[0].device)
        if self._on_host and norm_type == 2.0:
            return two_norms_on_host(tensors, per_gradient=per_gradient)
        lists = [[tensor] for tensor in tensors] if per_gradient else [tensors]
        norms = torch.stack([norm_of(part, norm_type, wide) for part in lists])
        return norms.tolist() if self._on_host else norms

    def total(self, norms: PartialNorms, norm_type: float, grad_scale: float | Tensor) -> Tensor:
        """The norm from partial norms, 0-d."""
        if isinstance(norms, list):
            norms = as_tensor([combine_numbers(norms, norm_type)])
        return unscaled(combine(norms, norm_type), grad_scale).to(self.dtype)

    def total_each(
        self, norms: PartialNorms, norm_type: float, grad_scale: float | Tensor
    ) -> Tensor:
        """The norm of each gradient, 1-d."""
        return unscaled(as_tensor(norms), grad_scale).to(self.dtype)

    def norms_each(self, norms: PartialNorms, norm_type: float) -> Tensor:
        """The norm of each gradient: there is one partial norm for each."""
        return as_tensor(norms)

    def partials_each(self, norms: Tensor, norm_type: float) -> Tensor:
        """The same norms."""
        return norms

    def scale_(self, norms: PartialNorms, clip: Clip) -> tuple[Tensor, float | Tensor]:
        """Multiplies all gradients by one coefficient."""
        if self._on_host:
            numbers = norms if isinstance(norms, list) else norms.tolist()
            total = combine_numbers(numbers, clip.norm_type)
            norms, least = self._scale_on_host_([total], clip)
            return norms[0], least
        norm = self.total(norms, clip.norm_type, clip.grad_scale)
        coefficient = coefficient_of(norm, clip.limit, clip.eps)
        factor = factor_of(coefficient, clip.grad_scale, self.tensors[0].dtype)
        erase = ~torch.isfinite(norm) if clip.erase else None
        multiply_(self.tensors, factor, erase)
        return norm, coefficient if erase is None else torch.where(erase, 0.0, coefficient)

    def _scale_on_host_(self, norms: list[float], clip: Clip) -> tuple[Tensor, float]:
        """Multiplies by numbers: by that of the only norm, or each gradient by that of its own."""
        results = results_of(norms, clip.grad_scale, self.dtype)
        norm = torch.frombuffer(results, dtype=self.dtype)
        if not math.isfinite(results[0]) if clip.erase is True else clip.erase:
            torch._foreach_zero_(self.tensors)
            return norm, 0.0
        factors = coefficients = _coefficients(results, clip.limit, clip.eps)
        total, scale = sum(coefficients), float(clip.grad_scale)
        # min may miss NaN.
        least = total if math.isnan(total) else min(coefficients)
        dtype = torch.float64 if self.tensors[0].dtype == torch.float64 else torch.float32
        if scale != 1 or dtype != self.dtype:
            (scale,) = array(results.typecode, [scale])
            quotients = array(results.typecode, [number / scale for number in coefficients])
            factors = array("d" if dtype == torch.float64 else "f", quotients)
        n_ones = factors.count(1.0)
        if n_ones == len(factors):
            return norm, least
        changed = self.tensors
        if n_ones:
            over = [factor != 1 for factor in factors]
            changed = list(compress(changed, over))
            factors = array(factors.typecode, compress(factors, over))
        by = torch.frombuffer(factors, dtype=dtype).unbind()
        torch._foreach_mul_(changed, by if len(by) == len(changed) else by[0])
        return norm, least

    def clip_(
        self, norm_type: float, eps: float, limit: float, grad_scale: float | Tensor
    ) -> Tensor:
        """Measures all gradients and multiplies them by one coefficient."""
        norms = self.norm(norm_type, per_gradient=False)
        return self.scale_(norms, Clip(norm_type, eps, limit, grad_scale))[0]

    def scale_each_(self, norms: PartialNorms, clip: Clip) -> tuple[Tensor, float | Tensor]:
        """Multiplies each gradient by the coefficient of its norm."""
        if self._on_host:
            return self._scale_on_host_(norms if isinstance(norms, list) else norms.tolist(), clip)
        erase = clip.erase if isinstance(clip.erase, Tensor) else None
        norm = self.total_each(norms, clip.norm_type, clip.grad_scale)
        coefficient = coefficient_of(norm, clip.limit, clip.eps)
        factors = factor_of(coefficient, clip.grad_scale, self.tensors[0].dtype)
        for tensor, factor in zip(self.tensors, factors.unbind(), strict=True):
            multiply_([tensor], factor, erase)
        return norm, coefficient if erase is None else torch.where(erase, 0.0, coefficient)

    def clamp_(self, low: float, high: float, grad_scale: float | Tensor) -> None:
        """Clamps the gradients."""
        tensors = self.tensors
        if isinstance(grad_scale, Tensor) or grad_scale != 1:
            unscale_and_clamp_(tensors, low, high, grad_scale)
            return
        if self._on_host and max(map(Tensor.numel, tensors)) > SMALL:
            for tensor in tensors:
                if tensor.numel() > SMALL:
                    tensor.clamp_(low, high)
            tensors = [tensor for tensor in tensors if tensor.numel() <= SMALL]
        if tensors:
            torch._foreach_clamp_min_(tensors, low)
            torch._foreach_clamp_max_(tensors, high)


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


def two_norms_on_host(tensors: list[Tensor], *, per_gradient: bool) -> list[float]:
    """2-norms of tensors on a CPU: of each, or of any parts of them whose norm is that of all."""
    sizes = list(map(Tensor.numel, tensors))
    total, few = sum(sizes), per_gradient and len(sizes) <= _FEW
    if few and total <= _FEW_ELEMENTS and tensors[0].dtype.itemsize in (2, 4):
        norms: list[float] = torch.stack(torch._foreach_norm(tensors, 2.0, torch.float64)).tolist()
        return norms
    norms, first, n = [], 0, 0
    for i, size in enumerate(sizes if total > LONG_PIECE else ()):
        # Of a long tensor, the norms of its rows are held.
        n_held = size if size <= TOGETHER else size // ROW
        if n and n + n_held > LONG_PIECE:
            norms += _two_norms(tensors[first:i], per_gradient=per_gradient)
            first, n = i, 0
        n += n_held
    return norms + _two_norms(tensors[first:], per_gradient=per_gradient)


def _two_norms(tensors: list[Tensor], *, per_gradient: bool) -> list[float]:
    """The 2-norm of each tensor or of all, from small ones end to end and rows of long ones."""
    per_gradient = per_gradient and len(tensors) > 1
    most = SMALL if per_gradient else TOGETHER
    small = [x for x in tensors if x.numel() <= most]
    long = [x for x in tensors if x.numel() > most] if len(small) < len(tensors) else []
    rows = list(map(_norms_of_rows, long))
    flat = [_flatten_dense_tensors(small)] if small else []
    if flat and flat[0].numel() > SMALL and not per_gradient:
        rows.append(_norms_of_rows(flat.pop()))
    parts = [x.to(rows[0].dtype) for x in flat] + rows if rows else flat
    values = (parts[0] if len(parts) == 1 else torch.cat(parts)).double()
    if per_gradient:
        # Half the time of torch.tensor.
        lengths = torch.frombuffer(array("q", map(Tensor.numel, small + rows)), dtype=torch.int64)
        sums = torch.segment_reduce(values.square(), "sum", lengths=lengths, unsafe=True)
        norms: list[float] = sums.sqrt_().tolist()
        if long:
            of_small, of_long = iter(norms), iter(norms[len(small) :])
            norms = [next(of_small if x.numel() <= most else of_long) for x in tensors]
    else:
        norms = [torch.linalg.vector_norm(values).item()]
    # In float64, squares of narrower elements are right, whatever they are.
    is_double = tensors[0].dtype == torch.float64
    least = _TRUSTED_DOUBLE if is_double else _TRUSTED if rows else 0.0
    if min(norms) >= least and sum(norms) < math.inf:
        return norms
    lists = [[x] for x in tensors] if per_gradient else [tensors]
    return [
        norm if least <= norm < math.inf else norm_of(measured, 2.0, torch.float64).item()
        for norm, measured in zip(norms, lists, strict=True)
    ]


def _norms_of_rows(x: Tensor) -> Tensor:
    """Norms of the rows of a long tensor, and the elements that are left over."""
    flat, row, dtype = x.reshape(-1), ROW, torch.float32
    if x.dtype == torch.float64:
        row, dtype = _ROW_OF_DOUBLES, x.dtype
    rest = x.numel() % row
    rows = flat[: x.numel() - rest] if rest else flat
    pieces = rows.split(LONG_PIECE) if x.dtype.itemsize == 2 else (rows,)
    norms = [torch.linalg.vector_norm(p.view(-1, row), 2, 1, dtype=dtype) for p in pieces]
    norms += [flat[-rest:].to(dtype)] if rest else []
    return torch.cat(norms) if len(norms) > 1 else norms[0]


def norm_of(tensors: list[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    """The norm of tensors, 0-d, for any device, norm type and magnitude.

    Args:
        tensors: at least one.
        norm_type: p of the p-norm.
        dtype: of the result: the widest of the device.
    """
    norms = [_norm_of_piece(piece, norm_type, dtype) for piece in _pieces(tensors, PIECE)]
    if not norms:
        return torch.zeros((), dtype=dtype, device=tensors[0].device)
    return norms[0] if len(norms) == 1 else combine(torch.stack(norms), norm_type)


def _pieces(tensors: list[Tensor], size: int) -> Iterator[Tensor]:
    """Yields every element once, in 1-d pieces of at most `size`; small tensors end to end."""
    small: list[Tensor] = []
    n = 0
    for tensor in tensors:
        if tensor.numel() > SMALL:
            yield from split_flat(tensor, size)
            continue
        if n + tensor.numel() > size:
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
    unscaled = [norm / scale for norm in norms] if scale != 1 else norms
    return array("d" if dtype == torch.float64 else "f", unscaled)


def combine_numbers(norms: list[float], p: float) -> float:
    """The norm of a whole from the norms of its parts."""
    total, largest = sum(norms), max(norms)
    # NaN stays in a sum, and may be lost in max and hypot.
    if p == 1 or len(norms) == 1 or math.isnan(total):
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
    ratio = limit / bound
    keep = (ratio > 1) | (bound == 0) | ((limit == math.inf) & (norm == norm))
    return torch.where(keep, 1.0, ratio)


def _coefficients(norms: array[float], limit: Limit, eps: float) -> array[float]:
    """`coefficient_of` in numbers, each rounded as a tensor of the array's type rounds it."""
    code = norms.typecode
    if isinstance(limit, Tensor):
        limit = limit.tolist()
    limits = array(code, limit if isinstance(limit, list) else [limit])
    (eps,) = array(code, [eps])
    pairs = zip(array(code, [norm + eps for norm in norms]), cycle(limits), strict=False)
    # A limit may be NaN.
    return array(code, [most / b if b and not most >= b else 1.0 for b, most in pairs])


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


def multiply_(tensors: list[Tensor], factor: Tensor, erase: Tensor | None) -> None:
    """Multiplies in place by a 0-d factor, or writes zeros; half types in float32."""
    # Elsewhere than on a CPU, foreach rounds a factor to the tensors' dtype first.
    if tensors[0].device.type == "cpu" or tensors[0].dtype == factor.dtype:
        torch._foreach_mul_(tensors, factor)
        if erase is not None:
            for tensor in tensors:
                tensor.masked_fill_(erase, 0.0)
        return
    for piece in _writable_pieces(tensors):
        wide = piece.to(factor.dtype, copy=True).mul_(factor)
        piece.copy_(wide if erase is None else wide.masked_fill_(erase, 0.0))


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
    if tensor.numel() == 0:
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
