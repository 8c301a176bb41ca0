"""Workloads: gradient lists in the shapes of public architectures, nothing downloaded.

A workload is what `model.parameters()` yields, in its order. Where a model does not fit the memory
of an ordinary machine, its note says what was scaled, and by how much.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """Shapes of the parameters of one model.

    Attributes:
        name: in rows and on the command line.
        title: in tables.
        shapes: one a tensor.
        note: what was scaled or is special; empty for a model as it is.
        misaligned: gradients start 1 to 7 elements after an aligned address, in turn.
    """

    name: str
    title: str
    shapes: tuple[Shape, ...]
    note: str = ""
    misaligned: bool = False

    @property
    def n_elements(self) -> int:
        """Elements of all tensors together."""
        return sum(map(prod, self.shapes))


def small(n: int) -> Workload:
    """`n` tensors as biases, norms and small layers have them: 1 to 64 elements, 28 on average.

    Ten shapes in turn, (8,), (8, 4), (16,), (16, 4), (4,), (32,), (2, 16), (1,), (64,), (10, 3):
    8 elements for 1 tensor, 40 for 2, 283 for 10, 8,490 for 300.
    """
    shapes = ((8,), (8, 4), (16,), (16, 4), (4,), (32,), (2, 16), (1,), (64,), (10, 3))
    taken = tuple(itertools.islice(itertools.cycle(shapes), n))
    note = "small lists: tensors of 1 to 64 elements" if n == 1 else ""
    return Workload(f"small_{n}", f"{n} small", taken, note)


def _dense(*widths: int) -> tuple[Shape, ...]:
    """Weight and bias of each layer of a multilayer perceptron."""
    pairs = itertools.pairwise(widths)
    return tuple(shape for i, o in pairs for shape in ((o, i), (o,)))


def mlp4() -> Workload:
    """A perceptron of widths 8, 64, 2: 4 tensors, 706 elements."""
    return Workload("mlp4", "MLP, 706 elements", _dense(8, 64, 2))


def mlp8() -> Workload:
    """A perceptron of widths 16, 256, 256, 256, 10: 8 tensors, 138,506 elements."""
    return Workload("mlp8", "MLP, 139 thousand", _dense(16, 256, 256, 256, 10))


def lenet5() -> Workload:
    """LeNet-5: LeCun et al. 1998, fully connected between its feature maps as is usual today."""
    shapes = ((6, 1, 5, 5), (6,), (16, 6, 5, 5), (16,), *_dense(400, 120, 84, 10))
    return Workload("lenet5", "LeNet-5", shapes)


def resnet20() -> Workload:
    """ResNet-20 for CIFAR-10: He et al. 2015 (arXiv:1512.03385), projections where it widens."""
    shapes: list[Shape] = [(16, 3, 3, 3), (16,), (16,)]
    channels = 16
    for width, block in itertools.product((16, 32, 64), range(3)):
        shapes += [(width, channels, 3, 3), (width,), (width,), (width, width, 3, 3)]
        shapes += [(width,), (width,)]
        if block == 0 and width != channels:
            shapes += [(width, channels, 1, 1), (width,), (width,)]
        channels = width
    return Workload("resnet20", "ResNet-20", (*shapes, (10, 64), (10,)))


def resnet50() -> Workload:
    """ResNet-50: He et al. 2015 (arXiv:1512.03385), as torchvision's `resnet50` has it."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for kernel in ((width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [kernel, kernel[:1], kernel[:1]]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return Workload("resnet50", "ResNet-50", (*shapes, (1000, 2048), (1000,)))


def vit_b16() -> Workload:
    """ViT-B/16 at 224: Dosovitskiy et al. 2020 (arXiv:2010.11929), as torchvision's `vit_b_16`."""
    layer = [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,)]
    layer += [(768,), (768,), (3072, 768), (3072,), (768, 3072), (768,)]
    stem = [(1, 1, 768), (768, 3, 16, 16), (768,), (1, 197, 768)]
    shapes = (*stem, *(layer * 12), (768,), (768,), (1000, 768), (1000,))
    return Workload("vit_b16", "ViT-B/16", shapes)


def gpt2_124m() -> Workload:
    """GPT-2 small, tied embeddings: Radford et al. 2019; `gpt2` of Hugging Face Transformers."""
    layer = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,)]
    layer += [(768,), (768,), (768, 3072), (3072,), (3072, 768), (768,)]
    shapes = ((50257, 768), (1024, 768), *(layer * 12), (768,), (768,))
    return Workload("gpt2_124m", "GPT-2 124M", shapes)


