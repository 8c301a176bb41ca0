"""How time, launches and memory are measured. All times are in microseconds.

Wall: from the call to when all its work is done. Host: from the call, on an idle queue, to its
return. Device: between two events on the GPU, around a call that was queued long before the GPU got
to it, with the L2 cache holding something else. Graph: the same for the replay of a CUDA graph of
the call. On a CPU there is wall time only.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity

# The profiler would tell of its own stages on the terminal.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# GPU cycles that the queue is held up while calls are queued: about 10 ms.
HEAD_START = 20_000_000
# Bytes copied to measure the bandwidth of memory, well beyond every cache.
COPIED = {"cpu": 2**28, "cuda": 2**30}


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps the garbage collector from running within a measurement."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def synchronize(device: torch.device) -> None:
    """Waits for all work on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_and_wall(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """One call on an idle queue: until it returned, and until its work was done."""
    synchronize(device)
    start = perf_counter()
    call()
    returned = perf_counter()
    synchronize(device)
    done = perf_counter()
    return (returned - start) * 1e6, (done - start) * 1e6


class Flush:
    """Reads three times the L2 cache of a GPU, so that it holds nothing else.

    Reading leaves no lines behind whose writing-back the next kernel would pay for.
    """

    def __init__(self, device: torch.device) -> None:
        size = 3 * torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.zeros(size // 4, dtype=torch.int32, device=device)

    def __call__(self) -> None:
        """Queues the reading."""
        torch.max(self._buffer)


def device_times(
    call: Callable[[], Any], refill: Callable[[], None] | None, flush: Flush, repetitions: int
) -> list[float]:
    """Times on the GPU alone, one a repetition.

    A wait on the GPU in front lets the host run ahead, so that the gaps between launches do not
    count. A call with more launches than the queue holds (about 1,000), or that waits for the GPU,
    is bound by the host all the same, and its time says so.

    Args:
        call: what is timed; on torch's current stream.
        refill: run before each repetition, outside the events; None for nothing.
        flush: of the current device.
        repetitions: how many times.
    """
    times = []
    for _ in range(repetitions):
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        if refill is not None:
            refill()
        flush()
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return times


def captured(call: Callable[[], Any], refill: Callable[[], None] | None) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a call, warmed up on a stream of its own as torch's documentation asks."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            if refill is not None:
                refill()
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def launches(call: Callable[[], Any], device: torch.device) -> int | None:
    """Kernels, copies and fills that one call puts on a GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiled:
        call()
        torch.cuda.synchronize(device)
    # A range that the program named shows on the GPU, too, and is not work.
    events = [e for e in profiled.events() if not e.is_user_annotation]
    return len([e for e in events if e.device_type.name == "CUDA"])


def extra_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that a call held at one time, beside what was there before.

    On a CPU every allocation that torch's allocator reports is counted; on a GPU its own peak.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.autograd.profiler.profile(profile_memory=True) as profiled:
        call()
    held = most = 0
    events = [e for e in profiled.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return int(most)


def copy_gb_per_s(device: torch.device) -> float:
    """Bytes read and written a second, in GB, while one large buffer is copied to another.

    The best of ten, which is what the memory can do.
    """
    source = torch.zeros(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    times = [host_and_wall(lambda: target.copy_(source), device)[1] for _ in range(11)]
    return 2 * source.nbytes / (min(times[1:]) * 1e3)
