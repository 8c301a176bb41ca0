"""Text for users: warnings that point to the user's line, lists of names, and tables."""

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

# Files of code between the user's line and a warning: ours, torch's, and that of `patch_torch`.
_BETWEEN = (
    *(str(Path(file).parent) + os.sep for file in (__file__, torch.__file__)),
    "<tritonclip.patch_torch>",
)


class ClippingWarning(UserWarning):
    """A sign that gradients are not clipped as intended, or more slowly than necessary.

    Each warning is given once, or once per line of the program, and names the remedy. A filter on
    this class turns all of them into errors, or off.

    Example:
        >>> import tritonclip
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", tritonclip.ClippingWarning)
        ...     try:
        ...         norm = tritonclip.clip_((p for p in []), 1.0)
        ...     except tritonclip.ClippingWarning as warning:
        ...         print(warning)
        `parameters` is an empty generator, no gradient clipping will occur.
    """


# The warnings that were already given, each with its file and line.
_given: set[tuple[str, str, int]] = set()


def warn_user(
    message: str, category: type[Warning] = ClippingWarning, *, once: bool = False
) -> None:
    """Warns at the user's line that called the library; if `once`, only once for that line."""
    level = 2
    frame = sys._getframe(1)
    # The generated constructor of a dataclass has no file, but the globals of its module.
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_BETWEEN)
        or str(frame.f_globals.get("__file__")).startswith(_BETWEEN)
    ):
        level += 1
        frame = frame.f_back
    if once:
        place = message, frame.f_code.co_filename, frame.f_lineno
        if place in _given:
            return
        _given.add(place)
    try:
        warnings.warn(message, category, stacklevel=level)
    except Warning:
        raise
    except Exception:
        # A closed sys.stderr, for example, must not end a training.
        return


def is_own(error: BaseException) -> bool:
    """Whether the library itself raised an error, not the code that it called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(_BETWEEN[0])


def printable(name: str) -> str:
    """A name as one line of text: characters that cannot be shown become Python's escapes."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def join_names(names: Sequence[str], most: int = 8) -> str:
    """Joins the first `most` names, for a message or a figure, and counts the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(printable, names[:most])) + more


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows as a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
