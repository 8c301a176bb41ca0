"""The torch backend: the verbs in PyTorch's operators, on any device.

On a CPU the host decides, in Python's numbers, what need not be written, and small gradients are
packed, so that few operators measure all of them. Elsewhere every decision is left to the device.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.backends.interface import Batch, Clip, Of, PartialNorms, arithmetic_of
from tritonclip.backends.native import HostBatch
from tritonclip.backends.operators import (
    SMALL,
    TYPECODES,
    as_contiguous,
    as_real_rows,
    as_scalar,
    coefficient_of,
    combine,
    count_rows,
    factor_of,
    multiply_,
    multiply_units_,
    norm_of,
    norms_of_units,
    unscale_and_clamp_,
    unscaled,
    wide_dtype,
)

# Elements of a half-precision tensor that are copied to float32 at a time, so that copies stay in
# cache: 27 million bfloat16 took 14.7 ms in pieces of 2^18, 11.4 in these, and 12.9 in pieces of
# 2^20. To copy them takes half of that. (torch 2.13, EPYC, 1 thread.)
LONG_PIECE = 2**19
# Elements of a tensor whose norms of rows are kept at a time, which takes 6 MiB for half types.
_MOST_MEASURED = 2**24
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


class TorchBatch(HostBatch):
    """Verbs in PyTorch; see :class:`tritonclip.backends.interface.Batch`."""

    def __init__(self, tensors: list[Tensor], layout: TorchLayout) -> None:
        n = layout.n_tensors
        self.tensors, self.weights = tensors[:n], tensors[n:]
        self.dtype, self._packings = layout.dtype, layout.packings
        self.sizes = layout.rows or ()

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

    def _of_rows(self, norms: Tensor) -> PartialNorms:
        norms = norms[0]
        if len(norms) == len(self.sizes):
            return norms
        parts = norms.split(self.sizes)
        if norms.dtype != torch.float64 or self.tensors[0].dtype.to_real() == torch.float64:
            # Squares may leave the range.
            return torch.stack([combine(part, 2.0) for part in parts])
        if self._packings:
            return self._packings[0].over_rows(norms.square()).sqrt_()
        return torch.stack(torch._foreach_norm(parts))

    def scale_(self, norms: PartialNorms, clip: Clip) -> tuple[Tensor, float | Tensor]:
        if self._packings:
            return super().scale_(norms, clip)
        return self._scale_on_device_(norms, clip)

    def _multiply_(self, factors: list[float]) -> None:
        if len(factors) == 1:
            dtype = arithmetic_of(self.tensors[0].dtype)
            by = torch.scalar_tensor(factors[0], dtype=dtype, device="cpu")
            torch._foreach_mul_(self.tensors, by)
        else:
            self._packings[0].multiply_each_(self.tensors, factors)

    def _scale_on_device_(self, norms: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
        """Multiplies all gradients by one coefficient, or each gradient or unit by its own."""
        tensors, of = self.tensors, clip.of
        norm = self.combine(norms, clip.norm_type, of, clip.grad_scale)
        if of == "rows":
            coefficient = self._coefficients_of_rows(norms, clip)
        else:
            coefficient = coefficient_of(norm, clip.limit, clip.eps)
        factor = factor_of(coefficient, clip.grad_scale, tensors[0].dtype.to_real())
        erase = clip.erase if isinstance(clip.erase, Tensor) else None
        if of == "all":
            erase = ~torch.isfinite(norm) if clip.erase else None
            multiply_(tensors, factor)
        elif of == "each":
            for tensor, own in zip(tensors, factor.unbind(), strict=True):
                multiply_([tensor], own)
        else:
            for tensor, own in zip(tensors, factor.split(self.sizes), strict=True):
                multiply_units_(tensor, own)
        if erase is None:
            return norm, coefficient
        for tensor in tensors:
            tensor.masked_fill_(erase, 0.0)
        return norm, torch.where(erase, 0.0, coefficient)

    def _multiply_rows_(self, norms: Tensor, clip: Clip) -> float | Tensor:
        coefficients = self._coefficients_of_rows(norms, clip)
        factors = factor_of(coefficients, clip.grad_scale, self.tensors[0].dtype.to_real())
        self._packings[0].multiply_units_(self.tensors, factors)
        return coefficients

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


class Memory(NamedTuple):
    """What a call on packed tensors needs, and no other call has at the same time.

    Attributes:
        rows: the matrix, with zeros behind each segment.
        views: of it, in the form of the packed tensors.
        numbers: a factor of every tensor.
        factors: the same memory as tensors, 0-d.
    """

    rows: Tensor
    views: list[Tensor]
    numbers: array[float]
    factors: Sequence[Tensor]


class Packing:
    """Where small tensors of a CPU are packed: as rows of a matrix, with zeros behind each segment.

    One operator then measures or multiplies all of them. A segment is a tensor, or, with counts,
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
        n, self._packed, self._long = 0, list[int](), list[int]()
        for i, size in enumerate(sizes):
            is_alone = len(sizes) == 1 and size <= SMALL and counts is None
            # A small one alone is not worth a copy, unless it has several segments.
            is_long = size > PACKED or n + size > ALL_PACKED or is_alone
            (self._long if is_long else self._packed).append(i)
            n += 0 if is_long else size
        self._is_complex = tensors[0].is_complex()
        # Of each packed tensor, in reals.
        reals = 2 if self._is_complex else 1
        lengths = {i: reals * sizes[i] // self._counts[i] for i in self._packed}
        longest = max(lengths.values(), default=0)
        n_segments = sum(self._counts[i] for i in lengths)
        # Segments of few elements in all have a row each, so that there is nothing to reduce.
        self._row = longest if ROW < longest <= SMALL // n_segments else ROW
        # Of each packed tensor, in elements; of each of its segments, in rows.
        self._starts, of_segments, n_rows = list[int](), list[int](), 0
        for i, length in lengths.items():
            n_own, count = -(-length // self._row), self._counts[i]
            self._starts.append(n_rows * self._row)
            of_segments += [n_own] * count
            n_rows += n_own * count
        self._n_rows = n_rows
        self._lengths = torch.tensor(of_segments, dtype=torch.int64, device="cpu")
        # The segment of each row; None where each segment has one row.
        self._segments = None
        if of_segments.count(1) < n_segments:
            self._segments = torch.repeat_interleave(self._lengths)
        self._of_tensors = torch.tensor(self._counts, dtype=torch.int64, device="cpu")
        self._spare: list[Memory] = []
        # Tensors that are clamped by two operators for all, and those by one each.
        are_small = [size <= SMALL and len(sizes) > 1 for size in sizes]
        self.by_size = [[i for i, own in enumerate(are_small) if own is of] for of in (True, False)]
        n_views = len(lengths) + len(sizes)
        self.n_bytes = n_rows * (self._row * self._dtype.itemsize + 8) + _VIEW_BYTES * n_views

    def _take(self, tensors: list[Tensor]) -> Memory:
        """Memory that no other thread has; the caller gives it back, with zeros behind segments."""
        try:
            return self._spare.pop()
        except IndexError:
            return self._memory_for(self._of(tensors))

    def _memory_for(self, tensors: list[Tensor]) -> Memory:
        # Never inference tensors, which a later call could not write to.
        with torch.inference_mode(False):
            flat, views = torch.zeros(self._n_rows * self._row, dtype=self._dtype, device="cpu"), []
            for tensor, start in zip(tensors, self._starts, strict=True):
                stride = tensor.stride()
                if self._by_slice:
                    # Dense, whatever the gaps of the tensor.
                    stride = torch.empty(tensor.shape, device="meta").stride()
                    if tensor.dim() > 1:
                        stride = (-(-stride[0] // self._row) * self._row, *stride[1:])
                views.append(flat.as_strided(tensor.shape, stride, start))
            numbers = array(TYPECODES[self._dtype], [1.0]) * len(self._counts)
            factors = torch.frombuffer(numbers, dtype=self._dtype).unbind()
            return Memory(flat.view(self._n_rows, self._row), views, numbers, factors)

    def _of(self, tensors: list[Tensor]) -> list[Tensor]:
        """The packed tensors, as they are packed."""
        if self._long:
            tensors = [tensors[i] for i in self._packed]
        return list(map(as_real_rows, tensors)) if self._is_complex else tensors

    def _pack(self, tensors: list[Tensor]) -> Memory:
        memory = self._take(tensors)
        torch._foreach_copy_(memory.views, self._of(tensors))
        return memory

    def multiply_each_(self, tensors: list[Tensor], factors: list[float]) -> None:
        """Multiplies each tensor by its factor, unless it is 1."""
        # Factors of ten gradients take 1 us in tensors that are kept, and 6 in new ones.
        memory = self._take(tensors)
        memory.numbers[:] = array(memory.numbers.typecode, factors)
        chosen = [i for i, factor in enumerate(factors) if factor != 1]
        own = [memory.factors[i] for i in chosen]
        torch._foreach_mul_([tensors[i] for i in chosen], own)
        self._spare.append(memory)

    def multiply_units_(self, tensors: list[Tensor], factors: Tensor) -> None:
        """Multiplies each segment by its factor; a tensor whose factors are 1 is not written."""
        changes = self.over_rows((factors - 1).abs_()).tolist()
        if self._long:
            parts = factors.split(self._counts)
            for i in self._long:
                if changes[i]:
                    multiply_units_(tensors[i], parts[i])
            factors = torch.cat([factors[:0], *(parts[i] for i in self._packed)])
        chosen = [at for at, i in enumerate(self._packed) if changes[i]]
        if not chosen:
            return
        memory, own = self._pack(tensors), self._of(tensors)
        if self._segments is not None:
            factors = factors.index_select(0, self._segments)
        memory.rows.mul_(factors.unsqueeze(1))
        torch._foreach_copy_([own[at] for at in chosen], [memory.views[at] for at in chosen])
        # Others leave no zeros behind the segments.
        if math.isfinite(sum(changes)):
            self._spare.append(memory)

    def partial_norms(self, tensors: list[Tensor]) -> list[float]:
        """2-norms of some parts of the tensors, whose norm is that of all."""
        norms, by_rows = [], bool(self._long)
        if self._packed:
            memory = self._pack(tensors)
            rows = memory.rows
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
        memory, is_double = self._pack(tensors), self._dtype == torch.float64
        # In float64, squares of narrower elements are right, whatever they are.
        is_right = memory.rows.numel() <= SMALL
        norms = self._norms_of(memory.rows, torch.float64 if is_right else self._dtype)
        is_right = is_right and not is_double
        if not is_right and not torch.equal(norms, norms.clamp(self._least, sys.float_info.max)):
            if is_double:
                norms = torch.cat([self._exact_norms(tensors[i]) for i in self._packed])
            else:
                norms = self._norms_of(memory.rows, torch.float64)
        self._spare.append(memory)
        return norms

    def _norms_of(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The norm of each segment, float64, from norms of rows in a dtype."""
        norms: Tensor = torch.linalg.vector_norm(rows, 2, 1, dtype=dtype)
        if self._segments is None:
            return norms.double()
        squares = norms.double().square_()
        return torch.segment_reduce(squares, "sum", lengths=self._lengths, unsafe=True).sqrt_()

    def over_rows(self, values: Tensor) -> Tensor:
        """The sum of the values of each tensor's segments."""
        return torch.segment_reduce(values, "sum", lengths=self._of_tensors, unsafe=True)

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
    norm: Tensor
    if x.numel() <= SMALL:
        norm = torch.linalg.vector_norm(x, dtype=torch.float64)
        return norm
    (flat,), row, dtype = as_contiguous([x]), ROW, torch.float32
    if x.dtype == torch.float64:
        row, dtype = _ROW_OF_DOUBLES, x.dtype
    flat, rest = flat.view(-1), x.numel() % row
    if x.numel() > _MOST_MEASURED:
        parts = torch.stack(list(map(_norm_by_rows, flat.split(_MOST_MEASURED))))
        norm = torch.linalg.vector_norm(parts)
        return norm
    rows = flat[: x.numel() - rest] if rest else flat
    pieces: Iterable[Tensor] = (rows,)
    if x.dtype.itemsize == 2:
        piece = torch.empty(min(LONG_PIECE, rows.numel()), dtype=dtype, device="cpu")
        pieces = (piece[: part.numel()].copy_(part) for part in rows.split(LONG_PIECE))
    norms = [torch.linalg.vector_norm(p.view(-1, row), 2, 1, dtype=dtype) for p in pieces]
    norms += [flat[-rest:].to(dtype)] if rest else []
    values = torch.cat(norms) if len(norms) > 1 else norms[0]
    norm = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm
