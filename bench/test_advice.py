"""How training goes under each kind of advice, beside no clipping and the best limit of a grid.

`suggest` reads the recorded run without clipping of the same seed. `find` gets batches and seeds
that no other training has, and its answer holds for all seeds. Everything is judged on data that no
step sees. A loss that is no lower than that of the untrained network counts as this one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import tritonclip
from bench.advice import TASKS, Run, Task, train
from bench.comparison import hand_over
from tritonclip.rules import Rule
from tritonclip.samples import Samples

GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
RULES: dict[str, Rule] = {
    "ClipByQuantile()": tritonclip.ClipByQuantile(),
    "ClipByZScore()": tritonclip.ClipByZScore(),
    "ClipByUnitNorm()": tritonclip.ClipByUnitNorm(),
}
SUGGESTED = {"suggest": True, "suggest without losses": False}
ADVICE = ("no clipping", "best of the grid", "1.0", *SUGGESTED, "find", *RULES)
# Of trainings that are judged, and of those that `find` tries.
SEEDS, SEEDS_OF_FIND = (0, 1, 2), (10, 11, 12)
STEPS_OF_FIND = 200


class Outcome(NamedTuple):
    """What came of advice.

    Attributes:
        loss: at the end of training.
        limit: that was advised; None for none, and for a rule.
        seconds: that training took.
        names_find: whether `find_max_norm` was named.
    """

    loss: float
    limit: float | None
    seconds: float
    names_find: bool = False


def suggested(run: Run, folder: Path, *, with_losses: bool) -> tuple[float | None, bool]:
    """The limit for a recorded run without clipping, and whether `find_max_norm` is named."""
    path = folder / "run.csv"
    path.unlink(missing_ok=True)
    with tritonclip.record(path) as recorder:
        for i, norm in enumerate(run.norms):
            loss = run.losses[i * len(run.losses) // len(run.norms)]
            recorder.add_(norm, limit=math.inf, loss=loss if with_losses else None)
    try:
        found = tritonclip.suggest_max_norm(path)
    except ValueError as error:
        # Too few norms before the first NaN.
        return None, "find_max_norm" in str(error)
    return found.max_norm, "find_max_norm" in found.reason


def found(task: Task) -> float | None:
    """The limit that `find_max_norm` finds in trainings that are not judged."""
    steps = min(STEPS_OF_FIND, task.steps)
    search = tritonclip.find_max_norm(
        task.make,
        task.batches(SEEDS_OF_FIND[0]),
        steps=steps,
        seeds=SEEDS_OF_FIND,
        progress=lambda done, most: None,
    )
    return search.max_norm


class Outcomes:
    """The outcomes of all advice for a task, by seed, each trained when it is first asked for."""

    def __init__(self, task: Task, folder: Path) -> None:
        self._task, self._folder = task, folder
        self._trained: dict[tuple[int, float | Rule], tuple[Run, float]] = {}
        self._found: list[float | None] = []

    def of(self, advice: str, seed: int) -> Outcome:
        """The outcome of advice for a seed."""
        limit: float | None = None
        names_find = False
        if advice in RULES:
            return self._outcome(seed, RULES[advice])
        if advice == "best of the grid":
            return min(map(partial(self._outcome, seed), (math.inf, *GRID)), key=_key)
        if advice == "1.0":
            limit = 1.0
        elif advice in SUGGESTED:
            run, _ = self._train(seed, math.inf)
            limit, names_find = suggested(run, self._folder, with_losses=SUGGESTED[advice])
        elif advice == "find":
            self._found = self._found or [found(self._task)]
            (limit,) = self._found
        outcome = self._outcome(seed, math.inf if limit is None else limit)
        return outcome._replace(names_find=names_find)

    def untrained(self, seed: int) -> float:
        """The loss before the first step."""
        torch.manual_seed(seed)
        return self._task.make().held_out_loss()

    def _outcome(self, seed: int, clip: float | Rule) -> Outcome:
        run, seconds = self._train(seed, clip)
        limit = None if isinstance(clip, Rule) or math.isinf(clip) else clip
        return Outcome(run.loss, limit, seconds)

    def _train(self, seed: int, clip: float | Rule) -> tuple[Run, float]:
        if (seed, clip) not in self._trained:
            begun = time.perf_counter()
            run = train(self._task, seed, clip)
            self._trained[seed, clip] = run, time.perf_counter() - begun
        return self._trained[seed, clip]


def _key(outcome: Outcome) -> float:
    return outcome.loss if math.isfinite(outcome.loss) else math.inf


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads only slow down matrices as small as these, and change the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def outcomes(one_thread: None, task: str, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Outcomes of a task, which share trainings."""
    return Outcomes(TASKS[task], tmp_path_factory.mktemp("advice"))


@pytest.mark.parametrize("advice", ADVICE)
@pytest.mark.parametrize("task", TASKS, scope="module")
def test_advice(
    benchmark: Any, request: pytest.FixtureRequest, outcomes: Outcomes, advice: str
) -> None:
    """Losses at the end of training; the time is that of a training."""
    seeds = SEEDS[:1] if request.config.option.plan == "quick" else SEEDS
    untrained = [outcomes.untrained(seed) for seed in seeds]
    each = [outcomes.of(advice, seed) for seed in seeds]
    pairs = zip(each, untrained, strict=True)
    benchmark.extra_info |= {
        "untrained": untrained,
        "losses": [one.loss if one.loss < most else most for one, most in pairs],
        "limits": [one.limit for one in each],
        "names_find": [one.names_find for one in each],
    }
    hand_over(benchmark, Samples([one.seconds * 1e6 for one in each], [], 1))
