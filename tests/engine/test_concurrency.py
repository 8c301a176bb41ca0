"""A list met before is clipped right in forks, in threads, and where a call interrupts another.

All lists of a test have equal shapes, so that they share whatever is kept between calls.
"""

import functools
import random
import signal
import sys
import threading
import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import tritonclip
from helpers.arena import Arena
from helpers.cases import INTERPRETED, each_rule
from helpers.clips import CHOICES, clip, random_arena, random_clip, random_sizes
from helpers.serving import forget_plans
from helpers.workers import NEEDS_FORK, run_in_fork, run_in_threads
from tritonclip import ClipByGlobalNorm

pytestmark = [
    # What a fork of a process with threads must not do is tested here.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # Kernels read runs of memory; gradients with gaps go to the torch backend, which is said once.
    pytest.mark.filterwarnings("ignore:tritonclip's kernels read:UserWarning"),
]

SMALL = (10,) * 10
MIXED = (torch.float32, torch.bfloat16) * 5
# An example takes forks, threads or signals.
FEWER = settings(max_examples=max(2, settings().max_examples // 4))


def repeat(times: int, work: Callable[..., None], *arguments: Any) -> None:
    for _ in range(times):
        work(*arguments)


def random_pair(choice: random.Random) -> list[Callable[[], None]]:
    """Clips of two lists of equal shapes, each of which checks itself."""
    sizes = random_sizes(choice)
    arenas = [random_arena(choice, sizes=sizes) for _ in range(2)]
    # Each has random numbers of its own, because they may run at once.
    return [
        functools.partial(
            random_clip(arena, choice).clip,
            arena,
            random.Random(choice.randrange(2**32)),
        )
        for arena in arenas
    ]


@NEEDS_FORK
@pytest.mark.parametrize("met", [True, False], ids=["met", "new"])
@FEWER
@given(choice=CHOICES)
def test_list_is_clipped_in_a_fork_and_after_it(met, choice):
    forget_plans()
    ours, _ = random_pair(choice)
    if met:
        repeat(2, ours)
    run_in_fork(lambda: repeat(2, ours))
    repeat(2, ours)


@NEEDS_FORK
@pytest.mark.usefixtures("frequent_switches")
@FEWER
@given(choice=CHOICES)
def test_fork_clips_while_another_thread_did(choice):
    """A fork has no thread but one, and what the others held stays held."""
    ours, theirs = random_pair(choice)
    ours()
    ended = threading.Event()

    def loop() -> None:
        while not ended.is_set():
            theirs()

    with ThreadPoolExecutor(1) as pool:
        looping = pool.submit(loop)
        try:
            for _ in range(4):
                run_in_fork(lambda: repeat(2, ours))
        finally:
            ended.set()
        looping.result(timeout=60)
    repeat(2, ours)
    repeat(2, theirs)


def interrupt_lines(call: Callable[[], object], interruption: Callable[[], object]) -> int:
    """Interrupts a call before each line of the library that it runs; returns how many it ran."""
    lines: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_globals.get("__name__", "").startswith("tritonclip"):
            return None
        line = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and line not in lines:
            lines.add(line)
            interruption()
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(previous)
    return len(lines)


@NEEDS_FORK
@pytest.mark.parametrize(
    "met",
    # A list that is new runs several times as many lines, each of which takes a fork.
    [pytest.param(True, id="met"), pytest.param(False, id="new", marks=pytest.mark.exhaustive)],
)
def test_fork_clips_wherever_another_thread_was(met):
    """The thread stands still before each line of its call in turn, while the process forks."""
    rule = ClipByGlobalNorm(0.5)
    ours, theirs = Arena(SMALL), Arena(SMALL if met else (10, 11, 12), seed=1)
    repeat(2, clip, ours, rule)
    stopped, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def stop() -> None:
        stopped.release()
        assert go_on.acquire(timeout=60)

    def walk() -> int:
        try:
            return interrupt_lines(lambda: clip(theirs, rule), stop)
        finally:
            stopped.release()

    with ThreadPoolExecutor(1) as pool:
        walking = pool.submit(walk)
        try:
            while stopped.acquire(timeout=60) and not walking.done():
                run_in_fork(lambda: clip(ours, rule), seconds=5)
                go_on.release()
        except BaseException:
            go_on.release(100_000)
            raise
        assert walking.result(timeout=60) > 0


@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.skipif(INTERPRETED, reason="the interpreter of Triton is not thread-safe")
@FEWER
@given(choice=CHOICES)
def test_threads_clip_equal_lists_at_once(backend, choice):
    """One list a thread, and other values in every call."""
    sizes = random_sizes(choice)
    seeds = [choice.randrange(2**32) for _ in range(4)]

    def work(thread: int) -> None:
        mine = random.Random(seeds[thread])
        with tritonclip.use_backend(backend.name):
            arena = random_arena(mine, backend.device, sizes=sizes)
            repeat(5, random_clip(arena, mine).clip, arena, mine)

    run_in_threads(work, len(seeds))


@NEEDS_FORK
@FEWER
@given(choice=CHOICES)
def test_signal_handler_clips_in_the_middle_of_a_call(choice):
    """In a fork, because a call that waits for itself never ends."""
    ours, theirs = random_pair(choice)
    handled, turns = 0, 40

    def handle(*_: object) -> None:
        nonlocal handled
        handled += 1
        theirs()

    def work() -> None:
        signal.signal(signal.SIGALRM, handle)
        duration = min(timeit.repeat(ours, number=1, repeat=3))
        for turn in range(turns):
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + duration * turn / turns)
            ours()
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert handled

    run_in_fork(work)


def _refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        tritonclip.get_total_norm([torch.ones(3), torch.ones(3, dtype=torch.int64)])


@NEEDS_FORK
@pytest.mark.covering(2)
@pytest.mark.parametrize("rule", each_rule(0.5, -0.3, 0.2))
@pytest.mark.parametrize("interruption", ["equal", "others", "refused"])
@pytest.mark.parametrize("name", ["auto", "torch"])
@pytest.mark.parametrize("dtypes", [torch.float32, MIXED], ids=["float32", "mixed"])
def test_call_is_right_where_another_interrupts_it_at_any_line(rule, interruption, name, dtypes):
    """As signal handlers and destructors do; in a fork, because it might wait for itself."""
    ours, theirs = Arena(SMALL, dtypes), Arena(SMALL, dtypes, seed=1)
    others = [Arena((n, 5), seed=n) for n in range(1, 41)]
    interruptions: dict[str, Callable[[], object]] = {
        "equal": lambda: clip(theirs, rule),
        "others": lambda: [tritonclip.clip_(other.params, rule) for other in others],
        "refused": _refused,
    }

    def work() -> None:
        assert interrupt_lines(lambda: clip(ours, rule), interruptions[interruption]) > 0
        repeat(2, clip, ours, rule)

    with tritonclip.use_backend(name):
        repeat(2, clip, ours, rule)
        run_in_fork(work, seconds=60)
