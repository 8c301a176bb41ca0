"""How the verbs of a backend read a gradient: as it is, by a view, or from a copy.

Copies are of gradients that no backend reads in their memory: sparse ones that are not coalesced,
those with gaps between their elements, and lazily negated ones. A copy lives as long as the call,
and is written back.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tritonclip.engine.memory import flat_size
from tritonclip.modes import without_grad


@dataclass(frozen=True, slots=True)
class View:
    """How a dense gradient is read by verbs, where not in its shape.

    Attributes:
        index: of the gradient in the list.
        pairs: a complex gradient is read as pairs of reals.
        size: elements of a flat view, for a gradient dense in another order of its dimensions
            whose verbs want it contiguous; None to keep the shape.
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
    """How verbs read a dense gradient; None for as it is."""
    pairs = grad.is_complex()
    real = View(index, pairs, None).of(grad)
    size = None if real.is_contiguous() else flat_size(real)
    return View(index, pairs, size) if pairs or size is not None else None


def needs_copy(grad: Tensor) -> bool:
    """Whether a gradient is read from a copy."""
    if grad.layout == torch.sparse_coo:
        return not grad.is_coalesced() or needs_copy(grad._values())
    return grad.is_neg() or (not grad.is_contiguous() and flat_size(grad) is None)


@without_grad
def copy_of(grad: Tensor) -> Tensor:
    """A dense copy of a gradient, of its layout: sparse gradients are coalesced."""
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
    """Writes a copy back."""
    if grad.layout == torch.sparse_coo and grad.is_coalesced():
        grad, copy = grad._values(), copy._values()
    grad.copy_(copy)
