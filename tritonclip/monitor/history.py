"""The history of a run: a table of norms by step, in a CSV file with one line per step.

A cell is a number, a truth value as 1 or 0, or empty where the value is unknown.
"""

from __future__ import annotations

import csv
import io
import json
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tritonclip.messages import printable

# A recorder writes these columns in this order, and then one column for each named norm.
COLUMNS = ("step", "norm", "coefficient", "limit", "skipped", "loss")
# Under a patch, this column follows; it names the list of parameters that a step is on.
LIST = "list"
# A list has a series for each limit if it has at most so many limits, and if its limit changes at
# least so often for each of them. Other limits are those of a schedule.
_MOST_LIMITS, _LEAST_TURNS = 4, 5
# Begins the columns of named norms, so that no name collides with those above.
PREFIX = "norm/"
_WRITTEN_BY = (
    "record(...) writes history files, and other files need a column 'norm' or 'grad_norm', or one "
    "that --column names"
)
# The usual names of other programs, without prefixes as in train/grad_norm and RUN - train/loss.
_THEIR_NAMES = {
    "norm": ["grad_norm"],
    "step": ["step", "global_step"],
    "loss": ["loss", "train_loss"],
}
_NOT_OF_TRAINING = {"eval", "val", "valid", "validation", "test"}
# The columns of a scalar that TensorBoard exports.
_TENSORBOARD = ["Wall time", "Step", "Value"]
# The place of a row in its file, for messages, and the cells.
_Row = tuple[str, list[str]]


@dataclass
class History:
    """The steps of a run in order.

    Attributes:
        columns: the 1-d tensors by the names of columns in a file. Only `norm` is required.
        steps: the numbers of the steps, which rise; 1-d int64.
        norms: global norms *before* clipping; 1-d float64, as are the next four.
        coefficients: factors of the gradients; NaN where unknown.
        limits: limits of the norm; NaN where unknown.
        skipped: 1 for steps that were skipped; NaN where unknown.
        losses: losses of the steps' batches; NaN where unknown.
        named_norms: norms of groups or parameters, by name.
        lists: the names of the lists of parameters, by the numbers in the column `list`.
    """

    columns: Mapping[str, Tensor]
    lists: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        numbers = torch.arange(1, len(self.columns["norm"]) + 1, device="cpu")
        columns = dict.fromkeys(COLUMNS, torch.full_like(self.columns["norm"], torch.nan))
        self.columns = columns = {**columns, "step": numbers, **self.columns}
        self.steps: Tensor = columns["step"].long()
        self.norms, self.coefficients, self.limits, self.skipped, self.losses = [
            columns[name] for name in COLUMNS[1:]
        ]
        self.named_norms = {
            name.removeprefix(PREFIX): column
            for name, column in columns.items()
            if name.startswith(PREFIX)
        }

    def __len__(self) -> int:
        return len(self.norms)

    def first(self, n: int) -> History:
        """Returns the first n steps."""
        return History({name: column[:n] for name, column in self.columns.items()}, self.lists)

    def series(self) -> dict[str, History]:
        """Returns the steps of each list of parameters by its name; the most steps come first.

        If there are several series, steps are numbered by the calls in each series. A list that is
        clipped at a few limits in turn has a series for each of them. A history without the column
        `list` is one series without a name.
        """
        if not self.lists:
            return {"": self}
        found = {}
        for code, name in enumerate(self.lists):
            one = self._where(self.columns[LIST] == code)
            limits = one.limits.unique()
            changes = int((one.limits[1:] != one.limits[:-1]).sum())
            in_turn = 1 < len(limits) <= _MOST_LIMITS and changes >= _LEAST_TURNS * len(limits)
            if not in_turn or limits.isnan().any():
                found[name] = one
                continue
            for limit in limits.tolist():
                found[f"{name}, limit {limit:g}"] = one._where(one.limits == limit)
        if len(found) == 1:
            return dict.fromkeys(found, self)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def _where(self, chosen: Tensor) -> History:
        columns = {name: column[chosen] for name, column in self.columns.items()}
        steps = torch.arange(1, int(chosen.sum()) + 1, dtype=torch.float64, device="cpu")
        return History({**{n: c for n, c in columns.items() if n != LIST}, "step": steps})

    @property
    def is_limited(self) -> bool:
        """Whether a limit is known to have been in use."""
        return bool(self.limits.isfinite().any() or (self.coefficients < 1).any())

    @property
    def has_losses(self) -> bool:
        """Whether a loss is known."""
        return bool(self.losses.isfinite().any())

    @property
    def is_clipped(self) -> Tensor:
        """Steps with a coefficient below 1 or, where unknown, a norm over the limit; 1-d bool."""
        by_limit = self.norms > self.limits
        clipped = torch.where(self.coefficients.isnan(), by_limit, self.coefficients < 1)
        return clipped & self.norms.isfinite() & ~self.is_skipped

    @property
    def is_positive(self) -> Tensor:
        """Steps whose norm is finite and over 0; 1-d bool."""
        return self.norms.isfinite() & (self.norms > 0)

    @property
    def is_skipped(self) -> Tensor:
        """Steps that were skipped; 1-d bool."""
        return self.skipped == 1


