"""`record` and the recorder, which writes the norms of a run without waiting for the device."""

from __future__ import annotations

import csv
import io
import math
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

import torch
from torch import Tensor

from tritonclip.messages import join_names, printable, warn_user
from tritonclip.modes import refuse_tracer
from tritonclip.monitor.gradient_lists import MOST_LISTS, GradientLists
from tritonclip.monitor.history import COLUMNS, LIST, PREFIX, check_path
from tritonclip.monitor.row_buffer import Row, RowBuffer, Value
from tritonclip.rules.arguments import as_count, as_flag, local_number

# The index of `skipped`, the only truth value in a row.
_SKIPPED = COLUMNS.index("skipped")
# Seconds from flush to flush if steps are slow. A flush may write only what the last one began to
# copy, so that it may take twice this time until a row is in the file.
_FLUSH_SECONDS = 5.0


def record(
    path: str | os.PathLike[str],
    *,
    every: int = 100,
    each: bool = False,
    write: bool | None = None,
) -> Recorder:
    """Makes a recorder, which writes the norms of a run to a file for `suggest` and `plot`.

    Norms stay in a buffer on their device. Every `every` steps, and at a step five seconds or more
    after the last flush, a flush copies the buffer to the host. On CUDA and ROCm the copy runs in
    the background, and the next flush usually writes it; on other accelerators the flush waits.
    `flush`, `close`, the end of a `with` block and the end of the program write all rows. A process
    that is killed loses at most the rows of its last ten seconds, if it adds rows until then.

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
        step,norm,coefficient,limit,skipped,loss
        1,10.0,,1.0,,
        2,8.0,,1.0,,

    Args:
        path: the .csv file, which is made at the first flush. It has the steps of one run: if it
            has steps already, the first step raises, unless the run resumed from a checkpoint.
        every: the largest number of steps from flush to flush, 1 or more.
        each: whether a ClippedOptimizer adds the 2-norm of every parameter's gradient by its name.
            Gradients are read once more, unless their rule measures these norms. The optimizer
            knows the names if it was made from `model.named_parameters()`.
        write: whether this process writes. None: only rank 0 writes, if torch.distributed is
            initialized at the first step. Other processes check their arguments and count steps.

    Returns:
        The recorder, also a context manager. `ClippedOptimizer(..., recorder=recorder)` adds every
        step; in a loop with :func:`clip_`, call `recorder.add_`.

    Raises:
        FileNotFoundError: the folder does not exist.
        TypeError: an argument of another kind.
        ValueError: a name that does not end in .csv, or `every` below 1.

    Notes:
        A recorder cannot be copied or pickled, and a fork cannot use it. With a CUDA graph, call
        `add_` after each replay. Under torch.compile, `add_` breaks the graph.

        Unknown values are empty in the file. Under :func:`patch_torch` and `python -m tritonclip
        run`, each call is a step, and a further column names the list of parameters that it was on.
        To resume a run from a checkpoint, load the recorder's `state_dict()`, which a
        ClippedOptimizer saves and loads with its own; the rows of the resumed run then replace
        those after the checkpoint. docs/choosing_max_norm.md has all columns.
    """
    return Recorder(path, every=every, each=each, write=write)


