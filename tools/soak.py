"""A soak: random lists and rules on both backends, with threads, forks and interrupts, for hours.

    TRITON_INTERPRET=1 PYTHONPATH=tests python tools/soak.py --minutes 60

Every call is checked byte by byte against helpers.reference. A round depends on its seed alone, so
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
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from clips import Clip, checked, random_clip, random_rule

import tritonclip
from helpers.arena import (
    Arena,
    FusedArena,
    OptimizerArena,
    TorchArena,
)
from helpers.cases import INTERPRETED, bounds_of
from helpers.memories import Follower, random_follower, random_skip_bound
from helpers.mutations import DTYPES, FORMS, MUTATIONS, RULES, SHAPES, take_step
from helpers.serving import decided_on_device
from helpers.workers import run_in_fork, run_in_threads
from helpers.world import World
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue
from tritonclip.engine.plan_cache import plans

BACKENDS = ("torch", "torch-deferred", *(["triton"] if INTERPRETED else []))
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
KINDS = (Arena, Arena, TorchArena, OptimizerArena, FusedArena)
# Seconds after which a call hangs, and rounds after which no more memory should be in use.
HANG = 300
WARM_UP = 50
# The number of elements, or rows and columns.
Sizes = list[int | tuple[int, ...]]
calls: Counter[str] = Counter()


def random_sizes(choice: random.Random, backend: str) -> Sizes:
    """Few large gradients or many small ones, or nothing; less where kernels are interpreted."""
    most = 20_000 if backend == "triton" else 200_000
    n = choice.choice([1, 2, 3, 10, 40] if backend == "triton" else [1, 2, 3, 10, 100, 600])
    largest = max(1, min(most // n, int(10 ** choice.uniform(0, 5.5))))
    sizes = [choice.choice([0, 1, choice.randint(1, largest), largest]) for _ in range(n)]
    sizes = [0] * n if choice.random() < 0.05 else sizes
    return [(size // 3, 3) if size % 3 == 0 and choice.random() < 0.5 else size for size in sizes]


def random_arena(
    choice: random.Random, backend: str, sizes: Sizes | None = None, *, follows: bool = True
) -> Arena:
    """Gradients of one dtype or of several, which one of the calls clips.

    `follows`: an optimizer may skip steps by the norms of earlier ones.
    """
    sizes = sizes or random_sizes(choice, backend)
    kind = choice.choice(KINDS)
    dtype = choice.choice(FLOATS)
    seed = choice.randrange(10**6)
    dtypes = [choice.choice(FLOATS) for _ in sizes] if choice.random() < 0.3 else dtype
    arena = kind(sizes, dtypes, seed=seed)
    if isinstance(arena, OptimizerArena) and choice.random() < 0.3:
        arena.optimizer.skip_above, arena.takes = random_skip_bound(choice, follows=follows)
    return arena


def clip_a_list(choice: random.Random, backend: str) -> None:
    """One list under rules by turns, of which one may follow the norms of its turns."""
    arena = random_arena(choice, backend)
    clips = [random_clip(arena, choice, follows=first) for first in (True, False, False)]
    for _ in range(choice.choice([3, 12])):
        choice.choice(clips).clip(arena, choice)
        calls["calls"] += 1


def is_refused_if_sparse(rule: Any) -> bool:
    """Whether the implicit zeros of a sparse gradient would count, or change."""
    if isinstance(rule, ClipByValue):
        low, high = bounds_of(rule)
        return not low <= 0 <= high
    return bool(rule.norm_type == -torch.inf)


def of_changing_lists(choice: random.Random, last: Any) -> Any:
    """Any rule that sparse gradients may have; one that remembers mostly goes on."""
    if isinstance(last, Follower) and choice.random() < 0.7:
        return last
    if choice.random() < 0.6:
        return random_follower(choice)
    while True:
        rule = random_rule(choice)
        known = isinstance(rule, ClipByGlobalNorm | ClipByNorm | ClipByValue)
        if known and not is_refused_if_sparse(rule):
            return rule


def change_a_list(choice: random.Random, backend: str) -> None:
    """Gradients are resized, retyped, tied, made sparse, dropped and more between calls."""
    world = World(torch.device("cpu"), [(4, 5), (4, 5), (), (7,)])
    rule: Any = None
    for _ in range(12):
        RULES["random"] = rule = of_changing_lists(choice, rule)
        change = choice.choice(list(MUTATIONS)), choice.randrange(6), choice.choice(SHAPES)
        dtype, keep = choice.choice([torch.float32, *DTYPES]), choice.random() < 0.5
        take_step(world, (*change, dtype, keep, "random", choice.choice(list(FORMS))))
        calls["calls"] += 1
        calls[f"{type(getattr(rule, 'rule', rule)).__name__} among changing lists"] += 1


def clip_in_threads(choice: random.Random, backend: str) -> None:
    """Each thread clips lists of equal sizes; the interpreter of Triton bears one thread only."""
    sizes = random_sizes(choice, backend)
    choices = [random.Random(choice.random()) for _ in range(1 if backend == "triton" else 4)]

    def work(thread: int) -> None:
        mine = choices[thread]
        with tritonclip.use_backend(backend.split("-")[0]):
            arena = random_arena(mine, backend, sizes)
            clip = random_clip(arena, mine)
            for _ in range(5):
                clip.clip(arena, mine)
                calls["calls in threads"] += 1

    run_in_threads(work, len(choices))


def clip_in_a_fork(choice: random.Random, backend: str) -> None:
    """While another thread clips."""
    sizes = random_sizes(choice, backend)
    ours, theirs = random_arena(choice, backend, sizes), random_arena(choice, backend, sizes)
    clip, their_clip = random_clip(ours, choice), random_clip(theirs, choice)
    their_choice = random.Random(choice.random())
    clip.clip(ours, choice)
    ended = threading.Event()

    def loop() -> None:
        with tritonclip.use_backend(backend.split("-")[0]):
            while not ended.is_set():
                their_clip.clip(theirs, their_choice)
                calls["calls beside forks"] += 1

    with ThreadPoolExecutor(1) as pool:
        looping = None if backend == "triton" else pool.submit(loop)
        try:
            for _ in range(3):
                run_in_fork(lambda: clip.clip(ours, choice), seconds=HANG)
                calls["forks"] += 1
        finally:
            ended.set()
        if looping is not None:
            looping.result(timeout=HANG)
    clip.clip(ours, choice)


def memory() -> str:
    """What grows with a leak."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident, blocks = pages * resource.getpagesize() / 2**20, sys.getallocatedblocks()
    return f"{resident:.0f} MiB resident, {blocks:,} Python objects, {len(plans)} plans"


