"""The Triton backend: launches the kernels of `tritonclip.kernels` on lists of gradients.

Imported where the backend is first chosen, because it imports triton.
"""

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tritonclip.backends import native
from tritonclip.backends.interface import Clip
from tritonclip.kernels import clamp, launch, norm, scale
from tritonclip.kernels.access import CHUNK, OCCUPANCY_2X128, OCCUPANCY_3X80, TAIL, block_of
from tritonclip.kernels.tables import KEPT, ChunkTable, ChunkTables

# How a launch of `scale_kernel` is known where limit and loss scale are numbers.
_NUMBERS = False, True, torch.float64, None, None
# Kernels import nothing of tritonclip.
launch.native = native.loops


class TritonLayout:
    """Chunk tables of gradients of one device and dtype that are dense in memory."""

    by_address = True

    def __init__(self, tensors: list[Tensor]) -> None:
        self._sizes = list(map(Tensor.numel, tensors))
        self.dtype = torch.float32
        # Addresses of the tables that are kept.
        self.n_bytes = 8 * KEPT * len(tensors)
        self._tables = ChunkTables(tensors[0].device, tensors[0].dtype, self._sizes)

    def bind(self, tensors: list[Tensor], addresses: list[int] | None) -> "TritonBatch":
        if addresses is None:
            addresses = list(map(Tensor.data_ptr, tensors))
        return TritonBatch(tensors, self._tables.table(addresses), self.dtype)


class TritonBatch:
    """Verbs that launch kernels; see :class:`tritonclip.backends.interface.Batch`."""

    def __init__(self, tensors: list[Tensor], table: ChunkTable, dtype: torch.dtype) -> None:
        self._table, self._dtype = table, dtype
        # The table has their addresses: they have to live until the launches.
        self._tensors = tensors

    def norm(self, norm_type: float, *, per_gradient: bool) -> Tensor:
        """Measures the gradients: one partial norm a chunk, or one a program."""
        table, key = self._table, ("norm", norm_type, per_gradient)
        programs = table.programs[OCCUPANCY_3X80]
        n_norms = table.n_chunks if per_gradient else programs
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
                EACH=per_gradient,
                CHUNK=CHUNK,
                BLOCK=norm.block_of(table.dtype.itemsize, norm_type),
            )
        return norms

    def total(self, norms: Tensor, norm_type: float, grad_scale: float | Tensor) -> Tensor:
        return self._scale_(norms, Clip(norm_type, 0.0, 0.0, grad_scale), write=False)[0]

    def total_each(self, norms: Tensor, norm_type: float, grad_scale: float | Tensor) -> Tensor:
        return self._scale_each_(norms, Clip(norm_type, 0.0, 0.0, grad_scale), write=False)[0]

    def norms_each(self, norms: Tensor, norm_type: float) -> Tensor:
        wide = TritonBatch(self._tensors, self._table, torch.float64)
        return wide.total_each(norms, norm_type, 1.0)

    def partials_each(self, norms: Tensor, norm_type: float) -> Tensor:
        """The norm of each gradient as that of its first chunk, and nothing in the others."""
        table = self._table
        partials = norms.new_zeros(table.n_chunks)
        return partials.index_copy_(0, table.arguments[2], norms)

    def scale_(self, norms: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
        result = self._scale_(norms, clip, write=True)
        # Kernels write through addresses, which autograd does not see.
        increment_version(self._tensors)
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
            if table.starts_again(("norm", norm_type, False), at, n_chunks) and (
                table.starts_again(key, *outputs, None, None, *numbers)
            ):
                increment_version(self._tensors)
                return total
        norms = self.norm(norm_type, per_gradient=False)
        return self.scale_(norms, Clip(norm_type, eps, limit, grad_scale))[0]

    def scale_each_(self, norms: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
        results = self._scale_each_(norms, clip, write=True)
        increment_version(self._tensors)
        return results

    def _scale_(self, norms: Tensor, clip: Clip, *, write: bool) -> tuple[Tensor, Tensor]:
        """Norm and coefficient; without `write` no gradient is touched."""
        table, dtype, erase = self._table, self._dtype, bool(clip.erase)
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

    def _scale_each_(self, norms: Tensor, clip: Clip, *, write: bool) -> tuple[Tensor, Tensor]:
        """Norms and coefficients, likewise."""
        table, dtype = self._table, self._dtype
        totals = torch.empty(table.n_tensors, dtype=dtype, device=table.device)
        coefficients = torch.empty(table.n_tensors, dtype=dtype, device=table.device)
        limit, most = split(clip.limit, table.device)
        divisor, scaled = split(clip.grad_scale, table.device)
        erase = flag_of(clip)
        arguments = (
            *(norms, totals, coefficients, limit, divisor, erase),
            *(table.n_chunks, stride_of(limit), most, float(clip.eps), scaled),
        )
        key = "each", clip.norm_type, dtype, write, *dtypes_of(norms, limit, divisor, erase)
        if not table.starts_again(key, *arguments):
            table.launch(
                key,
                scale.scale_each_kernel,
                table.programs[OCCUPANCY_2X128],
                OCCUPANCY_2X128,
                arguments,
                DTYPE=launch.TL_DTYPES[table.dtype],
                P=clip.norm_type,
                WRITE=write,
                CHUNK=CHUNK,
                BLOCK=block_of(table.dtype.itemsize),
                TAIL=TAIL,
            )
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


def flag_of(clip: Clip) -> Tensor | None:
    """Whether to write zeros, for kernels that have a coefficient for each gradient or unit."""
    return clip.erase.view(torch.uint8) if isinstance(clip.erase, Tensor) else None


def stride_of(limit: Tensor | None) -> int:
    """1 where each gradient has its own limit."""
    return int(limit is not None and limit.dim() == 1)


def dtypes_of(*tensors: Tensor | None) -> list[torch.dtype | None]:
    """Of each tensor; None where there is none."""
    return [None if tensor is None else tensor.dtype for tensor in tensors]
