"""How time on the GPU, launches and memory are measured. All times are in microseconds.

Wall and host time are sampled by `bench.samples`. Device: between two events on the GPU,
around a call that was queued long before the GPU got to it, with the L2 cache holding something
else. Graph: the same for the replay of a CUDA graph of the call. On a CPU there is wall time only.
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

# The profiler would tell of its own stages on the terminal.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# The queue of a GPU is held up for so much longer than the host takes to queue a call, in cycles of
# a clock of 2 GHz.
HEAD_START, CYCLES_PER_US = 4.0, 2_000
# Samples of the time on the GPU alone: it varies by 1%.
DEVICE_SAMPLES = 15
# Spins until its parent ends, which Ctrl-C is meant for.
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
    """Times on the GPU alone, on torch's current stream, of a call that the host queues so long.

    A wait on the GPU in front lets the host run ahead, so that the gaps between launches do not
    count. A call with more launches than the queue holds (about 1,000), or that waits for the GPU,
    is bound by the host all the same, and its time says so.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Read before each call, so that the L2 cache holds nothing else. Reading leaves no lines behind
    # whose writing-back the next kernel would pay for.
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
    # Without acc_events it warns that events of an earlier cycle are gone; there is one cycle.
    with torch.profiler.profile(activities=activities, acc_events=True) as profiled:
        call()
        synchronize(device)
    # A range that the program named shows on the GPU, too, and is not work.
    events = [e for e in profiled.events() if not e.is_user_annotation]
    return len([e for e in events if e.device_type.name == "CUDA"])


def extra_bytes(call: Callable[[], Any]) -> int:
    """The most bytes on the CPU that a call held at one time, beside those held before."""
    with profile(profile_memory=True) as profiled:
        call()
    events = [e for e in profiled.kineto_results.events() if e.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return int(max(accumulate(changes, initial=0)))
