"""How time on the GPU, launches and memory are measured. All times are in microseconds.

`bench.samples` samples wall and host time. Device time is the time between two events on the GPU
around a call that was queued long before the GPU got to it, while the L2 cache holds something
else. Graph time is the same for the replay of a CUDA graph of the call.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch.autograd.profiler import profile
from torch.profiler import ProfilerActivity

from bench.samples import Timed, synchronize

# Otherwise the profiler prints its stages on the terminal.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# The queue of a GPU is held up for this many times as long as the host takes to queue a call; a
# clock of 2 GHz is assumed.
HEAD_START, CYCLES_PER_US = 4.0, 2_000
# Samples of the time on the GPU alone, which varies by 1%.
DEVICE_SAMPLES = 15
# Spins until its parent ends; Ctrl-C is meant for the parent.
SPIN = """import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
parent = os.getppid()
while os.getppid() == parent: sum(range(100_000))"""


@contextmanager
def busy_cores(n: int) -> Iterator[None]:
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(n)]
    try:
        yield
    finally:
        for process in spinning:
            process.terminate()
            process.wait()


def device_us(timed: Timed, device: torch.device, host_us: float) -> list[float]:
    """Times on the GPU alone, on torch's current stream, of a call with the host time `host_us`.

    The GPU waits before each call while the host runs ahead, so that gaps between launches do not
    count. A call with more launches than the queue holds (about 1,000), or one that waits for the
    GPU, is still bound by the host, and its time includes that.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Read before each call, so that the L2 cache holds nothing else. Unlike writing, reading leaves
    # no lines that the next kernel would have to write back.
    size = 3 * torch.cuda.get_device_properties(device).L2_cache_size
    flushing = torch.zeros(size // 4, dtype=torch.int32, device=device)
    head_start = int(HEAD_START * (host_us + 50.0) * CYCLES_PER_US)
    times: list[float] = []
    for _ in range(DEVICE_SAMPLES):
        call = timed.prepared()
        torch.max(flushing)
        torch.cuda.synchronize()
        torch.cuda._sleep(head_start)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return times


def launches(call: Callable[[], Any], device: torch.device) -> int:
    """Kernels, copies and fills that one call puts on a GPU."""
    synchronize(device)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    # Without acc_events torch warns that events of earlier cycles are gone; there is only one.
    with torch.profiler.profile(activities=activities, acc_events=True) as profiled:
        call()
        synchronize(device)
    # A range that the program named is listed on the GPU too, but is no work.
    events = [e for e in profiled.events() if not e.is_user_annotation]
    return len([e for e in events if e.device_type.name == "CUDA"])


def extra_bytes(call: Callable[[], Any]) -> int:
    """The most bytes on the CPU that a call held at one time, beyond those held before."""
    with profile(profile_memory=True) as profiled:
        call()
    events = [e for e in profiled.kineto_results.events() if e.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return int(max(accumulate(changes, initial=0)))
