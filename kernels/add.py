"""Add: one launch turns partial norms into a coefficient, and adds the gradients times it to sums.

Each gradient and each sum is read once, and each sum is written once. A product is rounded with its
sum, once.
"""

import triton
import triton.language as tl

from tritonclip.kernels import launch
from tritonclip.kernels.access import (
    aligned_pointer,
    any_pointer,
    find_chunk,
    is_aligned,
    whole_vectors,
)
from tritonclip.kernels.norm import combine
from tritonclip.kernels.scalars import as_float64, coefficient_of, is_finite, load_number


@triton.jit
def _add_tile(x_ptr, sum_ptr, mask, coefficient, MASKED: tl.constexpr):
    """Adds one tile times the coefficient to another."""
    if MASKED:
        x = tl.load(x_ptr, mask=mask, other=0.0)
        y = tl.load(sum_ptr, mask=mask, other=0.0)
    else:
        x = tl.load(x_ptr)
        y = tl.load(sum_ptr)

    y = (y.to(coefficient.dtype) + x.to(coefficient.dtype) * coefficient).to(x.dtype)

    if MASKED:
        tl.store(sum_ptr, y, mask=mask)
    else:
        tl.store(sum_ptr, y)


@triton.jit
def _add_masked(x_ptr, sum_ptr, n, coefficient, BLOCK: tl.constexpr):
    """Adds x_ptr[0:n] times the coefficient to sum_ptr[0:n]."""
    offsets = tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        at = start + offsets
        _add_tile(x_ptr + at, sum_ptr + at, at < n, coefficient, True)


@launch.jit
def add_kernel(
    pointers_ptr,
    sizes_ptr,
    first_chunks_ptr,
    tensor_of_chunk_ptr,
    sums_ptr,
    norms_ptr,
    norm_ptr,
    max_norm_ptr,
    n_chunks: tl.int32,
    n_norms: tl.int32,
    max_norm_bits: tl.int64,
    eps_bits: tl.int64,
    DTYPE: tl.constexpr,
    P: tl.constexpr,
    ERASE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One program adds the chunks program_id, program_id + grid, ..., the last one first.

    All times one coefficient; with ERASE, none where the norm is not finite.

    pointers_ptr, sizes_ptr, first_chunks_ptr, sums_ptr: int64[n_tensors]; tensor_of_chunk_ptr:
    int32[n_chunks]; norms_ptr: float64[n_norms]; norm_ptr: float32 or float64 [1], written by
    program 0; max_norm_ptr: any float [1], or None.
    """
    pid = tl.program_id(0)
    RESULT: tl.constexpr = norm_ptr.dtype.element_ty
    LANE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32

    max_norm = load_number(max_norm_ptr, max_norm_bits, 0).to(RESULT)
    norm = combine(norms_ptr, 0, n_norms, P).to(RESULT)
    coefficient = coefficient_of(norm, max_norm, as_float64(eps_bits).to(RESULT)).to(LANE)

    if pid == 0:
        tl.store(norm_ptr, norm)

    if (ERASE == 0) | is_finite(norm):
        grid = tl.num_programs(0)
        last = pid + (n_chunks - 1 - pid) // grid * grid
        for i in range(pid, n_chunks, grid):
            tensor, address, start, n = find_chunk(
                pointers_ptr,
                sizes_ptr,
                first_chunks_ptr,
                tensor_of_chunk_ptr,
                pid + last - i,
                CHUNK,
            )
            sum_address = tl.load(sums_ptr + tensor)
            if is_aligned(address | sum_address):
                x_ptr = aligned_pointer(address, start, DTYPE)
                sum_ptr = aligned_pointer(sum_address, start, DTYPE)
                if n == CHUNK:
                    offsets = tl.arange(0, BLOCK)
                    for tile in range(0, CHUNK, BLOCK):
                        at = tile + offsets
                        _add_tile(x_ptr + at, sum_ptr + at, None, coefficient, False)
                else:
                    n_whole = whole_vectors(n)
                    _add_masked(x_ptr, sum_ptr, n_whole, coefficient, BLOCK)
                    _add_masked(x_ptr + n_whole, sum_ptr + n_whole, n - n_whole, coefficient, TAIL)
            else:
                x_any = any_pointer(address, start, DTYPE)
                sum_any = any_pointer(sum_address, start, DTYPE)
                _add_masked(x_any, sum_any, n, coefficient, BLOCK)
