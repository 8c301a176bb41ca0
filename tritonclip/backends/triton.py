"""The Triton backend: launches the kernels of `tritonclip.kernels` on lists of gradients.

Imported where the backend is first chosen, because it imports triton.
"""

import math
from collections.abc import Hashable, Sequence
from struct import Struct

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tritonclip.backends import native
from tritonclip.backends.interface import Clip
from tritonclip.kernels import adaptive, clamp, launch, norm, scale
from tritonclip.kernels.access import CHUNK, OCCUPANCY_2X128, OCCUPANCY_3X80, TAIL, block_of
from tritonclip.kernels.tables import ChunkTable, ChunkTables

_FLOATS, _INTEGERS = Struct("<3d"), Struct("<3q")
_NO_POINTERS = None, None, None
# Kernels import nothing of tritonclip.
launch.native = native.loops


class TritonLayout:
    """Chunk tables of gradients that are dense in memory.

    Args:
        tensors: gradients of one device and dtype; at least one.
    """

    by_address = True

    def __init__(self, tensors: list[Tensor]) -> None:
        self._sizes = list(map(Tensor.numel, tensors))
        self.dtype = torch.float32
        self.n_bytes = 0
        self._tables = ChunkTables(tensors[0].device, tensors[0].dtype, self._sizes)

    def bind(self, tensors: list[Tensor], addresses: list[int] | None) -> "TritonBatch":
        """The gradients of a call, with a table of their addresses on the device."""
        if addresses is None:
            addresses = list(map(Tensor.data_ptr, tensors))
        return TritonBatch(tensors, self._tables.table(addresses), self.dtype)