def check_path(path: Path) -> None:
    """Refuses a file whose name does not end in .csv."""
    if path.suffix.lower() != ".csv":
        raise ValueError(
            f"{path}: expected a name that ends in .csv, got {path.suffix or 'no ending'}; rename "
            "the file"
        )


def read(path: str | os.PathLike[str], column: str | None = None) -> History:
    """Reads a history file, written by a recorder or another program.

    Args:
        path: a .csv file with a column `norm`. The columns `step`, `coefficient`, `limit`,
            `skipped` and `loss` are optional, and so are named norms in columns `norm/<name>`.
            A column `list` names the list of parameters that a row is on. Other columns are not
            read. A loss that is no number is unknown. Rows without a norm are left out, and so is
            a last line without a line break, which a crash may have cut. Without a column `norm`,
            columns whose names end in `grad_norm`, `step` and `loss` are read, as in exports of
            W&B, or the values of a scalar that TensorBoard exported. The file may also be a .json
            file, the `trainer_state.json` of Hugging Face.
        column: the name of the column of norms, if it is another one.

    Returns:
        The steps in order.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not the history of one run.
    """
    path = Path(path)
    is_json = path.suffix.lower() == ".json"
    if not is_json:
        check_path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: expected a history file, got none; a recorder writes it at its first "
            "flush, after `every` steps or at close()"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = _logged_in(text) if is_json else _table_in(text[: text.rfind("\n") + 1])
        return _history_of(rows, column)
    except UnicodeDecodeError:
        error = "expected text in UTF-8, got other bytes"
    except ValueError as found:
        error = str(found)
    raise ValueError(f"{path} is not a history file: {error}; {_WRITTEN_BY}") from None


def _table_in(text: str) -> Iterator[_Row]:
    """Yields the rows of a CSV table; the first one has the names of the columns."""
    lines = csv.reader(io.StringIO(text))
    try:
        for cells in lines:
            yield f"line {lines.line_num}", cells
    except csv.Error as error:
        expected = f"line {lines.line_num}: expected comma-separated values"
        raise ValueError(f"{expected}: {error}") from None


def _logged_in(text: str) -> Iterator[_Row]:
    """Yields rows as `_table_in`, from the state that a trainer of Hugging Face saves."""
    state = json.loads(text)
    logged = state.get("log_history") if isinstance(state, dict) else None
    if not (isinstance(logged, list) and all(isinstance(entry, dict) for entry in logged)):
        raise ValueError("expected 'log_history', a list of dicts, as in a trainer_state.json")
    names = list(dict.fromkeys(name for entry in logged for name in entry))
    yield "", names
    for i, entry in enumerate(logged):
        # A norm that is None is unknown.
        cells = map(entry.get, names)
        yield f"entry {i}", ["" if cell is None else str(cell) for cell in cells]