# Llama-3-8B: Grattafiori et al. 2024 (arXiv:2407.21783) and its published model config.
_ATTENTION: tuple[Shape, ...] = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096))
_MLP: tuple[Shape, ...] = ((14336, 4096), (14336, 4096), (4096, 14336))
_LLAMA3_LAYER = (*_ATTENTION, *_MLP, (4096,), (4096,))


def llama3_8b() -> Workload:
    """One layer of the 32 of Llama-3-8B, with a 32nd of the embedding's and the head's rows."""
    rows = 128256 // 32
    shapes = ((rows, 4096), *_LLAMA3_LAYER, (4096,), (rows, 4096))
    note = "one layer of 32, with a 32nd of the embedding and of the head"
    return Workload("llama3_8b", "Llama-3-8B, 1/32", shapes, note)


def llama3_8b_full() -> Workload:
    """Llama-3-8B whole: 16 GB a copy in bfloat16, and the benchmark keeps two to three."""
    shapes = ((128256, 4096), *(_LLAMA3_LAYER * 32), (4096,), (128256, 4096))
    return Workload("llama3_8b_full", "Llama-3-8B", shapes)


def moe(shrink: int = 8) -> Workload:
    """DeepSeekMoE 16B: Dai et al. 2024 (arXiv:2401.06066) and its published model config.

    64 routed and 2 shared experts in 27 of 28 layers. Every width and the vocabulary are divided by
    `shrink`; the number of tensors is the model's.
    """
    width, expert, dense, vocabulary = (n // shrink for n in (2048, 1408, 10944, 102400))

    def feed_forward(inner: int) -> list[Shape]:
        return [(inner, width), (inner, width), (width, inner)]

    attention, norms = [(width, width)] * 4, [(width,)] * 2
    experts = feed_forward(expert) * 64
    layer = [*attention, *experts, (64, width), *feed_forward(2 * expert), *norms]
    first = [*attention, *feed_forward(dense), *norms]
    shapes = ((vocabulary, width), *first, *(layer * 27), (width,), (vocabulary, width))
    note = f"widths and vocabulary divided by {shrink}; all tensors" if shrink != 1 else ""
    return Workload("moe", f"DeepSeekMoE 16B, widths/{shrink}", shapes, note)


def lora_r16() -> Workload:
    """LoRA of rank 16 on the seven matrices of each layer of Llama-3-8B: Hu et al. 2021."""
    matrices = (*_ATTENTION, *_MLP)
    layer = [pair for rows, columns in matrices for pair in ((16, columns), (rows, 16))]
    return Workload("lora_r16", "LoRA r16 of Llama-3-8B", tuple(layer * 32))


def huge_and_small() -> Workload:
    """One embedding of 128,000 rows of 256, and 300 vectors of 64 to 1,024 elements."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(64, 1025, (300,), generator=generator).tolist()
    shapes = ((128000, 256), *((n,) for n in sizes))
    return Workload("huge_and_small", "1 huge, 300 small", shapes)


def twelve() -> Workload:
    """12 matrices of 4 million elements."""
    return Workload("twelve", "12 of 4 million", ((2000, 2000),) * 12)


def tiny_10000() -> Workload:
    """10,000 vectors of 4 elements: nothing but overhead."""
    return Workload("tiny_10000", "10,000 tiny", ((4,),) * 10000)


def odd() -> Workload:
    """200 vectors of odd sizes up to 300,001, none of them at an aligned address."""
    shapes = tuple((2 * (37 * i * i % 150001) + 1,) for i in range(200))
    note = "gradients start 1 to 7 elements after an aligned address"
    return Workload("odd", "200 odd, misaligned", shapes, note, misaligned=True)


SMALL = (1, 2, 4, 10, 30, 100, 300)
WORKLOADS: dict[str, Callable[[], Workload]] = {
    **{f"small_{n}": partial(small, n) for n in SMALL},
    "mlp4": mlp4,
    "mlp8": mlp8,
    "lenet5": lenet5,
    "resnet20": resnet20,
    "resnet50": resnet50,
    "vit_b16": vit_b16,
    "gpt2_124m": gpt2_124m,
    "twelve": twelve,
    "llama3_8b": llama3_8b,
    "moe": moe,
    "lora_r16": lora_r16,
    "huge_and_small": huge_and_small,
    "tiny_10000": tiny_10000,
    "odd": odd,
    # Only where it is asked for by name.
    "llama3_8b_full": llama3_8b_full,
}
