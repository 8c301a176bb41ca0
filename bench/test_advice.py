"""How training goes under each kind of advice, beside no clipping and the best limit of a grid.

Trainings are judged on data that no step sees. A training that ends no lower than the untrained
network counts with that network's loss. As many processes as there are cores train the tasks.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import pytest

from bench.advice import ADVICE, outcomes_of
from bench.comparison import hand_over
from bench.samples import Samples
from bench.trainings import TASKS

# The seeds of the trainings that are judged.
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Any]]]:
    """The figures under all advice, for each task of the run."""
    config, items = request.config, request.session.items
    seeds = SEEDS[:1] if config.option.plan == "quick" else SEEDS
    chosen = {item.callspec.params.get("task") for item in items if hasattr(item, "callspec")}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context) as pool:
        yield {task: pool.submit(outcomes_of, task, seeds) for task in TASKS if task in chosen}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("advice", ADVICE)
@pytest.mark.parametrize("task", TASKS)
def test_advice(benchmark: Any, outcomes: dict[str, Future[Any]], task: str, advice: str) -> None:
    """Losses at the end of trainings; the time is how long a training takes."""
    figures, seconds = outcomes[task].result()[advice]
    benchmark.extra_info |= figures
    hand_over(benchmark, Samples([one * 1e6 for one in seconds], [], 1))
