"""The form of a gradient list on a CPU, and memory for numbers that the host computes."""

from collections import deque

import torch
from torch import Tensor

from tritonclip.backends.numbers import Numbers
from tritonclip.modes import outside_inference

# Gradients whose coefficients are computed in Python's numbers, at most. For 32, 128 and 512 that
# takes 5, 10 and 29 us where nothing is clipped, tensor operators 33, 39 and 58; where all are
# clipped, 29, 94 and 361 against 65, 151 and 492. (torch 2.13, Xeon, 1 thread.)
FEW = 512
# Most that a view of scratch or of a number takes: 550 to 660 bytes (mallinfo2, torch 2.13).
VIEW_BYTES = 700


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

    def new_numbers(self, dtype: torch.dtype) -> Numbers:
        """Numbers of a dtype, which tensors share."""
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
