"""The Triton backend: launches the kernels of `tritonclip.kernels` on lists of gradients.

Imported where the backend is first chosen, because it imports triton.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tritonclip.backends import native
from tritonclip.backends.interface import Clip, Of
from tritonclip.backends.operators import count_rows
from tritonclip.kernels import clamp, launch, norm, scale, units
from tritonclip.kernels.access import (
    CHUNK,
    COLUMNS,
    MEDIUM,
    MEDIUM_ROWS,
    OCCUPANCY_2X128,
    OCCUPANCY_3X80,
    SHORT,
    STEPS,
    TAIL,
    WARPS,
    block_of,
    row_columns_of,
)
from tritonclip.kernels.tables import KEPT, ChunkTables, Tables, UnitTables, count_chunks

# How a launch of `scale_kernel` is known where limit and loss scale are numbers.
_NUMBERS = False, True, torch.float64, None, None
# Which rows are read in which way.
_LENGTHS = {
    "SHORT": SHORT,
    "COLUMNS": COLUMNS,
    "MEDIUM": MEDIUM,
    "MEDIUM_ROWS": MEDIUM_ROWS,
    "CHUNK": CHUNK,
}
# Kernels import nothing of tritonclip.
launch.native = native.loops


class TritonLayout:
    """Tables of gradients of one device and dtype that are dense in memory.

    By rows, of gradients and weights, each of one dtype, whose units are dense in memory.
    """

    def __init__(self, tensors: list[Tensor], weights: Sequence[Tensor] | None = None) -> None:
        self.dtype, device, dtype = torch.float32, tensors[0].device, tensors[0].dtype.to_real()
        n_sides, self.sizes, sizes = 1, list[int](), list(map(Tensor.numel, tensors))
        self._tables: Tables[Any]
        if weights is None:
            self._tables = ChunkTables(device, dtype, sizes)
        else:
            counts, reals = list(map(count_rows, tensors)), 2 if tensors[0].is_complex() else 1
            lengths = [reals * size // n for size, n in zip(sizes, counts, strict=True)]
            chunks = map(count_chunks, lengths)
            self.sizes = [n * own for n, own in zip(counts, chunks, strict=True)]
            dtypes = [dtype, weights[0].dtype.to_real()] if weights else [dtype]
            self._tables = UnitTables(device, dtypes, counts, lengths)
            n_sides = len(dtypes)
        # Addresses of the tables that are kept.
        self.n_bytes = 8 * KEPT * n_sides * len(tensors)

    def bind(self, tensors: list[Tensor], addresses: list[int] | None) -> "TritonBatch":
        if addresses is None:
            addresses = list(map(Tensor.data_ptr, tensors))
        return TritonBatch(tensors, self._tables.table(addresses), self.dtype, self.sizes)


class TritonBatch:
    """Verbs that launch kernels; see :class:`tritonclip.backends.interface.Batch`."""

    def __init__(
        self, tensors: list[Tensor], table: Any, dtype: torch.dtype, sizes: Sequence[int] = ()
    ) -> None:
        # A ChunkTable, or, by rows, a UnitTable.
        self._table, self._dtype, self.sizes = table, dtype, sizes
        # The table has their addresses: they have to live until the launches.
        self._tensors = tensors

    def norm(self, norm_type: float, of: Of) -> Tensor:
        """Measures the gradients: one partial norm a chunk, or one a program."""
        if of == "rows":
            return self._norm_of_rows()
        table, key = self._table, ("norm", norm_type, of)
        programs = table.programs[OCCUPANCY_3X80]
        n_norms = table.n_chunks if of == "each" else programs
        norms = torch.empty(n_norms, dtype=torch.float64, device=table.device)
        if not table.starts_again(key, norms, table.n_chunks):
            table.launch(
                key,
                norm.norm_kernel,
                programs,
                OCCUPANCY_3X80,
                (norms, table.n_chunks),
                DTYPE=launch.TL_DTYPES[table.dtype],
                P=norm_type,
                EACH=of == "each",
                CHUNK=CHUNK,
                BLOCK=norm.block_of(table.dtype.itemsize, norm_type),
            )
        return norms

    def _norm_of_rows(self) -> Tensor:
        """Measures rows, or chunks of long ones, by one launch for each dtype."""
        table, dtypes = self._table, self._table.dtypes
        norms = torch.empty(len(dtypes), table.n_norms, dtype=torch.float64, device=table.device)
        # Of a dtype, the first side and the number of sides.
        sides = {dtype: (dtypes.index(dtype), dtypes.count(dtype)) for dtype in dtypes}
        for dtype, (first, n) in sides.items():
            key = "rows", dtype, first, n
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

    def combine(
        self,
        norms: Tensor,
        norm_type: float,
        of: Of,
        grad_scale: float | Tensor = 1.0,
        *,
        wide: bool = False,
    ) -> Tensor:
        dtype = torch.float64 if wide else self._dtype
        # No limit: coefficients, which nobody reads, are not NaN.
        clip = Clip(norm_type, 0.0, math.inf, grad_scale, of=of)
        return self._scale_(norms, clip, dtype, write=False)[0]

    def partials_each(self, norms: Tensor, norm_type: float) -> Tensor:
        """The norm of each gradient as that of its first chunk, and nothing in the others."""
        table = self._table
        partials = norms.new_zeros(table.n_chunks)
        return partials.index_copy_(0, table.arguments[2], norms)

    def scale_(self, norms: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
        result = self._scale_(norms, clip, self._dtype, write=True)
        # Kernels write through addresses, which autograd does not see.
        increment_version(self._tensors[: len(self.sizes) or None])
        return result

    def clip_(
        self, norm_type: float, eps: float, limit: float, grad_scale: float | Tensor
    ) -> Tensor:
        table, dtype, key = self._table, self._dtype, ("scale", norm_type, self._dtype, *_NUMBERS)
        known = table.starts.get(key, launch.refuse) is not launch.refuse
        if known and type(limit) is type(eps) is type(grad_scale) is float:
            programs, n_chunks = table.programs[OCCUPANCY_3X80], table.n_chunks
            # The coefficient, which nobody reads, has its place behind the partial norms.
            norms = torch.empty(programs + 1, dtype=torch.float64, device=table.device)
            total = torch.empty_strided((), (), dtype=dtype, device=table.device)
            at = norms.data_ptr()
            outputs = at, total.data_ptr(), at + 8 * programs
            numbers = n_chunks, programs, limit, eps, grad_scale
            if table.starts_again(("norm", norm_type, "all"), at, n_chunks) and (
                table.starts_again(key, *outputs, None, None, *numbers)
            ):
                increment_version(self._tensors)
                return total
        norms = self.norm(norm_type, "all")
        return self.scale_(norms, Clip(norm_type, eps, limit, grad_scale))[0]

    def _scale_(
        self, norms: Tensor, clip: Clip, dtype: torch.dtype, *, write: bool
    ) -> tuple[Tensor, Tensor]:
        """Norm and coefficient; without `write` no gradient is touched."""
        if clip.of != "all":
            return self._scale_each_(norms, clip, dtype, write=write)
        table, erase = self._table, bool(clip.erase)
        # Less host time than views of one allocation.
        total = torch.empty_strided((), (), dtype=dtype, device=table.device)
        coefficient = torch.empty_strided((), (), dtype=dtype, device=table.device)
        limit, most = split(clip.limit, table.device)
        divisor, scaled = split(clip.grad_scale, table.device)
        n_chunks = table.n_chunks if write else 0
        arguments = (
            *(norms, total, coefficient, limit, divisor),
            *(n_chunks, norms.numel(), most, float(clip.eps), scaled),
        )
        key = "scale", clip.norm_type, dtype, erase, write, *dtypes_of(norms, limit, divisor)
        if not table.starts_again(key, *arguments):
            table.launch(
                key,
                scale.scale_kernel,
                table.programs[OCCUPANCY_3X80] if write else 1,
                OCCUPANCY_3X80,
                arguments,
                DTYPE=launch.TL_DTYPES[table.dtype],
                P=clip.norm_type,
                ERASE=erase,
                CHUNK=CHUNK,
                BLOCK=block_of(table.dtype.itemsize),
                TAIL=TAIL,
            )
        return total, coefficient

    def _scale_each_(
        self, norms: Tensor, clip: Clip, dtype: torch.dtype, *, write: bool
    ) -> tuple[Tensor, Tensor]:
        """The norm of each gradient, and the coefficient of each, or of each row; likewise."""
        table, by_rows = self._table, clip.of == "rows"
        n_coefficients = table.n_units if by_rows else table.n_tensors
        totals = torch.empty(table.n_tensors, dtype=dtype, device=table.device)
        coefficients = torch.empty(n_coefficients, dtype=dtype, device=table.device)
        limit, most = split(clip.limit, table.device)
        divisor, scaled = split(clip.grad_scale, table.device)
        # Whether to write zeros.
        erase = clip.erase.view(torch.uint8) if isinstance(clip.erase, Tensor) else None
        counts = (table.n_tensors, table.n_pieces, table.n_norms) if by_rows else (table.n_chunks,)
        # Each gradient may have its own limit.
        stride = int(limit is not None and limit.dim() == 1)
        arguments = (
            *(norms, totals, coefficients, limit, divisor, erase),
            *(*counts, stride, most, float(clip.eps), scaled),
        )
        key = clip.of, clip.norm_type, dtype, write, *dtypes_of(norms, limit, divisor, erase)
        if table.starts_again(key, *arguments):
            return totals, coefficients
        constants = {"DTYPE": launch.TL_DTYPES[table.dtype], "WRITE": write, "TAIL": TAIL}
        itemsize = table.dtype.itemsize
        if by_rows:
            kernel, programs = units.scale_units_kernel, min(table.n_pieces, table.wave)
            constants |= _LENGTHS | {
                "ROWS": units.ROWS_SCALED,
                "ROW_COLUMNS": units.columns_scaled(itemsize),
                "BLOCK": WARPS * row_columns_of(itemsize),
            }
        else:
            kernel, programs = scale.scale_each_kernel, table.programs[OCCUPANCY_2X128]
            constants |= {"P": clip.norm_type, "CHUNK": CHUNK, "BLOCK": block_of(itemsize)}
        table.launch(key, kernel, programs, OCCUPANCY_2X128, arguments, **constants)
        return totals, coefficients

    def clamp_(self, low: float, high: float, grad_scale: float | Tensor) -> None:
        table = self._table
        divisor, scaled = split(grad_scale, table.device)
        arguments = divisor, table.n_chunks, float(low), float(high), scaled
        key = "clamp", divisor if divisor is None else divisor.dtype
        if not table.starts_again(key, *arguments):
            occupancy = clamp.occupancy_of(table.dtype.itemsize)
            table.launch(
                key,
                clamp.clamp_kernel,
                table.programs[occupancy],
                occupancy,
                arguments,
                DTYPE=launch.TL_DTYPES[table.dtype],
                CHUNK=CHUNK,
                BLOCK=clamp.block_of(table.dtype.itemsize),
                TAIL=TAIL,
            )
        increment_version(self._tensors)


def split(number: float | Tensor, device: torch.device) -> tuple[Tensor | None, float]:
    """A pointer and a float for `scalars.load_number`, one of which stands for the number."""
    if type(number) is float:
        return None, number
    if isinstance(number, Tensor):
        # An upload need not be waited for.
        return number.to(device, non_blocking=number.device.type == "cpu"), 1.0
    return None, float(number)


def dtypes_of(*tensors: Tensor | None) -> list[torch.dtype | None]:
    """Of each tensor; None where there is none."""
    return [None if tensor is None else tensor.dtype for tensor in tensors]
