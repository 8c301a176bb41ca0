"""`python -m tritonclip run`: runs a program as Python does, with torch's functions patched.

We do not use runpy: it removes the module `__main__` at the end, where pickle and functions that
run at exit still need it, and it gives a script neither its loader nor its traceback.
"""

import argparse
import atexit
import builtins
import contextlib
import functools
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NamedTuple

import torch

from tritonclip.commands.call_log import CallLog, launched
from tritonclip.integrations.patching import Losses, TorchPatch
from tritonclip.messages import join_names
from tritonclip.monitor.recorder import Recorder, record

# Options of `run` that may be given to the script by mistake.
_OPTIONS = {"--compare", "--no-loss", "--record"}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments that stand before those of the script."""
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
    """Splits the words up to the script from its arguments; argparse would drop a `--` in them."""
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
        _refuse_others(chosen, arguments)
        recorder = None
        if file is not None:
            recorder = record(file, write=is_first)
            if is_first and recorder.path.exists():
                raise FileExistsError(f"{file} exists; expected the name of a new file")
        program = (module if chosen.is_module else script)(chosen.script)
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    late = sorted({argument.partition("=")[0] for argument in arguments} & _OPTIONS)
    if is_first and late:
        print(
            f"tritonclip run: {' and '.join(late)} after {chosen.script} went to the script; "
            "options of run stand before it: python -m tritonclip run "
            f"{' '.join(late)} ... {'-m ' * chosen.is_module}{chosen.script}",
            file=sys.stderr,
        )
    log = CallLog(compares=chosen.compare)
    losses = None if recorder is None or chosen.no_loss else Losses()
    unwatch: Callable[[], object] = (lambda: None) if losses is None else losses.watch()
    patch = TorchPatch(recorder, log, losses)
    started, forked = _note_processes(program.attributes["__file__"], chosen.script)
    process, stderr, failed = os.getpid(), sys.stderr, True

    def end() -> None:
        # A fork that the script made may end here as well. Errors here, for example because the
        # script changed builtins, must not become errors of the script.
        with contextlib.suppress(Exception):
            if os.getpid() == process:
                finish()

    def finish() -> None:
        patch.remove()
        unwatch()
        if recorder is not None:
            # Rows that cannot be written get a warning at the very end.
            with contextlib.suppress(OSError):
                recorder.close()
        if not is_first:
            return
        report = log.report(patch.served_by_torch, failed=failed)
        lines = f"tritonclip run: {report}".splitlines()
        if started:
            # If no call was seen, this is the likely reason, so it stands before all others.
            at = len(lines) if log.counts else 1
            lines.insert(at, _NOT_PATCHED.format(join_names(started, 4)))
        if forked and not log.counts:
            lines.insert(1, _NOT_COUNTED.format(join_names(forked, 4)))
        if recorder is not None:
            command = f"norms are in {file}: python -m tritonclip suggest {file}"
            lines.append(command if recorder.path.is_file() else "no norm was recorded")
        _say(stderr, lines)

    # This runs after all threads, and after the functions that the script registers.
    atexit.register(end)
    if recorder is not None and is_first:
        _flush_at_sigterm(recorder)
    try:
        program.run(arguments)
        failed = False
    except SystemExit as error:
        failed = not (error.code is None or (isinstance(error.code, int) and error.code == 0))
        raise
    return 0


def _say(stderr: Any, lines: Sequence[str]) -> None:
    """Writes to the standard error of the start, and bypasses its buffer.

    If nobody reads the pipe, Python would try at the end to write the rest of the buffer, and exit
    with status 120.
    """
    # Windows has no SIGPIPE, and it does no harm to ignore SIGTERM there for a moment.
    pipe = getattr(signal, "SIGPIPE", signal.SIGTERM)
    kills = signal.getsignal(pipe) == signal.SIG_DFL
    if kills:
        signal.signal(pipe, signal.SIG_IGN)
    try:
        with contextlib.suppress(OSError):
            stderr.flush()
        os.write(stderr.fileno(), "".join(f"{line}\n" for line in lines).encode())
    finally:
        if kills:
            signal.signal(pipe, signal.SIG_DFL)


def _flush_at_sigterm(recorder: Recorder) -> None:
    """Writes rows before SIGTERM ends this process; forks end at once."""
    if not hasattr(os, "register_at_fork") or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return

    def end(number: int, frame: object) -> None:
        # A device may still compute the last rows, but we do not wait for one that hangs.
        for pause in (0.0, 0.5) if torch.cuda.is_initialized() else (0.0,):
            time.sleep(pause)
            with contextlib.suppress(Exception):
                recorder.flush(wait=False)
        # Otherwise a handler of the script has called this one.
        if signal.getsignal(number) is end:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def leave() -> None:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, end)
    os.register_at_fork(after_in_child=leave)


# Modules whose processes do not train, and programs that run a script.
_HELPERS = {"torch.utils.data._utils.worker", "multiprocessing.managers"}
_RUNNERS = ("python", "torchrun", "accelerate", "deepspeed")


def _note_processes(*names: str) -> tuple[list[str], list[str]]:
    """Collects the names of processes that train without the patch, and of forks, which have it.

    These are processes of multiprocessing, kernels of notebooks, and processes that run the script
    again, which is known by its file or by one of `names`.
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


