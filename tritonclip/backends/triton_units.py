"""Unit-wise clipping by the Triton backend: two launches a group.

Imported where the backend is first chosen, because it imports triton.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tritonclip.backends.interface import Clip
from tritonclip.backends.triton import dtypes_of, flag_of, split, stride_of
from tritonclip.backends.units import TorchUnitLayout, TorchUnits, norms_of_rows
from tritonclip.kernels import launch, units
from tritonclip.kernels.access import (
    CHUNK,
    COLUMNS,
    MEDIUM,
    MEDIUM_ROWS,
    OCCUPANCY_2X128,
    SHORT,
    STEPS,
    TAIL,
    WARPS,
    block_of,
    row_columns_of,
)
from tritonclip.kernels.tables import UnitTable, UnitTables, count_chunks

# Which rows are read in which way.
_LENGTHS = {
    "SHORT": SHORT,
    "COLUMNS": COLUMNS,
    "MEDIUM": MEDIUM,
    "MEDIUM_ROWS": MEDIUM_ROWS,
    "CHUNK": CHUNK,
}


class TritonUnitLayout(TorchUnitLayout):
    """Tables of the units of gradients and weights, each of one dtype and dense in memory."""

    def __init__(self, grads: list[Tensor], weights: list[Tensor], dtype: torch.dtype) -> None:
        super().__init__(grads, dtype, on_host=False)
        counts, reals = self.counts, 2 if grads[0].is_complex() else 1
        lengths = [reals * grad.numel() // n for grad, n in zip(grads, counts, strict=True)]
        self.sizes = [n * count_chunks(length) for n, length in zip(counts, lengths, strict=True)]
        self._tables = UnitTables(
            grads[0].device,
            grads[0].dtype.to_real(),
            weights[0].dtype.to_real(),
            counts,
            lengths,
        )

    def bind(
        self, grads: list[Tensor], weights: list[Tensor], addresses: list[int]
    ) -> "TritonUnits":
        return TritonUnits(grads, weights, self._tables.table(addresses), self)


class TritonUnits(TorchUnits):
    """Verbs that launch one kernel each."""

    layout: TritonUnitLayout

    def __init__(
        self,
        grads: list[Tensor],
        weights: list[Tensor],
        table: UnitTable,
        layout: TritonUnitLayout,
    ) -> None:
        self._table, self.layout = table, layout
        # The table has their addresses: they have to live until the launches.
        self.grads, self.weights = grads, weights

    def measure(self) -> Tensor:
        """Measures gradients and weights, by unit: float64[2, n_norms].

        Norms of each gradient's rows, or of the chunks of its rows, and below them those of its
        weights. Two launches if dtypes differ.
        """
        table = self._table
        if table.weight_dtype == table.dtype:
            return self._measure(2, (table.dtype, 0, 2))
        # A kernel reads one dtype: one launch for each.
        return self._measure(2, (table.dtype, 0, 1), (table.weight_dtype, 1, 1))

    def _measure(self, n_sides: int, *launches: tuple[torch.dtype, int, int]) -> Tensor:
        """float64[n_sides, n_norms], by launches of a dtype, a first side and a number of sides."""
        table = self._table
        norms = torch.empty(n_sides, table.n_norms, dtype=torch.float64, device=table.device)
        for key in launches:
            dtype, first, n = key
            arguments = norms, table.n_tensors, table.n_pieces, first, n, table.n_norms
            if not table.starts_again(key, *arguments):
                table.launch(
                    key,
                    units.unit_norms_kernel,
                    min(n * table.n_pieces, table.wave),
                    OCCUPANCY_2X128,
                    arguments,
                    DTYPE=launch.TL_DTYPES[dtype],
                    ROWS=units.ROWS_MEASURED,
                    ROW_COLUMNS=row_columns_of(dtype.itemsize),
                    STEPS=STEPS,
                    BLOCK=block_of(dtype.itemsize),
                    **_LENGTHS,
                )
        return norms

    def norms_of_units(self) -> Sequence[Tensor]:
        layout, (norms,) = self.layout, self._measure(1, (self._table.dtype, 0, 1))
        pairs = zip(norms.split(layout.sizes), layout.counts, strict=True)
        return [
            of_units if len(of_units) == n else norms_of_rows(of_units.view(n, -1), torch.float64)
            for of_units, n in pairs
        ]

    def total_each(self, norms: Tensor, norm_type: float, grad_scale: float | Tensor) -> Tensor:
        return self._totals(norms, self.layout.dtype, grad_scale)

    def norms_each(self, norms: Tensor) -> Tensor:
        return self._totals(norms, torch.float64, 1.0)

    def _totals(self, norms: Tensor, dtype: torch.dtype, grad_scale: float | Tensor) -> Tensor:
        return self._scale_(norms, Clip(2.0, 0.0, math.inf, grad_scale), dtype, write=False)[0]

    def scale_each_(self, norms: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
        results = self._scale_(norms, clip, self.layout.dtype, write=True)
        # Kernels write through addresses, which autograd does not see.
        increment_version(self.grads)
        return results

    def _scale_(
        self, norms: Tensor, clip: Clip, dtype: torch.dtype, *, write: bool
    ) -> tuple[Tensor, Tensor]:
        """The norm of each gradient, [n_tensors], and the coefficient of each unit, [n_units]."""
        table = self._table
        totals = torch.empty(table.n_tensors, dtype=dtype, device=table.device)
        coefficients = torch.empty(table.n_units, dtype=dtype, device=table.device)
        limit, most = split(clip.limit, table.device)
        divisor, scaled = split(clip.grad_scale, table.device)
        erase = flag_of(clip)
        arguments = (
            *(norms, totals, coefficients, limit, divisor, erase),
            *(table.n_tensors, table.n_pieces, table.n_norms, stride_of(limit)),
            *(most, float(clip.eps), scaled),
        )
        key = "scale", dtype, write, *dtypes_of(norms, limit, divisor, erase)
        if not table.starts_again(key, *arguments):
            table.launch(
                key,
                units.scale_units_kernel,
                min(table.n_pieces, table.wave),
                OCCUPANCY_2X128,
                arguments,
                DTYPE=launch.TL_DTYPES[table.dtype],
                WRITE=write,
                ROWS=units.ROWS_SCALED,
                ROW_COLUMNS=units.columns_scaled(table.dtype.itemsize),
                BLOCK=WARPS * row_columns_of(table.dtype.itemsize),
                TAIL=TAIL,
                **_LENGTHS,
            )
        return totals, coefficients
