"""Device code that kernels share, by which a program finds its chunk or rows and reads them.

A chunk is addressed through a table of raw pointers, so the compiler cannot know that it is
aligned. It emits 128-bit accesses only if the pointer is hinted *after* the cast from int64, the
start of the chunk is a multiple of a constant, and the mask, if any, compares with a bound that is
hinted as well. `tests/kernels/test_codegen.py` asserts that it emits them.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

# The elements in a chunk. They are few enough that the last round of chunks leaves few programs
# idle (GPT-2 124M has 7,686 chunks for the 396 programs of an H100: 3% are idle, and 16% with
# 65,536 elements), and so many that 4 bytes of table per chunk do not matter. On an H100, half as
# many save 1% of a norm and 1 to 2% of a scale.
CHUNK = 16384
# The warps of a program.
WARPS = 8


class Occupancy(NamedTuple):
    """The programs of a grid on each multiprocessor, and the registers left to each thread.

    programs * 256 threads * registers fill the 65,536 registers of a multiprocessor. Left to
    itself, ptxas takes between 48 registers, with spills, and 128. Two programs keep 2 * 256 * 32
    bytes = 16 KiB or more in flight, as an H100 needs (3.35 TB/s * 650 ns / 132). On an H100, both
    occupancies below are within 3% of the fastest of 53 settings for GPT-2 and ResNet-50, and
    within 6% for one gradient of 3 GB.

    Attributes:
        programs: the programs that are resident on a multiprocessor at once.
        registers: the registers of a thread.
    """

    programs: int
    registers: int


# The fewest registers, a multiple of 8, with which no kernel of the kind spills on any target of
# tests/kernels/test_codegen.py.
OCCUPANCY_3X80 = Occupancy(programs=3, registers=80)
OCCUPANCY_2X128 = Occupancy(programs=2, registers=128)

# The size of the tile after the last whole vector, where at most 15 elements exist. It has at least
# one element for each thread of a program (512 on gfx942), so that the same thread loads and stores
# an element. Every warp would load a smaller tile, but only one would store it, which is a race.
TAIL = 512


@cache
def block_of(itemsize: int) -> int:
    """Elements loaded at a time: 4 loads of 16 bytes per thread for 4-byte elements, else 2."""
    return 1024 if itemsize == 8 else 4096


@triton.jit
def find_chunk(
    pointers_ptr, sizes_ptr, first_chunks_ptr, tensor_of_chunk_ptr, chunk, CHUNK: tl.constexpr
):
    """Returns a chunk's tensor, the tensor's address, and the chunk's start and length (int32).

    pointers_ptr, sizes_ptr, first_chunks_ptr: int64[n_tensors]; tensor_of_chunk_ptr:
    int32[n_chunks].
    """
    tensor = tl.load(tensor_of_chunk_ptr + chunk)
    address = tl.load(pointers_ptr + tensor)
    size = tl.load(sizes_ptr + tensor)
    first = tl.load(first_chunks_ptr + tensor)

    start = (chunk - first) * CHUNK
    n = tl.minimum(size - start, CHUNK).to(tl.int32)
    return tensor, address, start, n


@triton.jit
def is_aligned(address):
    """Whether 128-bit accesses at the address are legal.

    At other addresses, accesses are as wide as an element. We peel off no head to align the rest,
    because masked loops keep as many bytes in flight by narrow accesses as by wide ones.
    """
    return address % 16 == 0


@triton.jit
def aligned_pointer(address, start, DTYPE: tl.constexpr):
    """A pointer to element `start`, hinted for 128-bit accesses.

    It requires `is_aligned(address)`, and a start that CHUNK divides.
    """
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16) + start


@triton.jit
def any_pointer(address, start, DTYPE: tl.constexpr):
    """A pointer to element `start` without a hint."""
    return address.to(tl.pointer_type(DTYPE)) + start


@triton.jit
def whole_vectors(n):
    """The largest multiple of 16 up to n, hinted, so that masks with it keep 128-bit accesses."""
    return tl.multiple_of(n // 16 * 16, 16)


@triton.jit
def magnitude_key(x):
    """The bits of |x| as a signed integer, which are ordered like |x|, with NaN above inf.

    Therefore a maximum of keys keeps NaN.
    """
    if x.dtype == tl.float64:
        key = x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        key = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return key


@triton.jit
def key_magnitude(key):
    """The magnitude of a key in float64; a negative key stands for NaN."""
    if key.dtype == tl.int64:
        x = key.to(tl.float64, bitcast=True)
    else:
        x = key.to(tl.float32, bitcast=True).to(tl.float64)
    return tl.where(key < 0, float("nan"), x)


# Rows of up to this many elements are measured many at a time. Their sums in float32 lanes are
# right to 1e-6 with room to spare, and 64 of the longest fill a chunk.
SHORT = 256
# The elements of each of these rows in a tile.
COLUMNS = 16
# Longer rows of up to MEDIUM elements are read MEDIUM_ROWS at a time, two by each warp, if 128-bit
# accesses are legal at every row. One after the other, rows of 768 float32 keep only 6 KiB in
# flight on a multiprocessor, and each ends with a sum over all warps. On an H200, the norms of all
# rows of GPT-2's gradients and weights take 248 us in float32 and 174 us in bfloat16, and 304 and
# 226 us with one row per warp. Those of ResNet-50, with 28% of its elements in rows of 4,608, take
# 66 and 44 us, and 73 and 64 us with one row per warp and a MEDIUM of 4,096. (Measured by hand.)
MEDIUM, MEDIUM_ROWS = 8192, 16
# The tiles of such rows that are read at once. A tile has one load of 16 bytes for each thread.
STEPS = 4


def row_columns_of(itemsize: int) -> int:
    """Elements of each row in such a tile; in a wider tile several warps would share a row."""
    return (64 if torch.version.hip else 32) * 16 // itemsize


@triton.jit
def are_wide(address, length, DTYPE: tl.constexpr):
    """Whether 128-bit accesses are legal at all rows of `length` elements from an address on."""
    return is_aligned(address) & (length * (DTYPE.primitive_bitwidth // 8) % 16 == 0)


@triton.jit
def wide_length(length, DTYPE: tl.constexpr):
    """The length of wide rows, hinted, so that addresses and masks with it keep 128 bits."""
    return tl.multiple_of(length.to(tl.int32), 128 // DTYPE.primitive_bitwidth)


@triton.jit
def row_tile(x_ptr, rows, column, n_rows, length, COLUMNS: tl.constexpr):
    """Pointers to, and mask of, [rows, column : column + COLUMNS], for rows that lie end to end."""
    columns = column + tl.arange(0, COLUMNS)
    inside = (rows < n_rows)[:, None] & (columns < length)[None, :]
    return x_ptr + rows[:, None] * length + columns[None, :], inside


@triton.jit
def chunks_of(length, CHUNK: tl.constexpr):
    """The number of chunks, and so of partial norms, of a row."""
    return tl.maximum(tl.cdiv(length, CHUNK), 1)


@triton.jit
def find_piece(forms_ptr, pieces_ptr, piece):
    """Returns a piece's tensor, first row, number of rows (int32), chunk, and length of rows.

    forms_ptr: int64[n_tensors, 4]; pieces_ptr: int64[n_pieces, 4].
    """
    own_ptr = pieces_ptr + piece.to(tl.int64) * 4
    tensor = tl.load(own_ptr)
    row = tl.load(own_ptr + 1)
    n_rows = tl.load(own_ptr + 2)
    chunk = tl.load(own_ptr + 3)
    return tensor, row, n_rows.to(tl.int32), chunk, length_of(forms_ptr, tensor)


@triton.jit
def count_of(forms_ptr, tensor):
    """The number of a tensor's rows."""
    return tl.load(forms_ptr + tensor * 4)


@triton.jit
def length_of(forms_ptr, tensor):
    """The number of elements in each of a tensor's rows."""
    return tl.load(forms_ptr + tensor * 4 + 1)


@triton.jit
def first_norm_of(forms_ptr, tensor):
    """The position of a tensor's first partial norm."""
    return tl.load(forms_ptr + tensor * 4 + 2)


@triton.jit
def first_unit_of(forms_ptr, tensor):
    """The position of a tensor's first unit."""
    return tl.load(forms_ptr + tensor * 4 + 3)
