"""Unit-wise clipping by the Triton backend: two launches a group.

Imported where the backend is first chosen, because it imports triton.
"""

import math

import torch
from torch import Tensor

from tritonclip.backends.unit_batch import count_units
from tritonclip.kernels.unit_norm import unit_norms
from tritonclip.kernels.unit_scale import scale_units_
from tritonclip.kernels.unit_table import UnitTable, UnitTables, count_chunks
from tritonclip.rules import Rule


class TritonUnitLayout:
    """Tables of the units of gradients and weights whose units are dense in memory.

    Args:
        grads: of one device and dtype; at least one.
        weights: theirs, of one dtype.
        dtype: of results.
    """

    def __init__(self, grads: list[Tensor], weights: list[Tensor], dtype: torch.dtype) -> None:
        self.dtype = dtype
        counts = list(map(count_units, grads))
        reals = 2 if grads[0].is_complex() else 1
        lengths = [reals * grad.numel() // n for grad, n in zip(grads, counts, strict=True)]
        # Partial norms of each gradient.
        self.sizes = [n * count_chunks(length) for n, length in zip(counts, lengths, strict=True)]
        self.whole = [grad.dim() < 2 for grad in grads]
        self._weight_dtype = weights[0].dtype
        self._strides = list(map(Tensor.stride, weights))
        self._tables = UnitTables(
            grads[0].device,
            grads[0].dtype.to_real(),
            self._weight_dtype.to_real(),
            counts,
            lengths,
        )

    def serves(self, weights: list[Tensor]) -> bool:
        """Weights of the same dtype and strides."""
        return all(weight.dtype == self._weight_dtype for weight in weights) and (
            list(map(Tensor.stride, weights)) == self._strides
        )

    def bind(self, grads: list[Tensor], weights: list[Tensor | None]) -> "TritonUnits":
        """The gradients of a call, with a table of all addresses on the device."""
        addresses = list(map(Tensor.data_ptr, grads))
        addresses += [0 if weight is None else weight.data_ptr() for weight in weights]
        table = self._tables.table(addresses)
        assert isinstance(table, UnitTable)
        return TritonUnits(grads, weights, table, self)


class TritonUnits:
    """Verbs that launch one kernel each; see :class:`tritonclip.backends.unit_batch.UnitBatch`."""

    # Kernels write through addresses, which autograd does not see.
    counts_versions = False

    def __init__(
        self,
        grads: list[Tensor],
        weights: list[Tensor | None],
        table: UnitTable,
        layout: TritonUnitLayout,
    ) -> None:
        self._table, self._layout = table, layout
        # The table has their addresses: they have to live until the launches.
        self._tensors = grads, weights

    def measure(self) -> Tensor:
        """Measures gradients and weights, by unit."""
        return unit_norms(self._table)

    def total_each(
        self, norms: Tensor, first: int, norm_type: float, grad_scale: float | Tensor
    ) -> Tensor:
        """The norm of each gradient, 1-d."""
        return self._totals(norms, self._layout.dtype, grad_scale)

    def norms_each(self, norms: Tensor) -> Tensor:
        """The norm of each gradient, float64[n]."""
        return self._totals(norms, torch.float64, 1.0)

    def weight_norms_each(self, norms: Tensor) -> Tensor:
        """The norm of each gradient's weights, float64[n]."""
        return self._totals(norms.flip(0), torch.float64, 1.0)

    def _totals(self, norms: Tensor, dtype: torch.dtype, grad_scale: float | Tensor) -> Tensor:
        return scale_units_(
            self._table,
            norms,
            ratio=math.inf,
            eps=0.0,
            dtype=dtype,
            grad_scale=grad_scale,
            erase=None,
            write=False,
        )[0]

    def with_whole(self, norms: Tensor, gradients: Tensor, weights: Tensor) -> Tensor:
        """Partial norms in which gradients that are one unit have other norms."""
        layout, parts = self._layout, []
        for row, given in zip(norms.unbind(), (gradients, weights), strict=True):
            pairs = zip(row.split(layout.sizes), given.split(1), layout.whole, strict=True)
            for old, new, whole in pairs:
                # The norm as that of the first chunk, and nothing in the others.
                parts += [new, torch.zeros_like(old[1:])] if whole else [old]
        return torch.cat(parts).view(2, -1)

    def scale_each_(
        self,
        norms: Tensor,
        first: int,
        rule: Rule,
        max_norm: float | Tensor,
        grad_scale: float | Tensor,
        *,
        erase: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Multiplies each unit by its coefficient; `max_norm` is the limit of the ratio."""
        return scale_units_(
            self._table,
            norms,
            ratio=max_norm,
            eps=rule.eps,
            dtype=self._layout.dtype,
            grad_scale=grad_scale,
            erase=erase,
        )
