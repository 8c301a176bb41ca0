"""The pieces of a gradient list that lie here, or the refusal that other processes are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from tritonclip.distributed.domain import Holders
from tritonclip.distributed.shares import Shares, shares_of

if TYPE_CHECKING:
    from tritonclip.engine.gradients import Gradients
    from tritonclip.engine.sources import LabelOf


def are_pieces_(
    gradients: Gradients,
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    holders: Holders | None,
    label: LabelOf,
    *,
    tells: bool,
) -> bool:
    """Whether gradients are pieces, which their list then takes; False where all are whole.

    Args:
        gradients: their list.
        parameters: all that are to be clipped.
        grads: of each parameter, or None.
        holders: the processes that the gradients are spread over.
        label: names the i-th parameter in messages.
        tells: as for `of_parameters`.

    Raises:
        TypeError, ValueError: meshes or groups that cannot be reduced over; bad gradients or
            numbers of copies, unless the list tells of them.
    """

    def without() -> Shares | None:
        nothing = [None] * len(parameters)
        try:
            return shares_of(parameters, nothing, holders, label)
        except (TypeError, ValueError):
            # Numbers of copies are this process's own; all others meet another error too.
            user = None if holders is None else holders._replace(copies=None)
            return shares_of(parameters, nothing, user, label)

    refusal = None
    try:
        shares = shares_of(parameters, grads, holders, label)
    except (TypeError, ValueError) as error:
        if not tells:
            raise
        refusal = error
    if refusal is not None:
        shares = without()
    gradients.refusal = refusal
    gradients.shares_without = without if tells else None
    gradients.spread_(shares)
    return shares is not None
