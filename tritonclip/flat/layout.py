"""How FlatGradients lays gradients out in its buffers, and which parameters it can hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonclip.engine.arguments import PLAIN, needs_clip
from tritonclip.engine.memory import flat_size
from tritonclip.modes import outside_inference

# Bytes that one vector access reads: torch's fused optimizers and our kernels want gradients to
# start at a multiple.
_VECTOR = 16


@dataclass(frozen=True, slots=True)
class Slot:
    """The part of a buffer that one parameter's gradient takes: buffer, first element, layout."""

    label: str
    buffer: int
    offset: int
    n_elements: int
    shape: torch.Size
    stride: tuple[int, ...]


class Views(Sequence[Tensor]):
    """The gradients, each a view of a buffer that is made when it is read."""

    def __init__(self, buffers: tuple[Tensor, ...], slots: Sequence[Slot]) -> None:
        self.buffers, self.slots = buffers, slots

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, at: Any) -> Any:
        slot = self.slots[at]
        return self.buffers[slot.buffer].as_strided(slot.shape, slot.stride, slot.offset)

    def flat(self) -> list[Tensor]:
        """The gradients as 1-d slices of the buffers."""
        return [self.buffers[s.buffer][s.offset : s.offset + s.n_elements] for s in self.slots]


def refuse(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuses parameters and gradients that no buffer can hold."""
    for label, parameter in named:
        if not parameter.is_leaf:
            raise ValueError(
                f"{label} is computed from other tensors and never gets a gradient; expected leaves"
            )
        grad = parameter.grad
        for noun, tensor in ((label, parameter), (f"the gradient of {label}", grad)):
            if tensor is None:
                continue
            if type(tensor) not in PLAIN:
                raise TypeError(f"{noun} is a {type(tensor).__name__}; expected a plain tensor")
            if tensor.layout != torch.strided:
                raise TypeError(
                    f"{noun} has layout {tensor.layout}; expected strided: FlatGradients holds "
                    "dense gradients only"
                )
        if getattr(parameter, "grad_dtype", None) not in (None, parameter.dtype):
            raise TypeError(f"{label} has another grad_dtype; expected {parameter.dtype}")
        if grad is not None and grad.shape != parameter.shape:
            raise ValueError(
                f"the gradient of {label} has shape {tuple(grad.shape)}; expected that of the "
                f"parameter, {tuple(parameter.shape)}"
            )
        if grad is not None and (grad.dtype, grad.device) != (parameter.dtype, parameter.device):
            raise TypeError(
                f"the gradient of {label} is {grad.dtype} on {grad.device}; expected that of the "
                f"parameter, {parameter.dtype} on {parameter.device}"
            )


def lay_out(named: Sequence[tuple[str, Tensor]]) -> Views:
    """Views of new buffers of zeros, one for each parameter."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, (_, parameter) in enumerate(named):
        kinds.setdefault((parameter.device, parameter.dtype), []).append(position)
    buffers: list[Tensor] = []
    slots: dict[int, Slot] = {}
    for (device, dtype), members in kinds.items():
        offset = 0
        sizes = {i: named[i][1].numel() * named[i][1].element_size() for i in members}
        for position in sorted(members, key=lambda i: sizes[i] % _VECTOR != 0):
            label, parameter = named[position]
            stride = parameter.stride()
            # As autograd lays out gradients: as the parameter, where that is dense.
            if flat_size(parameter) is None:
                stride = torch.empty(parameter.shape, device="meta").stride()
            n, shape = parameter.numel(), parameter.shape
            slots[position] = Slot(label, len(buffers), offset, n, shape, stride)
            offset += n
        # Never inference tensors, which no backward could add to.
        buffers.append(outside_inference(torch.zeros)(offset, dtype=dtype, device=device))
    return Views(tuple(buffers), [slots[position] for position in range(len(named))])


def is_wanted(parameter: Tensor) -> bool:
    """Whether a parameter's gradient is to be held."""
    return parameter.requires_grad and needs_clip(parameter)


def is_same(grad: Tensor | None, view: Tensor) -> bool:
    """Whether a gradient is that view's memory, seen in the same way."""
    return (
        grad is not None
        and type(grad) in PLAIN
        and grad.layout == torch.strided
        and grad.data_ptr() == view.data_ptr()
        and (grad.dtype, grad.device, grad.shape, grad.stride())
        == (view.dtype, view.device, view.shape, view.stride())
    )