def _history_of(rows: Iterator[_Row], column: str | None) -> History:
    """Reads a history from rows; raises ValueError with the line's number for any other table."""
    known = {*COLUMNS, LIST}
    _, header = next(rows, ("", []))
    # The name of a norm may end in a space.
    names = [n.strip() if n.strip() in known else n.lstrip() for n in header]
    places = {name: i for i, name in enumerate(names)}
    theirs = {ours: places[given] for ours, given in _columns_in(names, column).items()}
    columns = {name: array("d") for name in theirs}
    lists: dict[str, int] = {}
    for line, cells in rows:
        if cells and len(cells) != len(names):
            raise ValueError(
                f"{line}: expected {len(names)} cells, as the first line has, got {len(cells)}"
            )
        if cells and cells[theirs["norm"]]:
            for name, i in theirs.items():
                if name == LIST:
                    number = float(lists.setdefault(cells[i], len(lists)))
                else:
                    number = _number(line, name, cells[i])
                columns[name].append(number)
            _check_last(line, columns)
    if not columns or not columns["norm"]:
        raise ValueError(
            "expected at least one row with a norm, got none; a recorder writes after every "
            "`every` steps, at flush() and at close()"
        )
    return History(
        {
            name: torch.tensor(values, dtype=torch.float64, device="cpu")
            for name, values in columns.items()
        },
        tuple(printable(name) or "no list" for name in lists) if any(lists) else (),
    )


def _columns_in(names: Sequence[str], column: str | None) -> dict[str, str]:
    """Chooses the columns to read; returns the names in the file by our names."""
    if ("norm" in names and column is None) or not names:
        known = {*COLUMNS, LIST}
        return {name: name for name in names if name in known or name.startswith(PREFIX)}
    by_last: dict[str, list[str]] = {}
    for name in names:
        *before, last = name.strip().lower().replace(" - ", "/").split("/")
        if _NOT_OF_TRAINING.isdisjoint(before):
            by_last.setdefault(last, []).append(name)
    found = {
        ours: next((by_last[last] for last in theirs if last in by_last), [])
        for ours, theirs in _THEIR_NAMES.items()
    }
    if column is not None:
        found["norm"] = [name for name in names if name.strip() == column.strip()]
    elif list(names) == _TENSORBOARD:
        found["norm"] = ["Value"]
    norms = found["norm"]
    if len(norms) != 1:
        shown = ", ".join(f"{name!r:.40}" for name in norms[:8] or names[:8])
        wanted = "one column of norms, or --column" if norms else f"a column {column or 'norm'!r}"
        raise ValueError(f"line 1: expected {wanted}, got columns {shown}")
    # Steps and losses may be missing, and are not read if several columns may be meant.
    return {ours: given[0] for ours, given in found.items() if len(given) == 1}


def _check_last(line: str, columns: dict[str, array[float]]) -> None:
    """Refuses a negative norm, and steps that do not rise."""
    norm = columns["norm"][-1]
    if norm < 0:
        raise ValueError(f"{line}: expected norm 0 or more, got {norm}")
    if "step" not in columns:
        return
    *_, before, step = (-torch.inf, *columns["step"][-2:])
    if not step.is_integer() or abs(step) > 2**53:
        raise ValueError(f"{line}: expected step to be a whole number, got {step}")
    if step <= before:
        raise ValueError(
            f"{line}: expected a step over {before:.0f}, got {step:.0f}: a file has the steps "
            "of one run"
        )


def _number(line: str, name: str, cell: str) -> float:
    if not cell:
        return torch.nan
    if cell.strip().lower() in ("true", "false"):
        return float(cell.strip().lower() == "true")
    try:
        return float(cell)
    except ValueError:
        if name == "loss":
            # Another program may mean something else by this usual name.
            return torch.nan
        raise ValueError(
            f"{line}: expected {printable(name):.40} to be a number, got {cell!r:.40}"
        ) from None
