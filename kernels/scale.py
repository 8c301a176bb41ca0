"""Scale: one launch turns partial norms into norm and coefficient, and multiplies the gradients.

Every program sums the few partials again, so no launch and no barrier is spent on them. Where the
multiplier is 1, the programs return without touching a gradient. Otherwise they walk the chunks in
reverse: what the norm read last is still in L2.
"""

import torch
import triton
import triton.language as tl

from tritonclip.kernels.chunks import ChunkTable
from tritonclip.kernels.launch import TL_DTYPES, float_bits, launch
from tritonclip.kernels.norm import INF, combine
from tritonclip.kernels.walk import (
    CHUNK,
    THREE,
    TWO,
    aligned_pointer,
    any_pointer,
    block_of,
    find_chunk,
    is_aligned,
    whole_vectors,
)
from tritonclip.limit import Limit


@triton.jit
def as_float64(bits):
    """A float64 argument from its bits."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def divide(a, b):
    """Returns a / b, rounded as IEEE 754 asks, for two float32 or two float64."""
    if a.dtype == tl.float64:
        quotient = a / b
    else:
        quotient = tl.div_rn(a, b)
    return quotient


@triton.jit
def _coefficient(norm, max_norm, eps):
    """Returns min(1, max_norm / (norm + eps)) in the dtype of norm.

    1 for nothing to clip and for an infinite limit; NaN stays.
    """
    bound = norm + eps
    ratio = divide(max_norm, bound)
    keep = (ratio > 1) | (bound == 0) | ((max_norm == INF) & (norm == norm))
    return tl.where(keep, 1.0, ratio)


@triton.jit
def _scale_tile(x_ptr, mask, multiplier, erase, MASKED: tl.constexpr):
    """Multiplies one tile in place; `erase` writes zeros, also over NaN."""
    if MASKED:
        x = tl.load(x_ptr, mask=mask, other=0.0)
    else:
        x = tl.load(x_ptr)

    y = tl.where(erase, 0.0, x.to(multiplier.dtype) * multiplier).to(x.dtype)

    if MASKED:
        tl.store(x_ptr, y, mask=mask)
    else:
        tl.store(x_ptr, y)


@triton.jit
def _scale_masked(x_ptr, n, multiplier, erase, BLOCK: tl.constexpr):
    """Multiplies x_ptr[0:n] in place."""
    offsets = tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        _scale_tile(x_ptr + start + offsets, start + offsets < n, multiplier, erase, True)


@triton.jit
def _scale_chunk(
    address,
    start,
    n,
    multiplier,
    erase,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiplies one chunk in place, by the widest accesses that its address and length allow."""
    if is_aligned(address):
        x_ptr = aligned_pointer(address, start, DTYPE)
        if n == CHUNK:
            offsets = tl.arange(0, BLOCK)
            for tile in range(0, CHUNK, BLOCK):
                _scale_tile(x_ptr + tile + offsets, None, multiplier, erase, False)
        else:
            n_whole = whole_vectors(n)
            _scale_masked(x_ptr, n_whole, multiplier, erase, BLOCK)
            _scale_masked(x_ptr + n_whole, n - n_whole, multiplier, erase, 16)
    else:
        _scale_masked(any_pointer(address, start, DTYPE), n, multiplier, erase, BLOCK)


@triton.jit
def _is_finite(x):
    return (x == x) & (tl.abs(x) != INF)


@triton.jit
def load_grad_scale(grad_scale_ptr, grad_scale_bits):
    """The loss scale in float64: a tensor's where there is one, else the argument's."""
    if grad_scale_ptr is not None:
        grad_scale = tl.load(grad_scale_ptr).to(tl.float64)
    else:
        grad_scale = as_float64(grad_scale_bits)
    return grad_scale


