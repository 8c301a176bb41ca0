"""The 2-norm on CPU at the speed of memory.

torch's own full reduction on CPU uses one thread and one running float32 sum a lane: 0.3% off over
38M normal float32 elements (torch 2.13). Here rows of 512 elements are reduced with all threads,
which keeps running sums short, and rows are added up in float64. Half types go through float32
scratch that stays in cache. Small gradients are gathered first.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, filterfalse

import torch
from torch import Tensor

from tritonclip.pieces import PIECE, flat_pieces

# Elements of a row. Over 124M float32 elements in memory, rows of 256, 512, 1,024 and 4,096 take
# 23.0, 20.8, 20.2 and 19.4 ms (torch.sum 17.3); on constant tensors, the worst case, with every
# instruction set, they are off by up to 3.1e-7, 5.3e-7, 9.9e-7 and 2.5e-6. (torch 2.13, Xeon, 2
# threads.)
ROW = 512
# Gradients up to this size are gathered, in batches that stay under 32,768 elements: up to there
# torch.cat copies in one go, 0.15 us a tensor, beyond it dispatches every tensor, 0.9 us.
SMALL = 8192
BATCH = 32767
# Larger ones up to this size are copied into scratch by one call, and measured together: 2,000 of
# 12,000 elements take 24 to 32 ms in float32, 19 to 27 in bfloat16 and 19 to 24 in float16, and one
# by one 32, 59 and 61.
MEDIUM = 65536
# Elements of float32 scratch for half types: 1.5 MiB stay in cache. 131,072 elements take 27.1 ms
# for 124M bfloat16 elements, 262,144 23.8, 393,216 22.7, 524,288 22.8.
SCRATCH = 393216
# Elements measured at once, and those whose row norms are kept until they are added up: 256 KiB of
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
    """Whether a tensor's device and dtype are those that rows are measured of."""
    return tensor.device.type == "cpu" and tensor.dtype in _MEASURED


def two_norms(tensors: list[Tensor]) -> Iterator[Tensor]:
    """0-d float64 2-norms of pieces that make up CPU tensors of one dtype; at least one."""
    yield torch.zeros((), dtype=torch.float64, device="cpu")
    kept: list[_Rows] = []
    n_kept = 0
    for rows in _rows(list(filter(Tensor.is_contiguous, tensors))):
        kept.append(rows)
        n_kept += rows[1].numel()
        if n_kept > SLAB // ROW:
            yield from _norms(kept)
            kept, n_kept = [], 0
    yield from _norms(kept)
    for tensor in filterfalse(Tensor.is_contiguous, tensors):
        # One copy at a time.
        for piece in flat_pieces(tensor, SCRATCH):
            yield from _norms(list(_rows([piece.contiguous()])))


