"""Units: one launch measures every row of gradients and weights, one more scales the rows.

Two launches measure them where weights have another dtype than their gradients.

Long rows are measured as chunks are (see `norm`), one after the other; short ones many at a time,
as the rows of a tile. A row whose sum of squares is not finite, or too small to be trusted, is
measured again in float64, divided by its largest magnitude. Every partial norm has its own place,
so equal inputs give equal bits. Only rows with a coefficient below 1 are written.
"""

import torch
import triton
import triton.language as tl

from tritonclip.kernels import launch
from tritonclip.kernels.chunk_access import (
    CHUNK,
    OCCUPANCY_2X128,
    TAIL,
    WARPS,
    any_pointer,
    key_magnitude,
    magnitude_key,
)
from tritonclip.kernels.norm import (
    LARGEST_FLOAT64,
    TRUSTED_FLOAT32,
    TRUSTED_FLOAT64,
    chunk_norm,
    combine,
    norm_of,
)
from tritonclip.kernels.scalars import (
    INF,
    as_float64,
    coefficient_of,
    factors_of,
    load_number,
    number_arguments,
)
from tritonclip.kernels.scale import scale_chunk
from tritonclip.kernels.unit_table import (
    UnitTable,
    count_of,
    find_piece,
    first_norm_of,
    first_unit_of,
    length_of,
)

# Rows of up to so many elements are measured as tiles: as many as keep a sum in float32 lanes
# right to 1e-6 with room to spare, and 64 of them fill a chunk.
SHORT = 256
# The tile: 4 elements for each of 256 threads, and 2 where it is multiplied; at least one for each
# of the 512 threads on gfx942 (see `TAIL`). Larger ones spill.
ROWS, COLUMNS = 64, 16
SCALED_ROWS = 32


def _block_of(itemsize: int) -> int:
    """Elements of a long row loaded at a time: one load of 16 bytes for each thread of a program.

    Most rows have some hundred to some thousand elements: a larger block would be empty for most,
    and half types spill with it on sm_80.
    """
    threads = WARPS * (64 if torch.version.hip else 32)
    return 16 * threads // itemsize


@triton.jit
def _short_tile(x_ptr, own, column, n_rows, length, COLUMNS: tl.constexpr):
    """Pointers and mask of the elements [own, column : column + COLUMNS] of rows end to end."""
    columns = column + tl.arange(0, COLUMNS)
    inside = (own < n_rows)[:, None] & (columns < length)[None, :]
    return x_ptr + own[:, None] * length + columns[None, :], inside


@triton.jit
def _exact_short_norms(x_ptr, own, n_rows, length, LANE: tl.constexpr, COLUMNS: tl.constexpr):
    """The norm of each row of a tile in float64, divided by its largest magnitude first."""
    zeros = tl.zeros([own.shape[0], COLUMNS], LANE)
    keys = magnitude_key(zeros)
    for column in range(0, length, COLUMNS):
        tile_ptr, inside = _short_tile(x_ptr, own, column, n_rows, length, COLUMNS)
        x = tl.load(tile_ptr, mask=inside, other=0.0).to(LANE)
        keys = tl.maximum(keys, magnitude_key(x))
    largest = key_magnitude(tl.max(keys, axis=1))

    squares = zeros.to(tl.float64)
    for column in range(0, length, COLUMNS):
        tile_ptr, inside = _short_tile(x_ptr, own, column, n_rows, length, COLUMNS)
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
            tile_ptr, inside = _short_tile(x_ptr, own, column, n_rows, length, COLUMNS)
            x = tl.load(tile_ptr, mask=inside, other=0.0).to(LANE)
            squares += x * x
        total = tl.sum(squares, axis=1).to(tl.float64)

        norm = tl.sqrt(total)
        doubtful = ((total < trusted) | (total >= most) | (total != total)) & (own < n_rows)
        if tl.max(doubtful.to(tl.int32), axis=0) != 0:
            exact = _exact_short_norms(x_ptr, own, n_rows, length, LANE, COLUMNS)
            norm = tl.where(doubtful, exact, norm)
        tl.store(out_ptr + own, norm, mask=own < n_rows)


@triton.jit
def _chunks_of(length, CHUNK: tl.constexpr):
    """Chunks, and partial norms, of a row."""
    return tl.maximum(tl.cdiv(length, CHUNK), 1)


