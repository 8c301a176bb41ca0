"""Notices mistakes around calls: gradients clipped twice, and calls that never find a gradient.

Calls are looked at after the first steps of an optimizer, and after one that found no gradient.
Every other call pays for one comparison of `calls` with 0, and nothing is entered.
"""

import math
from collections.abc import Iterable
from weakref import ref

from torch import Tensor

from tritonclip.engine.gradients import Gradients
from tritonclip.messages import warn_user
from tritonclip.rules import Rule

# Calls that are remembered: as many as may come between two steps.
CALLS = 4
# Calls in a row without a gradient that are warned of.
IN_VAIN = 3
# Calls after which one that found no gradient is forgotten.
_PATIENCE = 100

# How many of the next calls are looked at, and how many of them are remembered.
calls = 0
_remembers = 0
# Gradients as a call left them: by id, with their versions.
remembered: dict[int, tuple[ref[Tensor], int]] = {}
_was_noticed = False
# Lists without a gradient: by the id of their first parameter, with the number of calls in a row.
_in_vain: dict[int, tuple[ref[Tensor], int]] = {}
_was_warned = False


def watch() -> None:
    """Remembers the next calls, unless a program was warned already."""
    global calls, _remembers
    _remembers = 0 if _was_noticed else CALLS
    calls = max(calls, _remembers) if _in_vain else _remembers
    remembered.clear()


def look(gradients: Gradients, rule: Rule) -> None:
    """Looks at a call: remembers the gradients that it clipped, until something else writes."""
    global calls, _remembers
    calls = max(calls - 1, 0)
    if _in_vain:
        if gradients.tensors:
            _in_vain.pop(id(_first_of(gradients)), None)
        if not calls:
            _in_vain.clear()
        if not _in_vain:
            calls = max(_remembers - 1, 0)
    if not _remembers:
        return
    _remembers -= 1
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
    global _remembers, _was_noticed
    for key, (weak, version) in list(remembered.items()):
        grad = weak()
        if grad is None or grad._version != version:
            remembered.pop(key, None)
    if not any(id(grad) in remembered for grad in gradients):
        return False
    _was_noticed = True
    watch()
    return True


def _first_of(gradients: Gradients) -> Tensor | None:
    """The first parameter that the list was collected from; None where that is not known."""
    return gradients.sources[0] if gradients.sources else None


def warn_of_nothing(gradients: Gradients) -> None:
    """Warns of a call without any gradient: of a wrong list at once, else at the third in a row."""
    global calls, _was_warned
    if text := gradients.warning():
        warn_user(text)
        return
    first = _first_of(gradients)
    # Gradients that are there have need_clip = False.
    if _was_warned or first is None or any(p.grad is not None for p in gradients.sources or ()):
        return
    for key, (weak, _) in list(_in_vain.items()):
        if weak() is None:
            _in_vain.pop(key, None)
    _, before = _in_vain.get(id(first), (None, 0))
    if before + 1 < IN_VAIN:
        _in_vain[id(first)] = ref(first), before + 1
        calls = _PATIENCE
        return
    _was_warned = True
    _in_vain.clear()
    calls = _remembers
    warn_user(
        f"{IN_VAIN} calls in a row found no gradient in any of these {gradients.n_parameters} "
        "parameters, and clipped nothing; expected a call between backward() and step(), and the "
        "parameters that backward() reaches: those of the model that is trained"
    )
