"""Norm: one launch measures a group of gradients, whatever their number.

**Accurate.** A chunk's powers are summed in float32 lanes (float64 for float64 gradients), which
are added up in float64. If the sum is not finite, or so small that squares may have underflowed,
the chunk is measured again in float64, scaled by its largest magnitude, while it is still in cache.
Norm types other than 1, 2 and inf are measured in this way from the start.

**Deterministic.** Sizes alone determine the chunks, each program owns a fixed set of them, and
every partial has a fixed place. A partial is itself a norm in float64, of the elements of one
program or of one chunk, so the norm of the partials is the norm of all elements.
"""

from functools import cache

import triton
import triton.language as tl

from tritonclip.kernels import access, launch
from tritonclip.kernels.access import (
    aligned_pointer,
    any_pointer,
    find_chunk,
    is_aligned,
    key_magnitude,
    magnitude_key,
    whole_vectors,
)
from tritonclip.kernels.scalars import INF

# Sums below these are measured again. Each element lost to underflow adds less than 2^-149 (2^-126
# where denormals are flushed), and 16,384 of them add less than 2^-112, which is under 2^-52 of a
# sum of 2^-60. The limits of float64 leave room to spare.
TRUSTED_FLOAT32 = tl.constexpr(2.0**-60)
TRUSTED_FLOAT64 = tl.constexpr(2.0**-900)
LARGEST_FLOAT64 = tl.constexpr(2.0**900)
# The elements read at a time in the rare float64 path, and the partials in `combine`: few, to need
# few registers.
SLOW_BLOCK = tl.constexpr(512)


@triton.jit
def _power(ratio, P: tl.constexpr):
    """ratio^P for a float64 ratio >= 0."""
    if P == 1.0:
        power = ratio
    elif P == 2.0:
        power = ratio * ratio
    else:
        power = tl.exp2(P * tl.log2(ratio))
    return power


@triton.jit
def _root(total, P: tl.constexpr):
    """total^(1/P) for a float64 total >= 0."""
    if P == 1.0:
        root = total
    elif P == 2.0:
        root = tl.sqrt(total)
    else:
        root = tl.exp2(tl.log2(total) / P)
    return root


@triton.jit
def _zero_lanes(BLOCK: tl.constexpr, LANE: tl.constexpr, P: tl.constexpr):
    """Empty accumulators: LANE[BLOCK], or keys with as many bits."""
    lanes = tl.zeros([BLOCK], LANE)
    if P == INF:
        lanes = magnitude_key(lanes)
    return lanes


@triton.jit
def _add(lanes, x, P: tl.constexpr):
    """Adds elements x, of the lanes' width, to the accumulators."""
    if P == 1.0:
        lanes += tl.abs(x)
    elif P == 2.0:
        lanes += x * x
    else:
        lanes = tl.maximum(lanes, magnitude_key(x))
    return lanes


@triton.jit
def _total(lanes, P: tl.constexpr):
    """One float64 from all lanes: a sum of powers, or a maximum."""
    if P == INF:
        total = key_magnitude(tl.max(lanes, axis=0))
    elif P == 1.0:
        # No root halves the error here, and adding 4096 lanes in float32 may use up all of 1e-6.
        total = tl.sum(lanes.to(tl.float64), axis=0)
    else:
        total = tl.sum(lanes, axis=0).to(tl.float64)
    return total


@triton.jit
def _join(a, b, P: tl.constexpr):
    """The total of two float64 totals; NaN wins."""
    if P == INF:
        total = tl.where((a > b) | (a != a), a, b)
    else:
        total = a + b
    return total


@triton.jit
def _masked_total(x_ptr, n, LANE: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr):
    """The total of x_ptr[0:n]."""
    offsets = tl.arange(0, BLOCK)
    lanes = _zero_lanes(BLOCK, LANE, P)
    for start in range(0, n, BLOCK):
        x = tl.load(x_ptr + start + offsets, mask=start + offsets < n, other=0.0)
        lanes = _add(lanes, x.to(LANE), P)
    return _total(lanes, P)


