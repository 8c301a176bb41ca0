"""The share of clipping in whole training steps of real models.

A step is forward, backward, clip and AdamW on random data; the clock runs around the clip and
around all of it. Models with equal weights take a step with each clip in turn, in another order in
each round. Clips are called as in a training loop, with `model.parameters()`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import tritonclip
from bench.comparison import CPU, Effort, hand_over
from bench.models import MODELS
from tritonclip.samples import Samples, paired, spread, synchronize

Clip = Callable[..., object]
CLIPS: dict[str, Clip] = {
    "torch": torch.nn.utils.clip_grad_norm_,
    "tritonclip": tritonclip.clip_grad_norm_,
}
# Examples of a step.
BATCHES = {"MLP 784-256-128-10": 64, "LeNet-5": 64, "ResNet-20": 32}
BATCHES |= {"LSTM, 2 x 256": 16, "ViT-Ti/16": 4, "GPT-2 124M": 1}
# Steps that are not counted, and how much longer than a call a model is measured.
WARM_UP, LONGER = 3, 30


class Step:
    """Training steps of a model, and the microseconds of each and, on the host, of its clip."""

    def __init__(self, model: nn.Module, inputs: Tensor, targets: Tensor, clip: Clip) -> None:
        self.model, self.inputs, self.targets, self.clip = model, inputs, targets, clip
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=inputs.is_cuda or None)
        self.wholes: list[float] = []
        self.clips: list[float] = []

    def __call__(self) -> None:
        """Takes a step."""
        synchronize(self.inputs.device)
        start = perf_counter_ns()
        self.optimizer.zero_grad()
        cross_entropy(self.model(self.inputs).flatten(0, -2), self.targets).backward()
        before = perf_counter_ns()
        self.clip(self.model.parameters(), 1.0)
        after = perf_counter_ns()
        self.optimizer.step()
        synchronize(self.inputs.device)
        self.wholes.append((perf_counter_ns() - start) / 1e3)
        self.clips.append((after - before) / 1e3)


def steps_of(
    model: str, examples: int, clips: Mapping[str, Clip], device: torch.device
) -> dict[str, Step]:
    """Steps of equal models, by clip."""
    torch.manual_seed(0)
    first, inputs = MODELS[model].make().to(device), MODELS[model].draw(examples).to(device)
    with torch.no_grad():
        scores = copy.deepcopy(first)(inputs).flatten(0, -2)
    targets = torch.randint(scores.shape[1], scores.shape[:1]).to(device)
    return {name: Step(copy.deepcopy(first), inputs, targets, clip) for name, clip in clips.items()}


def take_turns(steps: Mapping[str, Step], effort: Effort) -> None:
    """Takes steps in turn, and forgets the first ones."""
    order, n = list(steps.values()), 0
    end = perf_counter_ns() + effort.seconds * 1e9
    while n < WARM_UP + effort.samples or perf_counter_ns() < end:
        random.Random(n).shuffle(order)
        for step in order:
            step()
        n += 1
    for step in order:
        del step.wholes[:WARM_UP], step.clips[:WARM_UP]


@pytest.fixture(scope="module")
def steps(effort: Effort, model: str) -> dict[str, Step]:
    """Steps of a model with each clip, taken in turn."""
    made = steps_of(model, BATCHES[model], CLIPS, CPU)
    take_turns(made, effort._replace(seconds=LONGER * effort.seconds))
    return made


@pytest.mark.parametrize("provider", CLIPS)
@pytest.mark.parametrize("model", BATCHES, scope="module")
def test_training(benchmark: Any, steps: dict[str, Step], provider: str) -> None:
    """Time of a step, and its clip's."""
    step = steps[provider]
    share = spread("step_share", paired(step.clips, step.wholes))
    n_tensors = len(list(step.model.parameters()))
    benchmark.extra_info |= {"tensors": n_tensors, **spread("clip_us", step.clips), **share}
    hand_over(benchmark, Samples(step.wholes, [], 1))
