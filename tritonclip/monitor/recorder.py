"""`record` and the recorder: the norms of a run in a file, without waiting for the device."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from tritonclip.messages import ClippingWarning, join_names, printable, warn_user
from tritonclip.modes import refuse_tracer
from tritonclip.monitor.history import SpikeCounter
from tritonclip.monitor.history_file import COLUMNS, Cell, HistoryFile
from tritonclip.monitor.row_buffer import Row, RowBuffer, Value
from tritonclip.rules.arguments import as_count, as_flag, local_number

# Places of cells; the numbers of a row are these without the run.
_STEP, _NORM, _SKIPPED = map(COLUMNS.index, ("step", "norm", "skipped"))
# The last recorder of each file in this process, while it is alive.
_open: weakref.WeakValueDictionary[Path, Recorder] = weakref.WeakValueDictionary()


def record(
    path: str | os.PathLike[str],
    *,
    every: int = 100,
    each: bool = False,
    write: bool | None = None,
    append: bool | None = None,
) -> Recorder:
    """Makes a recorder, which writes the norms of a run to a file for `suggest` and `plot`.

    Norms stay in a buffer on their device, and every `every` steps a flush copies the buffer to the
    host. On CUDA and ROCm the copy runs in the background, and the next flush usually writes it; on
    other accelerators it waits. `flush`, `close`, the end of a `with` block and the end of the
    program write all rows. A process that is killed loses the rows of the last flushes.

    Example:
        >>> import pathlib, tempfile, torch, tritonclip
        >>> path = pathlib.Path(tempfile.mkdtemp(), "run.csv")
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> with tritonclip.record(path) as recorder:
        ...     for step in range(2):
        ...         weight.grad = 2 * weight.detach()
        ...         recorder.add_(tritonclip.clip_(weight, 1.0), limit=1.0)
        ...         weight.data -= weight.grad
        >>> print(path.read_text(), end="")
        run,step,norm,coefficient,limit,skipped,loss
        1,1,10.0,,1.0,,
        1,2,8.0,,1.0,,

    Args:
        path: the file, .csv or .jsonl, which is made at the first flush. An open recorder of this
            file in this process is closed.
        every: the number of steps from flush to flush, 1 or more.
        each: whether a ClippedOptimizer adds the 2-norm of every parameter's gradient by its name.
            Gradients are read once more, unless their rule measures these norms. The optimizer
            knows the names if it was made from `model.named_parameters()`.
        write: whether this process writes. None: only rank 0 writes, if torch.distributed is
            initialized at the first step. Other processes check their arguments and count steps.
        append: whether to append to a file that already has steps. The columns must be the same,
            and the step count continues. None: append, with a warning. False: raise.

    Returns:
        The recorder, also a context manager. `ClippedOptimizer(..., recorder=recorder)` adds every
        step; in a loop with :func:`clip_`, call `recorder.add_`.

    Raises:
        FileNotFoundError: no such folder.
        FileExistsError: a file with steps, with append=False.
        TypeError: an argument of another kind.
        ValueError: another ending, `every` below 1, or a file that no recorder wrote.

    Warns:
        ClippingWarning: a file with steps, without `append`.

    Notes:
        A recorder cannot be copied or pickled, and a fork cannot use it. With a CUDA graph, call
        `add_` after each replay. Under torch.compile, `add_` breaks the graph.

        Unknown values are empty in the file. A run that resumes from a checkpoint loads
        `state_dict()`; without it, rows are appended as another run, with step numbers that
        continue. docs/choosing_max_norm.md has all columns.
    """
    recorder = Recorder(path, every=every, each=each, write=write, append=append)
    if append is None and recorder.steps:
        warnings.warn(
            f"{recorder.path} has steps up to {recorder.steps}; new steps are appended. Pass "
            "append=True to append without this warning, or another path for a new file",
            ClippingWarning,
            stacklevel=2,
        )
    return recorder


class Recorder:
    """Writes the norms of a run to a history file; made by :func:`record`.

    Example:
        >>> import pathlib, tempfile, torch, tritonclip
        >>> recorder = tritonclip.record(pathlib.Path(tempfile.mkdtemp(), "run.csv"))
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> inner = torch.optim.SGD([weight], lr=1.0)
        >>> optimizer = tritonclip.ClippedOptimizer(inner, 1.0, recorder=recorder)
        >>> for step in range(2):
        ...     optimizer.zero_grad()
        ...     (weight * weight).sum().backward()
        ...     optimizer.step()
        >>> recorder.close()
        >>> print(recorder.path.read_text(), end="")
        run,step,norm,coefficient,limit,skipped,loss
        1,1,10.0,0.09999999403953552,1.0,0,
        1,2,8.0,0.1249999850988388,1.0,0,

    Attributes:
        path: of the file.
        every: the number of steps from flush to flush.
        each: whether a ClippedOptimizer adds the norm of every parameter.
        steps: the number of the last step, counted from 1 and through resumed runs.
    """

    # Whether it was closed because another one was made for its file.
    _is_replaced = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int = 100,
        each: bool = False,
        write: bool | None = None,
        append: bool | None = None,
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(
                f"path must be that of a .csv or .jsonl file, such as 'run.csv', got {path!r:.80}"
            )
        for name, choice in (("write", write), ("append", append)):
            if not (choice is None or isinstance(choice, bool)):
                raise TypeError(f"{name} must be True, False or None, got {choice!r}")
        self.every = as_count("every", every, 1)
        self.each = as_flag("each", each)
        self._write = _rank_decides() if write is None else write
        # Absolute: the program may change its folder.
        self.path = Path(path).absolute()
        # For a process that does not write, the folder may be on another machine.
        file = HistoryFile(self.path, find=self._write is not False)
        writer = _open.get(self.path)
        if append is False and (file.last_step or (writer is not None and writer.steps)):
            raise FileExistsError(
                f"{self.path} already has steps, but append=False expects a file without any; "
                "pass another path, or append=True to append to the file"
            )
        if writer is not None:
            # As where a notebook's cell is run again. Its rows come first.
            writer.close()
            writer._is_replaced = True
            file = HistoryFile(self.path, find=self._write is not False)
        self._rows = _RowWriter(file, every)
        self.steps: int = file.last_step
        self._names: tuple[str, ...] | None = None
        _open[self.path] = self
        # Also at the end of the program.
        self._close = weakref.finalize(self, self._rows.flush)
        # The ClippedOptimizer that adds its steps.
        self._user: weakref.ref[object] | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the recording has ended."""
        return not self._close.alive

    @property
    def writes(self) -> bool:
        """Whether this process writes; fixed at the first step."""
        if self._write is None:
            self._write = _rank_decides() is not False
        return self._write

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of `norms`, fixed by the first step; None before."""
        return self._names

    @property
    def spike_score(self) -> float:
        """SpikeScore of the rows that this recorder wrote; see :func:`suggest_max_norm`.

        The share of the steps whose norm is above the mean plus 6 standard deviations of the 128
        norms before; NaN before 129 norms, and in a process that does not write. Rows are judged
        when a flush writes them: nothing waits for the device, and the last rows may be missing.
        `load_state_dict` begins the score anew.
        """
        return self._rows.spikes.score

    def prepare(self, names: tuple[str, ...]) -> None:
        """Checks that a step with norms of these names can be added; raises as `add_` does."""
        self._check_open()
        if names != self._names:
            self._check_names(names)

    def append_(self, row: list[Value]) -> None:
        """Adds a step that was prepared; raises as `add_` does.

        The row has checked values: norm, coefficient, limit, whether it was skipped, loss and the
        norms of the names. A 1-d tensor has several.
        """
        self._check_open()
        # Known since the names are.
        if self._write:
            self._rows.buffer.add_([self.steps + 1, *row])
        self.steps += 1
        if self.steps % self.every == 0:
            self._rows.flush(wait=False)

    @torch.compiler.disable
    def add_(
        self,
        norm: float | Tensor,
        *,
        coefficient: float | Tensor | None = None,
        limit: float | Tensor | None = None,
        skipped: bool | Tensor | None = None,
        loss: float | Tensor | None = None,
        norms: Mapping[str, float | Tensor | None] | None = None,
    ) -> None:
        """Adds a step. Values stay on their device until a flush; nothing waits for it.

        Values are numbers or one-element tensors on any device; None is unknown. DTensors have to
        be replicated, as :func:`clip_grad_norm_` returns the norm of DTensors.

        Args:
            norm: the global norm *before* clipping, as :func:`clip_` returns it; 0 or more.
            coefficient: the factor by which the gradients were multiplied.
            limit: the largest norm that the step allowed.
            skipped: whether the step was skipped.
            loss: of the step's batch, which `suggest` reads and `plot` draws.
            norms: more norms by the name of a group or parameter, as :func:`norms_by_name` returns
                them; the same names at every step.

        Raises:
            TypeError: a value of another kind.
            ValueError: several elements; a negative norm; other names than at the last step or in
                the file.
            RuntimeError: the recorder is closed, or belongs to another process; a CUDA graph is
                captured; make_fx or FakeTensorMode traces the call.
            OSError: the file cannot be written; the rows are kept for the next flush.
        """
        refuse_tracer()
        self._check_open()
        if norm is None:
            raise TypeError(
                "norm must be a number or a one-element tensor, got None, which clip_ returns for "
                "ClipByValue; measure the norm by get_total_norm before clipping"
            )
        named = {} if norms is None else dict(norms)
        row: list[Value] = [
            _checked_value("norm", norm, least=0.0),
            _checked_value("coefficient", coefficient),
            _checked_value("limit", limit),
            _checked_value("skipped", skipped, of_truth=True),
            _checked_value("loss", loss),
            *(
                _checked_value(f"norms[{name!r}]", value, least=0.0)
                for name, value in named.items()
            ),
        ]
        self.prepare(tuple(named))
        self.append_(row)

    def flush(self) -> None:
        """Writes all rows; waits for the device.

        Raises:
            OSError: the file cannot be written; the rows are kept for the next flush.
            RuntimeError: as for `add_`; another writer changed the file.
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, int]:
        """The numbers of the last step and of the run in the file, for a checkpoint."""
        return {"steps": self.steps, "run": self._rows.file.run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues the run of a checkpoint after its step; begins `spike_score` anew.

        All rows so far are written first. The file keeps the rows of later steps; of rows of a run
        with the same step, readers take the last.

        Args:
            state: the result of `state_dict`; without `run`, the recorder continues its own run.

        Raises:
            ValueError: not the result of `state_dict`.
            OSError, RuntimeError: as for `flush`.
        """
        steps, run = saved_place(state)
        self._rows.flush()
        self._rows.spikes = SpikeCounter()
        self.steps, self._rows.file.run = steps, run or self._rows.file.run

    def _check_names(self, names: tuple[str, ...]) -> None:
        if self._names is not None:
            changed = sorted(set(names) ^ set(self._names)) or ["another order"]
            raise ValueError(
                f"norms must have the same names at every step; at step {self.steps + 1} expected "
                f"{len(self._names)} names, got {len(names)}; different: "
                f"{join_names(changed, 4)}. Make a new recorder for other names"
            )
        for name in names:
            if not isinstance(name, str) or not name:
                raise ValueError(f"norms must have names, got {name!r}; rename the group")
        if len(set(map(printable, names))) < len(names):
            raise ValueError(
                f"norms must have names that differ when printed, got {join_names(names)}; rename "
                "the group"
            )
        if self.writes:
            self._rows.file.begin(names)
        self._names = names

    def _check_open(self) -> None:
        if self._is_replaced:
            raise RuntimeError(
                f"this recorder of {self.path} was closed when another one was made for the same "
                "file; expected the newer one: pass one recorder around, or give each a path"
            )
        if self.is_closed:
            raise RuntimeError(
                f"the recorder of {self.path} is closed; expected an open one: make a new one by "
                "record(path, append=True), which appends to the file"
            )
        if os.getpid() != self._rows.process:
            raise RuntimeError(
                f"the recorder of {self.path} belongs to process {self._rows.process}, got a call "
                "from a fork; record in that process, or make a recorder with another path here"
            )

    def note_user(self, user: object) -> None:
        """Warns where another live optimizer adds its steps, too."""
        noted = self._user and self._user()
        if noted is not None and noted is not user:
            warn_user(
                f"the recorder of {self.path} takes the steps of two wrappers, whose rows will "
                "alternate; expected a recorder for each, with another path"
            )
        self._user = weakref.ref(user)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a Recorder cannot be copied or pickled: both would write to {self.path}; save its "
            "state_dict(), and make a new one by record(path)"
        )

    def __repr__(self) -> str:
        state = ", closed" if self.is_closed else ""
        return f"<Recorder of {self.path}, {self.steps} steps{state}>"


def as_recorder(recorder: object) -> Recorder | None:
    """The user's `recorder`."""
    if recorder is None or isinstance(recorder, Recorder):
        return recorder
    raise TypeError(
        f"recorder must be a Recorder or None, got {type(recorder).__name__}; make one by "
        "tritonclip.record('run.csv')"
    )


def saved_place(state: object) -> tuple[int, int | None]:
    """Step and run of a recorder's saved state; None for the run where none was saved."""
    saved = state if isinstance(state, Mapping) else {}
    steps, run = saved.get("steps", -1), saved.get("run", 1)
    if not (type(steps) is type(run) is int and 0 <= steps < 2**53 and 0 < run < 2**53):
        raise ValueError(
            "expected the result of Recorder.state_dict(), {'steps': number, 'run': number}, got "
            f"{state!r:.80}. Nothing was loaded"
        )
    return steps, saved.get("run")


def _rank_decides() -> bool | None:
    """Whether this process has rank 0; None if torch.distributed is not initialized."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.get_rank() == 0


def _checked_value(
    name: str, value: object, *, least: float = -math.inf, of_truth: bool = False
) -> Value:
    """A number, a one-element tensor, or None, checked; the value of a tensor is not read."""
    if type(value) is float and not of_truth and not value < least:
        # As below, without asking whether a float is a number.
        return value
    if isinstance(value, Tensor):
        value = local_number(name, value)
        if value.numel() != 1 or value.is_complex() or value.is_meta:
            raise ValueError(
                f"{name} must be one real number, got shape {tuple(value.shape)}, {value.dtype}, "
                f"on {value.device}; if it holds the norms of gradients, pass norms.max()"
            )
        return value
    if value is None:
        return None
    if isinstance(value, bool) is not of_truth or not isinstance(value, Real):
        expected = "a truth value" if of_truth else "a number"
        raise TypeError(f"{name} must be {expected} or a one-element tensor, got {value!r:.80}")
    number = float(value)
    if number < least:
        raise ValueError(f"{name} must be {least:g} or more, got {number}")
    return number


def _cells_of(row: Row, run: int) -> list[Cell]:
    """The cells of a row: the step as a whole number, `skipped` as a truth value."""
    cells: list[Cell] = [run, *row]
    for at, kind in ((_STEP, int), (_SKIPPED, bool)):
        if (value := cells[at]) is not None:
            cells[at] = kind(value)
    return cells


class _RowWriter:
    """Carries rows from their device to the file; outlives its recorder until they are written."""

    def __init__(self, file: HistoryFile, every: int) -> None:
        self.file, self.process, self.spikes = file, os.getpid(), SpikeCounter()
        self.buffer = RowBuffer(every)
        # On the host, and not yet written.
        self._arrived: list[Row] = []

    def flush(self, *, wait: bool = True) -> None:
        """Writes the rows on the host, with `wait` all rows; none in a fork."""
        if os.getpid() != self.process:
            return
        self.buffer.send_()
        self._arrived += self.buffer.take(wait=wait)
        if self._arrived:
            self.file.append([_cells_of(row, self.file.run) for row in self._arrived])
            arrived, self._arrived = self._arrived, []
            self.spikes.add_(row[_NORM - 1] for row in arrived)
