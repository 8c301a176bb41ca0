"""Work in threads, in forks and in new processes, which must come to an end."""

from __future__ import annotations

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
        _work_and_exit(work, writer, seconds)
    os.close(writer)
    try:
        status = _wait(pid, seconds + 10)
        with os.fdopen(reader, errors="replace") as report:
            told = report.read()
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    if status != 0:
        pytest.fail(f"the forked process ended with status {status}:\n{told}")


def _work_and_exit(work: Callable[[], object], writer: int, seconds: float) -> None:
    """Never returns: what follows in this process is the parent's."""
    status = 1
    try:
        # Prints where it hangs, and exits.
        faulthandler.dump_traceback_later(seconds, exit=True, file=writer)
        # A fork has none of the threads that torch would hand work to.
        torch.set_num_threads(1)
        work()
        status = 0
    except BaseException:
        os.write(writer, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _wait(pid: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    raise TimeoutError(f"the forked process {pid} did not end in {seconds} s")
