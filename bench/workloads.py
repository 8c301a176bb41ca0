"""Gradient lists in the shapes of public architectures, and the plans to measure them.

A workload has the shapes that `model.parameters()` yields, in its order; nothing is downloaded.
If a model does not fit the memory of an ordinary machine, its note says how it was scaled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import nn

from bench import models

DTYPES = ("float32", "bfloat16", "float16", "mixed", "float64")
CLIPS = ("norm", "value", "gradient")
# "step" clips by global norm and takes a step of SGD, "largest" clips by the global norm of order
# inf, and "unit" clips each unit relative to its weights (adaptive gradient clipping).
RULES = (*CLIPS, "step", "largest", "unit")
STEPS = ("unclipped", "clipped")
BY = {"norm": "global norm", "value": "value", "gradient": "each norm", "step": "norm, SGD step"}
BY |= {"largest": "largest magnitude", "unit": "unit"}
Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]


def dtype_of(dtype: str, n_dimensions: int) -> torch.dtype:
    """The dtype of a tensor; in a "mixed" list, float32 for vectors and bfloat16 for the rest."""
    name = ("float32", "bfloat16")[n_dimensions > 1] if dtype == "mixed" else dtype
    return getattr(torch, name)  # type: ignore[no-any-return]


class Workload(NamedTuple):
    """Shapes of the parameters of one model."""

    name: str  # In rows and options.
    title: str  # In tables.
    shapes: Shapes
    note: str = ""  # How the model was scaled or is special; empty for others.
    misaligned: bool = False  # Gradients start 1 to 7 elements after an aligned address, in turn.
    channels_last: bool = False  # Gradients of four dimensions have those strides.

    def n_bytes(self, dtype: str) -> int:
        """Bytes of all gradients."""
        return sum(math.prod(one) * dtype_of(dtype, len(one)).itemsize for one in self.shapes)


def _shapes(make: Callable[[], nn.Module]) -> Shapes:
    """The shapes of the parameters of a model, which is made without memory."""
    with torch.device("meta"):
        return tuple(tuple(parameter.shape) for parameter in make().parameters())


def _dense(*widths: int) -> Shapes:
    """The shapes of a multilayer perceptron."""
    return _shapes(partial(models.dense, *widths))


def llama3(layers: int, vocabulary: int) -> Shapes:
    """Llama-3-8B: Grattafiori et al. 2024 (arXiv:2407.21783) and its published model config."""
    layer = (*_LLAMA3_MATRICES, (4096,), (4096,))
    return ((vocabulary, 4096), *(layer * layers), (4096,), (vocabulary, 4096))


def moe(shrink: int) -> Shapes:
    """DeepSeekMoE 16B: Dai et al. 2024 (arXiv:2401.06066), its config with widths / `shrink`."""
    # 64 routed and 2 shared experts in 27 of 28 layers.
    width, expert, dense, vocabulary = (n // shrink for n in (2048, 1408, 10944, 102400))

    def feed_forward(inner: int) -> list[Shape]:
        return [(inner, width), (inner, width), (width, inner)]

    attention, norms = [(width, width)] * 4, [(width,)] * 2
    experts = feed_forward(expert) * 64
    layer = [*attention, *experts, (64, width), *feed_forward(2 * expert), *norms]
    first = [*attention, *feed_forward(dense), *norms]
    return ((vocabulary, width), *first, *(layer * 27), (width,), (vocabulary, width))


# Dosovitskiy et al. 2020 (arXiv:2010.11929), as torchvision's `vit_b_16`, at 224.
_VIT_STEM, _VIT_NORM = ((1, 1, 768), (768, 3, 16, 16), (768,), (1, 197, 768)), ((768,), (768,))
_VIT_ATTENTION = (*_VIT_NORM, (2304, 768), (2304,), *_dense(768, 768))
_VIT_LAYER = (*_VIT_ATTENTION, *_VIT_NORM, *_dense(768, 3072, 768))
_VIT_B16 = (*_VIT_STEM, *(_VIT_LAYER * 12), *_VIT_NORM, *_dense(768, 1000))
# GPT-2 small with tied embeddings: Radford et al. 2019; `gpt2` of Hugging Face Transformers.
_GPT2_ATTENTION = ((768,), (768,), (768, 2304), (2304,), (768, 768), (768,))
_GPT2_LAYER = (*_GPT2_ATTENTION, (768,), (768,), (768, 3072), (3072,), (3072, 768), (768,))
_GPT2 = ((50257, 768), (1024, 768), *(_GPT2_LAYER * 12), (768,), (768,))
_LLAMA3_ATTENTION = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096))
_LLAMA3_MATRICES = (*_LLAMA3_ATTENTION, (14336, 4096), (14336, 4096), (4096, 14336))
# Rank 16 on the seven matrices of each layer: Hu et al. 2021.
_LORA_R16 = tuple(pair for o, i in _LLAMA3_MATRICES for pair in ((16, i), (o, 16))) * 32
_VECTORS = torch.randint(64, 1025, (300,), generator=torch.Generator().manual_seed(0)).tolist()
_ODD = tuple((2 * (37 * i * i % 150001) + 1,) for i in range(200))
_RESNET20 = _shapes(partial(models.resnet20, normalized=True))
SMALL = (1, 2, 4, 10, 30, 100, 300)
# Shapes of biases, norms and small layers in turn, with 28 elements on average.
_TEN = ((8,), (8, 4), (16,), (16, 4), (4,), (32,), (2, 16), (1,), (64,), (10, 3))
_SMALL_NOTE = "small lists: tensors of 1 to 64 elements"
_LLAMA3_NOTE = "one layer of 32, with a 32nd of the embedding and of the head"
_MOE_NOTE = "widths and vocabulary divided by 8; all tensors"
_ODD_NOTE = "gradients start 1 to 7 elements after an aligned address"
_ALL = (
    *(Workload(f"small_{n}", f"{n} small", (_TEN * n)[:n], _SMALL_NOTE * (n == 1)) for n in SMALL),
    Workload("mlp4", "MLP, 706 elements", _dense(8, 64, 2)),
    Workload("mlp8", "MLP, 139 thousand", _dense(16, 256, 256, 256, 10)),
    # All feature maps are connected, as is usual today.
    Workload("lenet5", "LeNet-5", _shapes(models.lenet5)),
    Workload("resnet20", "ResNet-20", _RESNET20),
    Workload("resnet20_last", "ResNet-20, channels_last", _RESNET20, channels_last=True),
    # The same as torchvision's.
    Workload("resnet50", "ResNet-50", _shapes(models.resnet50)),
    Workload("vit_b16", "ViT-B/16", _VIT_B16),
    Workload("gpt2_124m", "GPT-2 124M", _GPT2),
    Workload("twelve", "12 of 4 million", ((2000, 2000),) * 12),
    Workload("llama3_8b", "Llama-3-8B, 1/32", llama3(1, 128256 // 32), _LLAMA3_NOTE),
    Workload("moe", "DeepSeekMoE 16B, widths/8", moe(8), _MOE_NOTE),
    Workload("lora_r16", "LoRA r16 of Llama-3-8B", _LORA_R16),
    # An embedding, and vectors of 64 to 1,024 elements.
    Workload("huge_and_small", "1 huge, 300 small", ((128000, 256), *((n,) for n in _VECTORS))),
    # Nothing but overhead.
    Workload("tiny_10000", "10,000 tiny", ((4,),) * 10000),
    # Sizes up to 300,001.
    Workload("odd", "200 odd, misaligned", _ODD, _ODD_NOTE, misaligned=True),
)
WORKLOADS = {workload.name: workload for workload in _ALL}

SHORT = (*(f"small_{n}" for n in SMALL), "mlp4", "mlp8", "lenet5", "resnet20")
TWO = ("norm", "value")
# Entries of workloads, their dtype, and the rules by which they are measured.
Plan = Sequence[tuple[Sequence[str], str, Sequence[str]]]
PLANS: dict[str, Plan] = {
    # Under two minutes on two cores.
    "quick": (
        (("small_1", "small_100", "mlp4", "lenet5"), "float32", CLIPS),
        (("small_10",), "bfloat16", CLIPS),
        (("small_10", "resnet20"), "float32", RULES),
        (("resnet20",), "float16", CLIPS),
        (("lenet5",), "float64", CLIPS),
        (("resnet20_last", "resnet50"), "float32", TWO),
        (("gpt2_124m",), "bfloat16", ("norm",)),
        (("tiny_10000",), "float32", TWO),
    ),
    "full": (
        ((*SHORT, "resnet20_last", "resnet50", "vit_b16"), "float32", CLIPS),
        (("small_10", "resnet20"), "float32", ("step",)),
        (("gpt2_124m",), "float32", (*CLIPS, "step")),
        (("twelve", "llama3_8b", "moe"), "float32", TWO),
        (("lora_r16", "huge_and_small"), "float32", (*CLIPS, "step")),
        (("tiny_10000", "odd"), "float32", CLIPS),
        ((*SHORT, "resnet50", "gpt2_124m"), "bfloat16", CLIPS),
        (("twelve", "lora_r16", "tiny_10000"), "bfloat16", TWO),
        (("llama3_8b",), "bfloat16", ("norm",)),
        ((*SHORT, "resnet50", "gpt2_124m"), "float16", CLIPS),
        (("twelve", "odd"), "float16", TWO),
        (("gpt2_124m",), "mixed", ("norm",)),
        (("small_10", "small_100", "mlp8"), "mixed", CLIPS),
        (("small_1", "small_10", "small_100", "resnet20", "resnet50"), "float32", ("largest",)),
        (("small_10", "resnet20"), "bfloat16", ("largest",)),
        (("small_10", "mlp8", "resnet20", "resnet50", "gpt2_124m"), "float32", ("unit",)),
        (("resnet20", "resnet50"), "bfloat16", ("unit",)),
        (("small_10", "lenet5", "resnet20", "resnet50"), "float64", CLIPS),
        (("twelve",), "float64", TWO),
    ),
    # While other processes keep every core busy.
    "busy": (
        (("small_10", "small_100", "mlp8", "resnet20"), "float32", CLIPS),
        (("twelve",), "float32", TWO),
        (("twelve",), "bfloat16", TWO),
        (("small_10", "mlp8", "resnet20", "resnet50"), "float32", ("unit",)),
    ),
    # Each call after a backward pass, which makes new gradients.
    "training": (
        ((*SHORT, "resnet20_last", "resnet50"), "float32", CLIPS),
        (("small_10", "resnet20"), "float32", ("step",)),
        (("small_10", "resnet20"), "bfloat16", CLIPS),
    ),
    # Beside other frameworks.
    "frameworks": ((("resnet50", "gpt2_124m", "lora_r16", "odd"), "float32", CLIPS),),
    # Takes about ten minutes on an H100.
    "gpu": (
        (("small_1", "small_10", "small_100", "mlp8", "resnet20"), "float32", TWO),
        (("resnet50", "lora_r16", "tiny_10000", "odd"), "float32", TWO),
        (("gpt2_124m",), "float32", CLIPS),
        (("small_10", "gpt2_124m"), "float32", ("step",)),
        (("small_10", "resnet50", "gpt2_124m"), "float32", ("unit",)),
        (("small_10", "resnet50"), "bfloat16", TWO),
        (("gpt2_124m",), "bfloat16", (*CLIPS, "unit")),
        (("lora_r16", "llama3_8b", "moe"), "bfloat16", ("norm",)),
        (("gpt2_124m",), "float16", TWO),
        (("gpt2_124m",), "mixed", ("norm",)),
        (("resnet20",), "float64", ("norm",)),
    ),
}
# The plans for clipping out of place.
FUNCTIONAL: dict[str, Plan] = {
    "quick": ((("small_10", "resnet20"), "float32", CLIPS),),
    "full": (
        (("small_1", "small_10", "small_100", "resnet20"), "float32", CLIPS),
        (("resnet50", "gpt2_124m", "tiny_10000", "odd"), "float32", CLIPS),
        (("small_10", "resnet50", "gpt2_124m"), "bfloat16", CLIPS),
    ),
}


def named(part: str, value: str) -> str:
    """The title of a part of a case, if it has one."""
    titles = {name: workload.title for name, workload in WORKLOADS.items()}
    return {"workload": titles, "rule": BY}.get(part, {}).get(value, value)


def cases_of(plan: Plan) -> list[tuple[str, str, str, str]]:
    return [
        (name, dtype, rule, step)
        for workloads, dtype, rules in plan
        for name, rule, step in product(workloads, rules, STEPS)
    ]
