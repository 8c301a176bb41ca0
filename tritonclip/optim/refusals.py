"""Refuses the gradients of an optimizer step before any is written, and tells other processes."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from tritonclip.engine.building import refuse_
from tritonclip.engine.refusals import (
    refuse_for_rule,
    refuse_other_model,
    refuse_read_only,
    refuse_shared,
)
from tritonclip.engine.together import tell_others
from tritonclip.optim.param_groups import Groups
from tritonclip.optim.shares import Share, measure


def refuse(shares: Sequence[Share], measured: Sequence[Share], grad_scale: float | Tensor) -> None:
    """Refuses gradients, and tells those that would wait for the first norm.

    Needless for a single share with a plan that is ordinary, or with none.

    Args:
        shares: of the step.
        measured: those of them whose norms come next.
        grad_scale: the loss scale that gradients carry.

    Raises:
        TypeError, ValueError, RuntimeError: a share that its rule has no meaning for, or that was
            refused when it was collected; a gradient in two shares.
    """
    refusal = next((s.gradients.refusal for s in shares if s.gradients.refusal), None)
    try:
        if refusal is not None:
            raise refusal
        for share in shares:
            plan = share.gradients.plan
            if plan is not None and not plan.ordinary:
                refuse_read_only(share.gradients)
                refuse_for_rule(share.gradients, share.rule)
        if len(shares) > 1:
            refuse_shared([share.gradients for share in shares])
    except (TypeError, ValueError, RuntimeError) as error:
        for share in measured:
            gradients = share.gradients
            if gradients.plan is None or gradients.plan.reduction is None:
                continue
            if gradients.refusal is not None or refuse_(gradients, error):
                again = partial(measure, share, share.rule, grad_scale)
                tell_others(gradients, share.rule, again, names_culprits=False)
            if gradients.plan.device.type == "cpu":
                # Of which the others do not come to a second norm.
                break
        raise


def refuse_other_models(groups: Groups, shares: Sequence[Share]) -> None:
    """Refuses rules that exclude parameters of no group."""
    every = [p for group in groups for p in group["params"]]
    for share in shares:
        refuse_other_model(share.rule, every)
