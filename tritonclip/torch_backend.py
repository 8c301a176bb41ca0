"""The torch backend: the same verbs as `tritonclip.kernels`, in PyTorch.

On a CPU no sync is needed, so it branches: what lies within the limit need not be written. On other
devices it decides nothing on the host. It is held to the same accuracy everywhere; the fast path
for the 2-norm on CPU is in `cpu_norm`.
"""

import math
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tritonclip import cpu_norm
from tritonclip.gradient_list import Group
from tritonclip.limit import Limit
from tritonclip.pieces import PIECE, flat_pieces, gathered

# Elements from which a CPU tensor is clamped in one pass: of 1,024, 4,096, 8,192 and 131,072
# elements, two foreach passes take 1.2, 2.3, 7.5 and 78 us a tensor, one call of clamp_ 1.9, 2.2,
# 6.0 and 45. To look first whether any element is outside costs as much as to clamp: 28 to 35 ms
# for 124M float32 elements, against 29. (torch 2.13, Xeon, 2 threads.)
ONE_PASS = 4096
# Tensors of a batch from which it is asked which of them have elements outside: that takes 80 us a
# batch, and 0.8 us to clamp a tensor of up to 256 elements.
MANY = 256
# Dtypes that torch can multiply and clamp in place; float8 it cannot.
_ARITHMETIC = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def prepare(group: Group) -> Group:
    """What the other verbs take: the group itself."""
    return group


def count_norms(group: Group, each: bool) -> int:
    """How many norms `norm` writes: one, or one a gradient."""
    return len(group.tensors) if each else 1


def norm(group: Group, norm_type: float, out: Tensor, *, each: bool = False) -> None:
    """Measures gradients of one device and dtype.

    Args:
        group: real gradients, any strides.
        norm_type: p of the p-norm.
        out: float64[count_norms(tensors, each)] on the tensors' device (float32 where a device has
            no float64).
        each: one norm a gradient instead of one norm of all.
    """
    if each and norm_type == 2.0 and cpu_norm.measures(group):
        measured, unknown = cpu_norm.two_norms_of_each(group)
        out.copy_(measured)
        for i in unknown:
            out[i] = cpu_norm.two_norm_of(group.tensors[i])
        return
    parts = [group]
    if each:
        parts = [Group([tensor], [0], flat=tensor.is_contiguous()) for tensor in group.tensors]
    for i, part in enumerate(parts):
        out[i] = _combine(torch.stack(list(_norms(part, norm_type, out.dtype))), norm_type)


def _norms(group: Group, norm_type: float, dtype: torch.dtype) -> Iterator[Tensor]:
    """0-d norms of pieces; at least one."""
    if norm_type == 2.0 and group.device.type == "cpu":
        return cpu_norm.two_norms(group)
    return _exact_norms(group.tensors, norm_type, dtype)


def _exact_norms(tensors: list[Tensor], norm_type: float, dtype: torch.dtype) -> Iterator[Tensor]:
    """0-d norms of small pieces, for any device, norm type and magnitude; at least one."""
    nothing = math.inf if norm_type == -math.inf else 0.0
    yield torch.full((), nothing, dtype=dtype, device=tensors[0].device)
    for tensor in tensors:
        for piece in flat_pieces(tensor, PIECE):
            yield _exact_norm(piece, norm_type, dtype)


def _exact_norm(x: Tensor, norm_type: float, dtype: torch.dtype) -> Tensor:
    """The 0-d norm of a small 1-d tensor, in `dtype`, after division by the largest magnitude."""
    magnitudes = x.to(dtype, copy=True).abs_()
    if norm_type == 0:
        return torch.count_nonzero(magnitudes).to(dtype)
    if norm_type == -math.inf:
        return magnitudes.min()
    largest = magnitudes.max()
    if norm_type == math.inf:
        return largest
    # Dividing by 1 instead of 0, inf and NaN gives just these.
    scale = torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
    return scale * magnitudes.div_(scale).pow_(norm_type).sum().pow(1 / norm_type)


def _combine(norms: Tensor, norm_type: float) -> Tensor:
    """The 0-d norm whose parts have these norms."""
    if norms.numel() == 1:
        return norms.reshape(())
    return norms.sum() if norm_type == 0 else _exact_norm(norms, norm_type, norms.dtype)


