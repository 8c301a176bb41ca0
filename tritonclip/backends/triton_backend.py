"""The Triton backend: launches of `tritonclip.kernels`.

Imported where the backend is first chosen, because it imports triton.
"""

import torch
from torch import Tensor

from tritonclip.kernels import clamp, norm, scale
from tritonclip.kernels.chunk_table import ChunkTable, ChunkTables
from tritonclip.rules import Rule


class TritonLayout:
    """Chunk tables of contiguous gradients.

    Args:
        tensors: gradients of one device and dtype; at least one.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        sizes = list(map(Tensor.numel, tensors))
        self.dtype = torch.float32
        self.n_bytes = 0
        self._tables = ChunkTables(tensors[0].device, tensors[0].dtype, sizes)

    def bind(self, tensors: list[Tensor], addresses: list[int] | None) -> "TritonBatch":
        """The gradients of a call, with a table of their addresses on the device."""
        if addresses is None:
            addresses = list(map(Tensor.data_ptr, tensors))
        return TritonBatch(tensors, self._tables.table(addresses), self.dtype)


class TritonBatch:
    """Verbs that launch one kernel each; see :class:`tritonclip.backends.batch.Batch`."""

    # Kernels write through addresses, which autograd does not see.
    counts_versions = False

    def __init__(self, tensors: list[Tensor], table: ChunkTable, dtype: torch.dtype) -> None:
        self._table, self._dtype = table, dtype
        # The table has their addresses: they have to live until the launches.
        self._tensors = tensors

    def count_norms(self, *, per_gradient: bool) -> int:
        """How many partial norms `norm` gives: one a chunk, or one a program."""
        return norm.count_norms(self._table, per_gradient=per_gradient)

    def norm(self, norm_type: float, out: Tensor | None, *, per_gradient: bool) -> Tensor:
        """Measures the gradients."""
        return norm.norm(self._table, norm_type, out, per_gradient=per_gradient)

    def total(self, norms: Tensor, norm_type: float, grad_scale: float | Tensor) -> Tensor:
        """The norm from partial norms, 0-d."""
        return scale.scale_(
            self._table,
            norms,
            max_norm=0.0,
            norm_type=norm_type,
            eps=0.0,
            dtype=self._dtype,
            grad_scale=grad_scale,
            erase_nonfinite=False,
            write=False,
        )[0]

    def total_each(
        self, norms: Tensor, first: int, norm_type: float, grad_scale: float | Tensor
    ) -> Tensor:
        """The norm of each gradient, 1-d."""
        return scale.scale_each_(
            self._table,
            norms,
            first,
            max_norm=0.0,
            norm_type=norm_type,
            eps=0.0,
            dtype=self._dtype,
            grad_scale=grad_scale,
            erase=None,
            write=False,
        )[0]

    def norms_each(self, norms: Tensor, norm_type: float) -> Tensor:
        """The norm of each gradient, float64[n]."""
        return scale.scale_each_(
            self._table,
            norms,
            0,
            max_norm=0.0,
            norm_type=norm_type,
            eps=0.0,
            dtype=torch.float64,
            grad_scale=1.0,
            erase=None,
            write=False,
        )[0]

    def partials_each(self, norms: Tensor, norm_type: float) -> Tensor:
        """The norm of each gradient as that of its first chunk, and nothing in the others."""
        table, nothing = self._table, float("inf") if norm_type == -float("inf") else 0.0
        partials = norms.new_full((table.n_chunks,), nothing)
        return partials.index_copy_(0, table.arguments[2], norms)

    def scale_(
        self,
        norms: Tensor,
        rule: Rule,
        max_norm: float | Tensor,
        grad_scale: float | Tensor,
        *,
        erase_nonfinite: bool,
    ) -> tuple[Tensor, Tensor]:
        """Multiplies all gradients by one coefficient."""
        return scale.scale_(
            self._table,
            norms,
            max_norm=max_norm,
            norm_type=rule.norm_type,
            eps=rule.eps,
            dtype=self._dtype,
            grad_scale=grad_scale,
            erase_nonfinite=erase_nonfinite,
        )

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
        """Multiplies each gradient by the coefficient of its norm."""
        return scale.scale_each_(
            self._table,
            norms,
            first,
            max_norm=max_norm,
            norm_type=rule.norm_type,
            eps=rule.eps,
            dtype=self._dtype,
            grad_scale=grad_scale,
            erase=erase,
        )

    def clamp_(self, low: float, high: float, grad_scale: float | Tensor) -> None:
        """Clamps the gradients."""
        clamp.clamp_(self._table, low, high, grad_scale)
