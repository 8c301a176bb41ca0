"""Warnings that point to the user's line."""

import os
import sys
import warnings
from pathlib import Path

import torch

# Code between a warning and the user: ours, and torch's decorators and hooks of optimizers.
_BETWEEN = tuple(str(Path(file).parent) + os.sep for file in (__file__, torch.__file__))


class ClippingWarning(UserWarning):
    """Gradients are probably not clipped as the program intends, or more slowly than they could be.

    Each is given once, or at most once for each line of the program, and names the remedy.

    Example:
        >>> import tritonclip
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", tritonclip.ClippingWarning)
        ...     tritonclip.clip_(torch.zeros(3), 1.0)
        tensor(0.)
    """


def warn_user(message: str, category: type[Warning] = ClippingWarning) -> None:
    """Warns at the line that called into the library, however deep the cause lies."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        level += 1
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=level)
