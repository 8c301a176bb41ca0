"""The torch backend: the verbs in PyTorch's operators, on any device.

On a CPU the host decides, in Python's numbers, what need not be written, and small gradients are
packed, so that few operators measure all of them. Elsewhere every decision is left to the device.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import compress

import torch
from torch import Tensor

from tritonclip.backends.interface import Batch, Clip, Of, PartialNorms, arithmetic_of
from tritonclip.backends.operators import (
    SMALL,
    TYPECODES,
    as_contiguous,
    as_real_rows,
    as_scalar,
    coefficient_of,
    coefficients_of,
    combine,
    combine_numbers,
    count_rows,
    factor_of,
    multiply_,
    multiply_units_,
    norm_of,
    norms_of_units,
    results_of,
    unscale_and_clamp_,
    unscaled,
    wide_dtype,
)

# Elements of a half-precision tensor that are measured at a time: 2^20 took 390 us at once, and
# 270 us in pieces whose copies in float32 stay in cache. (torch 2.13, EPYC, 1 thread.)
LONG_PIECE = 2**18
# Elements of a tensor that is packed with others, and of all tensors that are. To copy a small
# tensor takes 0.4 us, and to measure it 1.3, or 2.1 in float64. (EPYC, 2 threads.)
PACKED, ALL_PACKED = 2**16, 2**19
# Bytes on the host that a packed tensor takes beside its rows, at most: a view, and where it lies.
_VIEW_BYTES = 704
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


class TorchLayout:
    """What is known of a group: where small tensors are packed, and by rows the units.

    Args:
        tensors: of one device and dtype, real and dense in memory; by rows, as users see them.
        weights: by rows, the weights of the gradients, or none; None for other norms.
        on_host: the device's values can be read without waiting for it.
    """

    by_address = True

    def __init__(
        self, tensors: Sequence[Tensor], weights: Sequence[Tensor] | None = None, *, on_host: bool
    ) -> None:
        self.dtype, self.n_tensors = torch.float32, len(tensors)
        self.rows = None if weights is None else list(map(count_rows, tensors))
        self.packings: list[Packing] = []
        if on_host:
            # Weights may have another dtype.
            lists = [tensors, weights] if weights else [tensors]
            self.packings = [Packing(one, self.rows) for one in lists]
        self.n_bytes = sum(packing.n_bytes for packing in self.packings)

    def bind(self, tensors: list[Tensor], addresses: list[int] | None) -> Batch:
        """The gradients of a call, and the weights."""
        return TorchBatch(tensors, self)


class TorchBatch:
    """Verbs in PyTorch; see :class:`tritonclip.backends.interface.Batch`.

    On the host, a gradient whose coefficients are 1 is not written.
    """

    def __init__(self, tensors: list[Tensor], layout: TorchLayout) -> None:
        n = layout.n_tensors
        self.tensors, self.weights = tensors[:n], tensors[n:]
        self.dtype, self._packings = layout.dtype, layout.packings
        self.sizes: Sequence[int] = layout.rows or ()

    def norm(self, norm_type: float, of: Of) -> PartialNorms:
        """Measures the gradients: numbers on the host, and a tensor elsewhere and by rows."""
        tensors, packings = self.tensors, self._packings
        if of == "rows":
            lists = [tensors, self.weights] if self.weights else [tensors]
            if packings:
                with torch.no_grad():
                    parts = list(map(Packing.norms, packings, lists))
            else:
                parts = [torch.cat(list(map(norms_of_units, one))) for one in lists]
            return torch.stack(parts)
        if packings and norm_type == 2.0:
            if of == "all" or len(tensors) == 1:
                return packings[0].partial_norms(tensors)
            norms: list[float] = packings[0].norms(tensors).tolist()
            return norms
        tensors, wide = as_contiguous(tensors), wide_dtype(tensors[0].device)
        lists = [[tensor] for tensor in tensors] if of == "each" else [tensors]
        found = [norm_of(part, norm_type, wide) for part in lists]
        return [norm.item() for norm in found] if packings else torch.stack(found)

    def combine(
        self,
        norms: PartialNorms,
        norm_type: float,
        of: Of,
        grad_scale: float | Tensor = 1.0,
        *,
        wide: bool = False,
    ) -> Tensor:
        """The norm of all, or of each gradient."""
        if isinstance(norms, list):
            numbers = [combine_numbers(norms, norm_type)] if of == "all" else norms
            dtype = torch.float64 if wide else self.dtype
            # torch.tensor would take three times as long.
            found = torch.frombuffer(results_of(numbers, grad_scale, dtype), dtype=dtype)
            return found[0] if of == "all" else found
        if of == "all":
            norms = combine(norms, norm_type)
        elif of == "rows":
            norms = self._of_rows(norms[0])
        return unscaled(norms, grad_scale).to(norms.dtype if wide else self.dtype)

    def _of_rows(self, norms: Tensor) -> Tensor:
        """The norm of each gradient, from those of its rows."""
        if len(norms) == len(self.sizes):
            return norms
        parts = norms.split(self.sizes)
        if norms.dtype != torch.float64 or self.tensors[0].dtype.to_real() == torch.float64:
            # Squares may leave the range.
            return torch.stack([combine(part, 2.0) for part in parts])
        if self._packings:
            return self._packings[0].over_rows(norms.square(), "sum").sqrt_()
        return torch.stack(torch._foreach_norm(parts))

    def partials_each(self, norms: Tensor, norm_type: float) -> Tensor:
        """The same norms."""
        return norms

    def scale_(self, norms: PartialNorms, clip: Clip) -> tuple[Tensor, float | Tensor]:
        """Multiplies all gradients by one coefficient, or each gradient or unit by its own."""
        if clip.of == "rows":
            return self._scale_rows_(norms, clip)
        if not self._packings:
            return self._scale_on_device_(norms, clip)
        numbers = norms if isinstance(norms, list) else norms.tolist()
        if clip.of == "all" and len(numbers) > 1:
            numbers = [combine_numbers(numbers, clip.norm_type)]
        code, scale = TYPECODES[self.dtype], float(clip.grad_scale)
        # Rounded as results are.
        measured = array(code, [norm / scale for norm in numbers] if scale != 1 else numbers)
        norm = torch.frombuffer(measured, dtype=self.dtype)
        norm = norm[0] if clip.of == "all" else norm
        if clip.erase and (clip.of == "each" or not math.isfinite(measured[0])):
            for tensor in self.tensors:
                tensor.zero_()
            return norm, 0.0
        limit = clip.limit.tolist() if isinstance(clip.limit, Tensor) else clip.limit
        factors, least = self._coefficients(measured.tolist(), limit, clip.eps)
        if scale != 1:
            (divisor,) = array(code, [scale])
            factors = array(code, [factor / divisor for factor in factors]).tolist()
        if factors.count(1.0) < len(factors):
            self._multiply_(factors)
        return norm, least

    def _coefficients(
        self, norms: list[float], limit: float | list[float], eps: float
    ) -> tuple[list[float], float]:
        """The coefficient of each norm in the dtype of results, and the least."""
        return coefficients_of(norms, limit, eps, self.dtype)

    def _multiply_(self, factors: list[float]) -> None:
        """Multiplies all gradients by one number, or each by its own, unless it is 1."""
        tensors = self.tensors
        dtype = arithmetic_of(tensors[0].dtype)
        if len(factors) == 1:
            by = torch.scalar_tensor(factors[0], dtype=dtype, device="cpu")
            torch._foreach_mul_(tensors, by)
            return
        own = torch.frombuffer(array(TYPECODES[dtype], factors), dtype=dtype).unbind()
        chosen = [i for i, factor in enumerate(factors) if factor != 1]
        torch._foreach_mul_([tensors[i] for i in chosen], [own[i] for i in chosen])

    def _scale_on_device_(self, norms: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
        """Multiplies all gradients by one coefficient, or each by its own."""
        norm = self.combine(norms, clip.norm_type, clip.of, clip.grad_scale)
        coefficient = coefficient_of(norm, clip.limit, clip.eps)
        factor = factor_of(coefficient, clip.grad_scale, self.tensors[0].dtype)
        erase = clip.erase if isinstance(clip.erase, Tensor) else None
        if clip.of == "all":
            erase = ~torch.isfinite(norm) if clip.erase else None
            multiply_(self.tensors, factor, erase)
        else:
            for tensor, own in zip(self.tensors, factor.unbind(), strict=True):
                multiply_([tensor], own, erase)
        return norm, coefficient if erase is None else torch.where(erase, 0.0, coefficient)

    def _scale_rows_(self, norms: Tensor, clip: Clip) -> tuple[Tensor, float | Tensor]:
        """Multiplies each unit by its coefficient."""
        tensors, on_host = self.tensors, bool(self._packings)
        norm = self.combine(norms, 2.0, "rows", clip.grad_scale)
        coefficient = self._coefficients_of_rows(norms, clip)
        factors = factor_of(coefficient, clip.grad_scale, tensors[0].dtype.to_real())
        erase = clip.erase if isinstance(clip.erase, Tensor) else None
        if on_host and erase is not None and not bool(erase):
            erase = None
        chosen: Iterable[int] = range(len(tensors))
        if on_host and erase is None:
            changed = self._packings[0].over_rows((factors != 1).to(factors.dtype), "max")
            chosen = compress(chosen, changed.tolist())
        parts = factors.split(self.sizes)
        for i in chosen:
            multiply_units_(tensors[i], parts[i], erase)
        return norm, coefficient if erase is None else torch.where(erase, 0.0, coefficient)

    def _coefficients_of_rows(self, norms: Tensor, clip: Clip) -> Tensor:
        """The coefficient of each unit, computed as wide as norms, then rounded once."""
        ratio = as_scalar(clip.limit, norms)
        if ratio.dim():
            own_ratios = zip(ratio.split(1), self.sizes, strict=True)
            ratio = torch.cat([ratio.expand(n) for ratio, n in own_ratios])
        grad_norms, weights = norms.unbind()
        # NaN stays.
        floor = weights.clamp(min=clip.eps)
        unlimited = (weights == torch.inf) | (ratio == torch.inf)
        limit = torch.where(unlimited, torch.inf, ratio * floor)
        return coefficient_of(unscaled(grad_norms, clip.grad_scale), limit, 0.0).to(self.dtype)

    def clip_(
        self, norm_type: float, eps: float, limit: float, grad_scale: float | Tensor
    ) -> Tensor:
        """Measures all gradients and multiplies them by one coefficient."""
        norms = self.norm(norm_type, "all")
        return self.scale_(norms, Clip(norm_type, eps, limit, grad_scale))[0]

    def clamp_(self, low: float, high: float, grad_scale: float | Tensor) -> None:
        """Clamps the gradients."""
        tensors = self.tensors
        if isinstance(grad_scale, Tensor) or grad_scale != 1:
            unscale_and_clamp_(as_contiguous(tensors), low, high, grad_scale)
            return
        if self._packings:
            small, large = self._packings[0].by_size
            for i in large:
                tensors[i].clamp_(low, high)
            tensors = [tensors[i] for i in small] if large else tensors
        if tensors:
            torch._foreach_clamp_min_(tensors, low)
            torch._foreach_clamp_max_(tensors, high)


class Packing:
    """Where small tensors of a CPU are packed: as rows of a matrix, with zeros behind each segment.

    One operator then measures all of them. A segment is a tensor, or, with counts,
    one of so many slices along its first dimension. Other tensors are long.

    Args:
        tensors: of one dtype; without counts real and dense in memory.
        counts: segments of each tensor.
    """

    def __init__(self, tensors: Sequence[Tensor], counts: Sequence[int] | None = None) -> None:
        sizes = list(map(Tensor.numel, tensors))
        self._by_slice = counts is not None
        self._counts = [1] * len(sizes) if counts is None else list(counts)
        dtype = tensors[0].dtype.to_real()
        self._dtype = arithmetic_of(dtype)
        # Of norms by rows of few elements, added up in the same dtype.
        self._least = _TRUSTED_DOUBLE if dtype == torch.float64 else _TRUSTED
        self._packed: list[int] = []
        self._long: list[int] = []
        # Of each packed tensor, in elements; of each of its segments, in rows.
        self._starts: list[int] = []
        lengths: list[int] = []
        n, n_rows = 0, 0
        for i, (size, count) in enumerate(zip(sizes, self._counts, strict=True)):
            if size > PACKED or n + size > ALL_PACKED:
                self._long.append(i)
                continue
            reals = 2 * size if tensors[i].is_complex() else size
            n_own = -(-reals // (count * ROW))
            self._packed.append(i)
            self._starts.append(n_rows * ROW)
            lengths += [n_own] * count
            n, n_rows = n + size, n_rows + n_own * count
        self._n_rows, self._lengths = n_rows, torch.tensor(lengths, dtype=torch.int64, device="cpu")
        # The segment of each row.
        self._segments = torch.repeat_interleave(self._lengths)
        self._has_empty = 0 in lengths
        self._of_tensors = torch.tensor(self._counts, dtype=torch.int64, device="cpu")
        # Matrices, and their views, that no call has.
        self._spare: list[tuple[Tensor, list[Tensor]]] = []
        # Tensors that are clamped by two operators for all, and those by one each.
        small = [i for i, size in enumerate(sizes) if size <= SMALL and len(sizes) > 1]
        self.by_size = small, [i for i in range(len(sizes)) if i not in set(small)]
        self.n_bytes = n_rows * (ROW * self._dtype.itemsize + 8) + _VIEW_BYTES * len(self._packed)

    def _of(self, tensors: list[Tensor], indices: Sequence[int]) -> list[Tensor]:
        """Tensors as they are packed."""
        if self._by_slice:
            return [as_real_rows(tensors[i]) for i in indices]
        return tensors if len(indices) == len(tensors) else [tensors[i] for i in indices]

    def _take(self, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """A matrix that no other thread has, and views of it in the form of the packed tensors."""
        try:
            return self._spare.pop()
        except IndexError:
            # Never inference tensors, which a later call could not write to.
            with torch.inference_mode(False):
                flat = torch.zeros(self._n_rows * ROW, dtype=self._dtype, device="cpu")
                views = []
                for tensor, start in zip(tensors, self._starts, strict=True):
                    stride = tensor.stride()
                    if self._by_slice:
                        own = torch.empty(tensor.shape[1:], device="meta")
                        stride = (-(-own.numel() // ROW) * ROW, *own.stride())
                    views.append(flat.as_strided(tensor.shape, stride, start))
                return flat.view(-1, ROW), views

    def partial_norms(self, tensors: list[Tensor]) -> list[float]:
        """2-norms of some parts of the tensors, whose norm is that of all."""
        norms, by_rows = [], bool(self._long)
        if self._packed:
            own = self._of(tensors, self._packed)
            rows, views = memory = self._take(own)
            torch._foreach_copy_(views, own)
            if rows.numel() > SMALL:
                by_rows, rows = True, torch.linalg.vector_norm(rows, 2, 1)
            norms = [torch.linalg.vector_norm(rows, dtype=torch.float64).item()]
            self._spare.append(memory)
        norms += [_norm_by_rows(tensors[i]).item() for i in self._long]
        least = self._least if by_rows or self._dtype == torch.float64 else 0.0
        if least <= math.hypot(*norms) < math.inf:
            return norms
        return [norm_of(as_contiguous(tensors), 2.0, torch.float64).item()]

    def norms(self, tensors: list[Tensor]) -> Tensor:
        """The 2-norm of each segment, float64, 1-d."""
        if not self._long:
            return self._packed_norms(tensors)
        parts = {i: self._long_norms(tensors[i]) for i in self._long}
        if self._packed:
            packed = self._packed_norms(tensors).split([self._counts[i] for i in self._packed])
            parts.update(zip(self._packed, packed, strict=True))
        return torch.cat([parts[i] for i in range(len(tensors))])

    def _packed_norms(self, tensors: list[Tensor]) -> Tensor:
        own = self._of(tensors, self._packed)
        rows, views = memory = self._take(own)
        torch._foreach_copy_(views, own)
        is_few = rows.numel() <= SMALL
        norms = self._norms_of(rows, torch.float64 if is_few else self._dtype)
        # In float64, squares of narrower elements are right, whatever they are.
        is_double = self._dtype == torch.float64
        if is_double or not is_few:
            least, most = map(Tensor.item, norms.aminmax())
            if not (self._least <= least and most < math.inf):
                if is_double:
                    norms = torch.cat([self._exact_norms(tensors[i]) for i in self._packed])
                else:
                    norms = self._norms_of(rows, torch.float64)
        self._spare.append(memory)
        return norms

    def _norms_of(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The norm of each segment, float64, from norms of rows in a dtype."""
        norms: Tensor = torch.linalg.vector_norm(rows, 2, 1, dtype=dtype).double()
        if len(rows) == len(self._lengths) and not self._has_empty:
            return norms
        squares = norms.square_()
        return torch.segment_reduce(squares, "sum", lengths=self._lengths, unsafe=True).sqrt_()

    def over_rows(self, values: Tensor, reduce: str) -> Tensor:
        """The sum or the largest of the values of each tensor's segments."""
        return torch.segment_reduce(values, reduce, lengths=self._of_tensors, unsafe=True)

    def _long_norms(self, tensor: Tensor) -> Tensor:
        if not self._by_slice:
            norm = _norm_by_rows(tensor).reshape(1)
            if self._least <= norm.item() < math.inf:
                return norm
        return self._exact_norms(tensor)

    def _exact_norms(self, tensor: Tensor) -> Tensor:
        """The 2-norms of a tensor's segments, whatever they are."""
        if self._by_slice:
            return norms_of_units(tensor)
        return norm_of(as_contiguous([tensor]), 2.0, torch.float64).reshape(1)


def _norm_by_rows(x: Tensor) -> Tensor:
    """The 2-norm of a long tensor, 0-d, float64, by norms of rows that may lose extreme squares."""
    (flat,), row, dtype = as_contiguous([x]), ROW, torch.float32
    if x.dtype == torch.float64:
        row, dtype = _ROW_OF_DOUBLES, x.dtype
    flat, rest = flat.view(-1), x.numel() % row
    rows = flat[: x.numel() - rest] if rest else flat
    pieces = rows.split(LONG_PIECE) if x.dtype.itemsize == 2 else (rows,)
    norms = [torch.linalg.vector_norm(p.view(-1, row), 2, 1, dtype=dtype) for p in pieces]
    norms += [flat[-rest:].to(dtype)] if rest else []
    values = torch.cat(norms) if len(norms) > 1 else norms[0]
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm
