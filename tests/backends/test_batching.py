"""Tensors in pieces: every element comes once, whatever the strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tritonclip.backends.operators import split_flat

GRID = torch.arange(120.0).view(10, 12)
TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda grid: grid,
    "columns": lambda grid: grid[:, :4],
    "transposed": lambda grid: grid.t(),
    "one-row": lambda grid: grid[:1, ::3],
    "row-of-rows": lambda grid: grid.view(1, 10, 12)[:, :, ::2],
    "gaps": lambda grid: grid.view(-1)[::2],
    "number": lambda grid: grid[3, 4],
    "nothing": lambda grid: grid[:0, ::2],
}


@pytest.mark.parametrize("writable", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("size", [1, 3, 4, 40, 60, 119, 120, 121])
@pytest.mark.parametrize("name", TENSORS)
def test_split_flat_yields_every_element_once(name, size, writable):
    tensor = TENSORS[name](GRID)
    pieces = list(split_flat(tensor, size, writable=writable))
    assert all(piece.numel() <= size for piece in pieces)
    elements = [number for piece in pieces for number in piece.flatten().tolist()]
    assert sorted(elements) == sorted(tensor.flatten().tolist())


@pytest.mark.parametrize("name", TENSORS)
def test_split_flat_for_writing_yields_views(name):
    tensor = TENSORS[name](GRID.clone())
    for piece in split_flat(tensor, 4, writable=True):
        piece.fill_(-1.0)
    assert bool((tensor == -1.0).all())
