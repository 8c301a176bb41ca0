"""The interface of a backend: a layout, kept by a plan, and the batches that calls make of it.

The interface of a backend for a rule by unit: a layout, and the batches that calls make of it.

A unit is a slice along the first dimension of a parameter, or all of one with fewer than two. The
partial norms of a group are a float64[2, n] (float32 where a device has no float64): norms of each
unit's gradient, gradient after gradient, and below them those of its weights; inf for weights that
set no limit.
"""

from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from tritonclip.rules import Rule

# Partial norms in the form that a backend gives and takes: a tensor on the gradients' device, or
# numbers where the host decides. Every backend takes a tensor.
PartialNorms: TypeAlias = Any


class Batch(Protocol):
    """The gradients of a group in one call, and a backend's verbs on them.

    They are real, of one device and dtype, each without overlap. A loss scale that they still
    carry, `grad_scale`, is a number or a one-element tensor.

    Attributes:
        counts_versions: autograd's version counters see the verbs' writes.
        on_host: the host decides, and reads partial norms without waiting.
    """

    counts_versions: bool
    on_host: bool

    def count_norms(self, *, per_gradient: bool) -> int:
        """How many partial norms `norm` gives."""

    def norm(self, norm_type: float, out: Tensor | None, *, per_gradient: bool) -> PartialNorms:
        """Measures the gradients.

        Args:
            norm_type: p of the p-norm.
            out: memory for the result, float64[count_norms] (float32 where a device has no
                float64); None for new memory.
            per_gradient: partial norms from which the norm of each gradient can be had.

        Returns:
            Partial norms, whose norm is the norm, still loss-scaled; numbers only without `out`.
        """

    def total(self, norms: PartialNorms, norm_type: float, grad_scale: float | Tensor) -> Tensor:
        """The norm from partial norms of all groups, 0-d."""

    def total_each(
        self, norms: PartialNorms, first: int, norm_type: float, grad_scale: float | Tensor
    ) -> Tensor:
        """The norm of each gradient, 1-d, from partial norms: this group's begin at `first`."""

    def norms_each(self, norms: Tensor, norm_type: float) -> Tensor:
        """The norm of each gradient, 1-d, as wide as this group's partial norms."""

    def partials_each(self, norms: Tensor, norm_type: float) -> Tensor:
        """Partial norms of this group that give these norms, 1-d, one a gradient; both float64."""

    def scale_(
        self,
        norms: PartialNorms,
        rule: Rule,
        max_norm: float | Tensor,
        grad_scale: float | Tensor,
        *,
        erase_nonfinite: bool,
    ) -> tuple[Tensor, float | Tensor]:
        """Multiplies all gradients by one coefficient.

        Args:
            norms: partial norms of all groups.
            rule: gives norm type and eps.
            max_norm: the rule's limit: a number, or a one-element tensor.
            grad_scale: see above.
            erase_nonfinite: write zeros where the norm is not finite.

        Returns:
            Norm before clipping, 0-d, and coefficient, on the gradients' device.
        """

    def scale_each_(
        self,
        norms: PartialNorms,
        first: int,
        rule: Rule,
        max_norm: float | Tensor,
        grad_scale: float | Tensor,
        *,
        erase: Tensor | None,
    ) -> tuple[Tensor, float | Tensor]:
        """Multiplies each gradient by the coefficient of its norm.

        Args:
            norms: partial norms, of which this group's begin at `first`.
            first: index of the first.
            rule: gives norm type and eps.
            max_norm: the rule's limit: a number, a one-element tensor, or 1-d with one for each
                gradient.
            grad_scale: see above.
            erase: 0-d bool on the gradients' device: whether to write zeros; None for no.

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
        by_address: batches find elements by the address of a gradient that is dense in memory,
            whatever the order of its dimensions; others want it contiguous.
        dtype: of results, float32 or float64; set by the plan.
        n_bytes: of scratch that it keeps on the host between calls, at most.
    """

    by_address: bool
    dtype: torch.dtype
    n_bytes: int

    def bind(self, tensors: list[Tensor], addresses: list[int] | None) -> Batch:
        """The gradients of a call; addresses are theirs where they are known."""


def count_units(tensor: Tensor) -> int:
    """The units of a parameter; one of length 0 where it has no elements."""
    return max(1, tensor.shape[0]) if tensor.dim() > 1 else 1


class UnitBatch(Protocol):
    """The gradients of a group in one call, beside their weights.

    `total_each` and `scale_each_` are called as those of
    :class:`tritonclip.backends.interface.Batch`; `norm_type` is 2, and `first` 0.

    Attributes:
        counts_versions: autograd's version counters see the verbs' writes.
    """

    counts_versions: bool

    def measure(self) -> Tensor:
        """Measures gradients and weights, by unit: partial norms."""

    def total_each(
        self, norms: Tensor, first: int, norm_type: float, grad_scale: float | Tensor
    ) -> Tensor:
        """The norm of each gradient, 1-d, from partial norms."""

    def norms_each(self, norms: Tensor) -> Tensor:
        """The norm of each gradient, 1-d, as wide as partial norms and still loss-scaled."""

    def scale_each_(
        self,
        norms: Tensor,
        first: int,
        rule: Rule,
        max_norm: float | Tensor,
        grad_scale: float | Tensor,
        *,
        erase: Tensor | None,
    ) -> tuple[Tensor, float | Tensor]:
        """Multiplies each unit by its coefficient.

        Args:
            norms: partial norms.
            first: 0.
            rule: gives eps.
            max_norm: the rule's limit: the largest norm of a unit in norms of its weights; a
                number, a one-element tensor, or 1-d with one for each gradient.
            grad_scale: the loss scale that gradients and partial norms still carry.
            erase: 0-d bool on the gradients' device: whether to write zeros; None for no.

        Returns:
            The norm of each gradient before clipping, and coefficients, 1-d, or the least.
        """

    def weight_norms_each(self, norms: Tensor) -> Tensor:
        """The norm of each gradient's weights, 1-d, from partial norms."""

    def with_whole(self, norms: Tensor, gradients: Tensor, weights: Tensor) -> Tensor:
        """Partial norms in which gradients that are one unit have other norms.

        Args:
            norms: partial norms.
            gradients: float64, the norm of each gradient of the group.
            weights: float64, the norm of each gradient's weights.
        """


class UnitLayout(Protocol):
    """All that a backend derives from the form of a group and of its weights; holds neither."""

    def serves(self, weights: list[Tensor]) -> bool:
        """Whether weights are of the form that it was made for."""

    def bind(self, grads: list[Tensor], weights: list[Tensor | None]) -> UnitBatch:
        """The gradients of a call, as users see them, and their weights.

        Args:
            grads: of the form that it was made for.
            weights: of the gradients' shapes; None for one without a limit.
        """
