"""The 2-norm on CPU at the speed of memory.

torch's own full reduction on CPU uses one thread and one running float32 sum a lane: 0.3% off over
38M normal float32 elements (torch 2.13). Here short rows are reduced with all threads, which bounds
the error of running sums, and rows are added up in float64. Small gradients are packed first, and
half types, for which torch has no such reduction with a float32 result, converted piece by piece.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tritonclip.backends.batching import BATCH, PIECE, pack_small, split_flat

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
# Where norms are told apart, elements of gradients up to this size are squared one by one.
TINY = 64
# Gradients up to this size are gathered.
SMALL = 8192
# Larger ones up to this size are copied into scratch by one call, and measured together. With
# 8,704, 12,288, 45,056 and 65,536 elements that takes 6.4, 8.6, 16.8 and 23.5 us a tensor in
# float32, one by one 7.3, 8.3, 12.6 and 15.0; in bfloat16 5.3, 7.1, 13.8 and 17.7 against 11.3,
# 11.9, 17.3 and 18.5; float16 is like bfloat16. (torch 2.13, Xeon, 2 threads.)
MEDIUM = {
    torch.float16: 65536,
    torch.bfloat16: 65536,
    torch.float32: 12288,
    torch.float64: 12288,
}
# Elements of scratch for medium gradients and those with gaps: 1.5 MiB of float32 stay in cache.
SCRATCH = 393216
# Elements of scratch for long gradients of half types: larger, for fewer parallel regions, each of
# which waits for every thread where cores are busy. 16M bfloat16 elements take 11.8, 9.6, 8.2, 8.1
# and 9.6 ms through 131,072, 393,216, 2^20, 2^21 and 2^22 elements. (torch 2.13, Xeon, 2 threads.)
LONG_SCRATCH = 2**20
# Elements measured at once, and those whose row norms are kept until they are added up: 1 MiB of
# float32 norms each.
SLAB = 2**25
# A smaller norm may have lost something to underflow, one that is not finite may have overflowed.
# From there on the sum of squares is 2^-60 or more, of which 2^31 elements that lose 2^-126 each
# are 2^-35. float64 alike.
_TRUSTED = {torch.float32: 2.0**-30, torch.float64: 2.0**-450}
# Sums of squares of float32 fit float64, whatever they are.
_LARGEST = {torch.float32: math.inf, torch.float64: 2.0**450}
_MEASURED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Tensors, and the norms of the rows that they were cut or gathered into.
_Rows = tuple[Sequence[Tensor], Tensor]


def measures(tensor: Tensor) -> bool:
    """Whether the row-wise norm supports a tensor's device and dtype."""
    return tensor.device.type == "cpu" and tensor.dtype in _MEASURED


def two_norm(tensors: list[Tensor], sizes: Sequence[int], *, flat: bool) -> Tensor:
    """The 2-norm of tensors on a CPU, 0-d float64.

    Args:
        tensors: of one dtype; at least one.
        sizes: theirs.
        flat: each is contiguous.
    """
    norms = list(_norms_of_parts(tensors, sizes, flat=flat))
    if len(norms) == 1:
        return norms[0]
    zero = torch.zeros((), dtype=torch.float64, device="cpu")
    return next(_exact_norms(torch.stack([zero, *norms])))


def _norms_of_parts(tensors: list[Tensor], sizes: Sequence[int], *, flat: bool) -> Iterator[Tensor]:
    """0-d norms of parts that make up all tensors."""
    if not flat:
        for tensor in tensors:
            # One copy at a time.
            for piece in split_flat(tensor, SCRATCH):
                yield from _norms(list(_rows([piece.contiguous()], [piece.numel()])))
        return
    kept: list[_Rows] = []
    n_kept = 0
    for rows in _rows(tensors, sizes):
        kept.append(rows)
        n_kept += rows[1].numel()
        if n_kept > SLAB // ROW:
            yield from _norms(kept)
            kept, n_kept = [], 0
    yield from _norms(kept)


def two_norms_of_each(tensors: list[Tensor], sizes: Sequence[int], *, flat: bool) -> Tensor:
    """The 2-norm of each of some tensors on a CPU, float64[n]; arguments as for `two_norm`."""
    if not flat:
        return torch.stack([two_norm_of(tensor) for tensor in tensors])
    norms, unknown = _two_norms_of_flat(tensors, sizes)
    for i in unknown:
        norms[i] = two_norm_of(tensors[i])
    return norms


