"""The values of a recorder's rows: checked on their way in, typed on their way to the file."""

from __future__ import annotations

import math
from numbers import Real

from torch import Tensor

from tritonclip.monitor.formats import Cell
from tritonclip.monitor.history import COLUMNS
from tritonclip.monitor.row_buffer import Row, Value

_SKIPPED = COLUMNS.index("skipped")


def checked_value(
    name: str, value: object, *, least: float = -math.inf, of_truth: bool = False
) -> Value:
    """A checked value: a number, a one-element tensor, or None; a tensor's value is not read."""
    if isinstance(value, Tensor):
        if hasattr(value, "full_tensor"):
            raise TypeError(
                f"{name} must be a plain tensor, got a DTensor; pass its full_tensor(), which "
                "every process has to call"
            )
        if value.numel() != 1 or value.is_complex() or value.is_meta:
            raise ValueError(
                f"{name} must be one real number, got shape {tuple(value.shape)}, {value.dtype}, "
                f"on {value.device}; of the norms of single gradients pass the largest, norms.max()"
            )
        return value
    if value is None:
        return None
    if isinstance(value, bool) is not of_truth or not isinstance(value, Real):
        kind = "a truth value" if of_truth else "a number"
        raise TypeError(f"{name} must be {kind} or a one-element tensor, got {value!r:.80}")
    number = float(value)
    if number < least:
        raise ValueError(f"{name} must be {least:g} or more, got {number}")
    return number


def cells_of(row: Row) -> list[Cell]:
    """A row as it stands in the file: a whole number, numbers, and a truth value."""
    step, skipped = row[0], row[_SKIPPED]
    assert step is not None
    cells: list[Cell] = [int(step), *row[1:]]
    cells[_SKIPPED] = None if skipped is None else bool(skipped)
    return cells