def _coefficient(norm: Tensor, limit: Limit) -> Tensor:
    """Returns min(1, max_norm / (norm + eps)) in the dtype of norm.

    1 for nothing to clip and for an infinite limit; NaN stays.
    """
    bound = norm + limit.eps
    ratio = torch.full_like(bound, limit.max_norm) / bound
    keep = (ratio > 1) | (bound == 0)
    if limit.max_norm == math.inf:
        keep = keep | (norm == norm)
    return torch.where(keep, 1.0, ratio)


def _scalar(value: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a 0-d tensor, filled in on the device: an upload would be a sync."""
    if isinstance(value, Tensor):
        return value.to(device, dtype).reshape(())
    return torch.full((), value, dtype=dtype, device=device)


def _results(norms: Tensor, limit: Limit) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From raw norms: norms and coefficients for users, multipliers, and where to write zeros."""
    grad_scale = _scalar(limit.grad_scale, norms.dtype, norms.device)
    measured = (norms / grad_scale).to(limit.dtype)
    coefficients = _coefficient(measured, limit)
    multipliers = coefficients / grad_scale.to(limit.dtype)
    if limit.erase_nonfinite:
        erase = ~torch.isfinite(measured)
    else:
        erase = torch.zeros_like(measured, dtype=torch.bool)
    return measured, coefficients, multipliers, erase


def scale_(
    group: Group, norms: Tensor, limit: Limit, *, write: bool = True
) -> tuple[Tensor, Tensor]:
    """Multiplies all gradients by one coefficient; on a CPU, not at all where it is 1.

    Args:
        group: gradients of one device and dtype.
        norms: float64[any] on their device: norms whose norm is the global norm, still loss-scaled.
        limit: what to scale to.
        write: false to compute norm and coefficient only.

    Returns:
        Norm before clipping and coefficient, 0-d, of `limit.dtype`, on the tensors' device.
    """
    measured, coefficients, multiplier, erase = _results(_combine(norms, limit.norm_type), limit)
    if write:
        _multiply_(group.tensors, multiplier, erase)
    return measured, torch.where(erase, 0.0, coefficients)


def scale_each_(
    group: Group,
    norms: Tensor,
    first: int,
    limit: Limit,
    *,
    erase: Tensor | None = None,
    write: bool = True,
) -> tuple[Tensor, Tensor]:
    """Multiplies each gradient by a coefficient of its own.

    Args:
        group: gradients of one device and dtype.
        norms: float64[any] on their device: norms by gradient, those of this group from `first`
            on, still loss-scaled.
        first: place of the first of them.
        limit: what to scale to; of `erase_nonfinite`, `erase` is the outcome.
        erase: 0-d bool on their device: whether to write zeros.
        write: false to compute norms and coefficients only.

    Returns:
        Norms before clipping and coefficients, 1-d, of `limit.dtype`, on the tensors' device.
    """
    tensors = group.tensors
    limit = limit._replace(erase_nonfinite=False)
    measured, coefficients, multipliers, kept = _results(norms[first : first + len(tensors)], limit)
    erase = kept[0] if erase is None else erase
    at_once = write and multipliers.device.type == "cpu" and not erase
    if write and not (at_once and _multiply_each_(tensors, multipliers)):
        for i, tensor in enumerate(tensors):
            _multiply_([tensor], multipliers[i], erase)
    return measured, torch.where(erase, 0.0, coefficients)


def _multiply_each_(tensors: list[Tensor], multipliers: Tensor) -> bool:
    """Multiplies CPU tensors in place, those with a multiplier of 1 not at all; see above."""
    # Numbers would be rounded to half types first, 0-d tensors are not.
    wide = multipliers.to(torch.float64 if tensors[0].dtype == torch.float64 else torch.float32)
    places = (wide != 1).nonzero().flatten().tolist()
    factors = wide.unbind()
    chosen = [tensors[i] for i in places]
    return not chosen or _in_one_call(torch._foreach_mul_, chosen, [factors[i] for i in places])


def _multiply_(tensors: list[Tensor], multiplier: Tensor, erase: Tensor) -> None:
    """Multiplies in place, or writes zeros; half types too take the multiplier in float32."""
    if tensors[0].dtype != torch.float64:
        multiplier = multiplier.to(torch.float32)
    if multiplier.device.type == "cpu" and (erase or multiplier == 1):
        if erase:
            for tensor in tensors:
                tensor.zero_()
        return
    on_cpu = multiplier.device.type == "cpu"
    # Elsewhere foreach rounds the multiplier to the tensors' dtype first.
    if (on_cpu or tensors[0].dtype == multiplier.dtype) and _in_one_call(
        torch._foreach_mul_, tensors, multiplier
    ):
        if not on_cpu:
            for tensor in tensors:
                tensor.masked_fill_(erase, 0.0)
        return
    # On a CPU, erase is false by now.
    for piece in _writable_pieces(tensors):
        wide = piece.to(multiplier.dtype, copy=True).mul_(multiplier)
        _store_(piece, wide.masked_fill_(erase, 0.0))


def _in_one_call(foreach: Callable[..., None], tensors: list[Tensor], *operands: Any) -> bool:
    """Runs one of torch's foreach functions; False, and nothing written, if it takes no such list.

    They take neither float8 nor lazily negated tensors.
    """
    if tensors[0].dtype not in _ARITHMETIC:
        return False
    try:
        foreach(tensors, *operands)
    except RuntimeError:
        if any(map(Tensor.is_neg, tensors)):
            return False
        raise
    return True


def _store_(piece: Tensor, values: Tensor) -> None:
    # From float32 to a lazily negated float16 tensor on a CPU, copy_ forgets the sign (torch 2.13).
    piece.copy_(values.to(piece.dtype) if piece.is_neg() else values)


def _writable_pieces(tensors: list[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield from flat_pieces(tensor, PIECE, writable=True)


def clamp_(group: Group, low: float, high: float, grad_scale: float | Tensor = 1.0) -> None:
    """Clamps gradients to [low, high] after division by the loss scale.

    Elements within bounds are left, or written back, as they were.

    Args:
        group: gradients of one device and dtype.
        low: least value, representable in the dtype.
        high: largest value, representable in the dtype.
        grad_scale: the loss scale that the gradients still carry: a number, or a one-element
            tensor.
    """
    tensors = group.tensors
    if isinstance(grad_scale, Tensor) or grad_scale != 1:
        _unscale_and_clamp_(tensors, low, high, grad_scale)
    elif group.device.type != "cpu" or group.dtype not in _ARITHMETIC:
        _clamp_at_once_(tensors, low, high)
    else:
        sizes = group.sizes
        small = [i for i, n in enumerate(sizes) if n < ONE_PASS]
        chosen = [tensors[i] for i in small]
        if group.flat:
            _clamp_small_(chosen, [sizes[i] for i in small], low, high)
        else:
            _clamp_at_once_(chosen, low, high)
        if len(small) < len(tensors):
            for tensor, n in zip(tensors, sizes, strict=True):
                if n >= ONE_PASS:
                    tensor.clamp_(low, high)


def _clamp_small_(tensors: list[Tensor], sizes: list[int], low: float, high: float) -> None:
    """Clamps small CPU tensors, those within bounds not at all.

    To look at many together takes less than to clamp them, unless most of them need it.
    """
    n_done = 0
    for start, stop, elements in gathered(tensors, sizes):
        least, largest = torch.aminmax(elements)
        if not (low <= least and largest <= high):
            if stop - start < MANY:
                break
            ends = torch.tensor(list(accumulate(sizes[start:stop])), device="cpu")
            outside = ((elements < low) | (elements > high)).nonzero().flatten()
            places = torch.searchsorted(ends, outside, right=True).unique_consecutive().tolist()
            if 2 * len(places) > stop - start:
                break
            _clamp_at_once_([tensors[start + place] for place in places], low, high)
        n_done = stop
    _clamp_at_once_(tensors[n_done:], low, high)


def _clamp_at_once_(tensors: list[Tensor], low: float, high: float) -> None:
    if not tensors:
        return
    if _in_one_call(torch._foreach_clamp_min_, tensors, low):
        torch._foreach_clamp_max_(tensors, high)
    else:
        _unscale_and_clamp_(tensors, low, high, 1.0)


def _unscale_and_clamp_(
    tensors: list[Tensor], low: float, high: float, grad_scale: float | Tensor
) -> None:
    """Divides by the loss scale and clamps, both in float32 or wider, rounding once."""
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    scale = _scalar(grad_scale, wide, tensors[0].device)
    factor = torch.ones_like(scale) / scale
    for piece in _writable_pieces(tensors):
        _store_(piece, piece.to(wide, copy=True).mul_(factor).clamp_(low, high))
