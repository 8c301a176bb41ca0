"""Searches of a limit by `find_max_norm` on a linear model and batches with outliers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import tritonclip
from tritonclip.advice import finder


def draw(n: int = 40, corrupt: float = 1000.0) -> list[torch.Tensor]:
    """Batches, of which every tenth is far too large."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(8, 4, generator=generator) for _ in range(n)]
    for i in range(5, n, 10):
        batches[i] *= corrupt
    return batches


def loss(model: nn.Module, x: torch.Tensor) -> Any:
    return (model(x) - x[:, :1]).square().mean()


def make(lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr)


def find(make: Any = make, batches: Any = None, **options: Any) -> finder.Found:
    options = {"steps": 40, "loss": loss, **options}
    return tritonclip.find_max_norm(make, draw() if batches is None else batches, **options)
