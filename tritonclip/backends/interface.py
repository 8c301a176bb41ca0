"""The interface of a backend: a layout, kept by a plan, and the batches that calls make of it.

A call binds the gradients of a group to their layout, measures them, and scales or clamps them:

    batch = layout.bind(tensors, addresses)
    partials = batch.norm(2.0, "all")
    norm, coefficient = batch.scale_(partials, Clip(2.0, eps, limit, grad_scale))

Partial norms are whatever a backend finds in one pass; it makes norms of them where it scales, or
by `combine`. A norm is of "all" gradients, of "each", or of "rows": of each unit, which is a slice
along the first dimension of a parameter, or all of one with fewer than two dimensions. By rows, a
layout is made of gradients and their weights, whose norms are the limits in a ratio, and `bind`
takes the gradients and then the weights.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

# Partial norms: a tensor on the gradients' device, or a list of floats from a backend that measures
# on the host. Every backend of a CPU takes both, others tensors. By rows they are a tensor with
# the norms of the rows of each gradient in turn, and, in a second row, those of the weights.
PartialNorms: TypeAlias = Any
# A number, a one-element tensor, or 1-d with one for each gradient; a list of floats to a backend
# whose partial norms are one.
Limit: TypeAlias = Any
# Whose norm it is.
Of: TypeAlias = Literal["all", "each", "rows"]


def arithmetic_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a real tensor is multiplied."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Clip(NamedTuple):
    """The numbers that decide how gradients are scaled: by min(1, limit / (norm + eps)).

    Attributes:
        norm_type: p of the p-norm.
        eps: added to a norm; by rows, the least norm of a row of weights.
        limit: the largest norm; by rows, the largest norm of a row in norms of its weights.
        grad_scale: the loss scale that gradients and partial norms still carry: a number, or a
            one-element tensor.
        erase: whether to write zeros. For the norm of all: True for where it is not finite. For
            others: 0-d bool on the gradients' device; None or False for no.
        of: whose norms the partial norms give.
    """

    norm_type: float
    eps: float
    limit: Limit
    grad_scale: float | Tensor
    erase: bool | Tensor | None = None
    of: Of = "all"


class Batch(Protocol):
    """The gradients of a group in one call, and a backend's verbs on them.

    They are real, of one device and dtype, each without overlap. Autograd's version counters see
    the verbs' writes.

    Attributes:
        sizes: by rows, the number of partial norms of each gradient.
    """

    sizes: Sequence[int]

    def norm(self, norm_type: float, of: Of) -> PartialNorms:
        """Partial norms, still loss-scaled: float64, or float32 where a device has no float64.

        Those of a batch by rows are always of rows, of norm type 2.
        """

    def combine(
        self,
        norms: PartialNorms,
        norm_type: float,
        of: Of,
        grad_scale: float | Tensor = 1.0,
        *,
        wide: bool = False,
    ) -> Tensor:
        """Norms from partial norms: 0-d of all groups, or 1-d of each gradient of this one.

        By rows, the norm of each gradient, too. Results have the layout's dtype, or, if `wide`,
        that of partial norms.
        """

    def partials_each(self, norms: Tensor, norm_type: float) -> Tensor:
        """Partial norms of this group that give these norms, 1-d, one a gradient; both float64."""

    def scale_(self, norms: PartialNorms, clip: Clip) -> tuple[Tensor, float | Tensor]:
        """Multiplies the gradients by the coefficients of their norms.

        Returns:
            Norms before clipping as of `combine`, on the gradients' device; and the coefficient, or
            several, or the least of them.
        """

    def clip_(
        self, norm_type: float, eps: float, limit: float, grad_scale: float | Tensor
    ) -> Tensor:
        """Measures and multiplies gradients that are alone under a norm; the norm before, 0-d."""

    def clamp_(self, low: float, high: float, grad_scale: float | Tensor) -> None:
        """Clamps the gradients to [low, high] after division by the loss scale.

        The bounds are representable in the gradients' dtype. Elements within them are left, or
        written back, as they were.
        """


class Layout(Protocol):
    """All that a backend derives from the form of a group: dtype, device, sizes and strides.

    Holds no gradient. Gradients are dense in memory, whatever the order of their dimensions; by
    rows, they are taken as users see them.

    Attributes:
        dtype: of results, float32 or float64; set by the plan.
        n_bytes: of memory that it keeps on the host between calls, at most.
    """

    dtype: torch.dtype
    n_bytes: int

    def bind(self, tensors: list[Tensor], addresses: list[int] | None) -> Batch:
        """The gradients of a call; addresses are theirs where they are known."""
