"""Rows into which gradients on a CPU are cut, gathered or copied, and the norms of these rows."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.backends.batching import BATCH, pack_small
from tritonclip.backends.cpu_pace import CONVERTED, SERIAL, Pace, middle_of

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
# Eight ones before 504 times 2^-12 come close: in a row of 512 they were off by 1.9e-6. 16M float32
# elements take 4.55, 4.91, 5.31 and 5.92 ms in rows of 512, 256, 128 and 64. (torch 2.13, Xeon, 2
# threads.)
ROW = 128 if torch.backends.cpu.get_cpu_capability().startswith("AVX") else 64
# Gradients up to this size are gathered.
SMALL = 8192
# Larger ones of half types up to this size, which one thread copies, are converted into scratch by
# one call, and measured together. With 8,704, 16,512 and 32,640 elements that takes 10.6, 11.1 and
# 16.2 us a gradient, one by one 14.9, 15.2 and 23.0; float32 one by one takes 10.9 and 15.6 with
# 16,512 and 32,640, together 13.0 and 20.6. Of more elements several threads copy, and others may
# read: see `middle_of`. 65,536 bfloat16 elements take 31 us together, and 82 where memory that
# another thread read is slow to write; one by one 35 and 39. (torch 2.13, AMD EPYC, 2 threads.)
MEDIUM = SERIAL
# Elements of scratch for medium gradients, 4 MiB.
SCRATCH = 2**20
# Elements measured at once, and those whose row norms are kept until they are added up: 512 KiB of
# float32 norms each, and three times as much while they are.
SLAB = 2**17 * ROW
# Elements to convert from which ways are compared: trials take up to 4.2M.
COMPARED = 2**23
# Dtypes in which rows are squared; others are converted to float32 first.
WIDE = (torch.float32, torch.float64)
MEASURED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class RowNorms(NamedTuple):
    """Tensors, and the norms of the rows that they were cut or gathered into.

    Attributes:
        tensors: in their order.
        norms: 1-d.
        counts: how many rows each tensor has; None where a row may hold the elements of several.
    """

    tensors: Sequence[Tensor]
    norms: Tensor
    counts: Sequence[int] | None = None


def row_norms_of(tensors: list[Tensor], sizes: Sequence[int]) -> Iterator[RowNorms]:
    """Every element of contiguous tensors in a row; small ones and remainders are gathered."""
    if not tensors:
        return
    if tensors[0].dtype not in MEASURED:
        # One of the float8 formats: rare, and small enough when it comes.
        tensors = [tensor.float() for tensor in tensors]
    most_copied = 0 if tensors[0].dtype in WIDE else MEDIUM
    short: list[Tensor] = []
    medium: list[Tensor] = []
    long: list[Tensor] = []
    for tensor, n in zip(tensors, sizes, strict=True):
        if n <= SMALL:
            short.append(tensor)
        elif n <= most_copied:
            medium.append(tensor.view(-1))
        elif n % ROW == 0:
            long.append(tensor)
        else:
            flat = tensor.view(-1)
            whole = n // ROW * ROW
            short.append(flat[whole:])
            long.append(flat[:whole])
    yield from _packed_rows(short)
    yield from _copied_rows(medium)
    yield from long_row_norms(long)


def _copied_rows(tensors: list[Tensor]) -> Iterator[RowNorms]:
    """Rows of 1-d tensors of up to MEDIUM elements, converted end to end into scratch."""
    if not tensors:
        return
    sizes = list(map(Tensor.numel, tensors))
    # One thread copies. Others may measure, as the first batches tell: with 24,576 elements that
    # takes 13 us a gradient, in the same thread 18; where memory that another thread read is slow
    # to write 31 and 16. (bfloat16, torch 2.13, AMD EPYC, 2 threads.)
    pace = Pace(*[SCRATCH] * (2 if sum(sizes) >= COMPARED else 1))
    scratch = torch.empty(min(SCRATCH, sum(sizes) + ROW), dtype=torch.float32, device="cpu")
    start, n = 0, 0
    for stop, size in enumerate([*sizes, SCRATCH]):
        if n + size > SCRATCH - ROW:
            batch = tensors[start:stop]
            padded = scratch[: n + -n % ROW]
            for _ in pace.spans(n, whole=True):
                torch._foreach_copy_(list(padded[:n].split_with_sizes(sizes[start:stop])), batch)
                padded[n:] = 0
                rows = padded.view(-1, ROW)
                is_alone = pace.is_serial or pace.way == 1
                parts = rows.split(SERIAL // ROW) if is_alone else [rows]
                norms = torch.cat([_norms_of_rows(part) for part in parts])
            yield RowNorms(batch, norms)
            start, n = stop, 0
        n += size


def _norms_of_rows(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms


def long_row_norms(tensors: list[Tensor], slab: int = SLAB) -> Iterator[RowNorms]:
    """Norms of the rows of contiguous tensors without a remainder, those of a slab at a time."""
    if not tensors:
        return
    blocks = [block for tensor in tensors for block in _split(tensor.view(-1, ROW), slab)]
    elements = list(map(Tensor.numel, blocks))
    wide, scratch = tensors[0].dtype, None
    sizes: Sequence[int] = (slab,)
    if wide not in WIDE:
        wide = torch.float32
        sizes = CONVERTED if sum(elements) >= COMPARED else CONVERTED[:1]
        scratch = torch.empty(min(max(sizes), max(elements)), dtype=wide, device="cpu")
    # Where pieces of so many elements are converted to.
    slots: dict[int, Tensor] = {}
    pace = Pace(*sizes)
    for first, last in _slabs(elements, slab):
        counts = [n // ROW for n in elements[first:last]]
        # One allocation: with one each, norms of float32 gradients of 12,288 and 45,056 elements
        # take 10.4 and 18.9 us, so 5.9 and 14.1. (torch 2.13, AMD EPYC.)
        norms = torch.empty(sum(counts), dtype=wide, device="cpu")
        outs = norms.split_with_sizes(counts)
        for i, start, stop in pace.spans(*elements[first:last]):
            rows, out, n = blocks[first + i], outs[i], stop - start
            if n < elements[first + i]:
                start, stop = start // ROW, stop // ROW
                rows, out = rows[start:stop], out[start:stop]
            if scratch is not None:
                slot = slots.get(n)
                if slot is None:
                    slot = slots[n] = middle_of(scratch, n).view(-1, ROW)
                rows = slot.copy_(rows)
            torch.linalg.vector_norm(rows, dim=1, out=out)
        yield RowNorms(blocks[first:last], norms, counts)


def _slabs(sizes: list[int], slab: int) -> Iterator[tuple[int, int]]:
    """Start and stop of each run of sizes that adds up to a slab at most, or is one size."""
    start = n = 0
    for stop, size in enumerate(sizes):
        if n + size > slab and stop > start:
            yield start, stop
            start, n = stop, 0
        n += size
    yield start, len(sizes)


def _split(rows: Tensor, size: int) -> Sequence[Tensor]:
    """Pieces of at most so many elements; the tensor itself if it is one."""
    return rows.split(size // ROW) if rows.numel() > size else [rows]


def _packed_rows(tensors: list[Tensor]) -> Iterator[RowNorms]:
    """Rows of tensors of up to SMALL elements, end to end; zeros fill up the last of a batch."""
    if not tensors:
        return
    wide = None
    if tensors[0].dtype not in WIDE:
        wide = torch.empty(BATCH, dtype=torch.float32, device="cpu")
    for start, stop, elements in pack_small(tensors, list(map(Tensor.numel, tensors)), ROW):
        filled = elements if wide is None else middle_of(wide, len(elements)).copy_(elements)
        yield RowNorms(tensors[start:stop], _norms_of_rows(filled.view(-1, ROW)))
