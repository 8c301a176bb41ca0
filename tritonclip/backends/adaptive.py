"""The state of an adaptive rule, advanced on its device: by one launch, or by operators."""

from __future__ import annotations

import importlib
import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tritonclip.backends import choose
from tritonclip.rules.rule import Adaptive, advanced


class Parts(NamedTuple):
    """What a norm is put together from, on its device; by default a norm that is known.

    Attributes:
        norms: partial norms of all gradients; or the norm, 0-d; or that of each gradient, 1-d.
        dtype: of the norm.
        norm_type: p of the p-norm; under inf, the norm of one norm is that norm.
        grad_scale: the loss scale that partial norms still carry.
    """

    norms: Tensor
    dtype: torch.dtype
    norm_type: float = math.inf
    grad_scale: float | Tensor = 1.0


class Measured(Protocol):
    """Measured norms, in both forms that are asked for."""

    def norm(self) -> Tensor:
        """The norm, 0-d, or that of each gradient, 1-d."""

    def parts(self) -> Parts:
        """What the norm is put together from."""


def advance(
    rule: Adaptive, values: Tensor, rows: Tensor | None, measured: Measured, *, in_place: bool
) -> tuple[Tensor, Tensor]:
    """The limit for measured norms, and all values after them; see `rules.rule.Measured`."""
    form = rule.in_kernel()
    each = form is not None and form[0] == "own_history"
    # Operators raise for the values of another rule.
    if (
        form is None
        or values.dim() != 1 + each
        or choose.backend_name(values.device, torch.float64) != "triton"
    ):
        norm = measured.norm().to(values.dtype)
        if rows is None:
            return advanced(rule, values, norm)
        limit, after = advanced(rule, values[rows], norm)
        return limit, values.index_copy(0, rows, after)
    after = values
    if not in_place:
        after = torch.empty_like(values) if rows is None else values.clone()
    triton, (kind, numbers) = importlib.import_module("tritonclip.backends.triton"), form
    if each:
        return triton.advance_each(numbers, values, after, rows, measured.parts().norms), after
    return triton.advance(kind, numbers, values, after, *measured.parts()), after
