"""Small gradient lists on a CPU: packed into scratch by one call, and measured by few more."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.backends.cpu_rows import ROW
from tritonclip.backends.host_form import VIEW_BYTES
from tritonclip.modes import outside_inference

# Lists of up to so many tensors are packed, if no more elements are copied, and no more measured:
# scratch takes up to 5 MiB a plan.
PACKED_TENSORS = 512
PACKED_ELEMENTS = 2**19
MEASURED_ELEMENTS = 2**22
# float32 gradients of so many elements, rows without a rest, are measured where they are: norms of
# an MLP's 138,506 and of ResNet-20's 272,474 elements take 30 and 121 us rather than 47 and 151;
# from 8,192 elements on 40 and 144. (torch 2.13, Xeon, 1 thread.)
LONG = 16384
# Lists of up to so many elements are squared in float64. With scratch of float64 the norm of 706,
# 61,706 and 138,506 float32 elements takes 3, 19 and 51 us, with float32 6, 23 and 38; that of
# float16 4, 43 and 88 against 6, 20 and 33. (torch 2.13, Xeon, 1 thread, squares added up by a
# product.)
WIDE_ELEMENTS = 32768
# Elements of float64 whose squares are added up by a product: of more, MKL starts a thread, and
# where cores are busy, one call in hundreds took 4 to 13 ms. For 640, 6,400 and 32,768 elements the
# product takes 1.2, 2.4 and 3.5 us, the norm 1.6, 2.5 and 6.5. (torch 2.13, Xeon, 2 threads.)
DOTTED = 2048
# The most elements of an operator in one thread: fewer than torch's grain of 32,768.
SERIAL = 32640
# Elements of a row, at most, where each gradient is one of float64; of float32 they are ROW.
LONGEST_ROW = 1024
# Each gradient is one row where that takes no more than so many times the elements.
MOST_PADDED = 8
# A norm is known where it lies from the first up to the second: a smaller one may have lost squares
# to underflow, a larger one overflowed. For float32, `cpu_norm` derives it.
_KNOWN = {torch.float32: (2.0**-30, math.inf), torch.float64: (2.0**-450, 2.0**450)}


class Rows(NamedTuple):
    """The rows into which a gradient list is cut: of scratch first, then those of long gradients.

    Attributes:
        dtype: of scratch.
        length: elements of a row. Each gradient begins with a row, and zeros fill up its last.
        counts: rows of each gradient.
        long: gradients that are measured where they are.
    """

    dtype: torch.dtype
    length: int
    counts: list[int]
    long: list[int]

    @property
    def shared(self) -> list[int]:
        """Gradients that several threads copy, each measured by a call: by the same threads.

        Memory that one thread wrote and another one read is slow to write again.
        """
        long, least = set(self.long), SERIAL // self.length
        return [i for i, count in enumerate(self.counts) if count > least and i not in long]

    @property
    def packed(self) -> list[int]:
        """Gradients that are copied to scratch: first those that are shared."""
        first = self.shared
        own = {*self.long, *first}
        return [*first, *(i for i in range(len(self.counts)) if i not in own)]

    @property
    def n_packed(self) -> int:
        """Rows of scratch."""
        return sum(self.counts) - sum(self.counts[i] for i in self.long)

    @property
    def measured(self) -> list[int]:
        """Rows of scratch that each call measures: each shared gradient, then the others.

        One thread copies those, and measures them: with several the norm of ResNet-20's gradients
        takes 127 to 194 us, so 122 to 135 (float32); 137 to 234, and 130 to 169 in bfloat16. (torch
        2.13, AMD EPYC, 2 threads, three processes each.)
        """
        counts = [self.counts[i] for i in self.shared]
        most, rest = SERIAL // self.length, self.n_packed - sum(counts)
        counts += [most] * (rest // most)
        return [*counts, rest % most] if rest % most else counts


def rows_of(dtype: torch.dtype, sizes: Sequence[int], *, flat: bool) -> Rows:
    """The rows of gradients of a dtype and of these sizes, contiguous if `flat`; at least one."""
    n, longest = sum(sizes), max(1, *sizes)
    wide = dtype == torch.float64 or n <= WIDE_ELEMENTS
    length = longest
    if longest > (LONGEST_ROW if wide else ROW) or longest * len(sizes) > MOST_PADDED * n:
        # A power of two near the mean size keeps the zeros few.
        length = min(ROW, 1 << (n // len(sizes)).bit_length())
    counts = [-(-size // length) for size in sizes]
    long = []
    if flat and not wide and dtype == torch.float32:
        long = [i for i, size in enumerate(sizes) if size >= LONG and size % length == 0]
    return Rows(torch.float64 if wide else torch.float32, length, counts, long)


def packs(dtype: torch.dtype, sizes: Sequence[int], *, flat: bool) -> bool:
    """Whether a gradient list is measured through scratch; arguments as for `rows_of`."""
    if len(sizes) > PACKED_TENSORS or sum(sizes) > MEASURED_ELEMENTS:
        return False
    rows = rows_of(dtype, sizes, flat=flat)
    return sum(sizes) - sum(sizes[i] for i in rows.long) <= PACKED_ELEMENTS


def scratch_bytes(dtype: torch.dtype, sizes: Sequence[int], *, flat: bool) -> int:
    """Bytes that scratch takes; arguments as for `rows_of`."""
    rows = rows_of(dtype, sizes, flat=flat)
    elements = rows.n_packed * rows.length * rows.dtype.itemsize
    # A row has a norm, a gradient a count and a place, and a call views of rows and norms.
    views = len(sizes) + 2 * len(rows.measured)
    return VIEW_BYTES * views + 16 * len(sizes) + elements + rows.dtype.itemsize * sum(rows.counts)


class Scratch:
    """Memory in which a small gradient list is measured.

    Attributes:
        elements: float64 or float32, 1-d: each packed gradient, followed by zeros.
        slots: a view of them for each packed gradient, of its shape.
        is_dotted: all gradients are packed, their squares fit the elements' dtype, whatever they
            are, and the elements are few enough for a product.

    Args:
        tensors: gradients of one dtype on a CPU.
        sizes: theirs.
        flat: each is contiguous.
    """

    __slots__ = (
        "_counts",
        "_dtype",
        "_is_short",
        "_known",
        "_long",
        "_norms",
        "_order",
        "_packed",
        "_parts",
        "elements",
        "is_dotted",
        "slots",
    )

    @outside_inference
    def __init__(self, tensors: Sequence[Tensor], sizes: Sequence[int], *, flat: bool) -> None:
        self._dtype = tensors[0].dtype
        rows = rows_of(self._dtype, sizes, flat=flat)
        packed = rows.packed
        # None for all, in their order.
        self._packed = packed if rows.long or rows.shared else None
        room = [rows.length * rows.counts[i] for i in packed]
        # One sum of more squares would miss the last of twelve digits.
        self._is_short = sum(sizes) <= WIDE_ELEMENTS
        fits = rows.dtype == torch.float64 != self._dtype
        self._known = (0.0, math.inf) if fits else _KNOWN[rows.dtype]
        self.is_dotted = fits and sum(room) <= DOTTED
        self.elements = torch.zeros(sum(room), dtype=rows.dtype, device="cpu")
        self.slots = [
            own[: sizes[i]].view(tensors[i].shape)
            for own, i in zip(self.elements.split(room), packed, strict=True)
        ]
        self._norms = torch.empty(sum(rows.counts), dtype=rows.dtype, device="cpu")
        own_norms = self._norms.split([rows.n_packed, *(rows.counts[i] for i in rows.long)])
        # Rows that are measured together, and where their norms go.
        parts = self.elements.view(rows.n_packed, rows.length).split(rows.measured)
        self._parts = list(zip(parts, own_norms[0].split(rows.measured), strict=True))
        # Long gradients, and where the norms of their rows go.
        self._long = list(zip(rows.long, own_norms[1:], strict=True))
        # Rows of each gradient as they lie in memory, and where its norm then is; None where each
        # gradient is one row.
        self._counts = None
        self._order = None
        if set(rows.counts) != {1}:
            lie = [*packed, *rows.long]
            self._counts = torch.tensor([rows.counts[i] for i in lie], device="cpu")
            if self._packed is not None:
                self._order = sorted(range(len(lie)), key=lie.__getitem__)

    def norm(self, tensors: list[Tensor]) -> float | None:
        """The 2-norm of gradients of the list's form; None where float64 cannot square them."""
        self._pack(tensors)
        elements = self.elements
        if not self._is_short:
            elements = self._row_norms(tensors).double()
        norm = float(torch.linalg.vector_norm(elements))
        least, largest = self._known
        if least <= norm < largest:
            return norm
        if self._dtype == torch.float64:
            return None
        norms = list(map(_exact_norm, tensors))
        # The hypotenuse of inf and NaN is inf.
        return math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)

    def norms(self, tensors: list[Tensor]) -> list[float] | None:
        """The 2-norm of each gradient of the list's form; None where one is beyond float64."""
        self._pack(tensors)
        rows = self._row_norms(tensors)
        if self._counts is not None:
            squares = rows.to(torch.float64, copy=True).square_()
            # For 487 and 2,160 rows of 10 and 65 gradients 1.3 and 2.7 us, index_add_ 2.3 and 4.6.
            rows = torch.segment_reduce(squares, "sum", lengths=self._counts, unsafe=True).sqrt_()
        norms: list[float] = rows.tolist()
        if self._order is not None:
            norms = [norms[place] for place in self._order]
        least, largest = self._known
        # A sum forgets no NaN.
        if least <= min(norms) and sum(norms) < largest:
            return norms
        if self._dtype == torch.float64:
            return None
        return [
            norm if least <= norm < largest else _exact_norm(tensor)
            for norm, tensor in zip(norms, tensors, strict=True)
        ]

    def _pack(self, tensors: list[Tensor]) -> None:
        if self._packed is not None:
            tensors = [tensors[i] for i in self._packed]
        if tensors:
            torch._foreach_copy_(self.slots, tensors)

    def _row_norms(self, tensors: list[Tensor]) -> Tensor:
        for rows, norms in self._parts:
            torch.linalg.vector_norm(rows, dim=1, out=norms)
        for i, norms in self._long:
            torch.linalg.vector_norm(tensors[i].view(len(norms), -1), dim=1, out=norms)
        return self._norms


def _exact_norm(x: Tensor) -> float:
    """The 2-norm of a dtype whose squares float64 holds."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))
