"""The test for outliers: norms and losses of steps, compared with a limit or with earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_float
from functools import lru_cache
from numbers import Real

import torch
from torch import Tensor

from tritonclip.distributed.process_groups import mean_of_all
from tritonclip.monitor.stats import Flag, either
from tritonclip.rules import ClipState, LossOutlier, Outlier
from tritonclip.rules.arguments import as_limit

# The keys of its states in checkpoints.
OUTLIERS, LOSSES = "outliers", "losses"
# States of tests, and their values after a step.
Judged = Sequence[tuple[ClipState, "Tensor | list[float]"]]


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


def tests_of(skip_above: float | Outlier | None) -> dict[str, Outlier]:
    """The tests that remember something, by the keys of their states."""
    if not isinstance(skip_above, Outlier):
        return {}
    return {OUTLIERS: skip_above, LOSSES: _of_losses(skip_above)}


@lru_cache(maxsize=16)
def _of_losses(above: Outlier) -> LossOutlier:
    """The test of losses beside one of norms."""
    return LossOutlier(above.sigmas, above.window)


def judge(
    skip_above: float | Outlier,
    norm: float | Tensor,
    dtype: torch.dtype,
    loss: float | Tensor | None,
    state_of: Callable[[str, Outlier], ClipState],
) -> tuple[Flag, Judged]:
    """Whether a norm is an outlier, or the loss; waits only for a loss on another device.

    Norm and loss are to be remembered by `commit` of the states, if the step did not overflow.
    `dtype` is that of a number before it was one.
    """
    if not isinstance(skip_above, Outlier):
        if isinstance(norm, float) and dtype == torch.float32:
            # As a tensor of this dtype is compared with a number.
            skip_above = c_float(skip_above).value
        return norm > skip_above, []
    flag: Flag = False
    judged: list[tuple[ClipState, Tensor | list[float]]] = []
    for owner, test in tests_of(skip_above).items():
        number: float | Tensor = norm
        if owner == LOSSES:
            if loss is None:
                break
            # Two numbers, or two tensors.
            number = mean_of_all(loss, None if isinstance(norm, float) else norm.device)
        state = state_of(owner, test)
        if isinstance(number, float) and type(test).advance is not Outlier.advance:
            # A user's class, which has no formula in numbers.
            number = torch.tensor(number, dtype=torch.float64)
        if isinstance(number, Tensor):
            most, values = state.advance(test, number)
            judged.append((state, values))
            flag = either(flag, number > most)
        else:
            limit, numbers = state.advance_numbers(test, number)
            judged.append((state, numbers))
            flag = either(flag, number > limit)
    return flag, judged
