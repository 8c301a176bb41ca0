"""Searches of a limit by `find_max_norm` on a linear model and batches with outliers."""

import itertools
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn

import tritonclip
from tritonclip.advice import finder


def draw(n: int = 40, corrupt: float = 1000.0, seed: int = 0) -> list[torch.Tensor]:
    """Batches, of which every tenth is far too large."""
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(8, 4, generator=generator) for _ in range(n)]
    for i in range(5, n, 10):
        batches[i] *= corrupt
    return batches


def loss(model: nn.Module, x: torch.Tensor) -> Any:
    return (model(x) - x[:, :1]).square().mean()


def make(lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr)


def training(make: Any = make, batches: Any = None, loss: Any = loss) -> Callable[[Any], Any]:
    """A `train` that goes through batches again and again; each seed begins at another one."""
    given = draw() if batches is None else batches

    def train(clip: Any) -> Generator[Any, None, None]:
        model, optimizer = make()
        first = torch.initial_seed() % len(given)
        for batch in itertools.cycle([*given[first:], *given[:first]]):
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            clip(model.parameters())
            optimizer.step()
            yield value

    return train


def find(train: Any = None, **options: Any) -> finder.Found:
    return tritonclip.find_max_norm(train or training(), **{"steps": 40, **options})
