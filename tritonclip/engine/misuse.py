"""Warns of calls that never find a gradient.

Only calls after one that found none are looked at. Every other call pays for one comparison of
`calls` with 0, and nothing is entered.
"""

from torch import Tensor

from tritonclip.engine.gradients import Gradients
from tritonclip.messages import warn_user

# Calls in a row without a gradient that are warned of.
IN_VAIN = 3
# Calls after which one that found no gradient is forgotten.
_PATIENCE = 100
# Lists that are known at a time.
_MOST_LISTS = 8

# How many of the next calls are looked at.
calls = 0
# Lists without a gradient, by the id of their smallest parameter: it, which stays alive so that no
# other one gets its id, and the number of calls in a row.
_in_vain: dict[int, tuple[Tensor, int]] = {}
_was_warned = False


def look(gradients: Gradients) -> None:
    """Looks at a call: forgets its list if it found a gradient, and all lists after some time."""
    global calls
    calls -= 1
    if gradients.tensors:
        _in_vain.pop(id(_smallest_of(gradients)), None)
    if calls <= 0:
        _in_vain.clear()
    if not _in_vain:
        calls = 0


def _smallest_of(gradients: Gradients) -> Tensor | None:
    """The smallest parameter that the list was collected from; None where that is not known."""
    return min(gradients.sources or (), key=Tensor.numel, default=None)


def warn_of_nothing(gradients: Gradients) -> None:
    """Warns of a call without any gradient: of a wrong list at once, else at the third in a row."""
    global calls, _was_warned
    if text := gradients.warning():
        warn_user(text)
        return
    smallest = _smallest_of(gradients)
    # Gradients that are there have need_clip = False.
    if _was_warned or smallest is None or any(p.grad is not None for p in gradients.sources or ()):
        return
    _, count = _in_vain.pop(id(smallest), (smallest, 0))
    count += 1
    if count < IN_VAIN:
        if len(_in_vain) == _MOST_LISTS:
            del _in_vain[next(iter(_in_vain))]
        _in_vain[id(smallest)] = smallest, count
        calls = _PATIENCE
        return
    _was_warned = True
    _in_vain.clear()
    calls = 0
    warn_user(
        f"{IN_VAIN} calls in a row found no gradient in any of these {gradients.n_parameters} "
        "parameters, and clipped nothing; expected a call between backward() and step(), and the "
        "parameters that backward() reaches: those of the model that is trained"
    )
