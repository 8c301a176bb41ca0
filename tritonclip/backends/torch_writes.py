"""Writes in PyTorch: gradients multiplied, clamped and set to 0 in place, on any device."""

from collections.abc import Callable, Iterator
from ctypes import c_float
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tritonclip.backends.batching import PIECE, split_flat

# Dtypes that torch can multiply and clamp in place; float8 it cannot.
ARITHMETIC = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def as_scalar(number: float | Tensor, like: Tensor) -> Tensor:
    """A number as a tensor of another one's dtype, filled in on the device: no upload, no sync."""
    if isinstance(number, Tensor):
        number = number.to(like.device, like.dtype)
        return number.reshape(()) if number.numel() == 1 else number
    if like.dtype == torch.float32:
        # inf beyond its range, where torch.full raises.
        number = c_float(number).value
    return torch.full((), number, dtype=like.dtype, device=like.device)


def multiply_(tensors: list[Tensor], factors: list[Tensor], erase: Tensor) -> None:
    """Multiplies in place by each 0-d factor in turn, or writes zeros; half types in float32."""
    if tensors[0].dtype != torch.float64:
        factors = [factor.to(torch.float32) for factor in factors]
    first, *others = factors
    # On a CPU, an interrupt between two factors would leave gradients multiplied by one of them.
    in_place = not others or tensors[0].device.type != "cpu"
    # Off the CPU, foreach rounds a factor to the tensors' dtype first.
    in_place = in_place and tensors[0].dtype == first.dtype
    if in_place and in_one_call(torch._foreach_mul_, tensors, first):
        for factor in others:
            torch._foreach_mul_(tensors, factor)
        for tensor in tensors:
            tensor.masked_fill_(erase, 0.0)
        return
    for piece in _writable_pieces(tensors):
        wide = piece.to(first.dtype, copy=True).mul_(first)
        for factor in others:
            wide.mul_(factor)
        store_(piece, wide.masked_fill_(erase, 0.0))


def zero_(tensors: list[Tensor]) -> None:
    """Writes zeros."""
    if not in_one_call(torch._foreach_zero_, tensors):
        for tensor in tensors:
            tensor.zero_()


def in_one_call(foreach: Callable[..., None], tensors: list[Tensor], *operands: Any) -> bool:
    """Runs one of torch's foreach functions; False, and nothing written, if it takes no such list.

    They take neither float8 nor lazily negated tensors.
    """
    if tensors[0].dtype not in ARITHMETIC:
        return False
    try:
        foreach(tensors, *operands)
    except RuntimeError:
        if any(map(Tensor.is_neg, tensors)):
            return False
        raise
    return True


def in_forward_mode() -> bool:
    """Whether gradients may be dual numbers of forward AD."""
    return forward_ad._current_level >= 0


def store_(piece: Tensor, values: Tensor) -> None:
    """Writes values, rounded to the dtype of the tensor that they go to."""
    # From float32 to a lazily negated float16 tensor on a CPU, copy_ forgets the sign (torch 2.13).
    piece.copy_(values.to(piece.dtype) if piece.is_neg() else values)


def _writable_pieces(tensors: list[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield from split_flat(tensor, PIECE, writable=True)


def clamp_together_(tensors: list[Tensor], low: float, high: float) -> None:
    """Clamps in two foreach passes, where torch has them for the tensors."""
    if not tensors:
        return
    if in_one_call(torch._foreach_clamp_min_, tensors, low):
        torch._foreach_clamp_max_(tensors, high)
    else:
        unscale_and_clamp_(tensors, low, high, 1.0)


def unscale_and_clamp_(
    tensors: list[Tensor], low: float, high: float, grad_scale: float | Tensor
) -> None:
    """Divides by the loss scale and clamps, both in float32 or wider, rounding once."""
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    one = torch.ones((), dtype=wide, device=tensors[0].device)
    factor = one / as_scalar(grad_scale, one)
    for piece in _writable_pieces(tensors):
        store_(piece, piece.to(wide, copy=True).mul_(factor).clamp_(low, high))