@triton.jit(
    do_not_specialize=[
        "n_chunks",
        "n_norms",
        "max_norm_bits",
        "eps_bits",
        "grad_scale_bits",
    ]
)
def _scale_kernel(
    pointers_ptr,
    sizes_ptr,
    first_chunks_ptr,
    owners_ptr,
    norms_ptr,
    norm_ptr,
    coefficient_ptr,
    grad_scale_ptr,
    n_chunks,
    n_norms,
    max_norm_bits: tl.int64,
    eps_bits: tl.int64,
    grad_scale_bits: tl.int64,
    DTYPE: tl.constexpr,
    P: tl.constexpr,
    ERASE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program multiplies the chunks n_chunks - 1 - program_id, that - grid, ...

    All by one coefficient; with ERASE, by zero where the norm is not finite.

    pointers_ptr, sizes_ptr, first_chunks_ptr: int64[n_tensors]; owners_ptr: int32[n_chunks];
    norms_ptr: float64[n_norms]; norm_ptr, coefficient_ptr: float32 or float64 [1], written by
    program 0; grad_scale_ptr: any float [1], or None.
    """
    pid = tl.program_id(0)
    RESULT: tl.constexpr = norm_ptr.dtype.element_ty

    grad_scale = load_grad_scale(grad_scale_ptr, grad_scale_bits)
    norm = (combine(norms_ptr, 0, n_norms, P) / grad_scale).to(RESULT)
    coefficient = _coefficient(
        norm, as_float64(max_norm_bits).to(RESULT), as_float64(eps_bits).to(RESULT)
    )
    multiplier = divide(coefficient, grad_scale.to(RESULT))
    erase = ERASE & (_is_finite(norm) == 0)

    if pid == 0:
        tl.store(norm_ptr, norm)
        tl.store(coefficient_ptr, tl.where(erase, 0.0, coefficient))

    if (multiplier != 1) | erase:
        LANE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
        for i in range(pid, n_chunks, tl.num_programs(0)):
            _, address, start, n = find_chunk(
                pointers_ptr, sizes_ptr, first_chunks_ptr, owners_ptr, n_chunks - 1 - i, CHUNK
            )
            _scale_chunk(address, start, n, multiplier.to(LANE), erase, DTYPE, CHUNK, BLOCK)


@triton.jit(
    do_not_specialize=[
        "n_chunks",
        "first_norm",
        "max_norm_bits",
        "eps_bits",
        "grad_scale_bits",
    ]
)
def _scale_each_kernel(
    pointers_ptr,
    sizes_ptr,
    first_chunks_ptr,
    owners_ptr,
    norms_ptr,
    norm_ptr,
    coefficient_ptr,
    grad_scale_ptr,
    erase_ptr,
    n_chunks,
    first_norm,
    max_norm_bits: tl.int64,
    eps_bits: tl.int64,
    grad_scale_bits: tl.int64,
    DTYPE: tl.constexpr,
    P: tl.constexpr,
    WRITE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program multiplies neighbouring chunks, each by the coefficient of its own gradient.

    A run rather than a stride, so that a program adds up the partials of a large gradient once and
    not once a chunk.

    pointers_ptr, sizes_ptr, first_chunks_ptr: int64[n_tensors]; owners_ptr: int32[n_chunks];
    norms_ptr: float64[any], of which norms_ptr[first_norm + chunk] belongs to this table; norm_ptr,
    coefficient_ptr: float32 or float64 [n_tensors], written by the program that holds the
    gradient's first chunk; grad_scale_ptr: any float [1], or None; erase_ptr: uint8[1], whether to
    write zeros, or None. Without WRITE no gradient is touched.
    """
    pid = tl.program_id(0)
    RESULT: tl.constexpr = norm_ptr.dtype.element_ty
    LANE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32

    grad_scale = load_grad_scale(grad_scale_ptr, grad_scale_bits)
    max_norm = as_float64(max_norm_bits).to(RESULT)
    eps = as_float64(eps_bits).to(RESULT)
    if erase_ptr is not None:
        erase = tl.load(erase_ptr) != 0
    else:
        erase = pid < 0

    known_owner = tl.full([], -1, tl.int32)
    norm = grad_scale.to(RESULT)
    coefficient = norm
    multiplier = norm
    run = tl.cdiv(n_chunks, tl.num_programs(0))
    for i in range(pid * run, tl.minimum(pid * run + run, n_chunks)):
        owner, address, start, n = find_chunk(
            pointers_ptr, sizes_ptr, first_chunks_ptr, owners_ptr, n_chunks - 1 - i, CHUNK
        )
        if owner != known_owner:
            known_owner = owner
            first = first_norm + tl.load(first_chunks_ptr + owner)
            n_own = tl.maximum(tl.cdiv(tl.load(sizes_ptr + owner), CHUNK), 1)
            norm = (combine(norms_ptr, first, first + n_own, P) / grad_scale).to(RESULT)
            coefficient = _coefficient(norm, max_norm, eps)
            multiplier = divide(coefficient, grad_scale.to(RESULT))
        if start == 0:
            tl.store(norm_ptr + owner, norm)
            tl.store(coefficient_ptr + owner, tl.where(erase, 0.0, coefficient))
        if WRITE:
            if (multiplier != 1) | erase:
                _scale_chunk(address, start, n, multiplier.to(LANE), erase, DTYPE, CHUNK, BLOCK)


def grad_scale_arguments(
    grad_scale: float | torch.Tensor, device: torch.device
) -> tuple[torch.Tensor | None, int]:
    """The loss scale as kernel arguments: a tensor or None, and the bits that count without one."""
    if isinstance(grad_scale, torch.Tensor):
        return grad_scale.to(device), float_bits(1.0)
    return None, float_bits(grad_scale)


def scale_(
    table: ChunkTable, norms: torch.Tensor, limit: Limit, *, write: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiplies all gradients of the table by one coefficient, in one launch.

    It returns early where there is nothing to multiply.

    Args:
        table: the gradients, of one device and dtype.
        norms: float64[any], contiguous, on the table's device: norms whose norm is the global norm,
            still loss-scaled.
        limit: what to scale to.
        write: false to compute norm and coefficient only.

    Returns:
        Norm before clipping and coefficient, 0-d, of `limit.dtype`, on the table's device.
    """
    norm, coefficient = torch.empty(2, dtype=limit.dtype, device=table.device).unbind()
    grad_scale, scale_bits = grad_scale_arguments(limit.grad_scale, table.device)
    launch(
        _scale_kernel,
        table.device,
        table.programs(THREE) if write else 1,
        THREE,
        (
            *table.arguments,
            norms,
            norm,
            coefficient,
            grad_scale,
            table.n_chunks if write else 0,
            norms.numel(),
            float_bits(limit.max_norm),
            float_bits(limit.eps),
            scale_bits,
        ),
        DTYPE=TL_DTYPES[table.dtype],
        P=float(limit.norm_type),
        ERASE=limit.erase_nonfinite,
        CHUNK=CHUNK,
        BLOCK=block_of(table.dtype.itemsize),
    )
    return norm, coefficient


def scale_each_(
    table: ChunkTable,
    norms: torch.Tensor,
    first: int,
    limit: Limit,
    *,
    erase: torch.Tensor | None = None,
    write: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiplies each gradient of the table by a coefficient of its own, in one launch.

    Args:
        table: the gradients, of one device and dtype.
        norms: float64[any], contiguous, on the table's device: norms by chunk, those of this table
            from `first` on, still loss-scaled.
        first: place of the table's first partial.
        limit: what to scale to; of `erase_nonfinite`, `erase` is the outcome.
        erase: 0-d bool on the table's device: whether to write zeros.
        write: false to compute norms and coefficients only.

    Returns:
        Norms before clipping and coefficients, 1-d, of `limit.dtype`, on the table's device.
    """
    result = torch.empty(2, table.n_tensors, dtype=limit.dtype, device=table.device)
    grad_scale, scale_bits = grad_scale_arguments(limit.grad_scale, table.device)
    launch(
        _scale_each_kernel,
        table.device,
        table.programs(TWO),
        TWO,
        (
            *table.arguments,
            norms,
            result[0],
            result[1],
            grad_scale,
            None if erase is None else erase.view(torch.uint8),
            table.n_chunks,
            first,
            float_bits(limit.max_norm),
            float_bits(limit.eps),
            scale_bits,
        ),
        DTYPE=TL_DTYPES[table.dtype],
        P=float(limit.norm_type),
        WRITE=write,
        CHUNK=CHUNK,
        BLOCK=block_of(table.dtype.itemsize),
    )
    return result[0], result[1]
