"""Clamp: one launch brings every element within bounds.

A chunk is read once and compared; if an element lies outside, the chunk is read again, from cache,
and written. If a loss scale other than 1 is divided out, every chunk is read and written once.
We compare instead of using tl.clamp, because comparisons keep NaN on every version of Triton.
"""

import torch
import triton
import triton.language as tl

from tritonclip.kernels import launch
from tritonclip.kernels.access import (
    OCCUPANCY_2X128,
    OCCUPANCY_3X80,
    Occupancy,
    aligned_pointer,
    any_pointer,
    find_chunk,
    is_aligned,
    whole_vectors,
)
from tritonclip.kernels.scalars import (
    as_float64,
    divide,
    load_number,
)


def block_of(itemsize: int) -> int:
    """Elements loaded at a time; with more, the two loops together spill on sm_100 and gfx942.

    On gfx942 half types need twice as many: 16 bytes for each of the 512 threads of a program.
    """
    return 4096 if itemsize == 2 and torch.version.hip else 2048


def occupancy_of(itemsize: int) -> Occupancy:
    """The faster occupancy for GPT-2 124M on an H100.

    Two and three programs take 92 and 88 us in bfloat16, and 160 and 162 us in float32.
    """
    return OCCUPANCY_3X80 if itemsize == 2 else OCCUPANCY_2X128


@triton.jit
def _outside_full(x_ptr, low, high, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Whether an element of a whole chunk lies outside.

    It has no mask, and keeps extremes instead of flags, so that the loads of several tiles are in
    flight at once: 8 or more per thread, where flags allowed 3. NaN is never an extreme.
    """
    offsets = tl.arange(0, BLOCK)
    least = tl.full([BLOCK], 0.0, low.dtype) + low
    most = tl.full([BLOCK], 0.0, low.dtype) + high
    for tile in range(0, CHUNK, BLOCK):
        x = tl.load(x_ptr + tile + offsets).to(low.dtype)
        least = tl.where(x < least, x, least)
        most = tl.where(x > most, x, most)
    return tl.max(((least < low) | (most > high)).to(tl.int32), axis=0)


@triton.jit
def _outside_masked(x_ptr, n, low, high, BLOCK: tl.constexpr):
    """Whether an element of x_ptr[0:n] lies outside.

    Masked elements are loaded as a bound, because using the mask again would delay the loads.
    """
    offsets = tl.arange(0, BLOCK)
    least = tl.full([BLOCK], 0.0, low.dtype) + low
    most = tl.full([BLOCK], 0.0, low.dtype) + high
    within = low.to(x_ptr.dtype.element_ty)
    for start in range(0, n, BLOCK):
        x = tl.load(x_ptr + start + offsets, mask=start + offsets < n, other=within).to(low.dtype)
        least = tl.where(x < least, x, least)
        most = tl.where(x > most, x, most)
    return tl.max(((least < low) | (most > high)).to(tl.int32), axis=0)


@triton.jit
def _clamp_values(x, low, high, factor):
    """Returns x * factor within [low, high], rounded once to x's dtype; NaN stays."""
    y = x.to(low.dtype) * factor
    y = tl.where(y < low, low, y)
    y = tl.where(y > high, high, y)
    return y.to(x.dtype)


@triton.jit
def _clamp_full(x_ptr, low, high, factor, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Clamps a whole chunk in place."""
    offsets = tl.arange(0, BLOCK)
    for tile in range(0, CHUNK, BLOCK):
        x = tl.load(x_ptr + tile + offsets)
        tl.store(x_ptr + tile + offsets, _clamp_values(x, low, high, factor))


@triton.jit
def _clamp_masked(x_ptr, n, low, high, factor, BLOCK: tl.constexpr):
    """Clamps x_ptr[0:n] in place."""
    offsets = tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        inside = start + offsets < n
        x = tl.load(x_ptr + start + offsets, mask=inside, other=0.0)
        tl.store(x_ptr + start + offsets, _clamp_values(x, low, high, factor), mask=inside)


@launch.jit
def clamp_kernel(
    pointers_ptr,
    sizes_ptr,
    first_chunks_ptr,
    tensor_of_chunk_ptr,
    grad_scale_ptr,
    n_chunks: tl.int32,
    low_bits: tl.int64,
    high_bits: tl.int64,
    grad_scale_bits: tl.int64,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One program clamps the chunks program_id, program_id + grid, ...

    pointers_ptr, sizes_ptr, first_chunks_ptr: int64[n_tensors]; tensor_of_chunk_ptr:
    int32[n_chunks]; grad_scale_ptr: any float [1], or None.
    """
    LANE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    low = as_float64(low_bits).to(LANE)
    high = as_float64(high_bits).to(LANE)
    grad_scale = load_number(grad_scale_ptr, grad_scale_bits, 0).to(LANE)
    factor = divide(tl.full([], 1.0, LANE), grad_scale)
    # A loss scale has to be divided out of every element, so nothing is compared first.
    write_all = factor != 1
    # With masks, only the loads of one tile are in flight at once. If the tile is twice as large,
    # half types spill on gfx942, and float64 spills on sm_90.
    LOOK: tl.constexpr = BLOCK if DTYPE.primitive_bitwidth == 64 else 4096

    for chunk in range(tl.program_id(0), n_chunks, tl.num_programs(0)):
        _, address, start, n = find_chunk(
            pointers_ptr, sizes_ptr, first_chunks_ptr, tensor_of_chunk_ptr, chunk, CHUNK
        )
        write = write_all
        if is_aligned(address):
            x_ptr = aligned_pointer(address, start, DTYPE)
            if n == CHUNK:
                if write_all == 0:
                    write = _outside_full(x_ptr, low, high, CHUNK, BLOCK) != 0
                if write:
                    _clamp_full(x_ptr, low, high, factor, CHUNK, BLOCK)
            else:
                n_whole = whole_vectors(n)
                if write_all == 0:
                    outside = _outside_masked(x_ptr, n_whole, low, high, LOOK)
                    outside |= _outside_masked(x_ptr + n_whole, n - n_whole, low, high, TAIL)
                    write = outside != 0
                if write:
                    _clamp_masked(x_ptr, n_whole, low, high, factor, BLOCK)
                    _clamp_masked(x_ptr + n_whole, n - n_whole, low, high, factor, TAIL)
        else:
            any_ptr = any_pointer(address, start, DTYPE)
            if write_all == 0:
                write = _outside_masked(any_ptr, n, low, high, LOOK) != 0
            if write:
                _clamp_masked(any_ptr, n, low, high, factor, BLOCK)
