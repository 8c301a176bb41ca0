"""Rows into which gradients on a CPU are cut, gathered or copied, and the norms of these rows."""

from collections.abc import Iterator, Sequence

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
    # Measured together, or each where it was copied, as the first batches tell: see `middle_of`.
    # 42M elements in 448 tensors take 10 to 15 ms together; where memory that another thread read
    # is slow to write, 52, and as chosen 20 to 33. (bfloat16, torch 2.13, AMD EPYC.)
    compares = dtype != tensors[0].dtype and sum(sizes) >= COMPARED
    pace = Pace(*[most] * (2 if compares else 1))
    # Where both may happen each begins with a row, so that they give the same bits.
    rooms = [size + -size % ROW for size in sizes] if compares else sizes
    scratch = torch.empty(min(most, sum(rooms) + ROW), dtype=dtype, device="cpu")
    start, n = 0, 0
    for stop, room in enumerate([*rooms, most]):
        if n + room > most - ROW:
            batch = tensors[start:stop]
            for _ in pace.spans(n, whole=True):
                if pace.is_serial or pace.way == 0:
                    own = rooms[start:stop]
                    norms = _norms_together(batch, own, scratch, is_serial=pace.is_serial)
                else:
                    norms = torch.cat([_norms_of_copy(tensor, scratch) for tensor in batch])
            yield batch, norms
            start, n = stop, 0
        n += room


def _norms_together(
    batch: list[Tensor], rooms: Sequence[int], scratch: Tensor, *, is_serial: bool
) -> Tensor:
    """Norms of the rows of tensors, copied one after another, by one thread or by all.

    Args:
        batch: the tensors.
        rooms: elements of scratch for each.
        scratch: memory that holds them and a row more.
        is_serial: in one thread.
    """
    n = sum(rooms)
    padded = n + -n % ROW
    scratch[n:padded] = 0
    slots = []
    for tensor, slot in zip(batch, scratch[:n].split_with_sizes(list(rooms)), strict=True):
        size = tensor.numel()
        if size < len(slot):
            slot[size:] = 0
            slot = slot[:size]
        slots.append(slot)
    rows = scratch[:padded].view(-1, ROW)
    if not is_serial:
        torch._foreach_copy_(slots, batch)
        return _norms_of_rows(rows)
    for tensor, slot in zip(batch, slots, strict=True):
        for piece, place in zip(tensor.split(SERIAL), slot.split(SERIAL), strict=True):
            place.copy_(piece)
    return torch.cat([_norms_of_rows(some) for some in rows.split(SERIAL // ROW)])


def _norms_of_copy(tensor: Tensor, scratch: Tensor) -> Tensor:
    """Norms of the rows of one tensor."""
    n = tensor.numel()
    copy = middle_of(scratch, n + -n % ROW)
    copy[:n].copy_(tensor)
    if n < len(copy):
        copy[n:] = 0
    return _norms_of_rows(copy.view(-1, ROW))


def _norms_of_rows(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms


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
                piece = middle_of(scratch, len(piece)).copy_(piece)
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
        filled = elements if wide is None else middle_of(wide, len(elements)).copy_(elements)
        yield tensors[start:stop], torch.linalg.vector_norm(filled.view(-1, ROW), dim=1)
