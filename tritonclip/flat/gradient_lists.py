"""The gradient lists that FlatGradients hands out: buffers, or the gradients that they hold."""

from __future__ import annotations

from tritonclip.distributed.gradients import ShardedGradients
from tritonclip.distributed.process_groups import Processes
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.plan_cache import PlanCache
from tritonclip.flat.layout import Views


def list_of(views: Views, processes: Processes | None, *, per_gradient: bool) -> Gradients:
    """A gradient list with its plan.

    Args:
        views: of the buffers.
        processes: that the gradients are spread over.
        per_gradient: the gradients, as flat tensors, in place of the buffers.

    Raises:
        ValueError: `copies`, because buffers hold many parameters.
    """
    tensors = views.pieces() if per_gradient else list(views.buffers)
    label_of = [place.label for place in views.places].__getitem__
    device, cache = tensors[0].device, PlanCache(capacity=1)
    if processes is None:
        return Gradients(tensors, device, label_of, cache=cache, views=views)
    refuse_copies(processes)
    return ShardedGradients(
        tensors, tensors, label_of, processes, device, label_of, cache=cache, views=views
    )


def refuse_copies(processes: Processes | None) -> None:
    """Refuses numbers of copies, which buffers of many parameters cannot have."""
    if processes is not None and processes.copies is not None:
        raise ValueError(
            "copies counts the holders of single parameters, and FlatGradients measures buffers of "
            "many; expected process_group alone, or the parameters in place of the FlatGradients"
        )
