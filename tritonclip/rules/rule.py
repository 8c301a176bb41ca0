"""The interface of a rule: every number that a call needs to clip by it.

The engine asks a rule and never its class, so that a new rule is a new file.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor


class Rule:
    """Base class of all rules.

    Attributes:
        norm_type: p of the p-norm that is measured.
        eps: added to the norm before the limit is divided by it.
        per_gradient: each gradient has its own norm and coefficient, rather than all one.
        clamps: elements are clamped to `bounds`; a norm is measured only where a policy for NaN and
            inf asks for one.
    """

    __slots__ = ()
    # The numbers that make up a rule, in the order of its constructor; a dataclass sets it.
    __match_args__: ClassVar[tuple[str, ...]] = ()

    norm_type: float
    eps: float
    per_gradient: ClassVar[bool] = False
    clamps: ClassVar[bool] = False

    def limit(self, norm: Callable[[], Tensor]) -> float | Tensor:
        """The largest norm after clipping.

        Args:
            norm: returns the norm before clipping, 0-d, or 1-d where `per_gradient`, on its device;
                costs a launch on a GPU.

        Returns:
            A number, or a tensor on any device: 0-d, or 1-d with a limit for each gradient.
        """
        raise NotImplementedError

    def bounds(self, dtype: torch.dtype) -> tuple[float, float]:
        """The least and the largest value of an element, as `dtype` holds them."""
        raise NotImplementedError

    @property
    def keeps_zero(self) -> bool:
        """Whether an element that is 0 stays 0."""
        return True
