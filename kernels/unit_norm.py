"""Units: one launch measures every row of gradients and weights.

Two launches measure them where weights have another dtype than their gradients.

Long rows are measured as chunks are (see `norm`), one after the other; short ones many at a time,
as the rows of a tile. A row whose sum of squares is not finite, or too small to be trusted, is
measured again in float64, divided by its largest magnitude. Every partial norm has its own place,
so equal inputs give equal bits.
"""

import triton
import triton.language as tl

from tritonclip.kernels import launch
from tritonclip.kernels.chunk_access import (
    any_pointer,
    key_magnitude,
    magnitude_key,
)
from tritonclip.kernels.norm import (
    LARGEST_FLOAT64,
    TRUSTED_FLOAT32,
    TRUSTED_FLOAT64,
    chunk_norm,
    norm_of,
)
from tritonclip.kernels.scalars import INF
from tritonclip.kernels.unit_access import (
    chunks_of,
    find_piece,
    first_norm_of,
    short_tile,
)

# Rows of a tile: it has 4 elements for each of 256 threads. Larger ones spill.
ROWS = 64


@triton.jit
def _exact_short_norms(x_ptr, own, n_rows, length, LANE: tl.constexpr, COLUMNS: tl.constexpr):
    """The norm of each row of a tile in float64, divided by its largest magnitude first."""
    zeros = tl.zeros([own.shape[0], COLUMNS], LANE)
    keys = magnitude_key(zeros)
    for column in range(0, length, COLUMNS):
        tile_ptr, inside = short_tile(x_ptr, own, column, n_rows, length, COLUMNS)
        x = tl.load(tile_ptr, mask=inside, other=0.0).to(LANE)
        keys = tl.maximum(keys, magnitude_key(x))
    largest = key_magnitude(tl.max(keys, axis=1))

    squares = zeros.to(tl.float64)
    for column in range(0, length, COLUMNS):
        tile_ptr, inside = short_tile(x_ptr, own, column, n_rows, length, COLUMNS)
        x = tl.load(tile_ptr, mask=inside, other=0.0).to(tl.float64)
        ratio = tl.where(x == 0, 0.0, x / largest[:, None])
        squares += ratio * ratio
    norm = largest * tl.sqrt(tl.sum(squares, axis=1))
    # NaN and inf are norms already.
    return tl.where((largest == largest) & (largest != INF), norm, largest)


@triton.jit
def _measure_short(
    x_ptr,
    n_rows,
    length,
    out_ptr,
    LANE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Stores the norms of rows that lie end to end from x_ptr on."""
    trusted: tl.constexpr = TRUSTED_FLOAT64 if LANE == tl.float64 else TRUSTED_FLOAT32
    most: tl.constexpr = LARGEST_FLOAT64 if LANE == tl.float64 else INF
    for first in range(0, n_rows, ROWS):
        own = first + tl.arange(0, ROWS)
        squares = tl.zeros([ROWS, COLUMNS], LANE)
        for column in range(0, length, COLUMNS):
            tile_ptr, inside = short_tile(x_ptr, own, column, n_rows, length, COLUMNS)
            x = tl.load(tile_ptr, mask=inside, other=0.0).to(LANE)
            squares += x * x
        total = tl.sum(squares, axis=1).to(tl.float64)

        norm = tl.sqrt(total)
        doubtful = ((total < trusted) | (total >= most) | (total != total)) & (own < n_rows)
        if tl.max(doubtful.to(tl.int32), axis=0) != 0:
            exact = _exact_short_norms(x_ptr, own, n_rows, length, LANE, COLUMNS)
            norm = tl.where(doubtful, exact, norm)
        tl.store(out_ptr + own, norm, mask=own < n_rows)


@launch.jit
def unit_norms_kernel(
    addresses_ptr,
    forms_ptr,
    pieces_ptr,
    norms_ptr,
    n_tensors: tl.int32,
    n_pieces: tl.int32,
    n_sides: tl.int32,
    n_norms: tl.int64,
    DTYPE: tl.constexpr,
    SHORT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program measures the pieces program_id, program_id + grid, ... of one side after another.

    A side is all gradients, or all weights. addresses_ptr: int64[n_sides, n_tensors]; forms_ptr:
    int64[n_tensors, 4]; pieces_ptr: int64[n_pieces, 4]; norms_ptr: float64[n_sides, n_norms], inf
    where there is no address.
    """
    ITEMSIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8
    LANE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32

    for at in range(tl.program_id(0), n_pieces * n_sides, tl.num_programs(0)):
        side = at // n_pieces
        tensor, row, n_rows, chunk, length = find_piece(forms_ptr, pieces_ptr, at - side * n_pieces)
        address = tl.load(addresses_ptr + side * n_tensors + tensor)
        first = first_norm_of(forms_ptr, tensor)

        chunks = chunks_of(length, CHUNK)
        out_ptr = norms_ptr + side * n_norms + first + row * chunks + chunk
        row_address = address + row * length * ITEMSIZE
        if (address == 0) & (length > 0):
            _store_unlimited(out_ptr, n_rows, ROWS)
        elif length <= SHORT:
            x_ptr = any_pointer(row_address, 0, DTYPE)
            _measure_short(x_ptr, n_rows, length.to(tl.int32), out_ptr, LANE, ROWS, COLUMNS)
        else:
            start = chunk * CHUNK
            n = tl.minimum(length - start, CHUNK).to(tl.int32)
            for i in range(n_rows):
                scale, total = chunk_norm(row_address, start, n, DTYPE, 2.0, CHUNK, BLOCK)
                tl.store(out_ptr + i, norm_of(scale, total, 2.0))
                row_address += length * ITEMSIZE


@triton.jit
def _store_unlimited(out_ptr, n_rows, ROWS: tl.constexpr):
    """Stores inf for every row of weights that set no limit."""
    for first in range(0, n_rows, ROWS):
        own = first + tl.arange(0, ROWS)
        tl.store(out_ptr + own, tl.full([ROWS], INF, tl.float64), mask=own < n_rows)
