"""The functions of the library that a call enters."""

import sys
from collections.abc import Callable
from typing import Any

import tritonclip
import tritonclip.kernels

FOLDERS = (*tritonclip.__path__, *tritonclip.kernels.__path__)
# Part of the function around them, as in Python 3.12.
INLINED = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


def entered(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """File and name of each function of the library that a call enters once it is warm."""
    found = []

    def note(frame: Any, event: str, argument: Any) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and name not in INLINED and file.startswith(FOLDERS):
            found.append((file, name))

    for _ in range(3):
        call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found