class TritonBatch:
    """Verbs that launch one kernel each; see :class:`tritonclip.backends.interface.Batch`.

    Args:
        tensors: gradients of one device and dtype.
        table: theirs.
        dtype: of results, float32 or float64.
    """

    on_host = False

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
        """The norm from partial norms, 0-d."""
        return self._scale_(norms, Clip(norm_type, 0.0, 0.0, grad_scale), write=False)[0]

    def total_each(self, norms: Tensor, norm_type: float, grad_scale: float | Tensor) -> Tensor:
        """The norm of each gradient, 1-d."""
        return self._scale_each_(norms, Clip(norm_type, 0.0, 0.0, grad_scale), write=False)[0]

    def norms_each(self, norms: Tensor, norm_type: float) -> Tensor:
        """The norm of each gradient, float64[n]."""
        wide = TritonBatch(self._tensors, self._table, torch.float64)
        return wide.total_each(norms, norm_type, 1.0)

    def partials_each(self, norms: Tensor, norm_type: float) -> Tensor:
        """The norm of each gradient as that of its first chunk, and nothing in the others."""
        table, nothing = self._table, math.inf if norm_type == -math.inf else 0.0
        partials = norms.new_full((table.n_chunks,), nothing)
        return partials.index_copy_(0, table.arguments[2], norms)

    def scale_(self, norms: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
        """Multiplies all gradients by one coefficient."""
        result = self._scale_(norms, clip, write=True)
        # Kernels write through addresses, which autograd does not see.
        increment_version(self._tensors)
        return result

    def clip_(
        self, norm_type: float, eps: float, limit: float, grad_scale: float | Tensor
    ) -> Tensor:
        """Measures all gradients and multiplies them by one coefficient."""
        table, dtype, key = self._table, self._dtype, ("clip", norm_type, self._dtype)
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
        """Multiplies each gradient by the coefficient of its norm."""
        results = self._scale_each_(norms, clip, write=True)
        increment_version(self._tensors)
        return results

    def _scale_(self, norms: Tensor, clip: Clip, *, write: bool) -> tuple[Tensor, Tensor]:
        """Norm and coefficient; without `write` no gradient is touched."""
        table, dtype = self._table, self._dtype
        # Less host time than views of one allocation.
        total = torch.empty_strided((), (), dtype=dtype, device=table.device)
        coefficient = torch.empty_strided((), (), dtype=dtype, device=table.device)
        (limit, _, divisor), bits = pack_scalars(
            clip.limit, clip.eps, clip.grad_scale, table.device
        )
        erase, n_chunks = bool(clip.erase), table.n_chunks if write else 0
        key: Hashable = clip.norm_type, erase, write, dtype, *_dtypes(norms, limit, divisor)
        if key == (clip.norm_type, False, True, dtype, torch.float64, None, None):
            key = "clip", clip.norm_type, dtype
        arguments = norms, total, coefficient, limit, divisor, n_chunks, norms.numel(), *bits
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
        (limit, _, divisor), bits = pack_scalars(
            clip.limit, clip.eps, clip.grad_scale, table.device
        )
        erase = clip.erase.view(torch.uint8) if isinstance(clip.erase, Tensor) else None
        stride = int(limit is not None and limit.dim() == 1)
        key = ("each", clip.norm_type, write, dtype, *_dtypes(norms, limit, divisor, erase))
        arguments = (
            *(norms, totals, coefficients, limit, divisor, erase),
            *(table.n_chunks, stride, *bits),
        )
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
        """Clamps the gradients."""
        table, known = self._table, type(low) is type(high) is type(grad_scale) is float
        if known and table.starts_again("clamp", None, table.n_chunks, low, high, grad_scale):
            increment_version(self._tensors)
            return
        (_, _, divisor), bits = pack_scalars(low, high, grad_scale, table.device)
        key = "clamp" if divisor is None else ("clamp", divisor.dtype)
        arguments = divisor, table.n_chunks, *bits
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


def _dtypes(*tensors: Tensor | None) -> list[torch.dtype | None]:
    """Of each tensor; None where there is none."""
    return [None if tensor is None else tensor.dtype for tensor in tensors]


def advance(
    rule: str,
    numbers: Sequence[float],
    values: Tensor,
    after: Tensor,
    norms: Tensor,
    dtype: torch.dtype,
    norm_type: float,
    grad_scale: float | Tensor,
) -> Tensor:
    """Advances the state of a rule by one norm, in one launch.

    Args:
        rule: its name in `kernels.adaptive`.
        numbers: three of the rule, and its largest limit.
        values: the state, float64, 1-d.
        after: for the state after; may be `values`.
        norms: partial norms, float32 or float64.
        dtype: of the norm's result, to which it is rounded.
        norm_type: p of the p-norm.
        grad_scale: the loss scale that partial norms still carry.

    Returns:
        The limit, float64, 0-d.
    """
    limit = torch.empty((), dtype=torch.float64, device=values.device)
    a, b, c, max_norm = numbers
    (_, _, divisor), bits = pack_scalars(max_norm, a, grad_scale, values.device)
    launch.launch(
        adaptive.advance_kernel,
        values.device,
        1,
        OCCUPANCY_2X128,
        (
            norms,
            values,
            after,
            limit,
            divisor,
            norms.numel(),
            values.numel() - 1,
            *bits,
            *_INTEGERS.unpack(_FLOATS.pack(b, c, 0.0))[:2],
        ),
        RULE=rule,
        P=norm_type,
        DTYPE=launch.TL_DTYPES[dtype],
        BLOCK=adaptive.BLOCK,
    )
    return limit


def advance_each(
    numbers: Sequence[float], values: Tensor, after: Tensor, rows: Tensor | None, norms: Tensor
) -> Tensor:
    """Advances one row of a state for each norm, in one launch.

    Args:
        numbers: three of the rule, and its largest limit.
        values: the state, float64[any, 2].
        after: for the state after; may be `values`. Other rows than these are not written.
        rows: of the norms, int64; None for all in order.
        norms: float32 or float64, 1-d.

    Returns:
        The limits, float64, 1-d.
    """
    limits = torch.empty(norms.numel(), dtype=torch.float64, device=values.device)
    ratio, decay, warmup, max_norm = numbers
    launch.launch(
        adaptive.advance_each_kernel,
        values.device,
        1,
        OCCUPANCY_2X128,
        (
            norms,
            rows,
            values,
            after,
            limits,
            norms.numel(),
            *_INTEGERS.unpack(_FLOATS.pack(max_norm, ratio, decay)),
            _INTEGERS.unpack(_FLOATS.pack(warmup, 0.0, 0.0))[0],
        ),
        BLOCK=adaptive.BLOCK,
    )
    return limits


def pack_scalars(
    a: float | Tensor, b: float | Tensor, c: float | Tensor, device: torch.device
) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """Pointers and bits for `scalars.load_number`, one of which stands for each number.

    Args:
        a: a number, or a floating-point tensor on any device; so are b and c.
        b: the second.
        c: the third.
        device: of the launch.
    """
    if type(a) is type(b) is type(c) is float:
        return _NO_POINTERS, _INTEGERS.unpack(_FLOATS.pack(a, b, c))
    numbers = [a, b, c]
    pointers: list[Tensor | None] = [None, None, None]
    for i, number in enumerate(numbers):
        if isinstance(number, Tensor):
            # An upload need not be waited for.
            pointers[i] = number.to(device, non_blocking=number.device.type == "cpu")
            numbers[i] = 1.0
    return tuple(pointers), _INTEGERS.unpack(_FLOATS.pack(*numbers))
