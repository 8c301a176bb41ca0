"""The interface of a backend for a rule by unit: a layout, and the batches that calls make of it.

A unit is a slice along the first dimension of a parameter, or all of one with fewer than two. The
partial norms of a group are a float64[2, n] (float32 where a device has no float64): norms of each
unit's gradient, gradient after gradient, and below them those of its weights; inf for weights that
set no limit.
"""

from typing import Protocol

from torch import Tensor

from tritonclip.rules import Rule


def count_units(tensor: Tensor) -> int:
    """The units of a parameter; one of length 0 where it has no elements."""
    return max(1, tensor.shape[0]) if tensor.dim() > 1 else 1


class UnitBatch(Protocol):
    """The gradients of a group in one call, beside their weights.

    `total_each` and `scale_each_` are called as those of
    :class:`tritonclip.backends.batch.Batch`; `norm_type` is 2, and `first` 0.

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
