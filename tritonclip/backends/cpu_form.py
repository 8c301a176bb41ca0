"""The form of a gradient list on a CPU, and memory that its calls share."""

from collections import deque

import torch
from torch import Tensor

from tritonclip.backends.cpu_clamp import Clamping
from tritonclip.backends.numbers import Numbers
from tritonclip.backends.packed import VIEW_BYTES, Scratch, packs, scratch_bytes
from tritonclip.backends.torch_writes import ARITHMETIC
from tritonclip.grad_mode import outside_inference

# Gradients whose coefficients are computed in Python's numbers, at most. For 32, 128 and 512 that
# takes 5, 10 and 29 us where nothing is clipped, tensor operators 33, 39 and 58; where all are
# clipped, 29, 94 and 361 against 65, 151 and 492. (torch 2.13, Xeon, 1 thread.)
FEW = 512
# Largest mean size of gradients that GradScaler's function multiplies faster than foreach does: 30
# float32 gradients of 64, 1,024, 4,096 and 16,384 elements take 8.2, 11.4, 20.8 and 67 us, foreach
# 13.1, 14.6, 20.7 and 56; of bfloat16 8.5, 14.8, 32 and 99 against 32, 37, 50 and 105; float16 is
# like bfloat16. (Xeon.) 16 half-type gradients of 65,536 and 2^18 elements take 180 and 664 us in
# bfloat16, foreach 195 and 657, in float16 93 and 227 against 96 and 205. (AMD EPYC.) Called once
# for each gradient, it wins for half types alone: 10 and 100 gradients of 28 elements on average
# and 65 of 4,192 take 6.5, 65 and 78 us in bfloat16, foreach 11.2, 108 and 107; in float32 6.4, 61
# and 66 against 5.4, 46 and 50. (Xeon; torch 2.13, 2 threads.)
UNSCALED = {torch.float32: 2048, torch.float16: 65536, torch.bfloat16: 65536}


class HostForm:
    """Sizes, and memory for numbers that the host computes.

    Args:
        tensors: gradients of one dtype on a CPU; at least one.
    """

    @outside_inference
    def __init__(self, tensors: list[Tensor]) -> None:
        self.dtype = torch.float32
        self.sizes = list(map(Tensor.numel, tensors))
        self.wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        self.least = torch.finfo(self.wide).tiny
        # Memory that no call uses: a call takes it and appends it again, each in one operation, so
        # that threads, and a signal handler within a call, never share any. One of each is kept.
        self.numbers: dict[torch.dtype, deque[Numbers]] = {
            dtype: deque(maxlen=1) for dtype in (torch.float32, torch.float64)
        }
        # One a gradient where there are few; else one for all.
        self._n_numbers = len(tensors) if len(tensors) <= FEW else 1
        # Of float32 and of float64, and a view of each together and of its first.
        self.n_bytes = 4 * VIEW_BYTES + 12 * self._n_numbers

    def take_numbers(self, dtype: torch.dtype) -> Numbers:
        """Numbers of a dtype that tensors share."""
        try:
            return self.numbers[dtype].pop()
        except IndexError:
            return self.new_numbers(dtype)

    def new_numbers(self, dtype: torch.dtype) -> Numbers:
        """Numbers that no other call has."""
        return Numbers(self._n_numbers, dtype)

    def holds(self, multipliers: list[float], coefficients: list[float], least: float) -> bool:
        """Whether no multiplier is too small for the dtype that it multiplies in.

        Args:
            multipliers: coefficients divided by the loss scale.
            coefficients: of the gradients.
            least: of the multipliers; NaN where one is.
        """
        return least >= self.least or not any(
            m < self.least and c > 0 for m, c in zip(multipliers, coefficients, strict=True)
        )


class CpuForm(HostForm):
    """The form of a list that operators serve, and scratch for a small one.

    Args:
        tensors: gradients of one dtype on a CPU; at least one.
        flat: each is contiguous.
    """

    @outside_inference
    def __init__(self, tensors: list[Tensor], *, flat: bool) -> None:
        super().__init__(tensors)
        self.flat = flat
        dtype = tensors[0].dtype
        self.packs = dtype in ARITHMETIC and packs(dtype, self.sizes, flat=flat)
        # Gradients whose mean size is small are scaled by GradScaler's function, which looks for
        # NaN and inf too; nothing reads its answer.
        self.unscales = (
            dtype in UNSCALED
            and sum(self.sizes) <= UNSCALED[dtype] * len(tensors)
            and not any(map(Tensor.is_neg, tensors))
        )
        self.unscales_each = self.unscales and dtype != torch.float32
        self.clamping = Clamping(tensors, self.sizes)
        self.found_nonfinite = torch.zeros((), dtype=torch.float32, device="cpu")
        self.scratch: deque[Scratch] = deque(maxlen=1)
        self.n_bytes += VIEW_BYTES * self._n_numbers
        if self.packs:
            self.n_bytes += scratch_bytes(dtype, self.sizes, flat=flat)
