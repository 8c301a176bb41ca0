"""The verdict on a step: whether it is left out, and why.

A flag is a bool where the host decides, else a 0-d tensor, for which nothing waits.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from torch import Tensor

Flag: TypeAlias = "bool | Tensor"


def either(*flags: Flag) -> Flag:
    """Whether any flag is true; a tensor is on the device of the first flag that is one."""
    found: Flag = False
    for flag in flags:
        if flag is True:
            return True
        if flag is not False:
            found = flag if isinstance(found, bool) else found | flag.to(found.device)
    return found


def unless(flag: Flag, other: Flag) -> Flag:
    """Whether a flag is true and another one is not; on the device of the first."""
    if other is False or flag is False:
        return flag
    if isinstance(other, bool):
        return False
    return ~other if flag is True else flag & ~other.to(flag.device)


class Verdict(NamedTuple):
    """Whether a step is left out, by the host or by the device alone, for any of three reasons.

    Attributes:
        overflow: a GradScaler found one, and counts it.
        skip: the policy or `skip_above` skips the step.
        error: the error of this step, or of one before it, is still to be raised.
    """

    left_out: Flag = False
    overflow: Flag = False
    skip: Flag = False
    error: Flag = False

    def read(self) -> Verdict:
        """The same in bools, of a step without an error to come; waits for the device."""
        if not self.left_out:
            return TAKEN
        overflow = bool(self.overflow)
        return Verdict(left_out=True, overflow=overflow, skip=not overflow)


TAKEN = Verdict()
SKIPPED = Verdict(left_out=True, skip=True)
