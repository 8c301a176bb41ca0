"""The norm of every unit of a tensor, in PyTorch; a unit is a slice along the first dimension."""

import torch
from torch import Tensor

from tritonclip.backends.batching import PIECE
from tritonclip.backends.torch_backend import norm_of


def unit_norms(tensor: Tensor, wide: torch.dtype) -> Tensor:
    """The 2-norm of each unit, 1-d, computed in `wide` whatever the dtype; by modulus if complex.

    Large tensors are converted piece by piece.
    """
    rows = as_rows(as_real(tensor), whole=tensor.dim() < 2)
    n, length = len(rows), rows[0].numel()
    if not length:
        return torch.zeros(n, dtype=wide, device=tensor.device)
    if length > PIECE:
        return torch.stack([norm_of([row], 2.0, wide) for row in rows])
    pieces = rows.split(PIECE // length) if rows.numel() > PIECE else [rows]
    norms = [_norms_of_rows(piece, wide) for piece in pieces]
    return norms[0] if len(norms) == 1 else torch.cat(norms)


def _norms_of_rows(rows: Tensor, wide: torch.dtype) -> Tensor:
    """The 2-norm of each slice of a small tensor."""
    x = rows.to(wide).reshape(len(rows), -1)
    if wide == torch.float64 and rows.dtype != wide:
        # Squares of narrower numbers fit float64, whatever they are.
        norms: Tensor = torch.linalg.vector_norm(x, dim=1)
        return norms
    largest = x.abs().amax(1, keepdim=True)
    # Dividing by 1 instead of 0, inf and NaN gives just these.
    scale = torch.where((largest > 0) & (largest < torch.inf), largest, 1.0)
    rest: Tensor = torch.linalg.vector_norm(x / scale, dim=1)
    return scale[:, 0] * rest


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of reals; of a conjugated one those of the memory."""
    tensor = tensor.detach()
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)


def as_rows(real: Tensor, *, whole: bool) -> Tensor:
    """A tensor whose slices along the first dimension are the units."""
    return real.unsqueeze(0) if whole or not real.shape[0] else real
