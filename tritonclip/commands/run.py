"""`python -m tritonclip run`: runs a program as Python does, with torch's functions patched.

Not by runpy: it takes the module `__main__` away at the end, where pickle and functions that run at
exit still need it, and gives a script neither its loader nor its traceback.
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import contextlib
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NamedTuple

from tritonclip.commands.call_log import CallLog, launched
from tritonclip.integrations.patching import Losses, TorchPatch
from tritonclip.messages import join_names
from tritonclip.monitor.recorder import record


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments, before those of the script."""
    command.usage = (
        f"{command.prog} [-h] [--compare] [--record FILE] [--no-loss] [-m] SCRIPT [ARGUMENT ...]"
    )
    command.add_argument(
        "--compare",
        action="store_true",
        help="let torch's functions and tritonclip's take turns, and print at the end which is "
        "faster on the gradients of this run, by how much, and whether it matters",
    )
    command.add_argument(
        "--record",
        metavar="FILE",
        help="write the norm of every call to FILE, a new .csv file, for suggest and plot, and the "
        "losses on which the script called backward before it",
    )
    command.add_argument(
        "--no-loss", action="store_true", help="with --record: write no losses, only norms"
    )
    command.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is a module, as for python -m"
    )
    command.add_argument(
        "script", metavar="SCRIPT or -m MODULE", help="a file, or with -m a module"
    )


