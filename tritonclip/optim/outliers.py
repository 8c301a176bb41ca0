"""The test for outliers: norms and losses of steps, compared with a limit or with earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from functools import lru_cache
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.distributed.process_groups import mean_of_all
from tritonclip.monitor.stats import Flag
from tritonclip.rules import ClipState, LossOutlier, Outlier
from tritonclip.rules.arguments import as_limit

# The keys of its states in checkpoints.
OWNERS = OUTLIERS, LOSSES = "outliers", "losses"


class Judgement(NamedTuple):
    """Whether a step is an outlier; the states of its tests, and their values after this step."""

    flag: Flag
    tests: Sequence[tuple[ClipState, Tensor | list[float]]]

    def commit(self, overflow: Flag) -> None:
        """Remembers norm and loss, of a skipped step too, but not of one that overflowed."""
        for state, values in self.tests:
            state.commit(values, overflow)


def as_skip_bound(skip_above: object) -> float | Outlier | None:
    """The user's `skip_above`."""
    if skip_above is None or isinstance(skip_above, Outlier):
        return skip_above
    try:
        bound = as_limit("skip_above", skip_above)
    except TypeError:
        remedy = ""
        if isinstance(skip_above, type) and issubclass(skip_above, Outlier):
            remedy = f", the class; write {skip_above.__name__}()"
        raise TypeError(
            "skip_above must be a number (the largest norm that is not skipped), an Outlier or "
            f"None, got {skip_above!r:.80}{remedy}"
        ) from None
    if bound == 0:
        raise ValueError(
            "skip_above must be over 0, got 0, above which every norm lies, so that every step "
            "would be skipped; expected None to skip none"
        )
    return bound


def as_loss(loss: object) -> float | Tensor | None:
    """The user's `loss`, without its graph."""
    if loss is None:
        return None
    if isinstance(loss, Real) and not isinstance(loss, bool):
        return float(loss)
    got = type(loss).__name__
    if isinstance(loss, Tensor) and not hasattr(loss, "full_tensor"):
        if loss.is_floating_point() and loss.dim() == 0:
            # A copy: a running sum may be reset before the step.
            return loss.detach().clone()
        got = f"shape {tuple(loss.shape)} of {loss.dtype}"
    raise TypeError(
        f"loss must be a floating-point tensor without dimensions, or a number, got {got}; "
        "expected the mean over the batch, of a DTensor loss.full_tensor()"
    )


@lru_cache(maxsize=16)
def _of_losses(above: Outlier) -> LossOutlier:
    """The test of losses beside one of norms."""
    return LossOutlier(above.sigmas, above.window)


class OutlierTest:
    """Whether steps are outliers; `states` of the tests by owner; `loss` of the step to come."""

    def __init__(self, skip_above: object = None) -> None:
        self.states: dict[str, ClipState] = {}
        self.loss: float | Tensor | None = None
        self.skip_above = as_skip_bound(skip_above)

    def rules(self) -> dict[str, Outlier]:
        """The tests that remember something, by the keys of their states."""
        above = self.skip_above
        return {OUTLIERS: above, LOSSES: _of_losses(above)} if isinstance(above, Outlier) else {}

    def judge(self, norm: float | Tensor, dtype: torch.dtype) -> Judgement:
        """Whether a norm is an outlier, or the loss; waits only for a loss on another device.

        `dtype` is that of a number before it was one.
        """
        above = self.skip_above
        assert above is not None
        if not isinstance(above, Outlier):
            if isinstance(norm, float) and dtype == torch.float32:
                # As a tensor of this dtype is compared with a number.
                above = c_float(above).value
            return Judgement(norm > above, ())
        flag, test = self._test(OUTLIERS, above, norm)
        if self.loss is None:
            return Judgement(flag, (test,))
        mean = mean_of_all(self.loss, None if isinstance(norm, float) else norm.device)
        loss_flag, loss_test = self._test(LOSSES, _of_losses(above), mean)
        # Two numbers, or two tensors.
        return Judgement(flag | loss_flag, (test, loss_test))

    def _test(
        self, owner: str, above: Outlier, number: float | Tensor
    ) -> tuple[Flag, tuple[ClipState, Tensor | list[float]]]:
        """Whether a number is an outlier; the state of the test, and its values after it."""
        state = self.states.get(owner)
        if state is None or not state.remembers(above):
            state = self.states[owner] = ClipState()
        if isinstance(number, Tensor):
            limit, values = state.advance(above, number)
            return number > limit, (state, values)
        most, numbers = state.advance_numbers(above, number)
        return number > most, (state, numbers)
