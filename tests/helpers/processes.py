"""Tests that run in several gloo processes: spawned once for each number, told what to run.

    @in_processes(2, 4)
    def test_property():
        ...  # runs in each of 2, then of 4 processes, within a default process group

A test is one item for each number of processes. An exception in any process fails it, with its
traceback. A process that dies or hangs ends the test within a minute, with the place where it
hangs, and takes the others with it; the next test spawns new ones.
"""

import faulthandler
import importlib.util
import inspect
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

# A test may take so long, and the other processes so much longer than the first that failed.
SECONDS, GRACE = 45.0, 3.0
# To import everything on a busy machine.
STARTUP = 120.0
# Begins the answer of a process that skips the test, as all of them do, before any collective.
SKIPPED = "skipped: "
PRELOADED = ["pytest", "torch.distributed.tensor.debug", "torch.distributed.fsdp", "tritonclip"]


def in_processes(
    *numbers: int, seconds: float = SECONDS, on_gpu: bool = False
) -> Callable[[Any], Any]:
    """Makes a test run in every process of a group of each of these sizes.

    Where its backend is one of a GPU, only if it asks for that: gloo distributes tensors of a CPU.
    """

    def wrap(body: Callable[..., None]) -> Any:
        def test(worlds: Worlds, world: int, **values: Any) -> None:
            if not on_gpu and "backend" in values and values["backend"].device.type == "cuda":
                pytest.skip("its tensors lie on a CPU")
            worlds.run(world, body, values, seconds)

        signature = inspect.signature(body)
        own = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("worlds", "world", *signature.parameters)
        ]
        test.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        test.__name__, test.__doc__, test.body = body.__name__, body.__doc__, body  # type: ignore[attr-defined]
        test.__module__ = body.__module__
        sizes = [
            pytest.param(n, id=f"{n}-processes", marks=pytest.mark.xdist_group(f"world-{n}"))
            for n in numbers
        ]
        return pytest.mark.parametrize("world", sizes)(test)

    return wrap


class Worlds:
    """The process groups of a test session, by size; each lives until a test in it fails."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def run(self, size: int, body: Callable[..., None], values: Any, seconds: float) -> None:
        """Runs a test's body in every process of a group; fails where it raises, dies or hangs."""
        world = self._worlds.pop(size, None) or World(size)
        failures = ["it was cut off"]
        try:
            failures = world.run((body.__code__.co_filename, body.__name__, values), seconds)
        finally:
            is_skipped = all(text.startswith(SKIPPED) for text in failures)
            if is_skipped:
                self._worlds[size] = world
            else:
                world.end()
        if failures and is_skipped:
            pytest.skip(failures[0].removeprefix(SKIPPED))
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)

    def end(self) -> None:
        """Ends all processes."""
        while self._worlds:
            self._worlds.popitem()[1].end()


class World:
    """Processes with one default process group."""

    def __init__(self, size: int) -> None:
        # Forks of one process that has imported everything and started nothing.
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="tritonclip-world-")
        self._ends, self._processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, self._folder.name, there), daemon=True
            )
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)
        ready = self._answers(STARTUP, 0.0)
        if any(ready):
            self.end()
            pytest.fail("\n".join(filter(None, ready)), pytrace=False)

    def run(self, command: tuple[str, str, Any], seconds: float) -> list[str]:
        """Runs a test's body; a text for each process that failed."""
        for end in self._ends:
            # Of a process that is dead the answer tells.
            with suppress(OSError):
                end.send(command)
        return [text for text in self._answers(seconds, GRACE) if text]

    def _answers(self, seconds: float, grace: float) -> list[str]:
        """A text from each process: "" where all is well."""
        told: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        while len(told) < len(self._ends):
            waiting = [end for rank, end in enumerate(self._ends) if rank not in told]
            ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for end in ready:
                rank = self._ends.index(end)  # type: ignore[arg-type]
                told[rank] = self._answer(rank)
                if told[rank]:
                    # The others may wait for it in a collective.
                    deadline = min(deadline, time.monotonic() + grace)
        for rank in set(range(len(self._ends))) - set(told):
            told[rank] = f"process {rank} did not come to an end:\n{self._stack(rank)}"
        return [told[rank] for rank in sorted(told)]

    def _answer(self, rank: int) -> str:
        try:
            return str(self._ends[rank].recv())
        except (EOFError, OSError):
            self._processes[rank].join(5)
            return f"process {rank} died with exit code {self._processes[rank].exitcode}"

    def _stack(self, rank: int) -> str:
        """Where a process hangs."""
        os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.5)
        path = Path(self._folder.name) / f"stack-{rank}"
        return path.read_text() if path.exists() else "unknown"

    def end(self) -> None:
        """Ends the processes: those that wait for a command end when their pipe does."""
        for end in self._ends:
            end.close()
        deadline = time.monotonic() + GRACE
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(rank: int, size: int, folder: str, end: Any) -> None:
    """A process: runs what it is told until its pipe is closed."""
    with (Path(folder) / f"stack-{rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        torch.set_num_threads(1)
        # Gloo and DTensor warn of much that is not under test.
        warnings.filterwarnings("ignore")
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
        )
        end.send("")
        while True:
            try:
                command = end.recv()
            except EOFError:
                break
            end.send(_run(rank, *command))
        faulthandler.unregister(signal.SIGUSR1)
    # Not by way of destructors, which may wait for the others.
    os._exit(0)


def _run(rank: int, path: str, name: str, values: dict[str, Any]) -> str:
    """Runs a test's body; "" where it passes, else the traceback."""
    # If nobody is left to end this process, it ends itself.
    faulthandler.dump_traceback_later(2 * SECONDS, exit=True)
    try:
        # As the fixture of that name does in the process of the tests.
        with values["backend"].entered() if "backend" in values else nullcontext():
            test = _load(path)[name]
            getattr(test, "body", test)(**values)
        dist.barrier()
    except pytest.skip.Exception as skipped:
        return f"{SKIPPED}{skipped}"
    except BaseException:
        return f"process {rank}:\n{traceback.format_exc()}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    return ""


@cache
def _load(path: str) -> dict[str, Any]:
    """The names in a file of tests."""
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"in_processes_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)