_NOT_COUNTED = "not counted: calls in forks of the script ({}), which are patched"
_NOT_PATCHED = (
    "not patched: processes that the script started ({}), in which torch clips. Start replicas by "
    "torchrun -m tritonclip run in their place; in other processes that train call "
    "tritonclip.patch_torch(), in the first cell of a notebook %load_ext tritonclip"
)


# Programs that start a training, with the option that names a module; the same as modules.
_RUN_MODULES = {"torchrun": "-m", "accelerate": "-m", "deepspeed": "--module"}
_LAUNCHERS = {
    "torch.distributed.run": "-m",
    "torch.distributed.launch": "-m",
    "accelerate.commands.launch": "-m",
    "accelerate.commands.accelerate_cli": "-m",
    "deepspeed.launcher.runner": "--module",
}
_SHELLS = {"sh", "bash", "zsh", "sbatch"}
_OF_SHELLS = {".sh", ".bash", ".slurm", ".sbatch"}


def _refuse_others(chosen: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Raises ValueError if this is no script of Python; the message has the line to write."""
    name = chosen.script if chosen.is_module else Path(chosen.script).name.removesuffix(".exe")
    is_python = re.fullmatch(r"python[\d.]*", name) is not None and not chosen.is_module
    suffix = "" if chosen.is_module else Path(name).suffix
    if suffix == ".ipynb":
        raise ValueError(
            f"expected a script, got the notebook {name}; in its first cell write: "
            "%load_ext tritonclip"
        )
    if suffix in _OF_SHELLS or (name in _SHELLS and not chosen.is_module):
        raise ValueError(
            f"expected a script of Python, got {name}; in the shell script write python -m "
            "tritonclip run train.py, or torchrun ... -m tritonclip run train.py"
        )
    option = _LAUNCHERS.get(name) if chosen.is_module else _RUN_MODULES.get(name)
    is_program = not (chosen.is_module or Path(chosen.script).is_file()) and shutil.which(name)
    if not (option or is_python or is_program):
        return
    words = ["python", "-m", name] if chosen.is_module else [name]
    ends = [i for i, word in enumerate(arguments) if word in ("-m", "--module")]
    ends += [i for i, word in enumerate(arguments) if word.endswith(".py")]
    at = min(ends, default=None)
    words += ["..."] if at is None else arguments[:at]
    if option is None and not any("python" in word for word in words):
        words.append("python")
    words += [option or "-m", "tritonclip", "run", *["--compare"] * chosen.compare]
    words += ["--record", chosen.record] if chosen.record else []
    rest = ["train.py", "..."] if at is None else [*arguments[at:]]
    words += ["-m" if word == "--module" else word for word in rest[:1]] + rest[1:]
    line = shlex.join(words).replace("'...'", "...")
    raise ValueError(f"expected a script, got {name}, which starts another program; write {line}")


class Program(NamedTuple):
    """A script or module that Python would run as `__main__`; `name` is sys.argv[0]."""

    code: Callable[[], CodeType]
    attributes: dict[str, Any]
    name: str

    def run(self, arguments: Sequence[str]) -> None:
        """Runs the program in a new module `__main__`, which stays; raises the program's errors."""
        sys.argv[:] = [self.name, *arguments]
        main = ModuleType("__main__")
        vars(main).update(self.attributes, __builtins__=builtins)
        # Here pickle and multiprocessing look up classes and functions.
        sys.modules["__main__"] = main
        code = None
        try:
            code = self.code()
            exec(code, vars(main))
        except BaseException as error:
            _hide_frames(error, code)
            raise


def script(path: str) -> Program:
    """The program in a file, whose folder becomes `sys.path[0]`, or in a folder or an archive.

    Raises ValueError if there is no file, and no folder or archive with a `__main__`.
    """
    # An absolute path, as in Python since 3.9, stays valid if the script changes its folder.
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
    """The program of a module or of a package; the current folder becomes `sys.path[0]`."""
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
        # Otherwise the package exists, and imports a module that does not.
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise ValueError(f"expected a module that can be run, got {name}; no Python code is there")
    return _of_spec(spec, str(spec.origin))


def _set_first_path(folder: str) -> None:
    """Sets the entry that Python makes for a program, unless it was told to make none (-P)."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _hide_frames(error: BaseException, code: CodeType | None) -> None:
    """Makes sys.excepthook show an uncaught error without the frames of this module."""
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
