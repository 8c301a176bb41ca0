"""Functions in C that are called with one wrong argument, in a process that a fault may end."""

import math
from array import array
from contextlib import suppress
from pathlib import Path

import torch

from helpers.workers import python
from tritonclip.backends.native import loops


class Unsure:
    def __bool__(self):
        raise ValueError("neither")


def packed(*numbers):
    return array("q", numbers).tobytes()


NUMBERS = torch.arange(64, dtype=torch.float64)
AT, HUGE, NAN = NUMBERS.data_ptr(), 2**70, math.nan
NO_SIZES = ("", None, b"", bytes(7), packed(-1), packed(2**62), packed(2, 2))
NO_NUMBER = ("a", None, [1.0], 10**400)
# By kind of argument, a right one and wrong ones.
KINDS = {
    "addresses": ([AT], ((AT,), None, 5, [], [None], [HUGE], [0], [AT, AT])),
    "addresses or 0": ([AT], ((AT,), None, 5, [], [None], [HUGE], [AT, AT])),
    "sizes": (packed(2), NO_SIZES),
    "rows": (packed(2), NO_SIZES),
    "counts": (packed(2), ("", None, *NO_SIZES[3:-1])),
    "dtype": (3, (-1, 4, HUGE, "a", None, 3.0)),
    "threads": (1, (0, -1, HUGE, "a", None, 1.0)),
    "order": (2.0, (*NO_NUMBER, 3.0, NAN)),
    "number": (1.0, NO_NUMBER),
    "flag": (True, (Unsure(),)),
    "numbers": ([1.0], ((1.0,), None, 5, ["a"], [None], [10**400])),
    "factors": (1.0, ("a", None, 10**400, [], ["a"], [1.0, 1.0])),
    "address": (AT, (0, HUGE, "a", None, 1.0)),
    "bytes": (bytes(16), ("", None, b"", bytes(8), bytes(17))),
    "call": (id, (None, "a", lambda _: 1 / 0)),
    "any": (None, ()),
    "leaves": ([NUMBERS], (5, "a", [5], (NUMBERS,), [[NUMBERS]])),
    "like": (torch.empty_like, (5, None, lambda x: 5, lambda x: x[:2], lambda x: x.float())),
    "bound": (1.0, ("a", NAN, True, [1.0])),
    "limit": (1.0, ("a", -1, NAN, True, [1.0, 1.0])),
}
# Operators serve what functions of these cannot.
LEFT = {"leaves", "like"}


def call_wrongly(verbs):
    """Prints calls with one wrong argument, and whether they were taken or changed memory."""
    for verb, names in verbs.items():
        kinds = names.split(", ")
        right = [KINDS[kind][0] for kind in kinds]
        wrong = [(i, value) for i, kind in enumerate(kinds) for value in KINDS[kind][1]]
        calls = [(i, value, [*right[:i], value, *right[i + 1 :]]) for i, value in wrong]
        for i, value, call in (*calls, (len(kinds), "one more", [*right, None])):
            print(end=f"\n{verb}, argument {i}: {str(value)[:20]!r}", flush=True)
            NUMBERS.copy_(torch.arange(64) + 2)
            with suppress(TypeError, ValueError, OverflowError, MemoryError, ZeroDivisionError):
                found = getattr(loops, verb)(*call)
                if found is not None or not LEFT.intersection(kinds):
                    print(end=" was taken")
            if not torch.equal(NUMBERS, torch.arange(64) + 2.0):
                print(end=" changed memory")


def check_wrong_arguments(verbs, first="pass"):
    """Raises unless each verb, with its kinds of arguments, refuses wrong ones; `first` is code."""
    code = f"{first}; from helpers import wrong_arguments as w; w.call_wrongly({verbs!r})"
    done = python(*("-X", "faulthandler", "-c", code), PYTHONPATH=str(Path(__file__).parents[1]))
    _, *lines = done.stdout.split("\n")
    assert done.returncode == 0, (lines[-1], done.stderr)
    assert not [line for line in lines if line.endswith(("was taken", "changed memory"))]
    assert {line.split(",")[0] for line in lines} == {*verbs}