def _two_norms_of_flat(tensors: list[Tensor], sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
    """The 2-norms of contiguous tensors, and the indices of those that sums of squares miss."""
    result = torch.zeros(len(tensors), dtype=torch.float64, device="cpu")
    dtype = tensors[0].dtype
    wide = dtype if dtype in _TRUSTED else torch.float32
    tiny: list[int] = []
    places: list[int] = []
    short: list[Tensor] = []
    owners: list[int] = []
    long: list[Tensor] = []
    for place, (tensor, n) in enumerate(zip(tensors, sizes, strict=True)):
        if n <= TINY:
            if n:
                tiny.append(place)
            continue
        flat = tensor.view(-1)
        whole = n // ROW * ROW if n > SMALL else 0
        if whole:
            owners.append(place)
            long.append(flat if whole == n else flat[:whole])
        if whole < n:
            places.append(place)
            short.append(flat[whole:] if whole else flat)

    counts = [-(-piece.numel() // ROW) for piece in short]
    blocks = list(_rows_apart(short))
    for place, (_, norms) in zip(owners, _long_rows(long, SLAB * ROW), strict=True):
        places.append(place)
        counts.append(norms.numel())
        blocks.append(norms)
    # Of these every element is a row: filled up, they would take up to ROW times the memory.
    tiny_counts = [sizes[i] for i in tiny]
    for _, _, elements in pack_small([tensors[i] for i in tiny], tiny_counts):
        blocks.append(elements.to(wide, copy=True))
    places += tiny
    counts += tiny_counts
    if blocks:
        norms = torch.cat(blocks)
        owner = _repeated(places, counts)
        result.index_add_(0, owner, norms.to(torch.float64, copy=True).square_()).sqrt_()
    trusted = (result >= _TRUSTED[wide]) & (result < _LARGEST[wide])
    doubtful = (~trusted).nonzero().flatten().tolist()
    # Tiny ones were squared in float64, which squares of float32 fit; of empty ones the norm is 0.
    return result, [i for i in doubtful if wide == torch.float64 or sizes[i] > TINY]


def _rows_apart(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Norms of rows of short 1-d tensors, each from a row of its own on, filled up with zeros."""
    batch: list[Tensor] = []
    n = 0
    for tensor in tensors:
        size = tensor.numel()
        if n + size + ROW > BATCH:
            yield _row_norms(batch)
            batch, n = [], 0
        batch.append(tensor)
        n += size
        if size % ROW:
            batch.append(_zeros(tensor.dtype, -size % ROW))
            n += -size % ROW
    if batch:
        yield _row_norms(batch)


def _row_norms(batch: list[Tensor]) -> Tensor:
    rows = torch.cat(batch).view(-1, ROW)
    norms: Tensor = torch.linalg.vector_norm(
        rows if rows.dtype in _TRUSTED else rows.float(), dim=1
    )
    return norms


def _zeros(dtype: torch.dtype, n: int) -> Tensor:
    return torch.zeros(n, dtype=dtype, device="cpu")


def _repeated(numbers: list[int], counts: list[int]) -> Tensor:
    """Each number so many times, without the threads that `repeat_interleave` would start."""
    first = torch.tensor([0, *accumulate(counts[:-1])], device="cpu")
    marks = torch.zeros(sum(counts), dtype=torch.int64, device="cpu")
    marks[first[1:]] = 1
    return torch.tensor(numbers, device="cpu").index_select(0, marks.cumsum_(0))


def two_norm_of(tensor: Tensor) -> Tensor:
    """The 0-d 2-norm of any CPU tensor, whatever its strides and magnitudes."""
    norms = list(_exact_norms(tensor))
    if len(norms) == 1:
        return norms[0]
    zero = torch.zeros((), dtype=torch.float64, device="cpu")
    return next(_exact_norms(torch.stack([zero, *norms])))


def _rows(tensors: list[Tensor], sizes: Sequence[int]) -> Iterator[_Rows]:
    """Every element of contiguous tensors in a row; small ones and remainders are gathered."""
    if not tensors:
        return
    if tensors[0].dtype not in _MEASURED:
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
    yield from _long_rows(long)


def _copied_rows(tensors: list[Tensor]) -> Iterator[_Rows]:
    """Rows of 1-d tensors of up to MEDIUM elements, end to end in scratch that stays in cache."""
    if not tensors:
        return
    sizes = list(map(Tensor.numel, tensors))
    dtype = tensors[0].dtype if tensors[0].dtype in _TRUSTED else torch.float32
    scratch = torch.empty(min(SCRATCH, sum(sizes) + ROW), dtype=dtype, device="cpu")
    start, n = 0, 0
    for stop, size in enumerate([*sizes, SCRATCH]):
        if n + size > SCRATCH - ROW:
            torch._foreach_copy_(
                scratch[:n].split_with_sizes(sizes[start:stop]), tensors[start:stop]
            )
            padded = n + -n % ROW
            scratch[n:padded] = 0
            norms = torch.linalg.vector_norm(scratch[:padded].view(-1, ROW), dim=1)
            yield tensors[start:stop], norms
            start, n = stop, 0
        n += size


def _long_rows(tensors: list[Tensor], slab: int = SLAB) -> Iterator[_Rows]:
    """Norms of the rows of contiguous tensors without a remainder, a block for each slab."""
    if tensors and tensors[0].dtype not in _TRUSTED:
        yield from _half_rows(tensors, slab)
        return
    for tensor in tensors:
        for rows in _split(tensor.view(-1, ROW), slab):
            yield [rows], torch.linalg.vector_norm(rows, dim=1)


def _half_rows(tensors: list[Tensor], slab: int) -> Iterator[_Rows]:
    """As `_long_rows` for half types, converted through scratch that stays in cache."""
    most = max(map(Tensor.numel, tensors))
    scratch = torch.empty(min(LONG_SCRATCH, most), dtype=torch.float32, device="cpu").view(-1, ROW)
    for tensor in tensors:
        for rows in _split(tensor.view(-1, ROW), slab):
            norms = torch.empty(len(rows), dtype=torch.float32, device="cpu")
            for piece, out in zip(rows.split(len(scratch)), norms.split(len(scratch)), strict=True):
                wide = scratch[: len(piece)].copy_(piece)
                torch.linalg.vector_norm(wide, dim=1, out=out)
            yield [rows], norms


def _split(rows: Tensor, size: int) -> Sequence[Tensor]:
    """Pieces of at most so many elements; the tensor itself if it is one."""
    return rows.split(size // ROW) if rows.numel() > size else [rows]


def _packed_rows(tensors: list[Tensor]) -> Iterator[_Rows]:
    """Rows of tensors of up to SMALL elements, end to end; zeros fill up the last of a batch."""
    if not tensors:
        return
    wide = None
    if tensors[0].dtype not in _TRUSTED:
        wide = torch.empty(BATCH, dtype=torch.float32, device="cpu")
    for start, stop, elements in pack_small(tensors, list(map(Tensor.numel, tensors)), ROW):
        filled = elements if wide is None else wide[: len(elements)].copy_(elements)
        yield tensors[start:stop], torch.linalg.vector_norm(filled.view(-1, ROW), dim=1)


def _norms(kept: Sequence[_Rows]) -> Iterator[Tensor]:
    """The norm of all rows; where it cannot be trusted, those of their tensors."""
    if not kept:
        return
    norm = _trusted_norm(torch.cat([norms for _, norms in kept]))
    if norm is not None:
        yield norm
        return
    for sources, norms in kept:
        norm = _trusted_norm(norms)
        if norm is not None:
            yield norm
            continue
        for source in sources:
            yield from _exact_norms(source)


def _trusted_norm(rows: Tensor) -> Tensor | None:
    """The float64 norm of row norms; None where it cannot be trusted."""
    if rows.dtype == torch.float32:
        # Their squares fit float64. One operator, on one thread: others may be busy.
        norm: Tensor = torch.linalg.vector_norm(rows, dtype=torch.float64)
        return norm if _TRUSTED[rows.dtype] <= norm < math.inf else None
    largest = rows.max()
    if not largest < math.inf:
        return None
    scale = 1.0 if largest == 0 else float(largest)
    norm = rows.div(scale).square_().sum().sqrt_().mul_(scale)
    return norm if norm >= _TRUSTED[rows.dtype] else None


def _exact_norms(x: Tensor) -> Iterator[Tensor]:
    """Norms of pieces of a tensor in float64, each divided by its largest magnitude."""
    for piece in split_flat(x, PIECE):
        low, high = torch.aminmax(piece)
        top = torch.maximum(-low, high).double()
        if 0 < float(top) < math.inf:
            wide = piece.to(torch.float64, copy=True)
            yield top * wide.div_(top).square_().sum().sqrt()
        else:
            # 0, inf and NaN are norms already.
            yield top
