"""Refuses the gradients of an optimizer step before any is written, and tells other processes."""

from collections.abc import Callable, Sequence

from tritonclip.engine.building import refuse_
from tritonclip.engine.refusals import (
    refuse_for_rule,
    refuse_other_model,
    refuse_read_only,
    refuse_shared,
)
from tritonclip.optim.param_groups import Groups
from tritonclip.optim.shares import Share


def refused(check: Callable[[], None], shares: Sequence[Share]) -> Exception | None:
    """The error of a check, if other processes wait for the norms of a share; None for no error.

    All shares are then refused: measuring them tells the others. Where nobody waits, it raises.

    Args:
        check: raises what keeps the gradients from being clipped.
        shares: all that are measured in this step.

    Raises:
        TypeError, ValueError, RuntimeError: that of the check.
    """
    try:
        check()
    except (TypeError, ValueError, RuntimeError) as error:
        lists = [share.gradients for share in shares]
        spread = [g for g in lists if g.plan is not None and g.plan.reduction is not None]
        for gradients in spread:
            if gradients.refusal is None:
                refuse_(gradients, error)
        if all(gradients.refusal is None for gradients in spread):
            raise
        return error
    return None


def refuse(shares: Sequence[Share]) -> None:
    """Refuses gradients that their rules have no meaning for.

    Args:
        shares: of the step.

    Raises:
        TypeError, ValueError, RuntimeError: a share that its rule has no meaning for, or that was
            refused when it was collected; a gradient in two shares.
    """
    for share in shares:
        if share.gradients.refusal is not None:
            raise share.gradients.refusal
    for share in shares:
        plan = share.gradients.plan
        if plan is not None and not plan.ordinary:
            refuse_read_only(share.gradients)
            refuse_for_rule(share.gradients, share.rule)
    if len(shares) > 1:
        refuse_shared([share.gradients for share in shares])


def refuse_other_models(groups: Groups, shares: Sequence[Share]) -> None:
    """Refuses rules that exclude parameters of no group."""
    every = [p for group in groups for p in group["params"]]
    for share in shares:
        refuse_other_model(share.rule, every)
