"""A list met before is clipped right in forks, in threads, and where a call interrupts another.

All lists of a test have equal shapes, so that they share whatever is kept between calls.
"""

from __future__ import annotations

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

import tritonclip
from helpers.arena import ARENAS, Arena
from helpers.cases import INTERPRETED
from helpers.workers import NEEDS_FORK, run_in_fork, run_in_threads
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue

pytestmark = [
    # What a fork of a process with threads must not do is tested here.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
]

GLOBAL = ClipByGlobalNorm(0.5)
RULES = [
    pytest.param(GLOBAL, id="global"),
    pytest.param(ClipByNorm(0.5), id="by-norm"),
    pytest.param(ClipByValue(-0.3, 0.2), id="by-value"),
]
SMALL, MEDIUM = (10,) * 10, (70_000,) * 3
SIZES = [pytest.param(SMALL, id="small"), pytest.param(MEDIUM, id="medium")]
DTYPES = [
    pytest.param(dtype, id=str(dtype)[6:])
    for dtype in (torch.float32, torch.bfloat16, torch.float64)
]
MIXED = (torch.float32, torch.bfloat16, torch.float64)


def repeat(times: int, work: Callable[..., None], *arguments: Any) -> None:
    for _ in range(times):
        work(*arguments)


def check_fork(ours: Arena, rule: Any, *, met: bool = True) -> None:
    """A list is clipped in a fork and after it, where it was met before or not."""
    if met:
        repeat(2, ours.clip, rule)
    run_in_fork(lambda: repeat(2, ours.clip, rule))
    repeat(2, ours.clip, rule)


@NEEDS_FORK
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtypes", [*DTYPES, pytest.param(MIXED, id="mixed")])
def test_list_is_clipped_in_a_fork_and_after_it(rule, sizes, dtypes):
    check_fork(Arena(sizes[:3] if dtypes is MIXED else sizes, dtypes), rule)


@NEEDS_FORK
@pytest.mark.parametrize("arena", ARENAS)
def test_every_call_is_right_in_a_fork_and_after_it(arena):
    check_fork(arena(SMALL), GLOBAL)


@NEEDS_FORK
def test_list_first_met_in_a_fork_is_clipped_in_the_parent():
    check_fork(Arena((11, 12, 13)), GLOBAL, met=False)


@NEEDS_FORK
@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.parametrize("sizes", SIZES)
def test_fork_clips_while_another_thread_did(sizes):
    """A fork has no thread but one, and what the others held stays held."""
    rule = ClipByGlobalNorm(0.5)
    ours, theirs = Arena(sizes), Arena(sizes, seed=1)
    ours.clip(rule)
    ended = threading.Event()

    def loop() -> None:
        while not ended.is_set():
            tritonclip.clip_(theirs.params, rule)

    with ThreadPoolExecutor(1) as pool:
        looping = pool.submit(loop)
        try:
            for _ in range(12 if sizes is SMALL else 4):
                run_in_fork(lambda: repeat(2, ours.clip, rule))
        finally:
            ended.set()
        looping.result(timeout=60)
    repeat(2, ours.clip, rule)
    repeat(2, theirs.clip, rule)


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
    repeat(2, ours.clip, rule)
    stopped, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def stop() -> None:
        stopped.release()
        assert go_on.acquire(timeout=60)

    def walk() -> int:
        try:
            return interrupt_lines(lambda: theirs.clip(rule), stop)
        finally:
            stopped.release()

    with ThreadPoolExecutor(1) as pool:
        walking = pool.submit(walk)
        try:
            while stopped.acquire(timeout=60) and not walking.done():
                run_in_fork(lambda: ours.clip(rule), seconds=5)
                go_on.release()
        except BaseException:
            go_on.release(100_000)
            raise
        assert walking.result(timeout=60) > 0


@pytest.mark.covering(2)
@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.skipif(INTERPRETED, reason="the interpreter of Triton is not thread-safe")
@pytest.mark.parametrize(
    ("sizes", "threads", "turns"),
    [
        pytest.param(SMALL, 2, 60, id="small-2"),
        pytest.param(SMALL, 4, 30, id="small-4"),
        pytest.param(MEDIUM, 3, 5, id="medium-3"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_threads_clip_equal_lists_at_once(backend, rule, dtype, sizes, threads, turns):
    """One list a thread, and other values in every call."""

    def work(thread: int) -> None:
        ours = Arena(sizes, dtype, backend.device, seed=thread)
        with tritonclip.use_backend(backend.name):
            repeat(turns, ours.clip, rule)

    run_in_threads(work, threads)


@pytest.mark.covering(1)
@NEEDS_FORK
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sizes", SIZES)
def test_signal_handler_clips_in_the_middle_of_a_call(rule, sizes):
    """In a fork, because a call that waits for itself never ends."""
    ours, theirs = Arena(sizes), Arena(sizes, seed=1)
    handled, turns = 0, 200 if sizes is SMALL else 50

    def handle(*_: object) -> None:
        nonlocal handled
        handled += 1
        theirs.clip(rule)

    def work() -> None:
        signal.signal(signal.SIGALRM, handle)
        duration = min(timeit.repeat(lambda: ours.call(rule), number=1, repeat=5))
        for turn in range(turns):
            ours.fill()
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + duration * turn / turns)
            measured = ours.call(rule)
            signal.setitimer(signal.ITIMER_REAL, 0)
            ours.assert_clipped(rule, measured)
        assert handled > turns / 4

    run_in_fork(work)


def _refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        tritonclip.get_total_norm([torch.ones(3), torch.ones(3, dtype=torch.int64)])


@NEEDS_FORK
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("interruption", ["equal", "others", "refused"])
def test_call_is_right_where_another_interrupts_it_at_any_line(rule, interruption):
    """As signal handlers and destructors do; in a fork, because it might wait for itself."""
    ours, theirs = Arena(SMALL), Arena(SMALL, seed=1)
    others = [Arena((n, 5), seed=n) for n in range(1, 41)]
    interruptions: dict[str, Callable[[], object]] = {
        "equal": lambda: theirs.clip(rule),
        "others": lambda: [tritonclip.clip_(other.params, rule) for other in others],
        "refused": _refused,
    }

    def work() -> None:
        assert interrupt_lines(lambda: ours.clip(rule), interruptions[interruption]) > 0
        repeat(2, ours.clip, rule)

    repeat(2, ours.clip, rule)
    run_in_fork(work, seconds=20)
