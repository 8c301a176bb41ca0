"""The form of a gradient list on a CPU that operators serve, and scratch that its calls share."""

from collections import deque

import torch
from torch import Tensor

from tritonclip.backends.cpu_clamp import Clamping
from tritonclip.backends.host_form import VIEW_BYTES, HostForm
from tritonclip.backends.operators import ARITHMETIC
from tritonclip.backends.packed import Scratch, packs, scratch_bytes
from tritonclip.modes import outside_inference

# Largest mean size of gradients that GradScaler's function multiplies faster than foreach does: 30
# float32 gradients of 64, 1,024, 4,096 and 16,384 elements take 8.2, 11.4, 20.8 and 67 us, foreach
# 13.1, 14.6, 20.7 and 56; of bfloat16 8.5, 14.8, 32 and 99 against 32, 37, 50 and 105; float16 is
# like bfloat16. (Xeon.) 16 half-type gradients of 65,536 and 2^18 elements take 180 and 664 us in
# bfloat16, foreach 195 and 657, in float16 93 and 227 against 96 and 205. (AMD EPYC.) Called once
# for each gradient, it wins for half types alone: 10 and 100 gradients of 28 elements on average
# and 65 of 4,192 take 6.5, 65 and 78 us in bfloat16, foreach 11.2, 108 and 107; in float32 6.4, 61
# and 66 against 5.4, 46 and 50. (Xeon; torch 2.13, 2 threads.)
UNSCALED = {torch.float32: 2048, torch.float16: 65536, torch.bfloat16: 65536}


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
