"""The torch backend on a CPU: the host decides, as in `host_batch`, and operators do the work.

Small gradient lists are packed into scratch by one call, and measured by one more.
"""

import math

import torch
from torch import Tensor

from tritonclip.backends import cpu_norm
from tritonclip.backends.cpu_form import CpuForm
from tritonclip.backends.cpu_scale import multiply_by_tensors_, multiply_each_, multiply_together_
from tritonclip.backends.host_batch import HostBatch
from tritonclip.backends.interface import PartialNorms
from tritonclip.backends.numbers import Numbers, as_tensor
from tritonclip.backends.operators import norm_of, unscale_and_clamp_
from tritonclip.backends.packed import Scratch


class CpuLayout(CpuForm):
    """A form that makes batches."""

    by_address = False

    def bind(self, tensors: list[Tensor], addresses: list[int] | None) -> "CpuBatch":
        """The gradients of a call."""
        return CpuBatch(tensors, self)


class CpuBatch(HostBatch):
    """Verbs by operators; see :class:`tritonclip.backends.interface.Batch`."""

    layout: CpuLayout

    def norm(self, norm_type: float, out: Tensor | None, *, per_gradient: bool) -> PartialNorms:
        """Measures the gradients."""
        measured: PartialNorms | None = None
        layout = self.layout
        if norm_type != 2.0:
            measured = self._as_torch().norm(norm_type, None, per_gradient=per_gradient)
        elif layout.packs:
            try:
                scratch = layout.scratch.pop()
            except IndexError:
                scratch = Scratch(self.tensors, layout.sizes, flat=layout.flat)
            if scratch.is_dotted and not per_gradient:
                torch._foreach_copy_(scratch.slots, self.tensors)
                elements = scratch.elements
                measured = [math.sqrt(torch.dot(elements, elements).item())]
            elif per_gradient:
                measured = scratch.norms(self.tensors)
            elif (norm := scratch.norm(self.tensors)) is not None:
                measured = [norm]
            layout.scratch.append(scratch)
        if measured is None:
            measured = self._two_norm(per_gradient)
        return measured if out is None else out.copy_(as_tensor(measured))

    def _two_norm(self, per_gradient: bool) -> Tensor:
        tensors, layout = self.tensors, self.layout
        if not per_gradient:
            return cpu_norm.two_norm(tensors, layout.sizes, flat=layout.flat)
        if cpu_norm.measures(tensors[0]):
            return cpu_norm.two_norms_of_each(tensors, layout.sizes, flat=layout.flat)
        return torch.stack([norm_of([tensor], 2.0, torch.float64) for tensor in tensors])

    def _multiply_(self, multiplier: float) -> None:
        layout = self.layout
        # In a 0-d tensor: a number would be rounded to a half type first.
        numbers = self._take_numbers(layout.wide)
        numbers.memory[0] = multiplier
        multiply_together_(self.tensors, layout, numbers.first)
        layout.numbers[layout.wide].append(numbers)

    def _multiply_each_(
        self,
        multipliers: list[float],
        coefficients: list[float],
        factors: Numbers,
        least: float,
        scale: float = 1.0,
    ) -> None:
        multiply_each_(self.tensors, self.layout, multipliers, coefficients, factors, least, scale)

    def _multiply_by_tensors_(self, changed: list[int], factors: list[Tensor]) -> None:
        multiply_by_tensors_(self.tensors, self.layout, changed, factors)

    def clamp_(self, low: float, high: float, grad_scale: float | Tensor) -> None:
        """Clamps the gradients, in one pass where they are large."""
        if isinstance(grad_scale, Tensor) or grad_scale != 1:
            unscale_and_clamp_(self.tensors, low, high, grad_scale)
        else:
            self.layout.clamping.clamp_(self.tensors, low, high)
