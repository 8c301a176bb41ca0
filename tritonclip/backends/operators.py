"""Splits large tensors to bound temporaries, and packs small tensors to save calls.

Writes in PyTorch: gradients multiplied, clamped and set to 0 in place, on any device.

The torch backend on any device: the verbs in PyTorch, with every decision left to the device.

On a CPU, where the host may decide, `cpu_backend` takes its place.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_float
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tritonclip.rules import Rule

# Elements of a piece that is copied to float64: 1 MiB a temporary.
PIECE = 131072
# Elements of small tensors gathered at a time: up to 32,768 torch.cat copies in one go, 0.15 us a
# tensor, beyond it dispatches every tensor, 0.9 us.
BATCH = 32767


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


def as_contiguous(tensors: list[Tensor]) -> list[Tensor]:
    """Contiguous tensors as they are; views of all elements of others that are dense in memory."""
    return [t if t.is_contiguous() else t.as_strided((t.numel(),), (1,)) for t in tensors]


def pack_small(
    tensors: list[Tensor], sizes: Sequence[int], multiple: int = 1
) -> Iterator[tuple[int, int, Tensor]]:
    """Copies contiguous CPU tensors of one dtype end to end, in batches.

    Args:
        tensors: of BATCH - multiple elements or fewer.
        sizes: theirs.
        multiple: zeros fill up each batch to a multiple of so many elements.

    Yields:
        Indices of the batch's first tensor and of the one after its last, and their elements, 1-d,
        overwritten by the next batch.
    """
    if not tensors:
        return
    if set(map(Tensor.dim, tensors)) != {1}:
        tensors = [tensor.view(-1) for tensor in tensors]
    ends = [0, *accumulate(sizes)]
    room = torch.empty(min(BATCH, ends[-1] + multiple), dtype=tensors[0].dtype, device="cpu")
    start = 0
    while start < len(tensors):
        stop = bisect_right(ends, ends[start] + BATCH - multiple) - 1
        n = ends[stop] - ends[start]
        if n:
            padded = n + -n % multiple
            torch.cat(tensors[start:stop], out=room[:n])
            room[n:padded] = 0
            yield start, stop, room[:padded]
        start = stop


# Dtypes that torch can multiply and clamp in place; float8 it cannot.
ARITHMETIC = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def as_scalar(number: float | Tensor, like: Tensor) -> Tensor:
    """A number as a tensor of another one's dtype, filled in on the device: no upload, no sync."""
    if isinstance(number, Tensor):
        number = number.to(like.device, like.dtype)
        return number.reshape(()) if number.numel() == 1 else number
    if like.dtype == torch.float32:
        # inf beyond its range, where torch.full raises.
        number = c_float(number).value
    return torch.full((), number, dtype=like.dtype, device=like.device)


def multiply_(tensors: list[Tensor], factors: list[Tensor], erase: Tensor) -> None:
    """Multiplies in place by each 0-d factor in turn, or writes zeros; half types in float32."""
    if tensors[0].dtype != torch.float64:
        factors = [factor.to(torch.float32) for factor in factors]
    first, *others = factors
    # On a CPU, an interrupt between two factors would leave gradients multiplied by one of them.
    in_place = not others or tensors[0].device.type != "cpu"
    # Off the CPU, foreach rounds a factor to the tensors' dtype first.
    in_place = in_place and tensors[0].dtype == first.dtype
    if in_place and in_one_call(torch._foreach_mul_, tensors, first):
        for factor in others:
            torch._foreach_mul_(tensors, factor)
        for tensor in tensors:
            tensor.masked_fill_(erase, 0.0)
        return
    for piece in _writable_pieces(tensors):
        wide = piece.to(first.dtype, copy=True).mul_(first)
        for factor in others:
            wide.mul_(factor)
        store_(piece, wide.masked_fill_(erase, 0.0))


def zero_(tensors: list[Tensor]) -> None:
    """Writes zeros."""
    if not in_one_call(torch._foreach_zero_, tensors):
        for tensor in tensors:
            tensor.zero_()


def in_one_call(foreach: Callable[..., None], tensors: list[Tensor], *operands: Any) -> bool:
    """Runs one of torch's foreach functions; False, and nothing written, if it takes no such list.

    They take neither float8 nor lazily negated tensors.
    """
    if tensors[0].dtype not in ARITHMETIC:
        return False
    try:
        foreach(tensors, *operands)
    except RuntimeError:
        if any(map(Tensor.is_neg, tensors)):
            return False
        raise
    return True


