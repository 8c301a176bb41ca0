"""`record`: begins the recording of a run, or goes on with one, which it says."""

from __future__ import annotations

import os
import warnings

from tritonclip.monitor.recorder import Recorder
from tritonclip.warn import ClippingWarning


def record(
    path: str | os.PathLike[str],
    *,
    every: int = 100,
    each: bool = False,
    write: bool | None = None,
    append: bool | None = None,
) -> Recorder:
    """Makes a recorder of the norms of a run; `python -m tritonclip suggest` and `plot` read it.

    Norms stay in a buffer on their device. Every `every` steps the buffer is copied to the host: on
    CUDA and ROCm into pinned memory, in the background, and the copy is written at the first flush
    after it arrived, usually the next; on a CPU it is written at once; on other devices the copy
    waits for the device. `flush`, `close`, the end of a `with` block and the end of the program
    write everything. A process that is killed loses the rows of at most the last flushes.

    Args:
        path: of the file; ends in .csv or .jsonl, which decides its form. Made at the first flush.
            An open recorder of this file in this process is closed.
        every: steps between two flushes.
        each: whether a ClippedOptimizer adds the norm of every parameter by its name, which reads
            all gradients once more. The optimizer knows names if it was made from
            `model.named_parameters()`.
        write: whether this process writes; of several, let one. None: the process of rank 0, where
            torch.distributed is initialized at the first step. The others check and count only, and
            look at no file if it is initialized already.
        append: whether to go on in a file that has the steps of a run: rows are added to it, which
            must have the same columns, and the count of steps goes on. None: so, with a warning.
            False: only a file without steps will do.

    Returns:
        The recorder, also a context manager. `ClippedOptimizer(..., recorder=recorder)` adds every
        step to it; in a loop with :func:`clip_`, call its `add_`.

    Raises:
        FileNotFoundError: no such folder.
        FileExistsError: a file with steps, with append=False.
        TypeError: a `write` or an `append` of another kind.
        ValueError: another ending, or `every` below 1; a file that no recorder wrote.

    Warns:
        UserWarning: a file with steps, without a word on `append`.

    Notes:
        A recorder cannot be copied or pickled, and a fork cannot use it. In a CUDA graph, call
        `add_` after each replay. Under torch.compile it breaks the graph.

        The columns are step, norm, coefficient, limit, skipped, and norm/<name> for each of
        `norms`. Unknown values are empty (null in JSON Lines). A run that resumes from a checkpoint
        loads `state_dict()`; without it, steps are counted on from the last row, after a row with
        its step alone, by which `suggest` tells the runs apart.

    Example:
        >>> import pathlib, tempfile, torch, tritonclip
        >>> weight = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> path = pathlib.Path(tempfile.mkdtemp(), "run.csv")
        >>> with record(path) as recorder:
        ...     for step in range(2):
        ...         weight.grad = torch.tensor([0.3, 0.4]) * 10**step
        ...         recorder.add_(tritonclip.clip_(weight, 1.0), limit=1.0)
        >>> print(path.read_text(), end="")
        step,norm,coefficient,limit,skipped
        1,0.5,,1.0,
        2,5.0,,1.0,
    """
    recorder = Recorder(path, every=every, each=each, write=write, append=append)
    if append is None and recorder.steps:
        warnings.warn(
            f"{recorder.path} has steps up to {recorder.steps}, and new ones are appended to them. "
            "To go on with that run, pass append=True; for a new run, take another name",
            ClippingWarning,
            stacklevel=2,
        )
    return recorder
