"""Models that benchmarks train: public architectures, and layers for small networks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn


def dense(*widths: int, between: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with a nonlinearity between them."""
    layers = [one for i, o in pairwise(widths) for one in (nn.Linear(i, o), between())]
    return nn.Sequential(*layers[:-1])


class Recurrent(nn.Module):
    """A recurrent layer with scores from its last state or, with `each`, from all states."""

    def __init__(self, layer: nn.Module, width: int, outputs: int, *, each: bool) -> None:
        super().__init__()
        self.layer, self.scores, self.each = layer, nn.Linear(width, outputs), each

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a sequence, or of each of its elements."""
        states = self.layer(x)[0]
        return self.scores(states if self.each else states[:, -1])  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Twelve encoder layers on vectors that `first` makes of the input, with learned positions."""

    def __init__(self, first: nn.Module, length: int, width: int, heads: int, outputs: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.first, self.positions = first, nn.Parameter(torch.zeros(length, width))
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, outputs, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each vector."""
        vectors = self.first(x)
        # The patches of an image become a sequence of vectors.
        vectors = vectors.flatten(2).transpose(1, 2) if vectors.dim() == 4 else vectors
        return self.last(self.layers(vectors + self.positions))  # type: ignore[no-any-return]


def convolution(inputs: int, outputs: int, size: int, stride: int) -> list[nn.Module]:
    """A convolution without bias, and batch normalization."""
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return [layer, nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
    """Convolutions with a shortcut (He et al. 2016); a size has the arguments of `convolution`."""

    def __init__(self, *sizes: tuple[int, int, int, int], normalized: bool) -> None:
        super().__init__()
        layers = [one for size in sizes for one in (*convolution(*size), nn.ReLU())]
        self.inner, self.outer = nn.Sequential(*layers[:-1]), nn.Sequential()
        inputs, outputs = sizes[0][0], sizes[-1][1]
        if inputs != outputs:
            stride = max(stride for *_, stride in sizes)
            projection = convolution(inputs, outputs, 1, stride)
            self.outer = nn.Sequential(*projection[: 2 if normalized else 1])

    def forward(self, x: Tensor) -> Tensor:
        """Adds the shortcut to the output of the convolutions."""
        return torch.relu(self.inner(x) + self.outer(x))


def resnet20(*, normalized: bool = False) -> nn.Module:
    """ResNet-20 for CIFAR-10 (He et al. 2016); its projections may be normalized."""
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    stem = *convolution(3, 16, 3, 1), nn.ReLU()
    blocks = [
        Residual((i, o, 3, 1 if i == o else 2), (o, o, 3, 1), normalized=normalized)
        for i, o in pairwise(widths)
    ]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def resnet50() -> nn.Module:
    """ResNet-50 for ImageNet (He et al. 2016)."""
    stem = *convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    blocks, inputs = list[nn.Module](), 64
    for width in [64] * 3 + [128] * 4 + [256] * 6 + [512] * 3:
        # The first block of each stage, except the first stage, halves the image.
        middle = (width, width, 3, 2 if inputs == 2 * width else 1)
        sizes = (inputs, width, 1, 1), middle, (width, 4 * width, 1, 1)
        blocks.append(Residual(*sizes, normalized=True))
        inputs = 4 * width
    last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)
    return nn.Sequential(*stem, *blocks, *last)


def lenet5() -> nn.Module:
    """LeNet-5 (LeCun et al. 1998), with ReLU."""
    first = nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*first, *second, *dense(400, 120, 84, 10))


def lstm() -> nn.Module:
    """A character-level language model with two layers of LSTM."""
    return nn.Sequential(
        nn.Embedding(96, 256), Recurrent(nn.LSTM(256, 256, 2, batch_first=True), 256, 96, each=True)
    )


def gpt2() -> nn.Module:
    """GPT-2 small (Radford et al. 2019), without its causal mask."""
    model = Transformer(nn.Embedding(50257, 768), 256, 768, 12, 50257)
    model.last[1].weight = model.first.weight
    return model


def vit() -> nn.Module:
    """ViT-Ti/16 (Touvron et al. 2021), without its class token."""
    return Transformer(nn.Conv2d(3, 192, 16, 16), 196, 192, 3, 1000)


class Model(NamedTuple):
    """A function that makes a model, and one that draws an input of some examples."""

    make: Callable[[], nn.Module]
    draw: Callable[[int], Tensor]


MODELS = {
    "PPO, 2 x 64": Model(lambda: dense(17, 64, 64, 6), lambda n: torch.randn(n, 17)),
    "MLP 784-256-128-10": Model(lambda: dense(784, 256, 128, 10), lambda n: torch.randn(n, 784)),
    "LeNet-5": Model(lenet5, lambda n: torch.randn(n, 1, 28, 28)),
    "ResNet-20": Model(resnet20, lambda n: torch.randn(n, 3, 32, 32)),
    "ResNet-50": Model(resnet50, lambda n: torch.randn(n, 3, 224, 224)),
    "LSTM, 2 x 256": Model(lstm, lambda n: torch.randint(96, (n, 64))),
    "ViT-Ti/16": Model(vit, lambda n: torch.randn(n, 3, 224, 224)),
    "GPT-2 124M": Model(gpt2, lambda n: torch.randint(50257, (n, 256))),
}
