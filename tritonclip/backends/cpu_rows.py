"""Rows into which gradients on a CPU are cut or gathered, and sums over these rows."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.backends.operators import pack_small

# Elements of a row, so few that no norm can be wrong by 1e-6. With u = 2^-24, torch sums up the
# squares of a row of n elements in w lanes, each rounded up to n / w + w - 1 times: as a square, in
# n / w - 1 sums of its lane, and in w - 1 sums over the lanes, from the first to the last. No term
# is negative, so the sum is off by as many u at most, its root by half of them, and the roundings
# of root and result add 2u. On x86 w is 8, with NEON 4:
#
#     n          64             128            256            512
#     w = 8      9.5u, 5.7e-7   13.5u, 8.0e-7  21.5u, 1.3e-6  37.5u, 2.2e-6
#     w = 4      11.5u, 6.9e-7  19.5u, 1.2e-6  35.5u, 2.1e-6  67.5u, 4.0e-6
#
# Eight ones before 504 times 2^-12 come close: in a row of 512 they were off by 1.9e-6. Squares of
# half types are exact in float32, and sums of them have no root: 2.5u less. 16M float32
# elements take 4.55, 4.91, 5.31 and 5.92 ms in rows of 512, 256, 128 and 64. (torch 2.13, Xeon, 2
# threads.)
ROW = 128 if torch.backends.cpu.get_cpu_capability().startswith("AVX") else 64
# Gradients up to this size are gathered.
SMALL = 8192
# Rows measured at once, and those whose sums are kept until they are added up: in float32 512 KiB
# each, three times as much while they are, and for half types while they are made.
SLAB = 2**17
# Dtypes of which rows have norms; of half types they have sums of squares, in float32.
WIDE = (torch.float32, torch.float64)
MEASURED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class RowSums(NamedTuple):
    """Tensors, and sums over the rows that they were cut or gathered into.

    Attributes:
        tensors: in their order.
        sums: 1-d, of each row: of float32 and float64 the norm, of half types the sum of squares.
        counts: how many rows each tensor has; None where a row may hold the elements of several.
    """

    tensors: Sequence[Tensor]
    sums: Tensor
    counts: Sequence[int] | None = None


def row_sums_of(tensors: list[Tensor], sizes: Sequence[int]) -> Iterator[RowSums]:
    """Every element of contiguous tensors in a row; small ones and remainders are gathered."""
    if not tensors:
        return
    if tensors[0].dtype not in MEASURED:
        # One of the float8 formats: rare, and small enough when it comes.
        tensors = [tensor.float() for tensor in tensors]
    short: list[Tensor] = []
    long: list[Tensor] = []
    counts: list[int] = []
    for tensor, n in zip(tensors, sizes, strict=True):
        if n <= SMALL:
            short.append(tensor)
        else:
            rows, rest = cut(tensor, n)
            long.append(rows)
            counts.append(n // ROW)
            if rest is not None:
                short.append(rest)
    yield from _packed_rows(short)
    yield from long_row_sums(long, counts)


def cut(tensor: Tensor, n: int) -> tuple[Tensor, Tensor | None]:
    """Whole rows [n // ROW, ROW] and the remainder, 1-d, of a contiguous tensor of n elements."""
    if n % ROW == 0:
        return tensor.view(-1, ROW), None
    # A view of each, where view and slices take five.
    count, rest = divmod(n, ROW)
    last = tensor.as_strided((rest,), (1,), tensor.storage_offset() + n - rest)
    return tensor.as_strided((count, ROW), (ROW, 1)), last


def long_row_sums(tensors: list[Tensor], counts: list[int], slab: int = SLAB) -> Iterator[RowSums]:
    """Sums over rows, a slab at a time.

    Args:
        tensors: contiguous, [count, ROW].
        counts: their rows.
        slab: rows that are measured at once, at most.
    """
    if not tensors:
        return
    if max(counts) > slab:
        pairs = zip(tensors, counts, strict=True)
        blocks = (rows.split(slab) if n > slab else [rows] for rows, n in pairs)
        tensors = list(chain.from_iterable(blocks))
        counts = list(map(len, tensors))
    for first, last in _slabs(counts, slab):
        own = counts[first:last]
        yield RowSums(tensors[first:last], sums_of_rows(tensors[first:last], own), own)


def sums_of_rows(tensors: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """The norm of each row of a wide dtype, or the sum of squares of a half type, 1-d.

    Args:
        tensors: contiguous, [count, ROW], of one dtype of MEASURED; at least one.
        counts: their rows.
    """
    if tensors[0].dtype not in WIDE:
        squares = _squares_of_rows(tensors, counts)
        return squares[0] if len(squares) == 1 else torch.cat(squares)
    # One allocation: with one each, norms of float32 gradients of 12,288 and 45,056 elements
    # take 10.4 and 18.9 us, so 5.9 and 14.1. (torch 2.13, AMD EPYC.)
    norms = torch.empty(sum(counts), dtype=tensors[0].dtype, device="cpu")
    for tensor, out in zip(tensors, norms.split_with_sizes(list(counts)), strict=True):
        torch.linalg.vector_norm(tensor, dim=1, out=out)
    return norms


def _squares_of_rows(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Sums of squares of the rows of half types, float32[count]; NaN for a row with inf or NaN.

    The gradient of a group norm's weights is the sum of gradients times normalised inputs: with
    the elements as both, a mean of 0 and a deviation of 1, of squares. torch's norms of half types
    are of half types; this operator reads the same elements once and adds up in float32.
    """
    mean = torch.zeros(1, dtype=torch.float32, device="cpu")
    deviation = torch.ones(1, dtype=torch.float32, device="cpu")
    # The operator takes their dtype for its result, and reads none.
    weights = {n: torch.empty(n, dtype=torch.float32, device="cpu") for n in set(counts)}
    weights_gradient = torch.ops.aten.native_group_norm_backward.default
    of_weights_alone = [False, True, False]
    return [
        weights_gradient(x, x, mean, deviation, weights[n], 1, n, ROW, 1, of_weights_alone)[1]
        for x, n in zip(tensors, counts, strict=True)
    ]


def _slabs(sizes: list[int], slab: int) -> Iterator[tuple[int, int]]:
    """Start and stop of each run of sizes that adds up to a slab at most, or is one size."""
    start = n = 0
    for stop, size in enumerate(sizes):
        if n + size > slab and stop > start:
            yield start, stop
            start, n = stop, 0
        n += size
    yield start, len(sizes)


def _packed_rows(tensors: list[Tensor]) -> Iterator[RowSums]:
    """Rows of tensors of up to SMALL elements, end to end; zeros fill up the last of a batch."""
    for start, stop, elements in pack_small(tensors, list(map(Tensor.numel, tensors)), ROW):
        rows = elements.view(-1, ROW)
        yield RowSums(tensors[start:stop], sums_of_rows([rows], [len(rows)]))
