"""When one process rejects its gradients, all processes raise and none hangs.

The one that rejects them enters the reduction as if it had none, and marks its numbers. On a CPU,
where numbers are read at once, all raise before anything is written. On an accelerator the others
have the norm NaN, as for a NaN of that process.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tritonclip.distributed.gradients import ERRORS, ShardedGradients
from tritonclip.distributed.process_groups import everyones
from tritonclip.distributed.reduction import Exchange, Rejected
from tritonclip.engine.gradients import Gradients
from tritonclip.rules import Rule


def is_awaited(gradients: Gradients, rule: Rule) -> bool:
    """Whether other processes wait for the norms of a list that this one rejected.

    Not where they find the same error in their parameters.
    """
    if gradients.plan is None or gradients.plan.reduction is None:
        return False
    return gradients.sharding.one_list or not rule.per_gradient


def reduced_norm(
    gradients: ShardedGradients, norm: Callable[..., Exchange[Tensor]]
) -> Exchange[Tensor]:
    """A reduction of norms, which a process may enter with a rejected list.

    Args:
        gradients: with their plan.
        norm: takes the devices, and whether this process rejects its gradients.

    Raises:
        TypeError, ValueError, RuntimeError: that of the process that rejects its gradients.
    """
    plan = gradients.plan
    assert plan is not None
    rejected = gradients.error is not None
    try:
        return (yield from norm(device=plan.device, home=gradients.device, rejected=rejected))
    except Rejected:
        # Of which one process has the reason.
        pass
    raise_everywhere(gradients)
    raise AssertionError("a process reported an error but sent no message")


def raise_everywhere(gradients: ShardedGradients) -> None:
    """Raises the error of this process, or the first of others; each calls this, and waits.

    Raises:
        TypeError, ValueError, RuntimeError: as that process does.
    """
    own, message = gradients.error, None
    if own is not None:
        message = next(i for i, kind in enumerate(ERRORS) if isinstance(own, kind)), str(own)
    everyone = everyones(message, gradients.sharding.domain)
    if own is not None:
        raise own
    for rank, found in everyone.items():
        if found is not None:
            at, message = found
            raise ERRORS[at](
                f"rank {rank} raised, so no gradient was clipped on any rank: {message}"
            )


def raise_error(gradients: ShardedGradients, *, names_culprits: bool) -> None:
    """Raises the error of a rejected list, after its norms were measured.

    Args:
        gradients: measured.
        names_culprits: the others will ask for names of gradients where a norm is NaN.

    Raises:
        TypeError, ValueError, RuntimeError: the error; none where the list was not rejected.
    """
    if gradients.error is None:
        return
    if names_culprits:
        everyones([], gradients.sharding.domain)
    raise gradients.error
