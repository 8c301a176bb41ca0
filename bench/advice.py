"""Trainings under each kind of advice on the limit, for `bench/test_advice.py`.

`suggest` reads the recorded run without clipping of the same seed. `find` gets batches and seeds
that no other training has, and its answer serves all seeds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tritonclip
from bench.trainings import NEW, TASKS, Clip
from tritonclip.rules import Rule

GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
RULES: dict[str, float | Rule] = {
    "ClipByQuantile()": tritonclip.ClipByQuantile(),
    "ClipByZScore()": tritonclip.ClipByZScore(),
    "ClipByUnitNorm()": tritonclip.ClipByUnitNorm(),
}
SUGGESTED = {"suggest": True, "suggest without losses": False}
ADVICE = ("no clipping", "best of the grid", "1.0", *SUGGESTED, "find", *RULES)
# The seeds of the trainings that `find` tries; no judged training has one of them.
SEEDS_OF_FIND = (10, 11, 12)
STEPS_OF_FIND = 200


class Run(NamedTuple):
    """How a training went."""

    loss: float  # At the end of the training, on held-out data.
    losses: list[float]  # Of each step.
    norms: list[float]  # Before clipping; a step that clips twice has two in turn.
    seconds: float


@cache
def train(name: str, seed: int, clip: float | Rule) -> Run:
    """Trains a task, with a limit or a rule."""
    states: dict[int, tritonclip.ClipState] = {}
    norms: list[Tensor] = []

    def clip_(parameters: Iterable[Tensor]) -> Tensor:
        listed = list(parameters)
        # A state for each list of parameters.
        state = states.setdefault(id(listed[0]), tritonclip.ClipState())
        norm = tritonclip.clip_(listed, clip, state=state)
        norms.append(norm if norm.dim() == 0 else norm.norm())
        return norm

    begun = time.perf_counter()
    torch.manual_seed(seed)
    step = TASKS[name].make()
    losses = [float(step(batch, clip_)) for batch in TASKS[name].batches(seed)]
    loss = step.held_out_loss()
    return Run(loss, losses, list(map(float, norms)), time.perf_counter() - begun)


def suggested(run: Run, *, with_losses: bool) -> float:
    """The limit for a recorded run without clipping."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "run.csv")
        with tritonclip.record(path) as recorder:
            for i, norm in enumerate(run.norms):
                loss = run.losses[i * len(run.losses) // len(run.norms)]
                recorder.add_(norm, limit=math.inf, loss=loss if with_losses else None)
        # It raises if too few norms came before the first NaN.
        with suppress(ValueError):
            return tritonclip.suggest_max_norm(path).max_norm or math.inf
    return math.inf


@cache
def found(name: str) -> float:
    """The limit that `find_max_norm` finds in trainings that are not judged."""
    task = TASKS[name]
    steps, batches = min(STEPS_OF_FIND, task.steps), task.batches(SEEDS_OF_FIND[0])

    def training(clip: Clip) -> Generator[Tensor, None, None]:
        # Each seed begins at another batch.
        first = SEEDS_OF_FIND.index(torch.initial_seed()) * len(batches) // len(SEEDS_OF_FIND)
        step = task.make()
        for batch in [*batches[first:], *batches[:first]]:
            yield step(batch, clip)

    search = tritonclip.find_max_norm(
        training, steps=steps, seeds=SEEDS_OF_FIND, progress=lambda done, most: None
    )
    return search.max_norm or math.inf


@cache
def untrained(name: str, seed: int) -> float:
    """The loss before any step."""
    torch.manual_seed(seed)
    return TASKS[name].make().held_out_loss()


def judged(name: str, seed: int, clip: float | Rule) -> float:
    """The loss after training, but at most the loss before it, which also replaces a NaN."""
    loss, most = train(name, seed, clip).loss, untrained(name, seed)
    return loss if loss < most else most


@cache
def best_of_grid(name: str, seeds: tuple[int, ...]) -> float:
    """The limit with the lowest mean loss over seeds; the largest of equally good ones."""
    return min(
        (math.inf, *reversed(GRID)),
        key=lambda limit: statistics.fmean(judged(name, seed, limit) for seed in seeds),
    )


def advised(advice: str, name: str, seed: int, seeds: Sequence[int]) -> float | Rule:
    """The limit or rule for the training with one of the seeds; inf for no clipping."""
    if advice == "best of the grid":
        return best_of_grid(name, tuple(seeds))
    if advice in SUGGESTED:
        return suggested(train(name, seed, math.inf), with_losses=SUGGESTED[advice])
    if advice == "find":
        return found(name)
    return {**RULES, "no clipping": math.inf, "1.0": 1.0}[advice]


def outcomes_of(name: str, seeds: Sequence[int]) -> dict[str, tuple[dict[str, Any], list[float]]]:
    """Trains a task under all advice; by advice, figures with a number for each seed, and seconds.

    More threads than one would only slow down matrices as small as these, and change sums.
    """
    torch.set_num_threads(1)
    outcomes = {}
    for advice in ADVICE:
        clips = [advised(advice, name, seed, seeds) for seed in seeds]
        runs = [train(name, seed, clip) for seed, clip in zip(seeds, clips, strict=True)]
        figures = {
            "is_new": name in NEW,
            "untrained": [untrained(name, seed) for seed in seeds],
            "losses": [judged(name, seed, clip) for seed, clip in zip(seeds, clips, strict=True)],
            "limits": [c if isinstance(c, float) and c < math.inf else None for c in clips],
        }
        outcomes[advice] = figures, [run.seconds for run in runs]
    return outcomes
