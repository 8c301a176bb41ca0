"""The 2-norm on CPU at the speed of memory.

torch's own full reduction on CPU uses one thread and one running float32 sum a lane: 0.3% off over
38M normal float32 elements (torch 2.13). Here short rows are reduced with all threads, which bounds
the error of running sums, and rows are added up in float64. Small gradients are packed first.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat

import torch
from torch import Tensor

from tritonclip.backends.cpu_rows import (
    MEASURED,
    ROW,
    SLAB,
    SMALL,
    WIDE,
    RowSums,
    cut,
    long_row_sums,
    row_sums_of,
    sums_of_rows,
)
from tritonclip.backends.cpu_squares import Squares
from tritonclip.backends.operators import BATCH, PIECE, pack_small, split_flat

# Where norms are told apart, elements of gradients up to this size are squared one by one.
TINY = 64
# Elements of a gradient with gaps that are copied at a time: up to 3 MiB.
GAPPED = 393216
# A smaller norm may have lost something to underflow, one that is not finite may have overflowed.
# From there on the sum of squares is 2^-60 or more, of which 2^31 elements that lose 2^-126 each
# are 2^-35. float64 alike.
_TRUSTED = {torch.float32: 2.0**-30, torch.float64: 2.0**-450}
# Sums of squares of float32 fit float64, whatever they are.
_LARGEST = {torch.float32: math.inf, torch.float64: 2.0**450}


def measures(tensor: Tensor) -> bool:
    """Whether the row-wise norm supports a tensor's device and dtype."""
    return tensor.device.type == "cpu" and tensor.dtype in MEASURED


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
            for piece in split_flat(tensor, GAPPED):
                yield from _norms(list(row_sums_of([piece.contiguous()], [piece.numel()])))
        return
    kept: list[RowSums] = []
    n_kept = 0
    for rows in row_sums_of(tensors, sizes):
        n = rows.sums.numel()
        if n_kept + n > SLAB:
            yield from _norms(kept)
            kept, n_kept = [], 0
        kept.append(rows)
        n_kept += n
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
    long_counts: list[int] = []
    for place, (tensor, n) in enumerate(zip(tensors, sizes, strict=True)):
        if n <= TINY:
            if n:
                tiny.append(place)
            continue
        rest: Tensor | None = tensor
        if n > SMALL:
            rows, rest = cut(tensor, n)
            owners.append(place)
            long.append(rows)
            long_counts.append(n // ROW)
        if rest is not None:
            places.append(place)
            short.append(rest.view(-1))

    squares = Squares(result, are_norms=dtype in WIDE)
    counts = [-(-piece.numel() // ROW) for piece in short]
    for start, stop, sums in _rows_apart(short):
        squares.add(places[start:stop], counts[start:stop], sums)
    blocks = [-(-count // SLAB) for count in long_counts]
    owner = chain.from_iterable(map(repeat, owners, blocks))
    for measured in long_row_sums(long, long_counts):
        assert measured.counts is not None
        squares.add([*islice(owner, len(measured.counts))], measured.counts, measured.sums)
    # Of these every element is a row: filled up, they would take up to ROW times the memory.
    tiny_counts = [sizes[i] for i in tiny]
    for start, stop, elements in pack_small([tensors[i] for i in tiny], tiny_counts):
        own = elements.clone() if dtype in WIDE else elements.double().square_()
        squares.add(tiny[start:stop], tiny_counts[start:stop], own)
    squares.finish()
    result.sqrt_()
    trusted = (result >= _TRUSTED[wide]) & (result < _LARGEST[wide])
    doubtful = (~trusted).nonzero().flatten().tolist()
    # Tiny ones were squared in float64, which squares of float32 fit; of empty ones the norm is 0.
    return result, [i for i in doubtful if wide == torch.float64 or sizes[i] > TINY]


def _rows_apart(tensors: list[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
    """Sums over rows of short 1-d tensors, each from a row of its own on, filled up with zeros.

    Yields:
        Indices of a batch's first tensor and of the one after its last, and sums over its rows.
    """
    batch: list[Tensor] = []
    start, n = 0, 0
    for stop, tensor in enumerate(tensors):
        size = tensor.numel()
        if n + size + ROW > BATCH:
            yield start, stop, _sums_of_batch(batch)
            batch, start, n = [], stop, 0
        batch.append(tensor)
        n += size
        if size % ROW:
            batch.append(_zeros(tensor.dtype, -size % ROW))
            n += -size % ROW
    if batch:
        yield start, len(tensors), _sums_of_batch(batch)


def _sums_of_batch(batch: list[Tensor]) -> Tensor:
    rows = torch.cat(batch).view(-1, ROW)
    return sums_of_rows([rows], [len(rows)])


def _zeros(dtype: torch.dtype, n: int) -> Tensor:
    return torch.zeros(n, dtype=dtype, device="cpu")


def two_norm_of(tensor: Tensor) -> Tensor:
    """The 0-d 2-norm of any CPU tensor, whatever its strides and magnitudes."""
    norms = list(_exact_norms(tensor))
    if len(norms) == 1:
        return norms[0]
    zero = torch.zeros((), dtype=torch.float64, device="cpu")
    return next(_exact_norms(torch.stack([zero, *norms])))


def _norms(kept: Sequence[RowSums]) -> Iterator[Tensor]:
    """The norm of all rows; where it cannot be trusted, those of their tensors."""
    if not kept:
        return
    parts = [rows.sums for rows in kept]
    are_norms = kept[0].tensors[0].dtype in WIDE
    norm = _trusted_norm(parts[0] if len(parts) == 1 else torch.cat(parts), are_norms=are_norms)
    if norm is not None:
        yield norm
        return
    for tensors, sums in chain.from_iterable(map(_apart, kept)):
        norm = _trusted_norm(sums, are_norms=are_norms)
        if norm is not None:
            yield norm
            continue
        for tensor in tensors:
            yield from _exact_norms(tensor)


def _apart(rows: RowSums) -> Iterator[tuple[Sequence[Tensor], Tensor]]:
    """As few tensors as share no row with others, and the sums over their rows."""
    if rows.counts is None:
        yield rows.tensors, rows.sums
        return
    sums = rows.sums.split_with_sizes(list(rows.counts))
    yield from zip(zip(rows.tensors), sums, strict=True)


def _trusted_norm(sums: Tensor, *, are_norms: bool) -> Tensor | None:
    """The float64 norm from sums over rows; None where it cannot be trusted."""
    if sums.dtype == torch.float32:
        # Squares of norms fit float64. One operator, on one thread: others may be busy.
        norm: Tensor = (
            torch.linalg.vector_norm(sums, dtype=torch.float64)
            if are_norms
            else sums.sum(dtype=torch.float64).sqrt_()
        )
        return norm if _TRUSTED[sums.dtype] <= norm < math.inf else None
    largest = sums.max()
    if not largest < math.inf:
        return None
    scale = 1.0 if largest == 0 else float(largest)
    norm = sums.div(scale).square_().sum().sqrt_().mul_(scale)
    return norm if norm >= _TRUSTED[sums.dtype] else None


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
