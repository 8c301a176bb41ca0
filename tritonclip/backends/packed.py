"""Small gradient lists on a CPU: packed into scratch by one call, and measured by few more."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.backends.cpu_norm import ROW

# Lists of up to so many elements and tensors are packed: their scratch takes up to 4 MiB a plan, of
# float64 8 MiB.
PACKED_ELEMENTS = 524288
PACKED_TENSORS = 512
# Lists of up to so many elements are squared in float64. With scratch of float64 the norm of 706,
# 61,706 and 138,506 float32 elements takes 3, 19 and 51 us, with float32 6, 23 and 38; that of
# float16 4, 43 and 88 against 6, 20 and 33. (torch 2.13, Xeon, 1 thread.)
WIDE_ELEMENTS = 32768
# Elements of a row, at most, where each gradient is one of float64; of float32 they are ROW.
LONGEST_ROW = 1024
# Each gradient is one row where that takes no more than so many times the elements.
MOST_PADDED = 8
# Most that a view of scratch or of a number takes: 550 to 660 bytes (mallinfo2, torch 2.13).
VIEW_BYTES = 700
# A norm is known where it lies from the first up to the second: a smaller one may have lost squares
# to underflow, a larger one overflowed. For float32, `cpu_norm` derives it.
_KNOWN = {torch.float32: (2.0**-30, math.inf), torch.float64: (2.0**-450, 2.0**450)}


class Rows(NamedTuple):
    """How a gradient list lies in scratch.

    Attributes:
        dtype: of scratch.
        length: elements of a row. Each gradient begins with a row, and zeros fill up its last.
        counts: rows of each gradient.
    """

    dtype: torch.dtype
    length: int
    counts: list[int]


def rows_of(dtype: torch.dtype, sizes: Sequence[int]) -> Rows:
    """The rows of gradients of a dtype and of these sizes; at least one."""
    n, longest = sum(sizes), max(1, *sizes)
    wide = dtype == torch.float64 or n <= WIDE_ELEMENTS
    length = longest
    if longest > (LONGEST_ROW if wide else ROW) or longest * len(sizes) > MOST_PADDED * n:
        # A power of two near the mean size keeps the zeros few.
        length = min(ROW, 1 << (n // len(sizes)).bit_length())
    counts = [-(-size // length) for size in sizes]
    return Rows(torch.float64 if wide else torch.float32, length, counts)


def scratch_bytes(dtype: torch.dtype, sizes: Sequence[int]) -> int:
    """Bytes that scratch for gradients of a dtype and of these sizes takes."""
    rows = rows_of(dtype, sizes)
    return VIEW_BYTES * len(sizes) + sum(rows.counts) * (rows.dtype.itemsize * rows.length + 8)


class Scratch:
    """Memory in which a small gradient list is measured.

    Attributes:
        elements: of all rows, 1-d.
        slots: a view for each gradient, of its shape.

    Args:
        tensors: gradients of one dtype.
        sizes: theirs.
    """

    __slots__ = ("_dtype", "_known", "_owners", "_rows", "elements", "slots")

    def __init__(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
        self._dtype = tensors[0].dtype
        dtype, length, counts = rows_of(self._dtype, sizes)
        room = [length * count for count in counts]
        # float64 holds the squares of all narrower dtypes.
        holds_squares = dtype == torch.float64 != self._dtype
        self._known = (0.0, math.inf) if holds_squares else _KNOWN[dtype]
        # Never inference tensors, which no later call could write to.
        with torch.inference_mode(False):
            self.elements = torch.zeros(sum(room), dtype=dtype, device="cpu")
            self._rows = self.elements.view(sum(counts), length)
            self.slots = [
                own[:n].view(tensor.shape)
                for own, tensor, n in zip(self.elements.split(room), tensors, sizes, strict=True)
            ]
            # The gradient of each row; None where each is one.
            self._owners = None
            if set(counts) != {1}:
                owners = [i for i, count in enumerate(counts) for _ in range(count)]
                self._owners = torch.tensor(owners, dtype=torch.int64, device="cpu")

    def norm(self) -> float | None:
        """The 2-norm of all gradients in the slots; None where float64 cannot square them."""
        elements = self.elements
        if elements.dtype == torch.float32:
            elements = torch.linalg.vector_norm(self._rows, dim=1).double()
        norm = math.sqrt(torch.dot(elements, elements).item())
        least, largest = self._known
        if least <= norm < largest:
            return norm
        return None if self._dtype == torch.float64 else _exact_norm(self.elements)

    def norms(self) -> list[float] | None:
        """The 2-norm of each gradient in the slots; None where float64 cannot square them."""
        rows = torch.linalg.vector_norm(self._rows, dim=1)
        if self._owners is not None:
            squares = rows.to(torch.float64, copy=True).square_()
            sums = torch.zeros(len(self.slots), dtype=torch.float64, device="cpu")
            rows = sums.index_add_(0, self._owners, squares).sqrt_()
        norms: list[float] = rows.tolist()
        least, largest = self._known
        # A sum forgets no NaN.
        if least <= min(norms) and sum(norms) < largest:
            return norms
        if self._dtype == torch.float64:
            return None
        return [
            norm if least <= norm < largest else _exact_norm(slot)
            for norm, slot in zip(norms, self.slots, strict=True)
        ]


def _exact_norm(x: Tensor) -> float:
    """The 2-norm of float32, in float64, which its squares fit."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))
