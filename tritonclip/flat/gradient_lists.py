"""The gradient lists that FlatGradients hands out: buffers, or the gradients that they hold."""

from __future__ import annotations

from tritonclip.distributed.process_groups import Holders
from tritonclip.engine.gradients import Gradients, are_pieces_
from tritonclip.engine.plan import refuse_
from tritonclip.engine.plan_cache import PlanCache, plan_
from tritonclip.flat.layout import Views


def list_of(views: Views, holders: Holders | None, *, per_gradient: bool) -> Gradients:
    """A gradient list with its plan, or with the refusal that other processes are told.

    Args:
        views: of the buffers.
        holders: the processes that the gradients are spread over.
        per_gradient: the gradients, as flat pieces, in place of the buffers.

    Raises:
        ValueError: `copies`, because buffers hold many parameters.
    """
    result = _unplanned(views, holders, per_gradient=per_gradient)
    plan_(result, PlanCache(capacity=1))
    if result.refusal is None:
        result.tensors, result.versions = views, views.buffers
    return result


def refused_list(
    views: Views, holders: Holders, error: Exception, *, per_gradient: bool
) -> Gradients:
    """A list whose refusal other processes are told."""
    result = _unplanned(views, holders, per_gradient=per_gradient)
    refuse_(result, error)
    return result


def _unplanned(views: Views, holders: Holders | None, *, per_gradient: bool) -> Gradients:
    pieces = views.pieces() if per_gradient else list(views.buffers)
    labels = [place.label for place in views.places]
    result = Gradients(pieces, pieces[0].device, labels.__getitem__)
    if holders is not None:
        refuse_copies(holders)
        are_pieces_(result, pieces, pieces, holders, labels.__getitem__, tells=True)
    return result


def refuse_copies(holders: Holders | None) -> None:
    """Refuses numbers of holders, which buffers of many parameters cannot have."""
    if holders is not None and holders.copies is not None:
        raise ValueError(
            "copies counts the holders of single parameters, and FlatGradients measures buffers of "
            "many; expected process_group alone, or the parameters in place of the FlatGradients"
        )