def two_norms_of_each(tensors: list[Tensor]) -> tuple[Tensor, list[int]]:
    """The 2-norms of CPU tensors of one dtype, float64[n], and the places where they are unknown.

    Unknown are those of tensors that are not contiguous, and those that sums of squares in the
    tensors' own range cannot give.
    """
    places: list[int] = []
    short: list[Tensor] = []
    long: list[Tensor] = []
    owners: list[int] = []
    for place, tensor in enumerate(tensors):
        n = tensor.numel()
        if not n or not tensor.is_contiguous():
            continue
        flat = tensor.view(-1)
        whole = n // ROW * ROW if n > SMALL else 0
        if whole:
            owners.append(place)
            long.append(flat if whole == n else flat[:whole])
        if whole < n:
            places.append(place)
            short.append(flat[whole:] if whole else flat)
    result = torch.zeros(len(tensors), dtype=torch.float64, device="cpu")
    unknown = {place for place, t in enumerate(tensors) if not t.is_contiguous()}
    if not places and not long:
        return result, sorted(unknown)

    counts = [-(-piece.numel() // ROW) for piece in short]
    blocks = list(_rows_apart(short))
    # A block for every slab of a tensor, in order.
    places += [p for p, x in zip(owners, long, strict=True) for _ in range(-(-x.numel() // SLAB))]
    for _, norms in _long_rows(long):
        counts.append(norms.numel())
        blocks.append(norms)
    norms = torch.cat(blocks)
    owner = _repeated(places, counts)
    result.index_add_(0, owner, norms.to(torch.float64, copy=True).square_()).sqrt_()
    trusted = (result >= _TRUSTED[norms.dtype]) & (result < _LARGEST[norms.dtype])
    if not trusted.all():
        unknown.update((~trusted).nonzero().flatten().tolist())
    return result, sorted(unknown)


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


@cache
def _zeros(dtype: torch.dtype, n: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(n, dtype=dtype, device="cpu")


def _repeated(numbers: list[int], counts: list[int]) -> Tensor:
    """Each number so many times, without the threads that `repeat_interleave` would start."""
    first = torch.tensor([0, *accumulate(counts[:-1])], device="cpu")
    marks = torch.zeros(sum(counts), dtype=torch.int64, device="cpu")
    marks[first[1:]] = 1
    return torch.tensor(numbers, device="cpu").index_select(0, marks.cumsum_(0))


def two_norm_of(tensor: Tensor) -> Tensor:
    """The 0-d 2-norm of any CPU tensor, whatever its strides and magnitudes."""
    zero = torch.zeros((), dtype=torch.float64, device="cpu")
    return next(_exact_norms(torch.stack([zero, *_exact_norms(tensor)])))


def _rows(tensors: list[Tensor]) -> Iterator[_Rows]:
    """Every element of contiguous tensors in a row; small ones and remainders are gathered."""
    if not tensors:
        return
    if tensors[0].dtype not in _MEASURED:
        # One of the float8 formats: rare, and small enough when it comes.
        tensors = [tensor.float() for tensor in tensors]
    short: list[Tensor] = []
    medium: list[Tensor] = []
    long: list[Tensor] = []
    for tensor in tensors:
        n = tensor.numel()
        if n <= SMALL:
            short.append(tensor)
        elif n <= MEDIUM:
            medium.append(tensor.view(-1))
        elif n % ROW == 0:
            long.append(tensor)
        else:
            flat = tensor.view(-1)
            whole = n // ROW * ROW
            short.append(flat[whole:])
            long.append(flat[:whole])
    yield from _gathered_rows(short)
    yield from _copied_rows(medium)
    yield from _long_rows(long)


def _scratch(dtype: torch.dtype, size: int) -> Tensor | None:
    """Room for so many elements as float32, where a dtype needs it; fresh memory is slow."""
    return None if dtype in _TRUSTED else torch.empty(size, dtype=torch.float32, device="cpu")


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


def _long_rows(tensors: list[Tensor]) -> Iterator[_Rows]:
    """Rows of contiguous tensors that have no remainder, one block a tensor or slab of it."""
    if not tensors:
        return
    norm = torch.linalg.vector_norm
    scratch = _scratch(tensors[0].dtype, min(SCRATCH, max(map(Tensor.numel, tensors))))
    for tensor in tensors:
        rows = tensor.view(-1, ROW)
        if scratch is None:
            for slab in _split(rows, SLAB):
                yield [slab], norm(slab, dim=1)
        elif tensor.numel() <= SCRATCH:
            yield [rows], norm(scratch[: tensor.numel()].view(-1, ROW).copy_(rows), dim=1)
        else:
            room = scratch.view(-1, ROW)
            for slab in _split(rows, SLAB):
                pieces = [norm(room[: len(x)].copy_(x), dim=1) for x in _split(slab, SCRATCH)]
                yield [slab], torch.cat(pieces)


def _split(rows: Tensor, size: int) -> Sequence[Tensor]:
    """Pieces of at most so many elements; the tensor itself if it is one."""
    return rows.split(size // ROW) if rows.numel() > size else [rows]


def _gathered_rows(tensors: list[Tensor]) -> Iterator[_Rows]:
    """Rows of tensors of up to SMALL elements, end to end; zeros fill up the last of a batch."""
    if not tensors:
        return
    if set(map(Tensor.dim, tensors)) != {1}:
        tensors = [tensor.view(-1) for tensor in tensors]
    dtype = tensors[0].dtype
    ends = list(accumulate(map(Tensor.numel, tensors), initial=0))
    size = min(BATCH, ends[-1] + ROW)
    gathered = torch.empty(size, dtype=dtype, device="cpu")
    wide = _scratch(dtype, size)
    start = 0
    while start < len(tensors):
        stop = bisect_right(ends, ends[start] + BATCH - ROW) - 1
        n = ends[stop] - ends[start]
        if n:
            padded = n + -n % ROW
            torch.cat(tensors[start:stop], out=gathered[:n])
            gathered[n:padded] = 0
            filled = gathered[:padded] if wide is None else wide[:padded].copy_(gathered[:padded])
            yield tensors[start:stop], torch.linalg.vector_norm(filled.view(-1, ROW), dim=1)
        start = stop


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
    largest = rows.max()
    if not largest < math.inf:
        return None
    # Squares of float32 fit float64; those of float64 need not.
    scale = 1.0 if rows.dtype == torch.float32 or largest == 0 else float(largest)
    norm = rows.to(torch.float64, copy=True).div_(scale).square_().sum().sqrt_().mul_(scale)
    return norm if norm >= _TRUSTED[rows.dtype] else None


def _exact_norms(x: Tensor) -> Iterator[Tensor]:
    """Norms of pieces of a tensor in float64, each divided by its largest magnitude."""
    for piece in flat_pieces(x, PIECE):
        low, high = torch.aminmax(piece)
        top = torch.maximum(-low, high).double()
        if 0 < top < math.inf:
            wide = piece.to(torch.float64, copy=True)
            yield top * wide.div_(top).square_().sum().sqrt()
        else:
            # 0, inf and NaN are norms already.
            yield top
