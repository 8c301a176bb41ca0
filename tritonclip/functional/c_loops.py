"""Out-of-place clipping by the loops in C, of plain tensors that need no derivative.

One call reads all leaves, a tensor or a list of tensors and None, makes new tensors and writes to
them. It returns None for what it leaves to others: tensors off the CPU, of other dtypes, with gaps
between elements, or in derivatives; limits that are no numbers on the CPU.
"""

from __future__ import annotations

import math
from array import array
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from tritonclip import settings
from tritonclip.backends.native import CODES, ORDERS, loops, may_share
from tritonclip.engine.memory import OFFSETS
from tritonclip.modes import is_observed

# Of complex tensors, pairs of reals are read.
_PAIRS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def introduce(exchange: object = getattr(Tensor, "__dlpack_c_exchange_api__", None)) -> None:
    """Tells the loops of PyTorch, which DLPack's functions for C, `exchange`, read fastest."""
    loops.register_torch(
        Tensor,
        Parameter,
        CODES | {dtype: CODES[real] + loops.PAIRS for dtype, real in _PAIRS.items()},
        torch.zeros((), dtype=torch.float32, device="cpu"),
        torch.zeros((), dtype=torch.float64, device="cpu"),
        torch.is_grad_enabled,
        torch.get_num_threads,
        math.hypot,
        exchange,
    )


if loops is not None:
    introduce()


def serve() -> bool:
    """Whether the loops may serve a call: they are chosen, and nothing has to see each operator."""
    if is_dynamo_compiling() or is_observed() or loops is None:
        return False
    backend, verifying = settings.current()
    return backend in ("auto", "native") and not verifying


def clamped(leaves: Any, low: object, high: object) -> Any:
    """New tensors within bounds, numbers or None."""
    return loops.clamped(leaves, torch.empty_like, low, high) if serve() else None


def clipped(leaves: Any, limit: object, norm: object = None) -> tuple[Any, Tensor] | None:
    """New tensors, scaled to a limit of the norm of all, and that norm, or the one given."""
    if not serve():
        return None
    limit, norm = _number_of(limit), _number_of(norm)
    return loops.clipped(leaves, torch.empty_like, limit, norm)  # type: ignore[no-any-return]


def clipped_each(
    leaves: Any, limit: object, norm_type: object = 2.0, power: float = 0.0
) -> tuple[Any, list[float]] | None:
    """New tensors, each scaled to a limit of its norm over numel**power, and the norms."""
    # The power is 0, 0.5 or 1.
    if type(norm_type) not in (float, int) or norm_type not in ORDERS or not serve():
        return None
    limit = _number_of(limit)
    return loops.clipped_each(leaves, torch.empty_like, limit, norm_type, power)  # type: ignore[no-any-return]


def _number_of(limit: object) -> object:
    """A limit as a number, if it is a tensor that the host can read and nothing differentiates."""
    if type(limit) is not Tensor or limit.dtype not in CODES or not limit.is_cpu:
        return limit
    is_recorded = limit.requires_grad and torch.is_grad_enabled()
    return limit if is_recorded or limit.numel() != 1 else limit.item()


def norm_of(leaves: Any) -> Tensor | None:
    """The norm of all tensors; None also where one is not contiguous."""
    return loops.measured(leaves, torch.empty_like) if serve() else None


def norms_of_rows(tensors: list[Tensor]) -> Tensor | None:
    """The 2-norm of each row of tensors with as many rows, float64[n_tensors, n_rows]."""
    dtype, n = tensors[0].dtype, len(tensors[0])
    if not serve() or dtype not in CODES:
        return None
    plain = all(
        x.dtype == dtype and x.dim() == 2 and x.is_cpu and x.is_contiguous() for x in tensors
    )
    addresses = list(map(Tensor.data_ptr, tensors)) if plain and n else []
    lengths = array("q", [x.shape[1] for x in tensors] if plain else [])
    if not addresses or min(addresses) < OFFSETS:
        return None
    norms = torch.empty(len(tensors), n, dtype=torch.float64, device="cpu")
    threads = torch.get_num_threads() if may_share([n * length for length in lengths]) else 1
    counts = array("q", [n] * len(tensors)).tobytes()
    unknown = loops.unit_norms(
        addresses, lengths.tobytes(), CODES[dtype], threads, counts, norms.data_ptr()
    )
    # Some norms of float64 are of extreme magnitudes.
    return None if unknown else norms
