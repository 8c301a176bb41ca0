"""How the verbs of a backend read a gradient: as it is, by a view, or from a copy.

No backend reads sparse gradients that are not coalesced, gradients with gaps between their
elements, or lazily negated ones in their memory. Verbs work on a copy of these, which lives as long
as the call and is written back.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tritonclip.engine.memory import flat_size
from tritonclip.modes import without_grad


@dataclass(frozen=True, slots=True)
class View:
    """How verbs read a dense gradient, if not in its own shape.

    Attributes:
        index: the index of the gradient in the list.
        pairs: whether a complex gradient is read as pairs of reals.
        size: the number of elements of a flat view, for a gradient that is dense in another order
            of its dimensions and has to be contiguous; None to keep the shape.
    """

    index: int
    pairs: bool
    size: int | None

    def of(self, grad: Tensor) -> Tensor:
        """The view of a gradient."""
        if self.pairs:
            grad = torch.view_as_real(grad.conj() if grad.is_conj() else grad)
        return grad if self.size is None else grad.as_strided((self.size,), (1,))


def view_of(index: int, grad: Tensor) -> View | None:
    """The view by which verbs read a dense gradient; None if they read it as it is."""
    pairs = grad.is_complex()
    real = View(index, pairs, None).of(grad)
    size = None if real.is_contiguous() else flat_size(real)
    return View(index, pairs, size) if pairs or size is not None else None


def needs_copy(grad: Tensor) -> bool:
    """Whether verbs read a gradient from a copy."""
    if grad.layout == torch.sparse_coo:
        return not grad.is_coalesced() or needs_copy(grad._values())
    return grad.is_neg() or (not grad.is_contiguous() and flat_size(grad) is None)


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