@contextmanager
def alarm(handle: Callable[..., None]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handle)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def duration_of(arena: Arena, clip: Clip, choice: random.Random) -> float:
    """Seconds of a call on a list met before."""
    clip.clip(arena, choice)
    clip.fill(arena, choice)
    start = time.perf_counter()
    measured = clip.call(arena)
    duration = time.perf_counter() - start
    clip.check(arena, *measured)
    return duration


def interrupt_a_call(choice: random.Random, backend: str) -> None:
    """KeyboardInterrupt anywhere in a call; later calls are right."""
    arena = random_arena(choice, backend, follows=False)
    # Nothing tells whether an interrupted call is remembered.
    clip = random_clip(arena, choice, follows=False)
    duration = duration_of(arena, clip, choice)
    armed = False

    def handle(*_: object) -> None:
        if armed:
            raise KeyboardInterrupt

    with alarm(handle):
        for _ in range(20):
            clip.fill(arena, choice)
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, 1e-6 + duration * choice.random())
                clip.call(arena)
                armed = False
            except KeyboardInterrupt:
                armed = False
                calls["interrupts"] += 1
                if not torch.is_grad_enabled():
                    # Where torch's optimizers enter and leave its mode.
                    assert isinstance(arena, OptimizerArena)
                    calls["interrupts of an update"] += 1
                    torch.set_grad_enabled(True)
            signal.setitimer(signal.ITIMER_REAL, 0)
            arena.restore()
            clip.clip(arena, choice)
            calls["calls"] += 1


def clip_in_a_handler(choice: random.Random, backend: str) -> None:
    """A signal handler clips other gradients of the same sizes in the middle of a call."""
    sizes = random_sizes(choice, backend)
    ours, theirs = random_arena(choice, backend, sizes), random_arena(choice, backend, sizes)
    clip, their_clip = random_clip(ours, choice), random_clip(theirs, choice)
    duration = duration_of(ours, clip, choice)

    def handle(*_: object) -> None:
        their_clip.clip(theirs, choice)
        calls["handlers"] += 1

    with alarm(handle):
        for _ in range(10):
            clip.fill(ours, choice)
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + duration * choice.random())
            measured = clip.call(ours)
            signal.setitimer(signal.ITIMER_REAL, 0)
            clip.check(ours, *measured)
            calls["calls"] += 1


ACTIVITIES = (
    *([clip_a_list] * 3 + [change_a_list] * 3),
    *(clip_in_threads, clip_in_a_fork, interrupt_a_call, clip_in_a_handler),
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
    if choice.random() < 0.1:
        plans.clear()
    # The code that serves other devices than a CPU, on CPU tensors.
    deferral = decided_on_device() if backend == "torch-deferred" else nullcontext()
    with deferral, tritonclip.use_backend(backend.split("-")[0]):
        activity(choice, backend)
    calls[f"{activity.__name__} on {backend}"] += 1


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
    number, end, early = options.first, time.monotonic() + 60 * options.minutes, memory()
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
            early = memory()
    faulthandler.cancel_dump_traceback_later()
    print(f"{number - options.first} rounds")
    for name, count in [*sorted(calls.items()), *sorted(checked.items())]:
        print(f"{count:8} {name}")
    print(f"after {WARM_UP} rounds: {early}")
    print(f"at the end: {memory()}")
    plans.clear()
    print(f"without plans: {memory()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
