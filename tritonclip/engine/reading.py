"""How the verbs of a backend read a gradient: as it is, as pairs of reals, or from a copy.

No backend reads sparse gradients that are not coalesced, gradients with gaps between their
elements, or lazily negated ones in their memory. Verbs work on a copy of these, which lives as long
as the call and is written back.
"""

import torch
from torch import Tensor

from tritonclip.engine.memory import is_dense
from tritonclip.modes import without_grad


def as_real(grad: Tensor) -> Tensor:
    """The gradient itself, or a complex one as pairs of reals, as verbs read it."""
    if not grad.is_complex():
        return grad
    return torch.view_as_real(grad.conj() if grad.is_conj() else grad)


def needs_copy(grad: Tensor) -> bool:
    """Whether verbs read a gradient from a copy."""
    if grad.layout == torch.sparse_coo:
        return not grad.is_coalesced() or needs_copy(grad._values())
    return grad.is_neg() or not is_dense(grad)


@without_grad
def copy_of(grad: Tensor) -> Tensor:
    """A dense copy of a strided gradient, or a coalesced copy of a sparse one."""
    if grad.layout == torch.sparse_coo:
        if not grad.is_coalesced():
            return grad.coalesce()
        return torch.sparse_coo_tensor(
            grad._indices(),
            copy_of(grad._values()),
            grad.shape,
            is_coalesced=True,
            check_invariants=False,
        )
    dense = grad.resolve_neg()
    copied = dense.clone(memory_format=torch.contiguous_format) if dense is grad else dense
    return copied.contiguous()


def write_back_(grad: Tensor, copy: Tensor) -> None:
    """Writes a copy back to its gradient."""
    if grad.layout == torch.sparse_coo and grad.is_coalesced():
        grad, copy = grad._values(), copy._values()
    grad.copy_(copy)
