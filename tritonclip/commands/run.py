"""`python -m tritonclip run`: a program as Python runs it, with torch's functions patched.

Not by runpy, which takes the module `__main__` away at the end, where pickle and functions that run
at exit still need it, and gives a script neither its loader nor its traceback.
"""

from __future__ import annotations

import argparse
import builtins
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NamedTuple

from tritonclip.commands.call_log import CallLog, launched
from tritonclip.integrations.patching import TorchPatch
from tritonclip.monitor.recorder import record

# Options that a script may be given by mistake.
_OPTIONS = {"--compare", "--record"}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments, before those of the script."""
    command.usage = f"{command.prog} [-h] [--compare] [--record FILE] [-m] SCRIPT [ARGUMENT ...]"
    command.add_argument(
        "--compare",
        action="store_true",
        help="let torch's functions and tritonclip's take turns, and print at the end which is "
        "faster on the gradients of this run, by how much, and whether it matters",
    )
    command.add_argument(
        "--record",
        metavar="FILE",
        help="write the norm of every call to FILE, a new .csv file, for suggest and plot",
    )
    command.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is a module, as for python -m"
    )
    command.add_argument(
        "script", metavar="SCRIPT or -m MODULE", help="a file, or with -m a module"
    )
    rest = command.add_argument(
        "arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="of the script"
    )
    # Else Python 3.11 and before say so where there is no script.
    rest.required = False


def main(chosen: argparse.Namespace) -> int:
    """Runs a script under `patch_torch`, as Python would; errors of the script are raised."""
    process, is_first, file = os.getpid(), launched()[0] == 0, chosen.record
    try:
        recorder = None
        if file is not None:
            recorder = record(file, write=is_first)
            if is_first and recorder.path.exists():
                raise FileExistsError(f"{file} exists; expected the name of a new file")
        program = (module if chosen.is_module else script)(chosen.script)
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    late = sorted({argument.partition("=")[0] for argument in chosen.arguments} & _OPTIONS)
    if is_first and late:
        print(
            f"tritonclip run: {' and '.join(late)} after {chosen.script} went to the script; "
            "options of run stand before it: python -m tritonclip run "
            f"{' '.join(late)} ... {'-m ' * chosen.is_module}{chosen.script}",
            file=sys.stderr,
        )
    log, failed = CallLog(compares=chosen.compare), True
    patch = TorchPatch(recorder, log)
    try:
        with patch:
            program.run(chosen.arguments)
        failed = False
    except SystemExit as end:
        failed = end.code not in (None, 0)
        raise
    finally:
        # A fork that the script made may end here, too.
        if os.getpid() == process:
            if recorder is not None:
                recorder.close()
            if is_first:
                report = log.report(patch.served_by_torch, failed=failed)
                print(f"tritonclip run: {report}", file=sys.stderr)
            if is_first and recorder is not None:
                command = f"python -m tritonclip suggest {file}"
                is_there = recorder.steps > 0
                said = f"norms are in {file}: {command}" if is_there else "no norm was recorded"
                print(said, file=sys.stderr)
    return 0


class Program(NamedTuple):
    """What `python SCRIPT` or `python -m MODULE` runs as `__main__`; `name` is sys.argv[0]."""

    code: Callable[[], CodeType]
    attributes: dict[str, Any]
    name: str

    def run(self, arguments: Sequence[str]) -> None:
        """Runs it in a new module `__main__`, which stays; raises its errors."""
        sys.argv[:] = [self.name, *arguments]
        main = ModuleType("__main__")
        vars(main).update(self.attributes, __builtins__=builtins)
        # Where pickle and multiprocessing look up classes and functions.
        sys.modules["__main__"] = main
        code = None
        try:
            code = self.code()
            exec(code, vars(main))
        except BaseException as error:
            _hide_frames(error, code)
            raise


def script(path: str) -> Program:
    """A file, whose folder becomes `sys.path[0]`; ValueError where there is none."""
    if not Path(path).is_file():
        raise ValueError(
            f"expected a script, got {path}; there is no such file in {Path.cwd()}. A module is "
            "run by -m NAME"
        )
    _set_first_path(str(Path(path).resolve().parent))
    # As Python does since 3.9: valid also where the script changes its folder.
    file = os.path.join(Path.cwd(), path)  # noqa: PTH118  (Path would leave out ./)
    loader = SourceFileLoader("__main__", file)
    attributes = {"__file__": file, "__cached__": None, "__loader__": loader}
    return Program(lambda: loader.source_to_code(loader.get_data(file), file), attributes, path)


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
        # Else a package is there, and imports a module that is not.
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    loader: Any = spec and spec.loader
    if spec is None or not hasattr(loader, "get_code"):
        raise ValueError(f"expected a module that can be run, got {name}; no Python code is there")
    attributes = {
        "__spec__": spec,
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__loader__": loader,
        "__package__": spec.parent,
    }
    return Program(lambda: loader.get_code(spec.name), attributes, str(spec.origin))


def _set_first_path(folder: str) -> None:
    """Sets the entry that is Python's own, unless Python was told to have none (-P)."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _hide_frames(error: BaseException, code: CodeType | None) -> None:
    """Lets the hook for errors that nothing catches show an error from the program's frames on."""
    shown, frames = sys.excepthook, error.__traceback__
    while frames is not None and frames.tb_frame.f_code is not code:
        frames = frames.tb_next

    def show(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        if value is error:
            value, traceback = error.with_traceback(frames), frames
        shown(kind, value, traceback)

    sys.excepthook = show
