"""Parameters with random gradients, and the check that these are views of flat buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from helpers.cases import grad_of, of_sizes, parameters
from tritonclip import FlatGradients

# Sizes that are multiples of 16 bytes for no dtype, for some and for all; an empty one.
SHAPES = ((5, 7), (8, 4), (3,), (0, 2), (16, 16), (), (2, 3, 5), (4099,))


def parameters_of(
    shapes: Any = SHAPES, dtype: torch.dtype = torch.float32, device: Any = "cpu"
) -> list[Tensor]:
    return parameters(of_sizes(shapes, dtype, device))


def grads_of(params: list[Tensor]) -> list[Tensor]:
    return [grad_of(p) for p in params]


def mixed(device: Any) -> list[Tensor]:
    """Gradients of three dtypes in turn."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    return [
        param
        for seed, shape in enumerate(SHAPES)
        for param in parameters_of([shape], dtypes[seed % 3], device)
    ]


def assert_views(flat: FlatGradients, params: list[Tensor]) -> None:
    """Every gradient lies in a buffer, none over another, and nothing lies between them."""
    spans = []
    for param in params:
        grad = grad_of(param)
        assert (grad.shape, grad.dtype, grad.device) == (param.shape, param.dtype, param.device)
        (buffer,) = [b for b in flat.buffers if (b.dtype, b.device) == (grad.dtype, grad.device)]
        if grad.numel():
            start = grad.data_ptr() - buffer.data_ptr()
            spans.append((buffer.data_ptr(), start, start + grad.numel() * grad.element_size()))
    spans.sort()
    ends: dict[int, int] = {}
    for base, start, end in spans:
        assert start == ends.get(base, 0)
        ends[base] = end
    sizes = {b.data_ptr(): b.numel() * b.element_size() for b in flat.buffers}
    assert ends == sizes


def backward(params: list[Tensor]) -> None:
    """Adds 1 to the gradients of parameters that are 0."""
    torch.stack([(p * p.detach().add(1)).sum() for p in params]).sum().backward()


GONE = r"is no longer a view of FlatGradients: .*Call flat\.attach_\(\)"
