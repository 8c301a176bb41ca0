"""Rows into which gradients on a CPU are cut, gathered or copied, and the norms of these rows."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tritonclip.backends.batching import BATCH, pack_small
from tritonclip.backends.cpu_pace import CONVERTED, SERIAL, Pace

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
# Larger ones up to this size are copied into scratch by one call, and measured together. With
# 8,704, 12,288 and 45,056 elements that takes 6.4, 8.6 and 16.8 us a tensor in float32, one by one
# 7.3, 8.3 and 12.6; in bfloat16 5.3, 7.1 and 13.8 against 11.3, 11.9 and 17.3; float16 is like
# bfloat16. (torch 2.13, Xeon, 2 threads.) Norms of 42M bfloat16 elements in 448 tensors of up to
# 229,376 take 21 ms where those of up to 32,640 are copied, and 15 where all are. (AMD EPYC.)
MEDIUM = {
    torch.float16: 2**18,
    torch.bfloat16: 2**18,
    torch.float32: 12288,
    torch.float64: 12288,
}
# Elements of scratch for medium gradients: 1.5 or 3 MiB stay in cache, and 4 MiB of float32 to
# which half types are converted.
SCRATCH = {
    torch.float16: 2**20,
    torch.bfloat16: 2**20,
    torch.float32: 393216,
    torch.float64: 393216,
}
# Elements measured at once, and those whose row norms are kept until they are added up: 512 KiB of
# float32 norms each, and three times as much while they are.
SLAB = 2**17 * ROW
# Elements to convert from which pieces of several sizes are compared: trials take 2.6M.
COMPARED = 2**23
# Dtypes in which rows are squared; others are converted to float32 first.
WIDE = (torch.float32, torch.float64)
MEASURED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# Tensors, and the norms of the rows that they were cut or gathered into.
RowNorms = tuple[Sequence[Tensor], Tensor]


def row_norms_of(tensors: list[Tensor], sizes: Sequence[int]) -> Iterator[RowNorms]:
    """Every element of contiguous tensors in a row; small ones and remainders are gathered."""
    if not tensors:
        return
    if tensors[0].dtype not in MEASURED:
        # One of the float8 formats: rare, and small enough when it comes.
        tensors = [tensor.float() for tensor in tensors]
    most_copied = MEDIUM[tensors[0].dtype]
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
    """Rows of 1-d tensors of up to MEDIUM elements, copied end to end into scratch."""
    if not tensors:
        return
    sizes = list(map(Tensor.numel, tensors))
    dtype = tensors[0].dtype if tensors[0].dtype in WIDE else torch.float32
    most = SCRATCH[tensors[0].dtype]
    scratch = torch.empty(min(most, sum(sizes) + ROW), dtype=dtype, device="cpu")
    # Copied by all threads, one parallel region a tensor, or by one, as the first batches tell. 448
    # regions take 5 ms or, for minutes at a time, 33. (AMD EPYC.)
    compares = dtype != tensors[0].dtype and sum(sizes) >= COMPARED
    pace = Pace(*[most] * (2 if compares else 1))
    start, n = 0, 0
    for stop, size in enumerate([*sizes, most]):
        if n + size > most - ROW:
            padded = n + -n % ROW
            scratch[n:padded] = 0
            slots = list(scratch[:n].split_with_sizes(sizes[start:stop]))
            norms = torch.empty(padded // ROW, dtype=dtype, device="cpu")
            _measure_copies(tensors[start:stop], slots, scratch[:padded], norms, pace)
            yield tensors[start:stop], norms
            start, n = stop, 0
        n += size


def _measure_copies(
    tensors: list[Tensor], slots: list[Tensor], copies: Tensor, norms: Tensor, pace: Pace
) -> None:
    """Copies tensors to slots, in all threads or one, and measures the rows of all copies."""
    rows = copies.view(-1, ROW)
    for _ in pace.spans(len(copies), whole=True):
        if pace.is_serial or pace.way == 1:
            for tensor, slot in zip(tensors, slots, strict=True):
                for piece, place in zip(tensor.split(SERIAL), slot.split(SERIAL), strict=True):
                    place.copy_(piece)
        else:
            torch._foreach_copy_(slots, tensors)
        if pace.is_serial:
            n = SERIAL // ROW
            for some, out in zip(rows.split(n), norms.split(n), strict=True):
                torch.linalg.vector_norm(some, dim=1, out=out)
        else:
            torch.linalg.vector_norm(rows, dim=1, out=norms)


def long_row_norms(tensors: list[Tensor], slab: int = SLAB) -> Iterator[RowNorms]:
    """Norms of the rows of contiguous tensors without a remainder, a block for each slab."""
    if not tensors:
        return
    wide, scratch = tensors[0].dtype, None
    sizes: Sequence[int] = (SLAB,)
    if wide not in WIDE:
        wide = torch.float32
        elements = list(map(Tensor.numel, tensors))
        sizes = CONVERTED if sum(elements) >= COMPARED else CONVERTED[:1]
        most = min(max(sizes), max(elements))
        scratch = torch.empty(most, dtype=wide, device="cpu").view(-1, ROW)
    pace = Pace(*sizes)
    blocks = [block for tensor in tensors for block in _split(tensor.view(-1, ROW), slab)]
    counts = [block.numel() // ROW for block in blocks]
    for rows, norms in zip(blocks, _memory_of(counts, wide), strict=True):
        n = rows.numel()
        for start, stop in pace.spans(n):
            piece, out = rows, norms
            if stop - start < n:
                piece, out = rows[start // ROW : stop // ROW], norms[start // ROW : stop // ROW]
            if scratch is not None:
                piece = scratch[: len(piece)].copy_(piece)
            torch.linalg.vector_norm(piece, dim=1, out=out)
        yield [rows], norms


def _memory_of(counts: list[int], dtype: torch.dtype) -> Iterator[Tensor]:
    """Memory for so many numbers each, allocated for those of a slab at a time.

    With an allocation each, norms of float32 gradients of 12,288 and 45,056 elements take 10.4 and
    18.9 us, so 5.9 and 14.1. (torch 2.13, AMD EPYC.)
    """
    start = 0
    while start < len(counts):
        stop, n = start + 1, counts[start]
        while stop < len(counts) and n + counts[stop] <= SLAB // ROW:
            n += counts[stop]
            stop += 1
        yield from torch.empty(n, dtype=dtype, device="cpu").split_with_sizes(counts[start:stop])
        start = stop


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
        filled = elements if wide is None else wide[: len(elements)].copy_(elements)
        yield tensors[start:stop], torch.linalg.vector_norm(filled.view(-1, ROW), dim=1)
