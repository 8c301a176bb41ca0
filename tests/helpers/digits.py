"""A small real task for tests of training loops: handwritten digits, and a loop written by hand."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import tritonclip

Batch = Sequence[Tensor]
BATCHES = 12
# Clips every step, and would clip the sum of two out of four micro-batches, if it looked at it.
MAX_NORM = 0.2


def loader(batch_size: int = 32) -> DataLoader[tuple[Tensor, ...]]:
    """12 batches of 32 images, in the same order every time."""
    digits = load_digits()
    count = BATCHES * 32
    images = torch.tensor(digits.data[:count] / 8 - 1, dtype=torch.float32)
    labels = torch.tensor(digits.target[:count], dtype=torch.int64)
    return DataLoader(TensorDataset(images, labels), batch_size)


def network() -> torch.nn.Sequential:
    """The same weights every time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10, bias=False)
    )


def loss_of(model: torch.nn.Module, batch: Batch) -> Tensor:
    """The mean cross entropy of a batch."""
    images, labels = batch
    return torch.nn.functional.cross_entropy(model(images), labels)


def sgd(model: torch.nn.Module, fused: bool = False) -> torch.optim.SGD:
    """An optimizer to which the length of a gradient matters."""
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, fused=fused)


def train_by_hand(
    model: torch.nn.Module,
    batches: Iterable[Batch],
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> list[float]:
    """The loop that trainers must equal, without the wrapper; returns norms before clipping.

    Steps that overflow have no norm.
    """
    optimizer = sgd(model)
    context = torch.autocast("cpu", autocast, cache_enabled=False) if autocast else nullcontext()
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    norms = []
    for number, batch in enumerate(batches, 1):
        with context:
            loss = loss_of(model, batch)
        scaler.scale(loss / accumulate).backward()
        if number % accumulate == 0:
            scaler.unscale_(optimizer)
            norm = tritonclip.clip_(model.parameters(), MAX_NORM)
            assert norm is not None
            norms += [norm.item()] if norm.isfinite() else []
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert max(norms) > MAX_NORM
    return norms
