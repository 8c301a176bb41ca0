"""A soak: random lists and rules on both backends, with threads, forks and interrupts, for hours.

    TRITON_INTERPRET=1 python tests/soak.py --minutes 60

Every call is checked byte by byte against tests/reference.py. A round depends on its seed alone, so
that `--seed S --first N` repeats the round that failed, as long as no earlier one matters to it.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from arena import Arena, FlatArena, OptimizerArena, TorchArena
from cases import INTERPRETED, bounds_of
from engine import test_stale_plans
from engine.test_stale_plans import DTYPES, MUTATIONS, SHAPES, World, take_step
from workers import run_in_fork, run_in_threads

import tritonclip
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue
from tritonclip.backends import choose
from tritonclip.engine.planner import plans

BACKENDS = ("torch", "torch-deferred", *(["triton"] if INTERPRETED else []))
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Seconds after which a call hangs, and rounds after which memory should not grow.
HANG = 300
WARM_UP = 50
calls: Counter[str] = Counter()


def random_rule(choice: random.Random) -> Any:
    """A rule that clips some gradients and leaves others alone."""
    limit = 10 ** choice.uniform(-3, 4)
    eps = choice.choice([1e-6, 0.0])
    kind = choice.randrange(3)
    if kind == 0:
        p = choice.choice([2.0, 2.0, 2.0, 1.0, 3.0, 0.5, 0.0, torch.inf, -torch.inf])
        return ClipByGlobalNorm(limit, p, eps=eps)
    if kind == 1:
        return ClipByNorm(limit, choice.choice([2.0, 2.0, 1.0, 3.0, 0.0, torch.inf]), eps=eps)
    low, high = sorted(choice.uniform(-2, 2) for _ in range(2))
    return ClipByValue(low, high)


def random_sizes(choice: random.Random, backend: str) -> list[int]:
    """Few large gradients or many small ones; less where kernels are interpreted."""
    most = 20_000 if backend == "triton" else 200_000
    n = choice.choice([1, 2, 3, 10, 40] if backend == "triton" else [1, 2, 3, 10, 100, 600])
    largest = max(1, min(most // n, int(10 ** choice.uniform(0, 5.5))))
    sizes = [choice.choice([0, 1, choice.randint(1, largest), largest]) for _ in range(n)]
    return sizes if any(sizes) else [*sizes, 3]


def random_arena(choice: random.Random, backend: str, sizes: list[int] | None = None) -> Arena:
    """Gradients of one dtype or of several, which one of the calls clips."""
    sizes = sizes or random_sizes(choice, backend)
    kind = choice.choice([Arena, Arena, TorchArena, FlatArena, OptimizerArena])
    dtype = choice.choice(FLOATS)
    seed = choice.randrange(10**6)
    if kind is not FlatArena and choice.random() < 0.3:
        return kind(sizes, [choice.choice(FLOATS) for _ in sizes], seed=seed)
    return kind(sizes, dtype, seed=seed)


def rule_for(arena: Arena, choice: random.Random) -> Any:
    if isinstance(arena, TorchArena):
        return ClipByGlobalNorm(10 ** choice.uniform(-3, 4))
    rule = random_rule(choice)
    # Statistics of other rules are no norms that the reference gives.
    while isinstance(arena, OptimizerArena) and not isinstance(rule, ClipByGlobalNorm):
        rule = random_rule(choice)
    return rule


def clip_a_list(choice: random.Random, backend: str) -> None:
    arena = random_arena(choice, backend)
    for _ in range(3):
        arena.clip(rule_for(arena, choice))
        calls["calls"] += 1


def is_refused_if_sparse(rule: Any) -> bool:
    """Whether the implicit zeros of a sparse gradient would count, or change."""
    if isinstance(rule, ClipByValue):
        low, high = bounds_of(rule)
        return not low <= 0 <= high
    return bool(rule.norm_type == -torch.inf)


def change_a_list(choice: random.Random, backend: str) -> None:
    """Gradients are resized, retyped, tied, made sparse, dropped and more between calls."""
    world = World(torch.device("cpu"), [(4, 5), (4, 5), (), (7,)])
    for _ in range(8):
        rule = random_rule(choice)
        while is_refused_if_sparse(rule):
            rule = random_rule(choice)
        test_stale_plans.RULES["random"] = rule
        step = (
            choice.choice(list(MUTATIONS)),
            choice.randrange(6),
            choice.choice(SHAPES),
            choice.choice([torch.float32, *DTYPES]),
            choice.random() < 0.5,
            "random",
            choice.choice(list(test_stale_plans.FORMS)),
        )
        take_step(world, step)
        calls["calls"] += 1


def clip_in_threads(choice: random.Random, backend: str) -> None:
    """Each thread clips lists of equal sizes; the interpreter of Triton bears one thread only."""
    sizes = random_sizes(choice, backend)
    choices = [random.Random(choice.random()) for _ in range(1 if backend == "triton" else 4)]

    def work(thread: int) -> None:
        mine = choices[thread]
        with tritonclip.use_backend(backend.split("-")[0]):
            arena = random_arena(mine, backend, sizes)
            for _ in range(5):
                arena.clip(rule_for(arena, mine))
                calls["calls in threads"] += 1

    run_in_threads(work, len(choices))


def clip_in_a_fork(choice: random.Random, backend: str) -> None:
    """While another thread clips."""
    sizes = random_sizes(choice, backend)
    ours, theirs = random_arena(choice, backend, sizes), random_arena(choice, backend, sizes)
    rule, their_rule = rule_for(ours, choice), rule_for(theirs, choice)
    ours.clip(rule)
    ended = threading.Event()

    def loop() -> None:
        with tritonclip.use_backend(backend.split("-")[0]):
            while not ended.is_set():
                theirs.clip(their_rule)
                calls["calls beside forks"] += 1

    with ThreadPoolExecutor(1) as pool:
        looping = None if backend == "triton" else pool.submit(loop)
        try:
            for _ in range(3):
                run_in_fork(lambda: ours.clip(rule), seconds=HANG)
                calls["forks"] += 1
        finally:
            ended.set()
        if looping is not None:
            looping.result(timeout=HANG)
    ours.clip(rule)


@contextmanager
def alarm(handle: Callable[..., None]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handle)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def duration_of(arena: Arena, rule: Any) -> float:
    """Seconds of a call on a list met before."""
    arena.clip(rule)
    arena.fill()
    start = time.perf_counter()
    arena.call(rule)
    return time.perf_counter() - start


def interrupt_a_call(choice: random.Random, backend: str) -> None:
    """KeyboardInterrupt anywhere in a call; later calls are right."""
    arena = random_arena(choice, backend)
    rule = rule_for(arena, choice)
    duration = duration_of(arena, rule)
    armed = False

    def handle(*_: object) -> None:
        if armed:
            raise KeyboardInterrupt

    with alarm(handle):
        for _ in range(20):
            arena.fill()
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, 1e-6 + duration * choice.random())
                arena.call(rule)
                armed = False
            except KeyboardInterrupt:
                armed = False
                calls["interrupts"] += 1
                if not torch.is_grad_enabled():
                    # Between the two lines of torch.no_grad's __enter__ or __exit__.
                    calls["interrupts of torch.no_grad"] += 1
                    torch.set_grad_enabled(True)
            signal.setitimer(signal.ITIMER_REAL, 0)
            arena.clip(rule)
            calls["calls"] += 1


def clip_in_a_handler(choice: random.Random, backend: str) -> None:
    """A signal handler clips other gradients of the same sizes in the middle of a call."""
    sizes = random_sizes(choice, backend)
    ours, theirs = random_arena(choice, backend, sizes), random_arena(choice, backend, sizes)
    rule, their_rule = rule_for(ours, choice), rule_for(theirs, choice)
    duration = duration_of(ours, rule)

    def handle(*_: object) -> None:
        theirs.clip(their_rule)
        calls["handlers"] += 1

    with alarm(handle):
        for _ in range(10):
            ours.fill()
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + duration * choice.random())
            measured = ours.call(rule)
            signal.setitimer(signal.ITIMER_REAL, 0)
            ours.assert_clipped(rule, measured)
            calls["calls"] += 1


ACTIVITIES = (
    clip_a_list,
    clip_a_list,
    clip_a_list,
    change_a_list,
    change_a_list,
    change_a_list,
    clip_in_threads,
    clip_in_a_fork,
    interrupt_a_call,
    clip_in_a_handler,
)
# An interrupt may leave the interpreter of Triton with the functions that it replaces.
NOT_INTERPRETED = (interrupt_a_call, clip_in_a_handler)


def play(name: str) -> None:
    """One round: everything in it follows from its name."""
    choice = random.Random(name)
    backend = choice.choice(BACKENDS)
    activity = choice.choice(ACTIVITIES)
    while backend == "triton" and activity in NOT_INTERPRETED:
        activity = choice.choice(ACTIVITIES)
    real = choose.host_decides
    if choice.random() < 0.1:
        plans.clear()
    if backend == "torch-deferred":
        # The code that serves other devices than a CPU, on CPU tensors.
        plans.clear()
        choose.host_decides = lambda device: False
    try:
        with tritonclip.use_backend(backend.split("-")[0]):
            activity(choice, backend)
    finally:
        if backend == "torch-deferred":
            choose.host_decides = real
            plans.clear()
    calls[f"{activity.__name__} on {backend}"] += 1


def resident() -> float:
    """MiB of memory that the process holds."""
    with Path("/proc/self/statm").open() as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 2**20


def main() -> int:
    """Plays rounds until the time is over; 1 where one of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", default=str(time.time_ns()))
    parser.add_argument("--first", type=int, default=0, help="the round to begin with")
    options = parser.parse_args()

    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    warnings.filterwarnings("ignore", "tritonclip's kernels read", UserWarning)
    torch.set_num_threads(2)
    sys.setswitchinterval(1e-5)
    number, end, early = options.first, time.monotonic() + 60 * options.minutes, resident()
    print(f"seed {options.seed}", flush=True)
    while time.monotonic() < end:
        faulthandler.dump_traceback_later(2 * HANG, exit=True)
        try:
            play(f"{options.seed} {number}")
        except BaseException:
            print(f"failed: --seed {options.seed} --first {number}", flush=True)
            raise
        number += 1
        if number == options.first + WARM_UP:
            gc.collect()
            early = resident()
    faulthandler.cancel_dump_traceback_later()
    gc.collect()
    print(f"{number - options.first} rounds")
    for name, count in sorted(calls.items()):
        print(f"{count:8} {name}")
    print(f"{early:.0f} MiB resident after {WARM_UP} rounds, {resident():.0f} at the end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
