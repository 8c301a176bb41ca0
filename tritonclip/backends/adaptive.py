"""The state of an adaptive rule, advanced on its device: by one launch, or by operators."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.backends import choose
from tritonclip.rules.rule import Adaptive, advanced


class Parts(NamedTuple):
    """What the norm of all gradients is put together from, on its device.

    Attributes:
        norms: partial norms of all gradients; or the norm itself, whose norm of order inf it is.
        dtype: of the norm.
        norm_type: p of the p-norm.
        grad_scale: the loss scale that partial norms still carry.
    """

    norms: Tensor
    dtype: torch.dtype
    norm_type: float
    grad_scale: float | Tensor


def advance(
    rule: Adaptive,
    values: Tensor,
    rows: Tensor | None,
    norm: Callable[[], Tensor],
    parts: Parts | None = None,
) -> tuple[Tensor, Tensor]:
    """The limit for measured norms, and all values after them; see `rules.rule.Measured`.

    `norm` returns them. A kernel puts the norm together from `parts`, which saves the launch of
    `norm`; None where the norm is there, or not of all gradients.
    """
    each = rule.in_kernel[:1] == ("own_history",)
    # Operators raise for the values of another rule.
    if (
        not rule.in_kernel
        or values.dim() != 1 + each
        or choose.backend_name(values.device, torch.float64) != "triton"
    ):
        norms = norm().to(values.dtype)
        if rows is None:
            return advanced(rule, values, norms)
        limit, after = advanced(rule, values[rows], norms)
        return limit, values.index_copy(0, rows, after)
    after = torch.empty_like(values) if rows is None else values.clone()
    triton, (form, *names) = importlib.import_module("tritonclip.backends.triton"), rule.in_kernel
    numbers = [getattr(rule, name) for name in names]
    numbers += [0.0] * (3 - len(names)) + [getattr(rule, "max_norm", math.inf)]
    if each:
        return triton.advance_each(numbers, values, after, rows, norm()), after
    if parts is None:
        whole = norm()
        parts = Parts(whole, whole.dtype, math.inf, 1.0)
    return triton.advance(form, numbers, values, after, *parts), after
