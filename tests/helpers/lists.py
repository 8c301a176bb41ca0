"""Lists of plain tensors for functions out of place."""

import torch
from torch import Tensor

from helpers.cases import normal


def make(dtype: torch.dtype) -> list[Tensor]:
    shapes = ((40,), (), (0,), (3, 70), (1,))
    return [normal(shape, dtype, seed=seed) for seed, shape in enumerate(shapes)]


def transposed(dtype: torch.dtype) -> list[Tensor]:
    """Two are dense in other orders of their dimensions."""
    channels_last = normal((2, 3, 4, 5), dtype, seed=9).to(memory_format=torch.channels_last)
    return [*make(dtype), normal((6, 5), dtype, seed=8).t(), channels_last]


def mixed(dtype: torch.dtype) -> list[Tensor]:
    """Several dtypes, of which float16 comes last and first again."""
    dtypes = (torch.float16, dtype, torch.bfloat16, torch.float32, torch.float16)
    return [x.to(kind) for x, kind in zip(make(torch.float32), dtypes, strict=True)]
