"""Notices gradients that a call has clipped when an optimizer is about to clip them again.

Only the first steps of an optimizer look. Every other call pays for one comparison of `calls` with
0, and nothing is entered.
"""

import math
from collections.abc import Iterable
from weakref import ref

from torch import Tensor

from tritonclip.engine.gradients import Gradients
from tritonclip.rules import Rule

# Calls that are remembered: as many as may come between two steps.
CALLS = 4
# How many of them still are.
calls = 0
# Gradients as a call left them: by id, with their versions.
remembered: dict[int, tuple[ref[Tensor], int]] = {}
_was_noticed = False


def watch() -> None:
    """Remembers the next calls, unless a program was warned already."""
    global calls
    calls = 0 if _was_noticed else CALLS
    remembered.clear()


def remember(gradients: Gradients, rule: Rule) -> None:
    """Remembers the gradients that a call has clipped, until something else writes to them."""
    global calls
    calls -= 1
    limit = getattr(rule, "max_norm", 0.0)
    if isinstance(limit, float) and limit == math.inf:
        # It only measured.
        return
    written = gradients.tensors if gradients.versions is None else gradients.versions
    for grad in written:
        if not grad.is_inference():
            remembered[id(grad)] = ref(grad), grad._version


def is_noticed(gradients: Iterable[Tensor]) -> bool:
    """Whether some of these are as a call left them; true once in a process."""
    global calls, _was_noticed
    for key, (weak, version) in list(remembered.items()):
        grad = weak()
        if grad is None or grad._version != version:
            remembered.pop(key, None)
    if not any(id(grad) in remembered for grad in gradients):
        return False
    calls, _was_noticed = 0, True
    remembered.clear()
    return True
