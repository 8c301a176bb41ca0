"""The torch backend: the verbs in PyTorch's operators, on any device.

On a CPU the host decides what need not be written, and small gradients are packed, so that few
operators serve all of them. Elsewhere every decision is left to the device.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from ctypes import c_double, c_float
from itertools import compress, cycle
from typing import Any

import torch
from torch import Tensor

from tritonclip.backends.interface import Batch, Clip, Of, PartialNorms, arithmetic_of
from tritonclip.backends.operators import (
    SMALL,
    as_contiguous,
    as_real_rows,
    as_scalar,
    as_tensor,
    coefficient_of,
    combine,
    combine_numbers,
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

# Elements of a half-precision tensor that are measured at a time: 2^20 took 390 us at once, and
# 270 us in pieces whose copies in float32 stay in cache. (torch 2.13, EPYC, 1 thread.)
LONG_PIECE = 2**18
# Elements of a tensor that is packed with others, and of all tensors that are. To copy a small
# tensor takes 0.4 us, to measure it 1.3, or 2.1 in float64, and to multiply it 0.4, or 1.4 in half
# precision. (EPYC, 2 threads.)
PACKED, ALL_PACKED = 2**16, 2**19
# Bytes on the host that a packed tensor takes beside its rows, at most: a view, and where it lies.
_VIEW_BYTES = 704
# Up to so many tensors are multiplied in less time one by one, each by its factor, than packed; and
# in half precision or by slices.
FEW, FEW_HALVES = 24, 6
# Up to so many coefficients are computed in less time as numbers than by operators, which take 16
# us for any list. (As above.)
MANY = 32
_CPU = torch.device("cpu")
_ROUNDED: dict[torch.dtype, type[Any]] = {torch.float32: c_float, torch.float64: c_double}
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
        self.tensors, self.weights = (
            (tensors, []) if len(tensors) == n else (tensors[:n], tensors[n:])
        )
        self.dtype, self.rows, self._packings = layout.dtype, layout.rows, layout.packings
        self.sizes: Sequence[int] = layout.rows or ()

    def norm(self, norm_type: float, of: Of) -> PartialNorms:
        """Measures the gradients; those of all, or of a few, are numbers on the host."""
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
            norms = packings[0].norms(tensors)
            return norms.tolist() if len(tensors) <= MANY else norms
        tensors, wide = as_contiguous(tensors), wide_dtype(tensors[0].device)
        if of == "each":
            return torch.stack([norm_of([tensor], norm_type, wide) for tensor in tensors])
        norm = norm_of(tensors, norm_type, wide)
        return [norm.item()] if packings else norm.reshape(1)

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
        if of == "all" and isinstance(norms, list):
            norms = [combine_numbers(norms, norm_type)]
        whole = as_tensor(norms)
        if of == "all":
            whole = combine(whole, norm_type)
        elif of == "rows":
            whole = self._of_rows(whole[0])
        return unscaled(whole, grad_scale).to(whole.dtype if wide else self.dtype)

    def _of_rows(self, norms: Tensor) -> Tensor:
        """The norm of each gradient, from those of its rows."""
        if len(norms) == len(self.sizes):
            return norms
        if norms.dtype != torch.float64 or self.tensors[0].dtype.to_real() == torch.float64:
            # Squares may leave the range.
            return torch.stack([combine(part, 2.0) for part in norms.split(self.sizes)])
        if self._packings:
            return self._packings[0].norms_of_tensors(norms)
        return torch.stack(torch._foreach_norm(norms.split(self.sizes)))

    def partials_each(self, norms: Tensor, norm_type: float) -> Tensor:
        """The same norms."""
        return norms

    def scale_(self, norms: PartialNorms, clip: Clip) -> tuple[Tensor, float | Tensor]:
        """Multiplies all gradients by one coefficient, or each gradient or unit by its own."""
        if self._packings and (clip.of == "all" or isinstance(norms, list)):
            return self._scale_on_host_(norms if isinstance(norms, list) else norms.tolist(), clip)
        if clip.of != "all":
            return self._scale_each_(norms, clip)
        norm = self.combine(norms, clip.norm_type, "all", clip.grad_scale)
        coefficient = coefficient_of(norm, clip.limit, clip.eps)
        factor = factor_of(coefficient, clip.grad_scale, self.tensors[0].dtype)
        erase = ~torch.isfinite(norm) if clip.erase else None
        multiply_(self.tensors, factor, erase)
        return norm, coefficient if erase is None else torch.where(erase, 0.0, coefficient)

    def _scale_on_host_(self, norms: list[float], clip: Clip) -> tuple[Tensor, float]:
        """Multiplies by numbers: all gradients by one, or each of a few by its own."""
        if clip.of == "all":
            norms = [combine_numbers(norms, clip.norm_type)]
        rounded, scale = _ROUNDED[self.dtype], float(clip.grad_scale)
        norms = [rounded(norm / scale).value for norm in norms]
        norm = self._as_result(norms)
        norm = norm[0] if clip.of == "all" else norm
        if clip.erase and (clip.of == "each" or not math.isfinite(norms[0])):
            torch._foreach_zero_(self.tensors)
            return norm, 0.0
        limits, eps = clip.limit, rounded(clip.eps).value
        limits = limits.tolist() if isinstance(limits, Tensor) else limits
        limits = limits if isinstance(limits, list) else [limits]
        coefficients = [
            _coefficient(one, limit, eps, rounded)
            for one, limit in zip(norms, cycle(limits), strict=False)
        ]
        scale = rounded(scale).value
        factors = [rounded(coefficient / scale).value for coefficient in coefficients]
        if factors.count(1.0) < len(factors):
            if len(factors) == 1:
                self._packings[0].multiply_all_(self.tensors, factors[0])
            else:
                chosen = [i for i, factor in enumerate(factors) if factor != 1]
                self._packings[0].multiply_(self.tensors, self._as_result(factors), chosen)
        least = sum(coefficients)
        # min may miss NaN.
        return norm, least if math.isnan(least) else min(coefficients)

    def _as_result(self, numbers: list[float]) -> Tensor:
        code = "d" if self.dtype == torch.float64 else "f"
        return torch.frombuffer(array(code, numbers), dtype=self.dtype)

    def _scale_each_(self, norms: PartialNorms, clip: Clip) -> tuple[Tensor, float | Tensor]:
        tensors, partials = self.tensors, as_tensor(norms)
        norm = self.combine(partials, clip.norm_type, clip.of, clip.grad_scale)
        erase = clip.erase if isinstance(clip.erase, Tensor) else None
        if self._packings and erase is not None and bool(erase):
            # Not by torch._foreach_zero_, which refuses conjugate views.
            for tensor in tensors:
                tensor.zero_()
            return norm, 0.0
        if clip.of == "rows":
            coefficient = self._coefficients_of_rows(partials, clip)
        else:
            coefficient = coefficient_of(norm, clip.limit, clip.eps)
        factors = factor_of(coefficient, clip.grad_scale, tensors[0].dtype.to_real())
        if self._packings:
            self._packings[0].multiply_(tensors, factors)
            return norm, coefficient
        own = factors.split(self.sizes) if clip.of == "rows" else factors.unbind()
        for tensor, factor in zip(tensors, own, strict=True):
            if clip.of == "rows":
                multiply_units_(tensor, factor, erase)
            else:
                multiply_([tensor], factor, erase)
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
        self._dtype, self._is_half = arithmetic_of(dtype), dtype.itemsize == 2
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
        self._ends = self._of_tensors.cumsum(0)
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

    def norms_of_tensors(self, norms: Tensor) -> Tensor:
        """The norm of each tensor, from those of its segments, whose squares float64 holds."""
        squares, lengths = norms.square(), self._of_tensors
        return torch.segment_reduce(squares, "sum", lengths=lengths, unsafe=True).sqrt_()

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

    def multiply_all_(self, tensors: list[Tensor], factor: float) -> None:
        """Multiplies all tensors by a number, unless it is 1 when it is rounded."""
        by = torch.scalar_tensor(factor, dtype=self._dtype, device=_CPU)
        if by.item() == 1:
            return
        if self._is_half and len(self._packed) > 1:
            # Copies and one product take a third of the time of a product for each.
            own = self._of(tensors, self._packed)
            rows, views = memory = self._take(own)
            torch._foreach_copy_(views, own)
            rows.mul_(by)
            torch._foreach_copy_(own, views)
            self._keep(memory, by)
            tensors = [tensors[i] for i in self._long]
        if tensors:
            torch._foreach_mul_(tensors, by)

    def multiply_(
        self, tensors: list[Tensor], factors: Tensor, chosen: list[int] | None = None
    ) -> None:
        """Multiplies each segment by its factor; only tensors with factors that are not 1.

        `chosen` are their indices, where they are known.
        """
        factors = factors.to(self._dtype)
        if chosen is None:
            changed = (factors != 1).nonzero().flatten()
            if self._by_slice:
                changed = torch.searchsorted(self._ends, changed, right=True).unique_consecutive()
            chosen = changed.tolist()
        few = FEW_HALVES if self._is_half or self._by_slice else FEW
        if self._packed and len(chosen) > few:
            self._multiply_packed_(tensors, factors, chosen)
            chosen = sorted(set(chosen).intersection(self._long))
        if chosen and not self._by_slice:
            by = factors.unbind()
            torch._foreach_mul_([tensors[i] for i in chosen], [by[i] for i in chosen])
        elif chosen:
            by = factors.split(self._counts)
            for i in chosen:
                multiply_units_(tensors[i], by[i], None)

    def _multiply_packed_(
        self, tensors: list[Tensor], factors: Tensor, chosen: Sequence[int]
    ) -> None:
        """Multiplies those of the packed tensors that are chosen."""
        own = self._of(tensors, self._packed)
        rows, views = memory = self._take(own)
        if len(chosen) < len(tensors):
            flags = list(map(set(chosen).__contains__, self._packed))
            own, views = list(compress(own, flags)), list(compress(views, flags))
        if self._long:
            by = factors.split(self._counts)
            factors = torch.cat([by[i] for i in self._packed])
        torch._foreach_copy_(views, own)
        rows.mul_(factors.index_select(0, self._segments)[:, None])
        torch._foreach_copy_(own, views)
        self._keep(memory, factors)

    def _keep(self, memory: tuple[Tensor, list[Tensor]], factors: Tensor) -> None:
        """Gives back memory that was multiplied, unless zeros behind a segment may be NaN now."""
        if math.isfinite(factors.sum().item()):
            self._spare.append(memory)


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


def _coefficient(norm: float, limit: float, eps: float, rounded: type[Any]) -> float:
    """`coefficient_of` in numbers, each rounded as a tensor of the dtype rounds it."""
    bound, limit = rounded(norm + eps).value, rounded(limit).value
    # A limit may be NaN.
    return float(rounded(limit / bound).value) if bound and not limit >= bound else 1.0
