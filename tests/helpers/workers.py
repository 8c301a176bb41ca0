"""Work in threads, in forks and in a new process of Python."""

import faulthandler
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

# os.fork is for POSIX; elsewhere than on Linux, libraries that torch loads may not survive it.
NEEDS_FORK = pytest.mark.skipif(sys.platform != "linux", reason="forks of torch work on Linux only")


def python(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python without the options that this process has from TRITON* variables."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    return subprocess.run(
        [sys.executable, *command], env=kept | environment, capture_output=True, text=True
    )


def run_in_threads(work: Callable[[int], object], threads: int) -> None:
    """Runs work in threads that start together; raises what any of them raised."""
    barrier = Barrier(threads)

    def start(thread: int) -> None:
        barrier.wait(timeout=60)
        work(thread)

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(start, thread) for thread in range(threads)]:
            done.result()


def run_in_fork(work: Callable[[], object], seconds: float = 20.0) -> None:
    """Runs work in a forked process; fails where it raises or hangs, with the traceback."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _work_and_exit(work, writer)
    os.close(writer)
    status = None
    try:
        status = _wait(pid, seconds)
        if status is None:
            # It writes where it hangs.
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)
    finally:
        # Whatever happened, no process is left.
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        with os.fdopen(reader, errors="replace") as report:
            told = report.read()
    if status is None:
        pytest.fail(f"the forked process did not end in {seconds} s:\n{told}")
    if status != 0:
        pytest.fail(f"the forked process ended with status {status}:\n{told}")


def _work_and_exit(work: Callable[[], object], writer: int) -> None:
    """Never returns: what follows in this process is the parent's."""
    status = 1
    try:
        # Prints where it hangs. A timer of faulthandler would wait for pytest's timer, whose thread
        # is the parent's.
        faulthandler.register(signal.SIGUSR1, file=writer)
        # A fork has none of the threads that torch would hand work to.
        torch.set_num_threads(1)
        work()
        status = 0
    except BaseException:
        os.write(writer, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _wait(pid: int, seconds: float) -> int | None:
    """The exit status of a process; None where it did not end in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None
