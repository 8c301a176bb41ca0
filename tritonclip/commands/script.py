"""A script or a module run as Python runs it, by `python -m tritonclip run`.

Not by runpy, which takes the module `__main__` away at the end, where pickle and functions that run
at exit still need it, and gives a script neither its loader nor its traceback.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NamedTuple


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
