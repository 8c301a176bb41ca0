"""Out-of-place clipping of plain tensors that need no derivative, by the loops in C.

A call takes all leaves, which are a tensor or a list of tensors and None, and writes to new tensors
that it makes. It returns None if the loops cannot serve it: for tensors off the CPU, of other
dtypes, with gaps between elements or with derivatives, and for limits that are no numbers on a CPU.
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

# Complex tensors are read as pairs of reals.
_PAIRS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def introduce(exchange: object = getattr(Tensor, "__dlpack_c_exchange_api__", None)) -> None:
    """Registers PyTorch with the loops; with DLPack's C functions, `exchange`, they read faster."""
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
    """Whether the loops may serve a call: they are chosen, and nothing observes the operators."""
    if is_dynamo_compiling() or is_observed() or loops is None:
        return False
    backend, verifying = settings.current()
    return backend in ("auto", "native") and not verifying


def clamped(leaves: Any, low: object, high: object) -> Any:
    """Clamps to bounds that are numbers or None; returns new tensors."""
    return loops.clamped(leaves, torch.empty_like, low, high) if serve() else None


def clipped(leaves: Any, limit: object, norm: object = None) -> tuple[Any, Tensor] | None:
    """Limits the norm of all tensors; returns new tensors, and this norm or the one given."""
    if not serve():
        return None
    limit, norm = _number_of(limit), _number_of(norm)
    return loops.clipped(leaves, torch.empty_like, limit, norm)  # type: ignore[no-any-return]


def clipped_each(
    leaves: Any, limit: object, norm_type: object = 2.0, power: float = 0.0
) -> tuple[Any, list[float]] | None:
    """Limits each norm over numel**power, 0, 0.5 or 1; returns new tensors and the norms."""
    if type(norm_type) not in (float, int) or norm_type not in ORDERS or not serve():
        return None
    limit = _number_of(limit)
    return loops.clipped_each(leaves, torch.empty_like, limit, norm_type, power)  # type: ignore[no-any-return]


def _number_of(limit: object) -> object:
    """Reads a limit that is a one-element tensor on the CPU and is not differentiated."""
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
    # Norms of float64 are unknown where squares are too large or too small.
    return None if unknown else norms
