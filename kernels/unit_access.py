"""How a program finds rows and moves over them: the device code that kernels of units share."""

import torch
import triton
import triton.language as tl

from tritonclip.kernels.chunk_access import WARPS

# Rows of up to so many elements are measured as tiles: as many as keep a sum in float32 lanes
# right to 1e-6 with room to spare, and 64 of them fill a chunk.
SHORT = 256
# Elements of each row of a tile.
COLUMNS = 16


def row_block_of(itemsize: int) -> int:
    """Elements of a long row loaded at a time: one load of 16 bytes for each thread of a program.

    Most rows have some hundred to some thousand elements: a larger block would be empty for most,
    and half types spill with it on sm_80.
    """
    threads = WARPS * (64 if torch.version.hip else 32)
    return 16 * threads // itemsize


@triton.jit
def short_tile(x_ptr, own, column, n_rows, length, COLUMNS: tl.constexpr):
    """Pointers and mask of the elements [own, column : column + COLUMNS] of rows end to end."""
    columns = column + tl.arange(0, COLUMNS)
    inside = (own < n_rows)[:, None] & (columns < length)[None, :]
    return x_ptr + own[:, None] * length + columns[None, :], inside


@triton.jit
def chunks_of(length, CHUNK: tl.constexpr):
    """Chunks, and partial norms, of a row."""
    return tl.maximum(tl.cdiv(length, CHUNK), 1)


@triton.jit
def find_piece(forms_ptr, pieces_ptr, piece):
    """Returns a piece's tensor, first row, number of rows (int32) and chunk, and its rows' length.

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
    """The rows of a tensor."""
    return tl.load(forms_ptr + tensor * 4)


@triton.jit
def length_of(forms_ptr, tensor):
    """The elements of a tensor's rows."""
    return tl.load(forms_ptr + tensor * 4 + 1)


@triton.jit
def first_norm_of(forms_ptr, tensor):
    """The place of a tensor's first partial norm."""
    return tl.load(forms_ptr + tensor * 4 + 2)


@triton.jit
def first_unit_of(forms_ptr, tensor):
    """The place of a tensor's first unit."""
    return tl.load(forms_ptr + tensor * 4 + 3)
