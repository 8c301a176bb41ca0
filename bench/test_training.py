"""The share of clipping in whole training steps of real models.

A step is forward, backward, clip and AdamW on random data; the clock runs around the clip and
around all of it. Models with equal weights take a step with each clip in turn, in another order in
each round. Both are called as in a training loop, with `model.parameters()`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter_ns
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonclip
from bench.comparison import Effort, hand_over
from tritonclip.samples import Samples, paired, spread

Clip = Callable[..., object]
CLIPS: dict[str, Clip] = {
    "torch": torch.nn.utils.clip_grad_norm_,
    "tritonclip": tritonclip.clip_grad_norm_,
}
# Steps that are not counted, and how much longer than a call a model is measured.
WARM_UP, LONGER = 3, 30


class Residual(nn.Module):
    """Two convolutions of 3 by 3 beside their input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.inner = nn.Sequential(*first, nn.ReLU(), *second)
        self.outer = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Adds the input to what the convolutions make of it."""
        return torch.relu(self.inner(x) + self.outer(x))


class Transformer(nn.Module):
    """Twelve layers over what `first` makes of the input, with learned positions."""

    def __init__(self, first: nn.Module, length: int, width: int, heads: int, outputs: int) -> None:
        super().__init__()
        form = {"activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, **form)  # type: ignore[arg-type]
        self.first, self.positions = first, nn.Parameter(torch.zeros(length, width))
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, outputs, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each vector."""
        vectors = self.first(x)
        # Of the patches of an image: a vector each.
        vectors = vectors.flatten(2).transpose(1, 2) if vectors.dim() == 4 else vectors
        return self.last(self.layers(vectors + self.positions)).flatten(0, 1)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A language model of characters: two layers of LSTM."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.first = nn.Embedding(vocabulary, width)
        self.layers = nn.LSTM(width, width, 2, batch_first=True)
        self.last = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next character."""
        return self.last(self.layers(self.first(tokens))[0]).flatten(0, 1)  # type: ignore[no-any-return]


def dense(*widths: int) -> list[nn.Module]:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = [nn.Linear(i, o) for i, o in pairwise(widths)]
    return [one for layer in layers for one in (layer, nn.ReLU())][:-1]


def lenet5() -> nn.Module:
    """LeNet-5 (LeCun et al. 1998), with ReLU."""
    first = nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*first, *second, *dense(400, 120, 84, 10))


def resnet20() -> nn.Module:
    """ResNet-20 for CIFAR-10 (He et al. 2016)."""
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    blocks = [Residual(i, o) for i, o in pairwise(widths)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def gpt2() -> nn.Module:
    """GPT-2 small (Radford et al. 2019), without its causal mask."""
    model = Transformer(nn.Embedding(50257, 768), 256, 768, 12, 50257)
    model.last[1].weight = model.first.weight
    return model


def vit() -> nn.Module:
    """ViT-Ti/16 (Touvron et al. 2021), without its class token."""
    return Transformer(nn.Conv2d(3, 192, 16, 16), 196, 192, 3, 1000)


# A model, its input, and how many classes and targets it has.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int, int]] = {
    "MLP 784-256-128-10": (
        lambda: nn.Sequential(*dense(784, 256, 128, 10)),
        lambda: torch.randn(64, 784),
        10,
        64,
    ),
    "LeNet-5": (lenet5, lambda: torch.randn(64, 1, 28, 28), 10, 64),
    "ResNet-20": (resnet20, lambda: torch.randn(32, 3, 32, 32), 10, 32),
    "LSTM, 2 x 256": (lambda: Recurrent(96, 256), lambda: torch.randint(96, (16, 64)), 96, 1024),
    "ViT-Ti/16": (vit, lambda: torch.randn(4, 3, 224, 224), 1000, 4 * 196),
    "GPT-2 124M": (gpt2, lambda: torch.randint(50257, (1, 256)), 50257, 256),
}


class Step:
    """Training steps of a model, and the microseconds of each and of its clip."""

    def __init__(self, model: nn.Module, inputs: Tensor, targets: Tensor, clip: Clip) -> None:
        self.model, self.inputs, self.targets, self.clip = model, inputs, targets, clip
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.wholes: list[float] = []
        self.clips: list[float] = []

    def __call__(self) -> None:
        """Takes a step."""
        start = perf_counter_ns()
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(self.inputs), self.targets).backward()
        before = perf_counter_ns()
        self.clip(self.model.parameters(), 1.0)
        after = perf_counter_ns()
        self.optimizer.step()
        self.wholes.append((perf_counter_ns() - start) / 1e3)
        self.clips.append((after - before) / 1e3)


@pytest.fixture(scope="module")
def steps(effort: Effort, model: str) -> dict[str, Step]:
    """Steps of a model with each clip, taken in turn."""
    torch.manual_seed(0)
    make, draw, n_classes, n_targets = MODELS[model]
    first, inputs, targets = make(), draw(), torch.randint(n_classes, (n_targets,))
    made = {clip: Step(copy.deepcopy(first), inputs, targets, CLIPS[clip]) for clip in CLIPS}
    order, begun, n = list(made.values()), perf_counter_ns(), 0
    end = begun + LONGER * effort.seconds * 1e9
    while n < WARM_UP + effort.samples or perf_counter_ns() < end:
        random.Random(n).shuffle(order)
        for step in order:
            step()
        n += 1
    return made


@pytest.mark.parametrize("provider", CLIPS)
@pytest.mark.parametrize("model", MODELS, scope="module")
def test_training(benchmark: Any, steps: dict[str, Step], provider: str) -> None:
    """Time of a step, and its clip's."""
    step = steps[provider]
    wholes, clips = step.wholes[WARM_UP:], step.clips[WARM_UP:]
    share = spread("step_share", paired(clips, wholes))
    n_tensors = len(list(step.model.parameters()))
    benchmark.extra_info |= {"tensors": n_tensors, **spread("clip_us", clips), **share}
    hand_over(benchmark, Samples(wholes, [], 1))