def in_forward_mode() -> bool:
    """Whether gradients may be dual numbers of forward AD."""
    return forward_ad._current_level >= 0


def store_(piece: Tensor, values: Tensor) -> None:
    """Writes values, rounded to the dtype of the tensor that they go to."""
    # From float32 to a lazily negated float16 tensor on a CPU, copy_ forgets the sign (torch 2.13).
    piece.copy_(values.to(piece.dtype) if piece.is_neg() else values)


def _writable_pieces(tensors: list[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield from split_flat(tensor, PIECE, writable=True)


def clamp_together_(tensors: list[Tensor], low: float, high: float) -> None:
    """Clamps in two foreach passes, where torch has them for the tensors."""
    if not tensors:
        return
    if in_one_call(torch._foreach_clamp_min_, tensors, low):
        torch._foreach_clamp_max_(tensors, high)
    else:
        unscale_and_clamp_(tensors, low, high, 1.0)


def unscale_and_clamp_(
    tensors: list[Tensor], low: float, high: float, grad_scale: float | Tensor
) -> None:
    """Divides by the loss scale and clamps, both in float32 or wider, rounding once."""
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    one = torch.ones((), dtype=wide, device=tensors[0].device)
    factor = one / as_scalar(grad_scale, one)
    for piece in _writable_pieces(tensors):
        store_(piece, piece.to(wide, copy=True).mul_(factor).clamp_(low, high))


# Elements of a tensor that is measured together with others: a copy costs less than its operators.
SMALL = 4096
# Powers of float32, at most, whose sums are normal numbers of float64: from 2^(-149 * 6) on.
MOST_IN_FLOAT64 = 6


class TorchLayout:
    """Needs to know nothing but the dtype of results."""

    by_address = False

    def __init__(self) -> None:
        self.dtype = torch.float32
        self.n_bytes = 0

    def bind(self, tensors: list[Tensor], addresses: list[int] | None) -> "TorchBatch":
        """The gradients of a call."""
        return TorchBatch(tensors, self.dtype)


class TorchBatch:
    """Verbs in PyTorch; see :class:`tritonclip.backends.interface.Batch`."""

    counts_versions = True
    on_host = False

    def __init__(self, tensors: list[Tensor], dtype: torch.dtype) -> None:
        self.tensors, self.dtype = tensors, dtype

    def count_norms(self, *, per_gradient: bool) -> int:
        """How many partial norms `norm` gives: one a gradient, or one."""
        return len(self.tensors) if per_gradient else 1

    def norm(self, norm_type: float, out: Tensor | None, *, per_gradient: bool) -> Tensor:
        """Measures the gradients."""
        wide = wide_dtype(self.tensors[0].device)
        parts = [[tensor] for tensor in self.tensors] if per_gradient else [self.tensors]
        measured = torch.stack([norm_of(part, norm_type, wide) for part in parts])
        if per_gradient and norm_type == -math.inf:
            for i, tensor in enumerate(self.tensors):
                if tensor.numel() == 0:
                    measured[i] = 0.0
        return measured if out is None else out.copy_(measured)

    def total(self, norms: Tensor, norm_type: float, grad_scale: float | Tensor) -> Tensor:
        """The norm from partial norms, 0-d."""
        return unscaled(combine(norms, norm_type), norm_type, grad_scale).to(self.dtype)

    def total_each(
        self, norms: Tensor, first: int, norm_type: float, grad_scale: float | Tensor
    ) -> Tensor:
        """The norm of each gradient, 1-d."""
        own = norms[first : first + len(self.tensors)]
        return unscaled(own, norm_type, grad_scale).to(self.dtype)

    def norms_each(self, norms: Tensor, norm_type: float) -> Tensor:
        """The norm of each gradient: there is one partial norm for each."""
        return norms

    def partials_each(self, norms: Tensor, norm_type: float) -> Tensor:
        """The same norms."""
        return norms

    def scale_(
        self,
        norms: Tensor,
        rule: Rule,
        max_norm: float | Tensor,
        grad_scale: float | Tensor,
        *,
        erase_nonfinite: bool,
    ) -> tuple[Tensor, float | Tensor]:
        """Multiplies all gradients by one coefficient."""
        norm = self.total(norms, rule.norm_type, grad_scale)
        coefficient = coefficient_of(norm, max_norm, rule.eps)
        factors = self.factors_of(coefficient, grad_scale)
        erase = (
            ~torch.isfinite(norm) if erase_nonfinite else torch.zeros_like(norm, dtype=torch.bool)
        )
        multiply_(self.tensors, factors, erase)
        return norm, torch.where(erase, 0.0, coefficient)

    def scale_each_(
        self,
        norms: Tensor,
        first: int,
        rule: Rule,
        max_norm: float | Tensor,
        grad_scale: float | Tensor,
        *,
        erase: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Multiplies each gradient by the coefficient of its norm."""
        norm, coefficient, factors = self.terms_each(norms, first, rule, max_norm, grad_scale)
        if erase is None:
            erase = torch.zeros((), dtype=torch.bool, device=norm.device)
        for i, tensor in enumerate(self.tensors):
            multiply_([tensor], [factor[i] for factor in factors], erase)
        return norm, torch.where(erase, 0.0, coefficient)

    def terms_each(
        self,
        norms: Tensor,
        first: int,
        rule: Rule,
        max_norm: float | Tensor,
        grad_scale: float | Tensor,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Norms and coefficients, 1-d, and factors for `multiply_`, each 1-d."""
        norm = self.total_each(norms, first, rule.norm_type, grad_scale)
        coefficient = coefficient_of(norm, max_norm, rule.eps)
        return norm, coefficient, self.factors_of(coefficient, grad_scale)

    def factors_of(self, coefficient: Tensor, grad_scale: float | Tensor) -> list[Tensor]:
        """Factors whose product is coefficient / grad_scale; the first alone where it suffices."""
        wide = torch.float64 if self.tensors[0].dtype == torch.float64 else torch.float32
        unscaled = not isinstance(grad_scale, Tensor) and grad_scale == 1
        if unscaled and wide == coefficient.dtype:
            return [coefficient]
        scale = as_scalar(grad_scale, coefficient)
        multiplier = coefficient / scale
        # A quotient below the least normal number would lose digits, or all of itself.
        least = torch.finfo(wide).tiny
        is_less = multiplier < least
        return [
            torch.where(is_less, coefficient / least / scale, multiplier),
            torch.where(is_less, least, torch.ones_like(multiplier)),
        ]

    def clamp_(self, low: float, high: float, grad_scale: float | Tensor) -> None:
        """Clamps the gradients."""
        if isinstance(grad_scale, Tensor) or grad_scale != 1:
            unscale_and_clamp_(self.tensors, low, high, grad_scale)
        else:
            clamp_together_(self.tensors, low, high)


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest floating-point dtype that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def norm_of(tensors: list[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    """The norm of tensors, 0-d, for any device, norm type and magnitude."""
    norms = [_norm_of_piece(piece, norm_type, dtype) for piece in _pieces(tensors)]
    if not norms:
        nothing = math.inf if norm_type == -math.inf else 0.0
        return torch.full((), nothing, dtype=dtype, device=tensors[0].device)
    return norms[0] if len(norms) == 1 else combine(torch.stack(norms), norm_type)


def _pieces(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yields every element once, in 1-d pieces of at most PIECE; small tensors end to end."""
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
    if x.dtype.itemsize == 1:
        # float8 has no operators.
        x = x.to(dtype)
    if norm_type == 0:
        return torch.count_nonzero(x).to(dtype)
    if math.isinf(norm_type):
        magnitudes = x.abs()
        return (magnitudes.max() if norm_type > 0 else magnitudes.min()).to(dtype)
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
    """The norm whose parts have these norms, 0-d."""
    if norms.numel() == 1:
        return norms.reshape(())
    if norm_type == 0:
        return norms.sum()
    return _norm_of_piece(norms, norm_type, norms.dtype)


def unscaled(norms: Tensor, norm_type: float, grad_scale: float | Tensor) -> Tensor:
    """Norms divided by the loss scale; a count of elements carries none."""
    is_scaled = norm_type and (isinstance(grad_scale, Tensor) or grad_scale != 1)
    return norms / as_scalar(grad_scale, norms) if is_scaled else norms


def coefficient_of(norm: Tensor, max_norm: float | Tensor, eps: float) -> Tensor:
    """Returns min(1, max_norm / (norm + eps)) in the dtype of norm.

    1 for nothing to clip and for an infinite limit; NaN stays.
    """
    bound = norm + eps
    limit = as_scalar(max_norm, bound)
    ratio = limit / bound
    keep = (ratio > 1) | (bound == 0) | ((limit == math.inf) & (norm == norm))
    return torch.where(keep, 1.0, ratio)
