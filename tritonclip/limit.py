"""What backends need to know to turn norms into coefficients: one value, handed down to them."""

from typing import NamedTuple

import torch


class Limit(NamedTuple):
    """How far gradients may go, and what is done where they go further.

    Attributes:
        max_norm: the norm that gradients are scaled down to.
        norm_type: p of the p-norm, of partial norms and of gradients alike.
        eps: added to the norm before the division.
        dtype: of norms and coefficients, float32 or float64.
        grad_scale: the loss scale that the gradients still carry: a number, or a one-element tensor
            on any device.
        erase_nonfinite: write zeros where the norm is not finite.
    """

    max_norm: float
    norm_type: float
    eps: float
    dtype: torch.dtype
    grad_scale: float | torch.Tensor = 1.0
    erase_nonfinite: bool = False