def split(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words up to the script, and its arguments, of which argparse would drop a `--`."""
    at = 1
    while at < len(given) and given[at].startswith("-") and given[at] != "--":
        at += 2 if given[at] == "--record" else 1
    end = at + (given[at : at + 1] == ["--"])
    return [*given[:at], *given[end : end + 1]], [*given[end + 1 :]]


def main(chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Runs a script under `patch_torch`, as Python would; errors of the script are raised.

    The report is written when the program ends, after the threads for which Python waits.
    """
    is_first, file = launched()[0] == 0, chosen.record
    try:
        _refuse_others(chosen)
        recorder = None
        if file is not None:
            recorder = record(file, write=is_first)
            if is_first and recorder.path.exists():
                raise FileExistsError(f"{file} exists; expected the name of a new file")
        program = (module if chosen.is_module else script)(chosen.script)
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    log = CallLog(compares=chosen.compare)
    losses = None if recorder is None or chosen.no_loss else Losses()
    unwatch: Callable[[], object] = (lambda: None) if losses is None else losses.watch()
    patch = TorchPatch(recorder, log, losses)
    started, forked = _note_processes(program.attributes["__file__"], chosen.script)
    process, stderr, failed = os.getpid(), sys.stderr, True

    def end() -> None:
        # A fork that the script made may end here, too.
        if os.getpid() != process:
            return
        # Nothing here is a fault of the script, not even builtins that it has changed.
        with contextlib.suppress(Exception):
            patch.remove()
            unwatch()
            if recorder is not None:
                # A warning at the very end names the rows that cannot be written.
                with contextlib.suppress(OSError):
                    recorder.close()
            if not is_first:
                return
            report = log.report(patch.served_by_torch, failed=failed)
            lines = f"tritonclip run: {report}".splitlines()
            if started:
                # Where no call was seen, the likely reason stands before all others.
                lines.insert(len(lines) if log.counts else 1, _not_patched(started))
            if forked and not log.counts:
                lines.insert(1, _not_counted(forked))
            if recorder is not None:
                command = f"norms are in {file}: python -m tritonclip suggest {file}"
                lines.append(command if recorder.steps else "no norm was recorded")
            # Not through the buffer of standard error: if nobody reads the pipe, Python would try
            # again to write the rest of the buffer, and end with status 120.
            with contextlib.suppress(OSError):
                stderr.flush()
            os.write(stderr.fileno(), "".join(f"{line}\n" for line in lines).encode())

    # This runs after all threads, and after the functions that the script registers.
    atexit.register(end)
    try:
        program.run(arguments)
        failed = False
    except SystemExit as error:
        failed = not (error.code is None or (isinstance(error.code, int) and error.code == 0))
        raise
    return 0


# Modules whose processes do not train, and programs that run a script.
_HELPERS = {"torch.utils.data._utils.worker", "multiprocessing.managers"}
_RUNNERS = ("python", "torchrun", "accelerate", "deepspeed")


def _note_processes(*names: str) -> tuple[list[str], list[str]]:
    """Names the processes that train without the patch, and forks, which have it.

    They are those of multiprocessing, of a notebook, and of a script, which is known by its file or
    by one of its names.
    """
    started: list[str] = []
    forked: list[str] = []
    files = {Path(name).resolve() for name in names}
    start, popen = BaseProcess.start, subprocess.Popen.__init__

    @functools.wraps(start)
    def start_noted(self: Any) -> None:
        target = getattr(self, "_target", None)
        start(self)
        method = getattr(getattr(self, "_popen", None), "method", "fork")
        if getattr(target, "__module__", None) not in _HELPERS:
            (forked if method == "fork" else started).append(self.name)

    @functools.wraps(popen)
    def popen_noted(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        popen(self, args, *rest, **options)
        with contextlib.suppress(Exception):
            words = [*map(os.fsdecode, args.split() if isinstance(args, str) else args)]
            paths = [Path(options.get("cwd") or "", word).resolve() for word in words]
            is_runner = Path(words[0]).name.startswith(_RUNNERS) or paths[0] in files
            if "ipykernel_launcher" in words:
                started.append(f"the kernel {self.pid}")
            elif is_runner and not (files.isdisjoint(paths) and set(names).isdisjoint(words)):
                started.append(f"process {self.pid}")

    BaseProcess.start = start_noted  # type: ignore[method-assign]
    subprocess.Popen.__init__ = popen_noted  # type: ignore[method-assign]
    return started, forked


def _not_counted(forked: Sequence[str]) -> str:
    return f"not counted: calls in forks of the script ({join_names(forked, 4)}), which are patched"


def _not_patched(started: Sequence[str]) -> str:
    return (
        f"not patched: processes that the script started ({join_names(started, 4)}),"
        " in which torch clips. Start replicas by torchrun -m tritonclip run in their place; in "
        "other processes that train call tritonclip.patch_torch(), in the first cell of a notebook "
        "%load_ext tritonclip"
    )


# Modules whose processes run the script, and the names of shell scripts.
_LAUNCHERS = ("torch.distributed.", "accelerate.", "deepspeed.")
_OF_SHELLS = {".sh", ".bash", ".slurm", ".sbatch"}


def _refuse_others(chosen: argparse.Namespace) -> None:
    """Raises ValueError for anything but a Python script or module that trains, with a remedy."""
    name = chosen.script if chosen.is_module else Path(chosen.script).name
    suffix = Path(name).suffix
    if chosen.is_module:
        is_program = name.startswith(_LAUNCHERS)
    else:
        is_program = not Path(chosen.script).is_file() and shutil.which(name) is not None
    if suffix == ".ipynb":
        remedy = "in the first cell of the notebook write: %load_ext tritonclip"
    elif suffix in _OF_SHELLS or is_program:
        remedy = (
            "write -m tritonclip run in front of the script that trains, as in python -m "
            "tritonclip run train.py, torchrun ... -m tritonclip run train.py, or deepspeed ... "
            "--module tritonclip run train.py"
        )
    else:
        return
    raise ValueError(f"expected a Python script, got {name}; {remedy}")


class Program(NamedTuple):
    """The code that `python SCRIPT` or `python -m MODULE` runs; `name` is sys.argv[0]."""

    code: Callable[[], CodeType]
    attributes: dict[str, Any]
    name: str

    def run(self, arguments: Sequence[str]) -> None:
        """Runs it in a new module `__main__`, which stays; raises its errors."""
        sys.argv[:] = [self.name, *arguments]
        main = ModuleType("__main__")
        vars(main).update(self.attributes, __builtins__=builtins)
        # Pickle and multiprocessing look up classes and functions there.
        sys.modules["__main__"] = main
        code = None
        try:
            code = self.code()
            exec(code, vars(main))
        except BaseException as error:
            _hide_frames(error, code)
            raise


def script(path: str) -> Program:
    """A file, whose folder becomes `sys.path[0]`, or a folder or archive with a `__main__`.

    ValueError where there is none.
    """
    # Absolute, as in Python since 3.9, so that it stays valid if the script changes its folder.
    file = os.path.join(Path.cwd(), path)  # noqa: PTH118  (Path would leave out ./)
    if (spec := PathFinder.find_spec("__main__", [file])) is not None:
        _set_first_path(file)
        return _of_spec(spec, path)
    if Path(path).is_dir() or not Path(path).exists():
        raise ValueError(
            f"expected a script, got {path}; there is no such file in {Path.cwd()}. A module is "
            "run by -m NAME"
        )
    _set_first_path(str(Path(path).resolve().parent))
    loader = SourceFileLoader("__main__", file)
    attributes = {"__file__": file, "__cached__": None, "__loader__": loader}
    return Program(lambda: loader.source_to_code(loader.get_data(file), file), attributes, path)


def _of_spec(spec: ModuleSpec, name: str) -> Program:
    loader: Any = spec.loader
    attributes = {
        "__spec__": spec,
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__loader__": loader,
        "__package__": spec.parent,
    }
    return Program(lambda: loader.get_code(spec.name), attributes, name)


def module(name: str) -> Program:
    """A module, or the `__main__` of a package; the current folder becomes `sys.path[0]`."""
    if name.endswith(".py") or "/" in name:
        raise ValueError(
            f"expected the name of a module after -m, got the path {name}; leave out -m"
        )
    _set_first_path(str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # Otherwise the module exists, and something that it imports does not.
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise ValueError(f"expected a module that can be run, got {name}; no Python code is there")
    return _of_spec(spec, str(spec.origin))


def _set_first_path(folder: str) -> None:
    """Sets the entry that is Python's own, unless Python was told to have none (-P)."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _hide_frames(error: BaseException, code: CodeType | None) -> None:
    """Lets the hook for errors that nothing catches show an error from the program's frames on."""
    shown, frames = getattr(sys, "excepthook", None), error.__traceback__
    if shown is None:
        return
    while frames is not None and frames.tb_frame.f_code is not code:
        frames = frames.tb_next

    def show(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        if value is error:
            value, traceback = error.with_traceback(frames), frames
        shown(kind, value, traceback)

    sys.excepthook = show
