"""Units: one launch measures every row of gradients and weights, and another scales the rows.

If weights have another dtype than their gradients, two launches measure them.

Long rows are measured one after the other, as chunks are (see `norm`). Shorter rows are measured as
the rows of a tile: 64 at a time or, from 257 elements on, 16, two by each warp. A row whose sum of
squares is not finite, or too small to be trusted, is measured again in float64, divided by its
largest magnitude. Every partial norm has a fixed place, so equal inputs give equal bits. Each row
is scaled by its own coefficient; only rows whose multiplier is not 1 are written.
"""

import triton
import triton.language as tl

from tritonclip.kernels import launch
from tritonclip.kernels.access import (
    aligned_pointer,
    any_pointer,
    are_wide,
    chunks_of,
    count_of,
    find_piece,
    first_norm_of,
    first_unit_of,
    key_magnitude,
    length_of,
    magnitude_key,
    row_tile,
    wide_length,
)
from tritonclip.kernels.norm import (
    LARGEST_FLOAT64,
    SLOW_BLOCK,
    TRUSTED_FLOAT32,
    TRUSTED_FLOAT64,
    chunk_norm,
    combine,
    norm_of,
)
from tritonclip.kernels.scalars import INF, as_float64, divide, load_number, unit_coefficient_of
from tritonclip.kernels.scale import scale_chunk

# The rows of a tile, which has 4 elements for each of 256 threads. Larger tiles spill.
ROWS_MEASURED = 64
# The rows of a tile that is multiplied. It has 2 elements for each of 256 threads, and at least one
# for each of the 512 threads on gfx942 (see `TAIL`). Larger tiles spill.
ROWS_SCALED = 32


def columns_scaled(itemsize: int) -> int:
    """Elements of each longer row in such a tile: 64 accesses of 16 bytes, two for each thread.

    On AMD each thread has one, because two spill on gfx942. On an H200, GPT-2 in bfloat16 takes
    153 us, and 165 us with one (measured by hand).
    """
    return 64 * 16 // itemsize


# The norms of units that are added up at once to the norm of a gradient. ptxas unrolls the loop by
# four, so that 4096 norms are in flight, and an embedding of 50,000 rows takes 13 rounds.
NORMS_AT_ONCE = tl.constexpr(1024)


@triton.jit
def _exact_norms(x_ptr, rows, n_rows, length, LANE: tl.constexpr):
    """The norm of each row of a tile in float64, after division by its largest magnitude."""
    COLUMNS: tl.constexpr = SLOW_BLOCK // rows.shape[0]
    zeros = tl.zeros([rows.shape[0], COLUMNS], LANE)
    keys = magnitude_key(zeros)
    for column in range(0, length, COLUMNS):
        tile_ptr, inside = row_tile(x_ptr, rows, column, n_rows, length, COLUMNS)
        x = tl.load(tile_ptr, mask=inside, other=0.0).to(LANE)
        keys = tl.maximum(keys, magnitude_key(x))
    largest = key_magnitude(tl.max(keys, axis=1))

    squares = zeros.to(tl.float64)
    for column in range(0, length, COLUMNS):
        tile_ptr, inside = row_tile(x_ptr, rows, column, n_rows, length, COLUMNS)
        x = tl.load(tile_ptr, mask=inside, other=0.0).to(tl.float64)
        ratio = tl.where(x == 0, 0.0, x / largest[:, None])
        squares += ratio * ratio
    norm = largest * tl.sqrt(tl.sum(squares, axis=1))
    # A largest magnitude of NaN or inf is the norm already.
    return tl.where((largest == largest) & (largest != INF), norm, largest)


