"""Samples of the time of calls, taken in turn: each round has every call once, so that they pair.

Ratios within rounds hold on a machine that other work slows down for a while. All times are in
microseconds. Wall: from the call to when all its work is done. Host: from the call, on an idle
queue, to its return.
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

# Calls on a CPU are put together to samples of about this long, so that the clock's cost vanishes.
# Each by its own time: one call between long ones of others would find its code out of cache.
SAMPLE_US, MOST_CALLS = 1000.0, 50
# Rounds before the first sample; the first of them warms up, the others tell the usual time.
WARM_UP = 4


class Timed(NamedTuple):
    """A call, and how to prepare it outside the clock; None where nothing has to be prepared."""

    call: Callable[[], Any]
    prepare: Callable[[], Any] | None = None

    def prepared(self) -> Callable[[], Any]:
        """The call, after its preparation."""
        if self.prepare is not None:
            self.prepare()
        return self.call


class Samples(NamedTuple):
    """Microseconds a call, one number a sample, the mean of `n_calls`."""

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
    """Host and wall time of a call, the mean of `n_calls`."""
    # A call that is prepared has readings of the clock around it, whose own time is subtracted.
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
    """At least `n_samples` of each call, and more for some seconds.

    They are paired: each round goes through all calls in another order, so that whatever slows the
    machine down for a while slows all of them. `warm_up` rounds come first: two or more. Garbage is
    collected afterwards.
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