@triton.jit
def _full_total(
    x_ptr, LANE: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """The total of a whole chunk, without masks, so that loads of several tiles are in flight."""
    offsets = tl.arange(0, BLOCK)
    lanes = _zero_lanes(BLOCK, LANE, P)
    for tile in range(0, CHUNK, BLOCK):
        x = tl.load(x_ptr + tile + offsets)
        lanes = _add(lanes, x.to(LANE), P)
    return _total(lanes, P)


@triton.jit
def _chunk_total(
    address,
    start,
    n,
    DTYPE: tl.constexpr,
    P: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The total of one chunk, by the widest accesses that its address and length allow."""
    LANE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    if is_aligned(address):
        x_ptr = aligned_pointer(address, start, DTYPE)
        if n == CHUNK:
            total = _full_total(x_ptr, LANE, P, CHUNK, BLOCK)
        else:
            n_whole = whole_vectors(n)
            body = _masked_total(x_ptr, n_whole, LANE, P, BLOCK)
            tail = _masked_total(x_ptr + n_whole, n - n_whole, LANE, P, 16)
            total = _join(body, tail, P)
    else:
        total = _masked_total(any_pointer(address, start, DTYPE), n, LANE, P, BLOCK)
    return total


@triton.jit
def _is_doubtful(total, DTYPE: tl.constexpr):
    """Whether a sum of powers of DTYPE may have lost elements to underflow, or is not finite."""
    trusted: tl.constexpr = TRUSTED_FLOAT64 if DTYPE == tl.float64 else TRUSTED_FLOAT32
    # The sum of two trusted totals must not overflow either.
    largest: tl.constexpr = LARGEST_FLOAT64 if DTYPE == tl.float64 else INF
    return (total < trusted) | (total >= largest) | (total != total)


@triton.jit
def _scaled_sum(x_ptr, n, P: tl.constexpr):
    """Returns (scale, total) in float64 with sum |x|^P = scale^P * total.

    The scale is the largest magnitude, so the total lies between 1 and n (or is 0), and nothing
    overflows. A NaN goes into the total.
    """
    largest = _masked_total(x_ptr, n, tl.float64, INF, SLOW_BLOCK)
    offsets = tl.arange(0, SLOW_BLOCK)
    lanes = tl.zeros([SLOW_BLOCK], tl.float64)
    for start in range(0, n, SLOW_BLOCK):
        x = tl.load(x_ptr + start + offsets, mask=start + offsets < n, other=0.0).to(tl.float64)
        ratio = tl.where(x == 0, 0.0, tl.abs(x) / largest)
        lanes += tl.where(x == 0, 0.0, _power(ratio, P))
    total = tl.sum(lanes, axis=0)

    is_nan = largest != largest
    total = tl.where(is_nan, float("nan"), tl.where(largest == INF, 1.0, total))
    return tl.where(is_nan, 1.0, largest), total


@triton.jit
def _add_scaled(scale_a, total_a, scale_b, total_b, P: tl.constexpr):
    """The sum of two (scale, total) pairs."""
    scale = tl.where(scale_a > scale_b, scale_a, scale_b)
    share_a = tl.where(scale_a == scale, 1.0, _power(scale_a / scale, P))
    share_b = tl.where(scale_b == scale, 1.0, _power(scale_b / scale, P))
    return scale, total_a * share_a + total_b * share_b


@triton.jit
def chunk_norm(
    address,
    start,
    n,
    DTYPE: tl.constexpr,
    P: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Measures a chunk as (scale, total): norm = scale * total^(1/P), or total if P is inf."""
    scale = tl.full([], 1.0, tl.float64)
    if P == 1.0 or P == 2.0:
        total = _chunk_total(address, start, n, DTYPE, P, CHUNK, BLOCK)
        if _is_doubtful(total, DTYPE):
            scale, total = _scaled_sum(any_pointer(address, start, DTYPE), n, P)
            if DTYPE != tl.float64:
                # The sums of squares of any float32 fit float64, so only float64 needs a scale from
                # here on.
                total *= _power(scale, P)
                scale = tl.full([], 1.0, tl.float64)
    elif P == INF:
        total = _chunk_total(address, start, n, DTYPE, P, CHUNK, BLOCK)
    else:
        scale, total = _scaled_sum(any_pointer(address, start, DTYPE), n, P)
    return scale, total


@triton.jit
def norm_of(scale, total, P: tl.constexpr):
    """The norm that a (scale, total) pair stands for."""
    if P == INF:
        norm = total
    else:
        norm = scale * tl.where(total == 0, 0.0, _root(total, P))
    return norm


@triton.jit
def combine(norms_ptr, start, stop, P: tl.constexpr, BLOCK: tl.constexpr = SLOW_BLOCK):
    """The norm of norms_ptr[start:stop], float64, in fixed order.

    If the sum of powers may have overflowed or underflowed, it is repeated, scaled by the largest.
    """
    n = stop - start
    if P == INF:
        norm = _masked_total(norms_ptr + start, n, tl.float64, P, SLOW_BLOCK)
    elif P == 1.0 or P == 2.0:
        total = _masked_total(norms_ptr + start, n, tl.float64, P, BLOCK)
        norm = _root(total, P)
        if _is_doubtful(total, tl.float64):
            scale, total = _scaled_sum(norms_ptr + start, n, P)
            norm = norm_of(scale, total, P)
    else:
        scale, total = _scaled_sum(norms_ptr + start, n, P)
        norm = norm_of(scale, total, P)
    return norm


@launch.jit
def norm_kernel(
    pointers_ptr,
    sizes_ptr,
    first_chunks_ptr,
    tensor_of_chunk_ptr,
    norms_ptr,
    n_chunks: tl.int32,
    DTYPE: tl.constexpr,
    P: tl.constexpr,
    EACH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program measures the chunks program_id, program_id + grid, ...

    pointers_ptr, sizes_ptr, first_chunks_ptr: int64[n_tensors]; tensor_of_chunk_ptr:
    int32[n_chunks]; norms_ptr: float64[grid], one norm per program, or with EACH float64[n_chunks],
    one per chunk.
    """
    pid = tl.program_id(0)
    UNSCALED: tl.constexpr = P == INF or (DTYPE != tl.float64 and (P == 1.0 or P == 2.0))
    scale = tl.full([], 1.0 if UNSCALED else 0.0, tl.float64)
    total = tl.zeros([], tl.float64)

    for chunk in range(pid, n_chunks, tl.num_programs(0)):
        _, address, start, n = find_chunk(
            pointers_ptr, sizes_ptr, first_chunks_ptr, tensor_of_chunk_ptr, chunk, CHUNK
        )
        chunk_scale, chunk_total = chunk_norm(address, start, n, DTYPE, P, CHUNK, BLOCK)
        if EACH:
            tl.store(norms_ptr + chunk, norm_of(chunk_scale, chunk_total, P))
        elif UNSCALED:
            total = _join(total, chunk_total, P)
        else:
            scale, total = _add_scaled(scale, total, chunk_scale, chunk_total, P)

    if EACH == 0:
        tl.store(norms_ptr + pid, norm_of(scale, total, P))


@cache
def block_of(itemsize: int, norm_type: float) -> int:
    """Elements loaded at a time; a maximum of float32 would spill with as many as a sum has."""
    return 2048 if itemsize == 4 and norm_type == float("inf") else access.block_of(itemsize)