@triton.jit
def _measure_rows(
    x_ptr,
    n_rows,
    length,
    out_ptr,
    LANE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Stores the norms of rows that lie end to end from x_ptr on, read STEPS tiles at a time."""
    trusted: tl.constexpr = TRUSTED_FLOAT64 if LANE == tl.float64 else TRUSTED_FLOAT32
    most: tl.constexpr = LARGEST_FLOAT64 if LANE == tl.float64 else INF
    for first in range(0, n_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        squares = tl.zeros([ROWS, COLUMNS], LANE)
        for column in range(0, length, STEPS * COLUMNS):
            some = tl.zeros([ROWS, COLUMNS], LANE)
            for step in tl.static_range(STEPS):
                at = column + step * COLUMNS
                tile_ptr, inside = row_tile(x_ptr, rows, at, n_rows, length, COLUMNS)
                x = tl.load(tile_ptr, mask=inside, other=0.0).to(LANE)
                some += x * x
            squares += some
        total = tl.sum(squares.to(tl.float64), axis=1)

        norm = tl.sqrt(total)
        doubtful = ((total < trusted) | (total >= most) | (total != total)) & (rows < n_rows)
        if tl.max(doubtful.to(tl.int32), axis=0) != 0:
            exact = _exact_norms(x_ptr, rows, n_rows, length, LANE)
            norm = tl.where(doubtful, exact, norm)
        tl.store(out_ptr + rows, norm, mask=rows < n_rows)


@launch.jit
def unit_norms_kernel(
    addresses_ptr,
    forms_ptr,
    pieces_ptr,
    norms_ptr,
    n_tensors: tl.int32,
    n_pieces: tl.int32,
    first_side: tl.int32,
    n_sides: tl.int32,
    n_norms: tl.int64,
    DTYPE: tl.constexpr,
    SHORT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MEDIUM: tl.constexpr,
    MEDIUM_ROWS: tl.constexpr,
    ROW_COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program measures the pieces program_id, program_id + grid, ... of one side after another.

    Side 0 is all gradients, side 1 all weights. addresses_ptr: int64[2, n_tensors]; forms_ptr:
    int64[n_tensors, 4]; pieces_ptr: int64[n_pieces, 4]; norms_ptr: float64[2, n_norms], or [1,
    n_norms] if only gradients are measured.
    """
    ITEMSIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8
    LANE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32

    for at in range(tl.program_id(0), n_pieces * n_sides, tl.num_programs(0)):
        turn = at // n_pieces
        tensor, row, n_rows, chunk, length = find_piece(forms_ptr, pieces_ptr, at - turn * n_pieces)
        side = first_side + turn
        address = tl.load(addresses_ptr + side * n_tensors + tensor)
        first = first_norm_of(forms_ptr, tensor)

        chunks = chunks_of(length, CHUNK)
        out_ptr = norms_ptr + side * n_norms + first + row * chunks + chunk
        row_address = address + row * length * ITEMSIZE
        if length <= SHORT:
            x_ptr = any_pointer(row_address, 0, DTYPE)
            _measure_rows(x_ptr, n_rows, length.to(tl.int32), out_ptr, LANE, ROWS, COLUMNS, 1)
        elif (length <= MEDIUM) & are_wide(row_address, length, DTYPE):
            x_ptr = aligned_pointer(row_address, 0, DTYPE)
            n = wide_length(length, DTYPE)
            _measure_rows(x_ptr, n_rows, n, out_ptr, LANE, MEDIUM_ROWS, ROW_COLUMNS, STEPS)
        else:
            start = chunk * CHUNK
            n = tl.minimum(length - start, CHUNK).to(tl.int32)
            for i in range(n_rows):
                scale, total = chunk_norm(row_address, start, n, DTYPE, 2.0, CHUNK, BLOCK)
                tl.store(out_ptr + i, norm_of(scale, total, 2.0))
                row_address += length * ITEMSIZE


@triton.jit
def _norms_of_row(norms_ptr, n_norms, chunks):
    """The norms of a row and of its weights, from the partial norms of their chunks."""
    norm = tl.load(norms_ptr)
    weight = tl.load(norms_ptr + n_norms)
    if chunks > 1:
        # A loop compiles the code once; with two copies of it, registers spill.
        for side in range(2):
            whole = combine(norms_ptr + side * n_norms, 0, chunks, 2.0)
            if side == 0:
                norm = whole
            else:
                weight = whole
    return norm, weight


@triton.jit
def _scale_rows(
    x_ptr,
    norms_ptr,
    weights_ptr,
    coefficient_ptr,
    n_rows,
    length,
    ratio,
    eps,
    grad_scale,
    erase,
    RESULT: tl.constexpr,
    LANE: tl.constexpr,
    WRITE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiplies rows that lie end to end from x_ptr on, each by its own coefficient."""
    for first in range(0, n_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        norm = tl.load(norms_ptr + rows, mask=rows < n_rows, other=0.0) / grad_scale
        weight = tl.load(weights_ptr + rows, mask=rows < n_rows, other=INF)
        coefficient = unit_coefficient_of(norm, weight, ratio, eps, RESULT)
        multiplier = divide(coefficient, grad_scale.to(RESULT)).to(LANE)
        kept = tl.where(erase, 0.0, coefficient)
        tl.store(coefficient_ptr + rows, kept, mask=rows < n_rows)
        if WRITE:
            # One comparison serves both, as interpreters do not take a mask made of `erase`.
            changed = (tl.where(erase, 0.0, multiplier) != 1) & (rows < n_rows)
            if tl.max(changed.to(tl.int32), axis=0) != 0:
                for column in range(0, length, COLUMNS):
                    tile_ptr, inside = row_tile(x_ptr, rows, column, n_rows, length, COLUMNS)
                    inside &= changed[:, None]
                    x = tl.load(tile_ptr, mask=inside, other=0.0)
                    y = x.to(LANE) * multiplier[:, None]
                    y = tl.where(erase, 0.0, y).to(x.dtype)
                    tl.store(tile_ptr, y, mask=inside)


@launch.jit
def scale_units_kernel(
    addresses_ptr,
    forms_ptr,
    pieces_ptr,
    norms_ptr,
    norm_ptr,
    coefficient_ptr,
    ratio_ptr,
    grad_scale_ptr,
    erase_ptr,
    n_tensors: tl.int32,
    n_pieces: tl.int32,
    n_norms: tl.int64,
    ratio_stride: tl.int32,
    ratio_bits: tl.int64,
    eps_bits: tl.int64,
    grad_scale_bits: tl.int64,
    DTYPE: tl.constexpr,
    WRITE: tl.constexpr,
    SHORT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MEDIUM: tl.constexpr,
    MEDIUM_ROWS: tl.constexpr,
    ROW_COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One program multiplies rows of pieces program_id, program_id + grid, ... from the last on.

    addresses_ptr: int64[2, n_tensors]; forms_ptr: int64[n_tensors, 4]; pieces_ptr: int64[n_pieces,
    4]; norms_ptr: float64[2, n_norms]; norm_ptr: float32 or float64 [n_tensors], the norm of each
    gradient; coefficient_ptr: [n_units], of norm_ptr's dtype; ratio_ptr: any float [1] with
    ratio_stride 0, or [n_tensors] with 1, or None; grad_scale_ptr: any float [1], or None;
    erase_ptr: uint8[1], whether to write zeros, or None. Without WRITE no gradient is touched.
    """
    pid = tl.program_id(0)
    RESULT: tl.constexpr = norm_ptr.dtype.element_ty
    LANE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    ITEMSIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8

    grad_scale = load_number(grad_scale_ptr, grad_scale_bits, 0)
    eps = as_float64(eps_bits)
    if erase_ptr is not None:
        erase = tl.load(erase_ptr) != 0
    else:
        erase = pid < 0

    # This comes before the loop below, in which its registers would spill on gfx942. The last
    # programs take the first gradients, because they have one piece less than others, if any has.
    for index in range(tl.num_programs(0) - 1 - pid, n_tensors, tl.num_programs(0)):
        n_partials = count_of(forms_ptr, index) * chunks_of(length_of(forms_ptr, index), CHUNK)
        first = first_norm_of(forms_ptr, index)
        whole = combine(norms_ptr + first, 0, n_partials, 2.0, NORMS_AT_ONCE) / grad_scale
        tl.store(norm_ptr + index, whole.to(RESULT))

    piece = n_pieces - 1 - pid
    while piece >= 0:
        tensor, row, n_rows, chunk, length = find_piece(forms_ptr, pieces_ptr, piece)
        row_address = tl.load(addresses_ptr + tensor) + row * length * ITEMSIZE
        ratio = load_number(ratio_ptr, ratio_bits, tensor * ratio_stride)
        chunks = chunks_of(length, CHUNK)
        own_ptr = norms_ptr + first_norm_of(forms_ptr, tensor) + row * chunks
        unit_ptr = coefficient_ptr + first_unit_of(forms_ptr, tensor) + row

        if length <= SHORT:
            _scale_rows(
                any_pointer(row_address, 0, DTYPE), own_ptr, own_ptr + n_norms, unit_ptr,
                n_rows, length.to(tl.int32), ratio, eps, grad_scale, erase,
                RESULT, LANE, WRITE, ROWS, COLUMNS,
            )  # fmt: skip
        elif (length <= MEDIUM) & are_wide(row_address, length, DTYPE):
            _scale_rows(
                aligned_pointer(row_address, 0, DTYPE), own_ptr, own_ptr + n_norms, unit_ptr,
                n_rows, wide_length(length, DTYPE), ratio, eps, grad_scale, erase,
                RESULT, LANE, WRITE, MEDIUM_ROWS, ROW_COLUMNS,
            )  # fmt: skip
        else:
            start = chunk * CHUNK
            n = tl.minimum(length - start, CHUNK).to(tl.int32)
            for i in range(n_rows):
                norm, weight = _norms_of_row(own_ptr + i, n_norms, chunks)
                coefficient = unit_coefficient_of(norm / grad_scale, weight, ratio, eps, RESULT)
                multiplier = divide(coefficient, grad_scale.to(RESULT)).to(LANE)
                if chunk == 0:
                    tl.store(unit_ptr + i, tl.where(erase, 0.0, coefficient))
                if WRITE:
                    if (multiplier != 1) | erase:
                        scale_chunk(
                            row_address, start, n, multiplier, erase, DTYPE, CHUNK, BLOCK, TAIL
                        )
                row_address += length * ITEMSIZE
        piece -= tl.num_programs(0)
