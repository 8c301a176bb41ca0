"""The share of clipping in whole training steps of real models.

A step is forward, backward, clip and AdamW on random data; both the clip and the whole step are
timed. Models with equal weights, one for each clip, take steps in turn, in another order in each
round. Clips are called as in a training loop, with `model.parameters()`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import tritonclip
from bench.comparison import CPU, AllSamples, Effort, hand_over
from bench.models import MODELS
from bench.samples import Timed, interleaved, paired, spread

Clip = Callable[..., object]
CLIPS: dict[str, Clip] = {
    "torch": torch.nn.utils.clip_grad_norm_,
    "tritonclip": tritonclip.clip_grad_norm_,
}
# The number of examples in a step.
BATCHES = {"MLP 784-256-128-10": 64, "LeNet-5": 64, "ResNet-20": 32}
BATCHES |= {"LSTM, 2 x 256": 16, "ViT-Ti/16": 4, "GPT-2 124M": 1}
# The number of uncounted steps, and how much longer a model is measured than a call.
WARM_UP, LONGER = 3, 30


class Step:
    """Training steps of a model, and the microseconds of each clip on the host."""

    def __init__(self, model: nn.Module, inputs: Tensor, targets: Tensor, clip: Clip) -> None:
        self.model, self.inputs, self.targets, self.clip = model, inputs, targets, clip
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=inputs.is_cuda or None)
        self.clips: list[float] = []

    def __call__(self) -> None:
        """Takes a step."""
        self.optimizer.zero_grad()
        cross_entropy(self.model(self.inputs).flatten(0, -2), self.targets).backward()
        start = perf_counter_ns()
        self.clip(self.model.parameters(), 1.0)
        self.clips.append((perf_counter_ns() - start) / 1e3)
        self.optimizer.step()


def steps_of(
    model: str, examples: int, clips: Mapping[str, Clip], device: torch.device
) -> dict[str, Step]:
    """Steps of models with equal weights, by clip."""
    torch.manual_seed(0)
    first, inputs = MODELS[model].make().to(device), MODELS[model].draw(examples).to(device)
    with torch.no_grad():
        scores = copy.deepcopy(first)(inputs).flatten(0, -2)
    targets = torch.randint(scores.shape[1], scores.shape[:1]).to(device)
    return {name: Step(copy.deepcopy(first), inputs, targets, clip) for name, clip in clips.items()}


def take_turns(steps: Mapping[str, Step], effort: Effort, device: torch.device) -> AllSamples:
    """Samples of steps; each step keeps a time of its clip for each sample."""
    calls = list(map(Timed, steps.values()))
    found = interleaved(calls, device, *effort, most_calls=1, warm_up=WARM_UP)
    for step in steps.values():
        del step.clips[:WARM_UP]
    return dict(zip(steps, found, strict=True))


@pytest.fixture(scope="module")
def measured(effort: Effort, model: str) -> tuple[dict[str, Step], AllSamples]:
    """Steps of a model with each clip, taken in turn."""
    steps = steps_of(model, BATCHES[model], CLIPS, CPU)
    return steps, take_turns(steps, effort._replace(seconds=LONGER * effort.seconds), CPU)


@pytest.mark.parametrize("provider", CLIPS)
@pytest.mark.parametrize("model", BATCHES, scope="module")
def test_training(benchmark: Any, measured: Any, provider: str) -> None:
    step, samples = (of[provider] for of in measured)
    share = spread("step_share", paired(step.clips, samples.walls))
    n_tensors = len(list(step.model.parameters()))
    benchmark.extra_info |= {"tensors": n_tensors, **spread("clip_us", step.clips), **share}
    hand_over(benchmark, samples)
