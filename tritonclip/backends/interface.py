"""The interface of a backend: a layout, kept by a plan, and the batches that calls make of it.

For a rule by unit a backend has another layout and other batches, see `units.py`.
"""

from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

# Partial norms: a tensor on the gradients' device, or a list of floats from a backend that measures
# on the host. Every backend of a CPU takes both, others tensors.
PartialNorms: TypeAlias = Any
# A number, a one-element tensor, or 1-d with one for each gradient; a list of floats to a backend
# whose partial norms are one.
Limit: TypeAlias = Any


def arithmetic_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a real tensor is multiplied."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Clip(NamedTuple):
    """The numbers that decide how gradients are scaled: by min(1, limit / (norm + eps)).

    Attributes:
        norm_type: p of the p-norm.
        eps: added to a norm; by unit, the least norm of a unit's weights.
        limit: the largest norm; by unit, the largest norm of a unit in norms of its weights.
        grad_scale: the loss scale that gradients and partial norms still carry: a number, or a
            one-element tensor.
        erase: whether to write zeros. For one norm: True for where it is not finite. For a norm of
            each gradient: 0-d bool on the gradients' device; None or False for no.
    """

    norm_type: float
    eps: float
    limit: Limit
    grad_scale: float | Tensor
    erase: bool | Tensor | None = None


class Batch(Protocol):
    """The gradients of a group in one call, and a backend's verbs on them.

    They are real, of one device and dtype, each without overlap. Autograd's version counters see
    the verbs' writes.
    """

    def norm(self, norm_type: float, *, per_gradient: bool) -> PartialNorms:
        """Partial norms, whose norm is the norm, still loss-scaled.

        With `per_gradient`, the norm of each gradient can be had from them. They are float64, or
        float32 where a device has no float64.
        """

    def total(self, norms: PartialNorms, norm_type: float, grad_scale: float | Tensor) -> Tensor:
        """The norm from partial norms of all groups, 0-d."""

    def total_each(
        self, norms: PartialNorms, norm_type: float, grad_scale: float | Tensor
    ) -> Tensor:
        """The norm of each gradient, 1-d, from partial norms of this group."""

    def norms_each(self, norms: PartialNorms, norm_type: float) -> Tensor:
        """The norm of each gradient, 1-d, as wide as partial norms and still loss-scaled."""

    def partials_each(self, norms: Tensor, norm_type: float) -> Tensor:
        """Partial norms of this group that give these norms, 1-d, one a gradient; both float64."""

    def scale_(self, norms: PartialNorms, clip: Clip) -> tuple[Tensor, float | Tensor]:
        """Multiplies all gradients by one coefficient, from partial norms of all groups.

        Returns:
            Norm before clipping, 0-d, and coefficient, on the gradients' device.
        """

    def clip_(
        self, norm_type: float, eps: float, limit: float, grad_scale: float | Tensor
    ) -> Tensor:
        """Measures and multiplies gradients that are alone under a norm; the norm before, 0-d."""

    def scale_each_(self, norms: PartialNorms, clip: Clip) -> tuple[Tensor, float | Tensor]:
        """Multiplies each gradient by the coefficient of its norm, from those of this group.

        Returns:
            Norms before clipping, 1-d, on the gradients' device; coefficients, 1-d, or the least.
        """

    def clamp_(self, low: float, high: float, grad_scale: float | Tensor) -> None:
        """Clamps the gradients to [low, high] after division by the loss scale.

        The bounds are representable in the gradients' dtype. Elements within them are left, or
        written back, as they were.
        """


class Layout(Protocol):
    """All that a backend derives from the form of a group: dtype, device, sizes and strides.

    Holds no gradient.

    Attributes:
        by_address: reads a gradient that is dense in memory by its address, whatever the order of
            its dimensions; other layouts need contiguous ones.
        dtype: of results, float32 or float64; set by the plan.
        n_bytes: of memory that it keeps on the host between calls, at most.
    """

    by_address: bool
    dtype: torch.dtype
    n_bytes: int

    def bind(self, tensors: list[Tensor], addresses: list[int] | None) -> Batch:
        """The gradients of a call; addresses are theirs where they are known."""
