"""Clipping by unit in the C loops, on a CPU: one call measures a list, and one writes it."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tritonclip.backends.interface import Clip
from tritonclip.backends.native import CODES, is_extreme, loops, may_share
from tritonclip.backends.units import (
    TorchUnitLayout,
    TorchUnits,
    has_dense_units,
    unit_norms,
)

_DOUBLE = CODES[torch.float64]


class _Form(NamedTuple):
    """Units as the loops take those of a list of tensors."""

    # Packed, the reals in a unit of each tensor.
    lengths: bytes
    # Of the dtype.
    code: int
    # Packed, the units of each tensor.
    rows: bytes


class NativeUnitLayout(TorchUnitLayout):
    """The units of each gradient and of its weights, as the loops take them.

    Both are of one dtype that has loops, on a CPU.
    """

    def __init__(self, grads: list[Tensor], weights: list[Tensor], dtype: torch.dtype) -> None:
        super().__init__(grads, dtype, on_host=True)
        self.is_alike = weights[0].dtype == grads[0].dtype
        self.is_shared = may_share(2 * [grad.numel() for grad in grads])
        self.grads, self.weights = self._form_of(grads), self._form_of(weights)
        self.both = _Form(self.grads.lengths * 2, self.grads.code, self.grads.rows * 2)
        # Of gradients, then of weights.
        self.with_gaps = [
            i for i, tensor in enumerate([*grads, *weights]) if not has_dense_units(tensor)
        ]
        # Where the partial norms of each gradient begin, in bytes.
        self.starts = [8 * (end - n) for end, n in zip(self.ends, self.counts, strict=True)]

    def _form_of(self, tensors: list[Tensor]) -> _Form:
        reals = 2 if tensors[0].is_complex() else 1
        counted = zip(tensors, self.counts, strict=True)
        lengths = array("q", [reals * tensor.numel() // n for tensor, n in counted])
        code = CODES[tensors[0].dtype.to_real()]
        return _Form(lengths.tobytes(), code, array("q", self.counts).tobytes())

    def bind(
        self, grads: list[Tensor], weights: list[Tensor], addresses: list[int]
    ) -> "NativeUnits":
        # The loops leave out what has no address.
        for i in self.with_gaps:
            addresses[i] = 0
        return NativeUnits(grads, weights, addresses, self)


class NativeUnits(TorchUnits):
    """Verbs by addresses: one call measures all units, one multiplies them.

    Operators serve units with gaps and extreme norms. Versions count before a write.
    """

    layout: NativeUnitLayout

    def __init__(
        self,
        grads: list[Tensor],
        weights: list[Tensor],
        addresses: list[int],
        layout: NativeUnitLayout,
    ) -> None:
        super().__init__(grads, weights, layout)
        self._addresses, self._at = addresses, addresses[: len(grads)]
        self._threads = torch.get_num_threads() if layout.is_shared else 1

    def measure(self) -> Tensor:
        layout, at = self.layout, self._addresses
        norms = torch.empty(2, layout.n_units, dtype=torch.float64, device="cpu")
        if layout.is_alike:
            self._measure([*self.grads, *self.weights], at, layout.both, norms)
        else:
            self._measure(self.grads, self._at, layout.grads, norms[:1])
            self._measure(self.weights, at[len(self._at) :], layout.weights, norms[1:])
        return norms

    def norms_of_units(self) -> Sequence[Tensor]:
        norms = torch.empty(1, self.layout.n_units, dtype=torch.float64, device="cpu")
        self._measure(self.grads, self._at, self.layout.grads, norms)
        of_units: Sequence[Tensor] = norms[0].split(self.layout.counts)
        return of_units

    def _measure(
        self, tensors: Sequence[Tensor], at: list[int], memory: _Form, norms: Tensor
    ) -> None:
        """Writes the norm of each unit of some tensors."""
        lengths, code, rows = memory
        for i in loops.unit_norms(at, lengths, code, self._threads, rows, norms.data_ptr()):
            part = norms.view(-1).split(self.layout.counts * len(norms))[i]
            part.copy_(unit_norms(tensors[i]))

    def total_each(self, norms: Tensor, norm_type: float, grad_scale: float | Tensor) -> Tensor:
        totals, scale = self._totals(norms), float(grad_scale)
        if totals is None:
            return super().total_each(norms, norm_type, grad_scale)
        code = "d" if self.dtype == torch.float64 else "f"
        return torch.frombuffer(array(code, [total / scale for total in totals]), dtype=self.dtype)

    def norms_each(self, norms: Tensor) -> Tensor:
        totals = self._totals(norms)
        if totals is None:
            return super().norms_each(norms)
        return torch.frombuffer(array("d", totals), dtype=torch.float64)

    def _totals(self, norms: Tensor) -> list[float] | None:
        """As `norms_each`, or None where squares may leave the range."""
        layout, first = self.layout, norms.data_ptr()
        at = [first + start for start in layout.starts]
        totals: list[float] = loops.norms(at, layout.grads.rows, _DOUBLE, 1, 2.0)
        is_double = _DOUBLE in (layout.grads.code, layout.weights.code)
        return None if is_double and any(map(is_extreme, totals)) else totals

    def scale_each_(self, norms: Tensor, clip: Clip) -> tuple[Tensor, float | Tensor]:
        norm = self.total_each(norms, 2.0, clip.grad_scale)
        if isinstance(clip.erase, Tensor) and bool(clip.erase):
            # Not by torch._foreach_zero_, which refuses conjugate views.
            for grad in self.grads:
                grad.zero_()
            return norm, 0.0
        limit = clip.limit.tolist() if isinstance(clip.limit, Tensor) else clip.limit
        lengths, code, rows = self.layout.grads
        scale, wide = float(clip.grad_scale), self.dtype == torch.float64
        factors, changed, least = loops.unit_factors(
            norms.data_ptr(), rows, limit, clip.eps, scale, wide, code
        )
        if changed:
            increment_version([self.grads[i] for i in changed if self._at[i]])
            loops.multiply_units_(self._at, lengths, code, self._threads, rows, factors)
            with_gaps = [i for i in changed if not self._at[i]]
            if with_gaps:
                numbers = torch.frombuffer(bytearray(factors), dtype=torch.float64)
                self._multiply_(with_gaps, numbers if code == _DOUBLE else numbers.float(), None)
        return norm, least
