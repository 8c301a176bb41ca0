"""KeyboardInterrupt at a place that is counted off: before a bytecode, or where signals arrive."""

import inspect
import sys
from types import CodeType, FrameType
from typing import Any


class InterruptAtBytecode:
    """Raises KeyboardInterrupt before the n-th bytecode that is run in traced code.

    `traced`: functions by their code, and all functions of files with this in their path.
    """

    def __init__(self, n: int, *traced: str | CodeType) -> None:
        self.n_seen, self._n = 0, n
        self._paths = [at for at in traced if isinstance(at, str)]
        self._codes = [at for at in traced if not isinstance(at, str)]

    def __enter__(self) -> None:
        # Python 3.12 traces bytecodes only where a frame asked for them before settrace.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code not in self._codes and not any(path in code.co_filename for path in self._paths):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._count

    def _count(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            self.n_seen += 1
            if self.n_seen == self._n:
                raise KeyboardInterrupt
        return self._count


class InterruptAtCall:
    """Raises KeyboardInterrupt at the n-th place where Python 3.11 and later look for signals.

    That is where a function of Python begins, and where one of C has returned; the places in loops
    lie between these.
    """

    def __init__(self, n: int) -> None:
        self.n_seen, self._n = 0, n

    def __enter__(self) -> None:
        sys.setprofile(self._count)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        # Not in a generator, which may be closing: Python only prints what is raised there.
        if event not in ("call", "c_return") or frame.f_code.co_flags & inspect.CO_GENERATOR:
            return
        if frame.f_code is not InterruptAtCall.__exit__.__code__:
            self.n_seen += 1
            if self.n_seen == self._n:
                raise KeyboardInterrupt