class Recorder:
    """Writes the norms of a run to a history file; made by :func:`~tritonclip.record`.

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
        step,norm,coefficient,limit,skipped,loss
        1,10.0,0.09999999403953552,1.0,0,
        2,8.0,0.1249999850988388,1.0,0,

    Attributes:
        path: the absolute path of the file.
        every: the largest number of steps from flush to flush.
        each: whether a ClippedOptimizer adds the norm of every parameter.
        steps: the number of the last step, counted from 1 and through resumed runs.
        names: the names of further norms, fixed by the first step; None before.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int = 100,
        each: bool = False,
        write: bool | None = None,
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(
                f"path must be that of a .csv file, such as 'run.csv', got {path!r:.80}"
            )
        if not (write is None or isinstance(write, bool)):
            raise TypeError(f"write must be True, False or None, got {write!r}")
        self.every = as_count("every", every, 1)
        self.each = as_flag("each", each)
        self._write = _rank_decides() if write is None else write
        # Absolute, because the program may change its folder.
        self.path = Path(path).absolute()
        check_path(self.path)
        # For a process that does not write, the folder may be on another machine.
        if self._write is not False and not self.path.parent.is_dir():
            raise FileNotFoundError(
                f"{self.path}: expected an existing folder, got {self.path.parent}; make it first"
            )
        self._rows = _RowWriter(self.path, every)
        self.steps: int = 0
        self.names: tuple[str, ...] | None = None
        # Whether rows name the list that they are on; fixed by the first row.
        self._has_lists = False
        self._lists = GradientLists()
        self._warned_of_lists = False
        # Also called at the end of the program.
        self._close = weakref.finalize(self, self._rows.end)

    @property
    def is_closed(self) -> bool:
        """Whether the recording has ended."""
        return not self._close.alive

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a fork, and so not the process that made the recorder."""
        return os.getpid() != self._rows.process

    @property
    def writes(self) -> bool:
        """Whether this process writes; fixed at the first step."""
        if self._write is None:
            self._write = _rank_decides() is not False
        return self._write

    def prepare(self, names: tuple[str, ...], *, of_list: bool = False) -> None:
        """Checks that a step with norms of these names can be added; raises as `add_` does."""
        self._check_open()
        if names != self.names or of_list > self._has_lists:
            self._check_names(names, of_list)

    def append_(self, row: list[Value], of_list: str | None = None) -> None:
        """Adds a step for which `prepare` was called; raises as `add_` does.

        The row has checked values: norm, coefficient, limit, whether the step was skipped, loss,
        and the named norms in order.
        """
        self._check_open()
        rows = self._rows
        with rows.lock:
            # `prepare` has found out at the first step whether this process writes.
            if self._write:
                cells: Row = [self.steps + 1, *row]
                if self._has_lists:
                    cells.insert(len(COLUMNS), of_list)
                rows.buffer.add_(cells)
            self.steps += 1
            if self.steps % self.every == 0 or monotonic() >= rows.due:
                rows.flush(wait=False)

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

        Values are numbers or one-element tensors on any device; None is unknown. DTensors must be
        replicated, as are the norms of DTensors that :func:`~tritonclip.clip_grad_norm_` returns.

        Args:
            norm: the global norm *before* clipping, as :func:`~tritonclip.clip_` returns it; 0 or
                more.
            coefficient: the factor by which the gradients were multiplied.
            limit: the largest norm that the step allowed.
            skipped: whether the step was skipped.
            loss: the loss of the step's batch, which `suggest` reads.
            norms: more norms by the name of a group or parameter, as
                :func:`~tritonclip.norms_by_name` returns them; the same names at every step.

        Raises:
            TypeError: a value of another kind.
            ValueError: several elements; a negative norm; other names than at the last step or in
                the file.
            FileExistsError: the file has the steps of another run.
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

    def add_call_(
        self,
        tensors: Sequence[Tensor],
        norm: float | Tensor,
        limit: float | Tensor,
        norm_type: float = 2.0,
        *,
        loss: float | Tensor | None = None,
    ) -> None:
        """Adds a call of a patched function on a list of parameters; raises as `add_` does."""
        refuse_tracer()
        self._check_open()
        values = [_checked_value("norm", norm, least=0.0), None, _checked_value("limit", limit)]
        self.prepare((), of_list=True)
        found = self._lists.find(tensors)
        if found is None:
            if not self._warned_of_lists:
                self._warned_of_lists = True
                warn_user(
                    f"{self!r} has {MOST_LISTS:,} lists of parameters, and further ones are not "
                    "recorded. Clip fewer lists, or give each part of the run a recorder"
                )
            return
        name = str(found) if norm_type == 2.0 else f"{found}, order {norm_type:g}"
        self.append_([*values, None, _checked_value("loss", loss)], name)

    def flush(self, *, wait: bool = True) -> None:
        """Writes all rows; waits for the device.

        Args:
            wait: if False, only the rows that have arrived on the host are written, without a wait.

        Raises:
            OSError: the file cannot be written; the rows are kept for the next flush.
            RuntimeError: the recorder is closed, or belongs to another process.
        """
        self._check_open()
        self._rows.flush(wait=wait)

    def close(self) -> None:
        """Writes all rows and ends the recording; a second call does nothing.

        Raises:
            OSError, RuntimeError: as for `flush`; the end of a `with` block warns instead.
        """
        if not self.is_closed:
            self.flush()
            self._close.detach()

    def __enter__(self) -> Recorder:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        # Trouble is only a warning here, so that the program goes on after the block.
        self._close()

    def state_dict(self) -> dict[str, int]:
        """Returns the number of the last step, for a checkpoint."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues the run of a checkpoint after its step, in its file.

        All rows so far are written first. The first row that is written later replaces those of
        the steps after the checkpoint.

        Args:
            state: the result of `state_dict`.

        Raises:
            ValueError: not the result of `state_dict`.
            OSError, RuntimeError: as for `flush`.
        """
        steps = saved_steps(state)
        self._rows.flush()
        self.steps = self._rows.resumed = steps

    def _check_names(self, names: tuple[str, ...], of_list: bool) -> None:
        if self.names == names:
            raise ValueError(
                f"{self.path} has rows of one list of parameters, which no column names; expected "
                "another recorder for patch_torch"
            )
        if self.names is not None:
            changed = sorted(set(names) ^ set(self.names)) or ["another order"]
            raise ValueError(
                f"norms must have the same names at every step; at step {self.steps + 1} expected "
                f"{len(self.names)} names, got {len(names)}; different: "
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
            self._rows.begin(names, of_list=of_list)
            if of_list:
                self._lists.resume(self._rows.lists())
        self.names, self._has_lists = names, of_list

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError(
                f"the recorder of {self.path} is closed; expected an open one: make a new one by "
                "record(...) with another path"
            )
        if self.is_elsewhere:
            raise RuntimeError(
                f"the recorder of {self.path} belongs to process {self._rows.process}, got a call "
                "from a fork; record in that process, or make a recorder with another path here"
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a Recorder cannot be copied or pickled: both would write to {self.path}; save its "
            "state_dict(), and make a new one by record(path)"
        )

    def __repr__(self) -> str:
        state = ", closed" if self.is_closed else ""
        return f"<Recorder of {self.path}, {self.steps} steps{state}>"


def as_recorder(recorder: object) -> Recorder | None:
    """Checks the user's `recorder`."""
    if recorder is None or isinstance(recorder, Recorder):
        return recorder
    raise TypeError(
        f"recorder must be a Recorder or None, got {type(recorder).__name__}; make one by "
        "tritonclip.record('run.csv')"
    )


def saved_steps(state: object) -> int:
    """Reads the number of the last step from a recorder's saved state."""
    steps = state.get("steps") if isinstance(state, Mapping) else None
    if not (type(steps) is int and 0 <= steps < 2**53):
        raise ValueError(
            "expected the result of Recorder.state_dict(), {'steps': number}, got "
            f"{state!r:.80}. Nothing was loaded"
        )
    return steps


def _rank_decides() -> bool | None:
    """Whether this process has rank 0; None if torch.distributed is not initialized."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.get_rank() == 0


def _checked_value(
    name: str, value: object, *, least: float = -math.inf, of_truth: bool = False
) -> Value:
    """Checks a number, a one-element tensor, or None, without reading the value of a tensor."""
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


def _as_csv(rows: Sequence[Sequence[float | str | None]]) -> bytes:
    """Formats rows as lines of comma-separated values, with numbers in full precision."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


class _RowWriter:
    """Carries rows from their device to the file; outlives its recorder until they are written.

    The file is made with the first rows. If the run of a checkpoint continues, `resumed` is its
    step until rows are written, which then replace the rows of later steps in the file.
    """

    def __init__(self, path: Path, every: int) -> None:
        self.path, self.process = path, os.getpid()
        self.buffer = RowBuffer(every)
        self.resumed: int | None = None
        # Rows that are on the host and not written yet.
        self._arrived: list[Row] = []
        self._header = b""
        # The file's size in bytes after the last write; None before the first one, when it must be
        # empty.
        self._size: int | None = None
        # Threads may add rows, and a signal handler may flush in the middle of that.
        self.lock = threading.RLock()
        self.due = monotonic() + _FLUSH_SECONDS

    def begin(self, names: Sequence[str], *, of_list: bool) -> None:
        """Fixes the columns at the first row; raises if the file has others, or another run."""
        lists = [LIST] if of_list else []
        header = _as_csv([(*COLUMNS, *lists, *(PREFIX + printable(name) for name in names))])
        if self.path.exists() and self.path.stat().st_size:
            if self.resumed is None:
                raise self._of_another_run()
            with self.path.open("rb") as file:
                found = file.readline()
            if found != header:
                had, got = (one.decode(errors="replace").strip() for one in (found, header))
                raise ValueError(
                    f"{self.path} has the columns {printable(had):.200}; to resume its run, "
                    f"expected the same, got {got:.200}: record with the each= and the norms= of "
                    "the rows that are there, or pass another path to record(...)"
                )
        self._header = header

    def _of_another_run(self) -> FileExistsError:
        return FileExistsError(
            f"{self.path} has the steps of another run; a file has those of one: pass another path "
            "to record(...), or move the file. To resume the run, load the recorder's state from "
            "its checkpoint before the first step"
        )

    def lists(self) -> list[str]:
        """Reads the names of lists from the file of a run that is resumed."""
        if self.resumed is None or not self.path.exists():
            return []
        at = len(COLUMNS)
        with self.path.open(encoding="utf-8", errors="replace", newline="") as file:
            return list(dict.fromkeys(row[at] for row in csv.reader(file) if len(row) > at))

    def flush(self, *, wait: bool = True) -> None:
        """Writes the rows that have arrived or, with `wait`, all rows; does nothing in a fork."""
        if os.getpid() != self.process:
            return
        with self.lock:
            self.due = monotonic() + _FLUSH_SECONDS
            self.buffer.send_()
            self._arrived += self.buffer.take(wait=wait)
            if self._arrived:
                self._write()
                self._arrived = []

    def _write(self) -> None:
        if self.resumed is not None:
            self._size, self.resumed = self._size_until(self.resumed), None
        for row in self._arrived:
            if row[_SKIPPED] is not None:
                row[_SKIPPED] = int(row[_SKIPPED])
        data = _as_csv(self._arrived)
        with self.path.open("ab") as file:
            there = file.seek(0, os.SEEK_END)
            if self._size is None and there:
                raise self._of_another_run()
            # A write that failed may have left half a row, and the file may have been removed.
            self._size = 0 if self._size is None or there < self._size else self._size
            file.truncate(self._size)
            size = file.write(data if self._size else self._header + data)
        self._size += size

    def _size_until(self, last: int) -> int:
        """Returns the size in bytes of the first line and of the rows up to the step `last`."""
        if not self.path.exists():
            return 0
        with self.path.open("rb") as file:
            size = len(file.readline())
            for line in file:
                step = line.partition(b",")[0]
                if not (line.endswith(b"\n") and step.isdigit() and int(step) <= last):
                    break
                size += len(line)
        return size

    def end(self) -> None:
        """Writes all rows, or warns that they are lost."""
        try:
            self.flush()
        except Exception as error:
            warn_user(f"rows for {self.path} are lost: {error}", RuntimeWarning)
