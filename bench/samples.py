"""Samples of the times of calls that take turns: each round has one sample of every call.

Ratios within rounds hold even while other work slows the machine down. All times are in
microseconds. Wall time is from a call to when all its work is done; host time is from a call, on
an idle queue, to its return.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from itertools import repeat
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

# A sample has as many calls on a CPU as take about this long, so that the cost of the clock
# vanishes. A single short call between long ones of others would find its code out of cache.
SAMPLE_US, MOST_CALLS = 1000.0, 50
# Rounds before the first sample; the first one warms up, and the others measure the usual time.
WARM_UP = 4


class Timed(NamedTuple):
    """A call, and its preparation outside the clock, if there is any."""

    call: Callable[[], Any]
    prepare: Callable[[], Any] | None = None

    def prepared(self) -> Callable[[], Any]:
        """Prepares the call and returns it."""
        if self.prepare is not None:
            self.prepare()
        return self.call


class Samples(NamedTuple):
    """Microseconds a call; each sample is the mean of `n_calls`."""

    walls: list[float]
    hosts: list[float]
    n_calls: int


def paired(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """The ratio of each pair of samples."""
    return [a / b for a, b in zip(over, under, strict=True)]


def spread(name: str, samples: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of samples, by name."""
    low, middle, high = statistics.quantiles(samples, n=4)
    return {name: middle, f"{name}_lo": low, f"{name}_hi": high}


def synchronize(device: torch.device) -> None:
    """Waits for all work on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def clock_us() -> float:
    """The time between two readings of the clock with nothing in between."""
    return statistics.median(-(perf_counter_ns() - perf_counter_ns()) / 1e3 for _ in range(1000))


def sample(timed: Timed, device: torch.device, n_calls: int = 1) -> tuple[float, float]:
    """Mean host and wall time of `n_calls`."""
    # Each call with a preparation is timed alone, and the time of the clock is subtracted.
    n_readings, clock = (1, 0.0) if timed.prepare is None else (n_calls, clock_us())
    host = wall = 0
    for _ in range(n_readings):
        calls = repeat(timed.prepared(), n_calls // n_readings)
        synchronize(device)
        start = perf_counter_ns()
        for call in calls:
            call()
        returned = perf_counter_ns()
        synchronize(device)
        host, wall = host + returned - start, wall + perf_counter_ns() - start
    return host / 1e3 / n_calls - clock, wall / 1e3 / n_calls - clock


def interleaved(
    timed: Sequence[Timed],
    device: torch.device,
    n_samples: int,
    seconds: float,
    *,
    most_samples: int = 300,
    most_calls: int = MOST_CALLS,
    warm_up: int = WARM_UP,
) -> list[Samples]:
    """Takes at least `n_samples` of each call, and more until some seconds are over.

    Samples are paired: each round goes through all calls in another order, so that whatever slows
    the machine down for a while slows all of them. Two or more `warm_up` rounds come first. The
    garbage collector is off meanwhile.
    """
    shuffle = random.Random(0)
    collects = gc.isenabled()
    try:
        gc.disable()
        rounds = [[sample(call, device)[1] for call in timed] for _ in range(warm_up)]
        # The first round warms up.
        usual = map(statistics.median, zip(*rounds[1:], strict=True))
        most = most_calls if device.type == "cpu" else 1
        batches = [min(most, math.ceil(SAMPLE_US / max(time, 1.0))) for time in usual]
        result = [Samples([], [], n_calls) for n_calls in batches]
        end = perf_counter_ns() + seconds * 1e9
        for done in range(most_samples):
            if done >= n_samples and perf_counter_ns() >= end:
                break
            for i in shuffle.sample(range(len(timed)), len(timed)):
                host, wall = sample(timed[i], device, batches[i])
                result[i].hosts.append(host)
                result[i].walls.append(wall)
    finally:
        if collects:
            gc.enable()
    return result
