"""Refuses the gradients of an optimizer step before any is written, and tells other processes."""

from collections.abc import Callable, Sequence
from typing import NoReturn

from tritonclip.distributed.execute import check
from tritonclip.distributed.gradients import error_of
from tritonclip.distributed.process_groups import Processes, domain_of, everyones
from tritonclip.distributed.shards import meshes_of
from tritonclip.engine.checks import (
    raise_if_any_nonfinite,
    raise_if_nonfinite,
    refuse_other_model,
    refuse_shared,
)
from tritonclip.optim.measurement import Wanted
from tritonclip.optim.param_groups import Groups
from tritonclip.optim.shares import Share

NONFINITE_REMEDY = (
    "Neither gradients nor parameters were changed. To go on, set nonfinite to 'propagate', 'zero' "
    "or 'skip'"
)


def refused(check: Callable[[], None], shares: Sequence[Share]) -> Exception | None:
    """The error of a check, if other processes wait for the norms of a share; None for no error.

    All shares are then refused: measuring them tells the others. Where nobody waits, it raises.

    Args:
        check: raises an error where the gradients cannot be clipped.
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
            gradients.reject_(error)
        if not spread:
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
        if (error := error_of(share.gradients)) is not None:
            raise error
    for share in shares:
        plan = share.gradients.plan
        if plan is not None and not plan.ordinary:
            check(share.gradients, share.rule)
    if len(shares) > 1:
        refuse_shared([share.gradients for share in shares])


def refuse_nonfinite(shares: Sequence[Share], remedy: str) -> NoReturn:
    """RuntimeError for a step that is not finite, which names the parameters with NaN or inf.

    Args:
        shares: measured.
        remedy: ends the message.
    """
    for share in shares:
        if share.norms is not None:
            if not share.unclipped:
                norm = share.norms.total()
                finite = share.norms.is_finite()
                raise_if_nonfinite(share.gradients, share.rule, norm, remedy, finite)
            raise_if_any_nonfinite(share.gradients, remedy)
    plans = [share.gradients.plan for share in shares]
    if any(plan is not None and plan.reduction is not None for plan in plans):
        raise RuntimeError(f"Another process refuses its gradients. {remedy}")
    raise RuntimeError(
        "Every gradient is finite, but divided by the loss scale the largest does not fit its "
        f"dtype. {remedy}"
    )


def refuse_other_steps(wanted: Sequence[Wanted], groups: Groups, holders: Processes | None) -> None:
    """Refuses, under `verify()`, a step in which processes would send different norms.

    Every process of the step calls this, and waits for the others.

    Args:
        wanted: all norms of the step.
        groups: parameter groups of the optimizer.
        holders: the processes that the gradients are spread over.

    Raises:
        ValueError: a process with other rules or policies than the first one's.
    """
    meshes = meshes_of(p for group in groups for p in group["params"])
    if not meshes and holders is None:
        return
    domain = domain_of(meshes, None if holders is None else holders.group)
    forms = everyones([one.form for one in wanted if one.is_spread], domain)
    first, *others = forms
    for rank in others:
        if forms[rank] != forms[first]:
            raise ValueError(
                "the processes of one step measure different norms: "
                f"rank {first} {forms[first]}, rank {rank} {forms[rank]}; expected the same rules, "
                "policies and parameter groups in the same order everywhere"
            )


def refuse_other_models(groups: Groups, shares: Sequence[Share]) -> None:
    """Refuses rules that exclude parameters of no group."""
    every = [p for group in groups for p in group["params"]]
    for share in shares:
        refuse_other_model(share.rule, every)
