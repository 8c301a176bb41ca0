"""Small gradient lists on a CPU: packed into scratch by one call, and measured by one more."""

import math
from collections.abc import Sequence
from ctypes import c_double, c_float
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

# Lists of up to so many elements and tensors are packed: their scratch takes up to 8 MiB a plan.
PACKED_ELEMENTS = 524288
PACKED_TENSORS = 512
# Elements of a row, at most. A row is a power of two near the mean size, so that the zeros after
# each gradient's last element stay few. Rows of 1,024 take 0.24 ns a float64 element.
LONGEST_ROW = 1024
# Most that a view of scratch or of a number takes: 550 to 660 bytes (mallinfo2, torch 2.13).
VIEW_BYTES = 700
# Sums of squares of float64 elements outside of this range may have lost some, or overflowed.
_SMALLEST, _LARGEST = 2.0**-450, 2.0**450


def _row_length(sizes: Sequence[int]) -> int:
    mean = max(1, sum(sizes) // len(sizes))
    return min(LONGEST_ROW, 1 << (mean - 1).bit_length())


def scratch_bytes(sizes: Sequence[int]) -> int:
    """Bytes that scratch for gradients of these sizes takes."""
    length = _row_length(sizes)
    return sum(8 * (n + -n % length) + VIEW_BYTES for n in sizes)


class Scratch:
    """Memory in which a small gradient list is measured, in float64.

    Squares of narrower dtypes neither overflow nor vanish there.

    Attributes:
        elements: float64[n], rows of all gradients end to end, filled up with zeros.
        slots: a view for each gradient, of its shape.

    Args:
        tensors: gradients of one dtype.
        sizes: theirs.
    """

    __slots__ = ("_rows", "_spans", "elements", "slots")

    def __init__(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
        length = _row_length(sizes)
        padded = [n + -n % length for n in sizes]
        # Never inference tensors, which no later call could write to.
        with torch.inference_mode(False):
            self.elements = torch.zeros(sum(padded), dtype=torch.float64, device="cpu")
            self.slots = [
                room[:n].view(tensor.shape)
                for room, tensor, n in zip(self.elements.split(padded), tensors, sizes, strict=True)
            ]
            self._rows = self.elements.view(-1, length)
        ends = [end // length for end in accumulate(padded)]
        # Of each gradient, its first row and the one after its last; None for one row each.
        self._spans = None
        if ends != list(range(1, len(ends) + 1)):
            self._spans = list(zip([0, *ends[:-1]], ends, strict=True))

    def norms(self) -> list[float]:
        """The 2-norm of each gradient in the slots."""
        rows: list[float] = torch.linalg.vector_norm(self._rows, dim=1).tolist()
        if self._spans is None:
            return rows
        return [math.sqrt(sum([x * x for x in rows[i:j]])) for i, j in self._spans]


def is_trusted(norm: float) -> bool:
    """Whether float64 held the squares of float64 elements: none was lost or overflowed."""
    return _SMALLEST <= norm < _LARGEST


class Numbers:
    """Python's numbers as tensors on a CPU, through memory that both see.

    To store ten and clone them takes 2.8 us, torch.tensor 6.5. (torch 2.13, Xeon.)

    Attributes:
        memory: the numbers; what is stored there is rounded.
        together: the numbers, 1-d.
        first: a 0-d view of the first.

    Args:
        n: how many numbers.
        dtype: float32 or float64, to which they are rounded.
    """

    def __init__(self, n: int, dtype: torch.dtype) -> None:
        self.memory = ((c_double if dtype == torch.float64 else c_float) * n)()
        with torch.inference_mode(False):
            self.together = torch.frombuffer(self.memory, dtype=dtype)
            self.first = self.together[0]

    @cached_property
    def each(self) -> tuple[Tensor, ...]:
        """A 0-d view of each number."""
        with torch.inference_mode(False):
            return self.together.unbind()
