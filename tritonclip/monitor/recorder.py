"""A recorder: the norms of a run in a file, without waiting for the device."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from tritonclip.modes import refuse_tracer
from tritonclip.monitor.history_file import HistoryFile
from tritonclip.monitor.row_buffer import Value
from tritonclip.monitor.row_writer import RowWriter
from tritonclip.monitor.rows import checked_value

# The last recorder of each file in this process, while it is alive.
_open: weakref.WeakValueDictionary[Path, Recorder] = weakref.WeakValueDictionary()


class Recorder:
    """Writes the norms of a run to a history file; made by :func:`record`.

    Attributes:
        path: of the file.
        every: steps between two flushes.
        each: a ClippedOptimizer adds the norms of single parameters.
        steps: the number of the last step, counted from 1 and over resumed runs.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int = 100,
        each: bool = False,
        write: bool | None = None,
        append: bool | None = None,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a number of steps, 1 or more, got {every!r}")
        for name, choice in (("write", write), ("append", append)):
            if not (choice is None or isinstance(choice, bool)):
                raise TypeError(f"{name} must be True, False or None, got {choice!r}")
        self.every, self.each = every, bool(each)
        self._write = _rank_decides() if write is None else write
        # Absolute, so that a program may change its folder.
        self.path = Path(path).absolute()
        # Of a process that does not write, the folder may be on another machine.
        self._rows = RowWriter(HistoryFile(self.path, find=self._write is not False), every)
        self.steps = self._rows.file.last_step
        self._names: tuple[str, ...] | None = None
        known = _open.get(self.path)
        if append is False and (self.steps or (known is not None and known.steps)):
            raise FileExistsError(
                f"{self.path} has steps of another run; expected a file without any, because of "
                "append=False: take another name, or append=True to go on with that run"
            )
        if known is not None:
            # A cell of a notebook that is run again drops it: its rows come first.
            known.close()
            self._rows.file = HistoryFile(self.path, find=self._write is not False)
            self.steps = self._rows.file.last_step
        _open[self.path] = self
        # Also at the end of the program.
        self._close = weakref.finalize(self, self._rows.flush)

    @property
    def is_closed(self) -> bool:
        """Whether the recording has ended."""
        return not self._close.alive

    @property
    def writes(self) -> bool:
        """Whether this process writes; decided for good at the first step."""
        if self._write is None:
            self._write = _rank_decides() is not False
        return self._write

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of further norms, fixed by the first step; None before."""
        return self._names

    def prepare(self, names: Iterable[str]) -> None:
        """Checks that a step with these further norms can be added; raises as `add_` does."""
        self._check_open()
        self._check_names(tuple(names))

    @torch.compiler.disable
    def add_(
        self,
        norm: float | Tensor,
        *,
        coefficient: float | Tensor | None = None,
        limit: float | Tensor | None = None,
        skipped: bool | Tensor | None = None,
        norms: Mapping[str, float | Tensor | None] | None = None,
    ) -> None:
        """Adds a step. Values stay on their device until a flush; nothing waits for it.

        Args:
            norm: the global norm *before* clipping: a number or a one-element tensor of any device,
                as are the others.
            coefficient: the factor of the gradients; None where it is not known.
            limit: of the norm.
            skipped: whether the step was left out.
            norms: further norms, by the name of a group or parameter, the same names at every step;
                see :func:`norms_by_name`.

        Raises:
            TypeError: a value of another kind.
            ValueError: several elements; a negative norm; other names than at the step before, or
                than in the file.
            RuntimeError: a recorder that is closed, or belongs to another process; inside the
                capture of a CUDA graph, under make_fx and FakeTensorMode.
            OSError: the file cannot be written; the rows are kept for the next flush.
        """
        refuse_tracer()
        self._check_open()
        if norm is None:
            raise TypeError(
                "norm must be a number or a one-element tensor, got None, as clip_ returns by "
                "value; measure it by get_total_norm before clipping"
            )
        named = {} if norms is None else dict(norms)
        row: list[Value] = [
            checked_value("norm", norm, least=0.0),
            checked_value("coefficient", coefficient),
            checked_value("limit", limit),
            checked_value("skipped", skipped, of_truth=True),
            *(checked_value(f"norms[{name!r}]", value, least=0.0) for name, value in named.items()),
        ]
        self._check_names(tuple(named))
        if self.writes:
            self._rows.add_(self.steps + 1, row)
        self.steps += 1
        if self.steps % self.every == 0:
            self._rows.flush(wait=False)

    def flush(self) -> None:
        """Writes all rows; waits for the device.

        Raises:
            OSError: the file cannot be written; the rows are kept for the next flush.
            RuntimeError: as for `add_`; something else writes to the file.
        """
        self._check_open()
        self._rows.flush()

    def close(self) -> None:
        """Writes all rows and ends the recording; a second call does nothing."""
        if not self.is_closed:
            self.flush()
            self._close.detach()

    def __enter__(self) -> Recorder:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def state_dict(self) -> dict[str, int]:
        """The number of the last step, for a checkpoint."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on after the step of a checkpoint.

        The file keeps the steps that came after it; a reader takes the later row of each number.

        Raises:
            ValueError: no result of `state_dict`.
        """
        steps = state.get("steps")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(
                f"expected the result of Recorder.state_dict(), {{'steps': number}}, got {state!r}"
            )
        self.steps = steps
        self._rows.file.resumes = True

    def _check_names(self, names: tuple[str, ...]) -> None:
        if names == self._names:
            return
        if self._names is not None:
            changed = sorted(set(names) ^ set(self._names)) or ["another order"]
            raise ValueError(
                f"norms must have the same names at every step; at step {self.steps + 1} expected "
                f"{len(self._names)} names, got {len(names)}; different: "
                f"{', '.join(changed[:4])}; for other names make a new recorder"
            )
        for name in names:
            if not isinstance(name, str) or not name or "\n" in name or "\r" in name:
                raise ValueError(
                    f"norms must have names of one line each, got {name!r}; rename the group"
                )
        if self.writes:
            self._rows.file.begin(names)
        self._names = names

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError(
                f"the recorder of {self.path} is closed; expected an open one: make a new one by "
                "record(path, append=True), which goes on in the same file"
            )
        if os.getpid() != self._rows.process:
            raise RuntimeError(
                f"the recorder of {self.path} belongs to process {self._rows.process}, got a call "
                "from a fork of it; record in the first one, or make a recorder with another path"
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a Recorder cannot be copied or pickled, since both would write to {self.path}; save "
            "state_dict(), and make a new one by record(path)"
        )

    def __repr__(self) -> str:
        state = ", closed" if self.is_closed else ""
        return f"<Recorder of {self.path}, {self.steps} steps{state}>"


def _rank_decides() -> bool | None:
    """Whether this process has rank 0; None where torch.distributed is not initialized."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.get_rank() == 0