@launch.jit
def _unit_norms_kernel(
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

        chunks = _chunks_of(length, CHUNK)
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


@triton.jit
def _unit_coefficient(norm, weight, ratio, eps, RESULT: tl.constexpr):
    """Returns min(1, ratio * max(weight, eps) / norm), computed in float64; NaN stays."""
    floor = tl.where(weight < eps, eps, weight)
    limit = tl.where(weight == INF, INF, ratio * floor)
    limit = tl.where(ratio == INF, INF, limit)
    return coefficient_of(norm, limit, 0.0).to(RESULT)


@triton.jit
def _norms_of_row(norms_ptr, n_norms, chunks):
    """The norm of a row and that of its weights, from the partial norms of its chunks."""
    norm = tl.load(norms_ptr)
    weight = tl.load(norms_ptr + n_norms)
    if chunks > 1:
        # A loop, so that the code is there once: for two of it, registers spill.
        for side in range(2):
            whole = combine(norms_ptr + side * n_norms, 0, chunks, 2.0)
            if side == 0:
                norm = whole
            else:
                weight = whole
    return norm, weight


@triton.jit
def _scale_short(
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
        own = first + tl.arange(0, ROWS)
        norm = tl.load(norms_ptr + own, mask=own < n_rows, other=0.0) / grad_scale
        weight = tl.load(weights_ptr + own, mask=own < n_rows, other=INF)
        coefficient = _unit_coefficient(norm, weight, ratio, eps, RESULT)
        multiplier, rest = factors_of(coefficient, grad_scale.to(RESULT), LANE)
        kept = tl.where(erase, 0.0, coefficient)
        tl.store(coefficient_ptr + own, kept, mask=own < n_rows)
        if WRITE:
            # One comparison: interpreters do not take a mask made of `erase`.
            changed = (tl.where(erase, 0.0, multiplier) != 1) & (own < n_rows)
            if tl.max(changed.to(tl.int32), axis=0) != 0:
                for column in range(0, length, COLUMNS):
                    tile_ptr, inside = _short_tile(x_ptr, own, column, n_rows, length, COLUMNS)
                    inside &= changed[:, None]
                    x = tl.load(tile_ptr, mask=inside, other=0.0)
                    y = x.to(LANE) * multiplier[:, None]
                    if LANE != tl.float64:
                        y *= rest[:, None]
                    y = tl.where(erase, 0.0, y).to(x.dtype)
                    tl.store(tile_ptr, y, mask=inside)


@launch.jit
def _scale_units_kernel(
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
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One program multiplies the rows of the pieces n_pieces - 1 - program_id, that - grid, ...

    addresses_ptr: int64[2, n_tensors]; forms_ptr: int64[n_tensors, 4]; pieces_ptr: int64[n_pieces,
    4]; norms_ptr: float64[2, n_norms]; norm_ptr: float32 or float64 [n_tensors], of each gradient;
    coefficient_ptr: as norm_ptr, [n_units]; ratio_ptr: any float [1] with ratio_stride 0, or
    [n_tensors] with 1, or None; grad_scale_ptr: any float [1], or None; erase_ptr: uint8[1],
    whether to write zeros, or None.
    Without WRITE no gradient is touched.
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

    # First: within the loop below, its registers would spill on gfx942.
    for own in range(pid, n_tensors, tl.num_programs(0)):
        n_own = count_of(forms_ptr, own) * _chunks_of(length_of(forms_ptr, own), CHUNK)
        first = first_norm_of(forms_ptr, own)
        whole = combine(norms_ptr + first, 0, n_own, 2.0) / grad_scale
        tl.store(norm_ptr + own, whole.to(RESULT))

    for back in range(pid, n_pieces, tl.num_programs(0)):
        tensor, row, n_rows, chunk, length = find_piece(forms_ptr, pieces_ptr, n_pieces - 1 - back)
        row_address = tl.load(addresses_ptr + tensor) + row * length * ITEMSIZE
        ratio = load_number(ratio_ptr, ratio_bits, tensor * ratio_stride)
        chunks = _chunks_of(length, CHUNK)
        own_ptr = norms_ptr + first_norm_of(forms_ptr, tensor) + row * chunks
        unit_ptr = coefficient_ptr + first_unit_of(forms_ptr, tensor) + row

        if length <= SHORT:
            _scale_short(
                any_pointer(row_address, 0, DTYPE), own_ptr, own_ptr + n_norms, unit_ptr,
                n_rows, length.to(tl.int32), ratio, eps, grad_scale, erase,
                RESULT, LANE, WRITE, ROWS, COLUMNS,
            )  # fmt: skip
        else:
            start = chunk * CHUNK
            n = tl.minimum(length - start, CHUNK).to(tl.int32)
            for i in range(n_rows):
                norm, weight = _norms_of_row(own_ptr + i, n_norms, chunks)
                coefficient = _unit_coefficient(norm / grad_scale, weight, ratio, eps, RESULT)
                multiplier, rest = factors_of(coefficient, grad_scale.to(RESULT), LANE)
                if chunk == 0:
                    tl.store(unit_ptr + i, tl.where(erase, 0.0, coefficient))
                if WRITE:
                    if (multiplier != 1) | erase:
                        scale_chunk(
                            row_address, start, n, multiplier, rest, erase,
                            DTYPE, CHUNK, BLOCK, TAIL,
                        )  # fmt: skip
                row_address += length * ITEMSIZE


def unit_norms(table: UnitTable) -> torch.Tensor:
    """Measures the rows of the table's gradients and weights: one launch, two if dtypes differ.

    Args:
        table: the gradients and weights.

    Returns:
        float64[2, n_norms]: norms of each gradient's rows, or of the chunks of its rows, and below
        them those of its weights; inf for weights without an address.
    """
    norms = torch.empty(2, table.n_norms, dtype=torch.float64, device=table.device)
    addresses, forms, pieces = table.arguments
    sides = [(addresses, norms, table.dtype, 2)]
    if table.weight_dtype != table.dtype:
        # A kernel reads one dtype: one launch for each.
        gradients, weights = addresses.split(table.n_tensors)
        sides = [
            (gradients, norms[0], table.dtype, 1),
            (weights, norms[1], table.weight_dtype, 1),
        ]
    for own, out, dtype, n_sides in sides:
        launch.launch(
            _unit_norms_kernel,
            table.device,
            table.programs[OCCUPANCY_2X128],
            OCCUPANCY_2X128,
            (own, forms, pieces, out, table.n_tensors, table.n_pieces, n_sides, table.n_norms),
            DTYPE=launch.TL_DTYPES[dtype],
            SHORT=SHORT,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            CHUNK=CHUNK,
            BLOCK=_block_of(dtype.itemsize),
        )
    return norms


def scale_units_(
    table: UnitTable,
    norms: torch.Tensor,
    *,
    ratio: float | torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    grad_scale: float | torch.Tensor,
    erase: torch.Tensor | None,
    write: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiplies each row of the table's gradients by its coefficient, in one launch.

    Args:
        table: the gradients and weights, of which the latter are not read.
        norms: the result of `unit_norms`, still loss-scaled.
        ratio: largest norm of a row, in norms of its weights: a number, a one-element tensor, or
            contiguous [n_tensors], one for each gradient.
        eps: norm that weights count with at least.
        dtype: of norms and coefficients, float32 or float64.
        grad_scale: the loss scale that the gradients still carry: a number, or a one-element
            tensor.
        erase: 0-d bool on the table's device: whether to write zeros; None for no.
        write: false to compute norms and coefficients only.

    Returns:
        The norm of each gradient before clipping, [n_tensors], and the coefficient of each row,
        [n_units], on the table's device.
    """
    norm = torch.empty(table.n_tensors, dtype=dtype, device=table.device)
    coefficient = torch.empty(table.n_units, dtype=dtype, device=table.device)
    (limit, scale, _), bits = number_arguments(ratio, grad_scale, eps, table.device)
    limit_bits, scale_bits, eps_bits = bits
    launch.launch(
        _scale_units_kernel,
        table.device,
        table.programs[OCCUPANCY_2X128],
        OCCUPANCY_2X128,
        (
            *table.arguments,
            norms,
            norm,
            coefficient,
            limit,
            scale,
            None if erase is None else erase.view(torch.uint8),
            table.n_tensors,
            table.n_pieces,
            table.n_norms,
            int(limit is not None and limit.dim() == 1),
            limit_bits,
            eps_bits,
            scale_bits,
        ),
        DTYPE=launch.TL_DTYPES[table.dtype],
        WRITE=write,
        SHORT=SHORT,
        ROWS=SCALED_ROWS,
        COLUMNS=COLUMNS,
        CHUNK=CHUNK,
        BLOCK=_block_of(table.dtype.itemsize),
        TAIL=TAIL,
    )
    return norm, coefficient
