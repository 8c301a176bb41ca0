"""Refusals that only one process of a domain meets: every process raises, and none waits.

The one that refuses its gradients enters the reduction as if it had none, and marks its numbers. On
a CPU, where numbers are read at once, all raise before anything is written. On an accelerator the
others have the norm NaN, as for a NaN of that process.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tritonclip.distributed.process_groups import everyones
from tritonclip.distributed.reduction import Exchange, Refused
from tritonclip.engine.gradients import Gradients
from tritonclip.rules import Rule

_KINDS = (TypeError, ValueError, RuntimeError)


def reduced_norm(gradients: Gradients, norm: Callable[..., Exchange[Tensor]]) -> Exchange[Tensor]:
    """A reduction of norms, which may be that of a list that is refused.

    Args:
        gradients: with their plan.
        norm: takes the devices, and whether this process refuses its gradients.

    Raises:
        TypeError, ValueError, RuntimeError: that of the process that refuses its gradients.
    """
    plan = gradients.plan
    assert plan is not None
    refused = gradients.refusal is not None
    try:
        return (yield from norm(device=plan.device, home=gradients.device, refused=refused))
    except Refused:
        # Of which one process has the reason.
        pass
    ask_others(gradients)
    raise AssertionError("a process refuses its gradients, and says nothing")


def ask_others(gradients: Gradients) -> None:
    """Raises the refusal of this process, or the first of others; each calls this, and waits.

    Raises:
        TypeError, ValueError, RuntimeError: as that process does.
    """
    sharding, own, told = gradients.sharding, gradients.refusal, None
    assert sharding is not None
    if own is not None:
        told = next(at for at, kind in enumerate(_KINDS) if isinstance(own, kind)), str(own)
    everyone = everyones(told, sharding.domain)
    if own is not None:
        raise own
    for rank, found in everyone.items():
        if found is not None:
            at, message = found
            raise _KINDS[at](
                f"rank {rank} refuses its gradients, so that no process clips: {message}"
            )


def is_told(gradients: Gradients, rule: Rule) -> bool:
    """Whether other processes wait for the norms of a list that is refused.

    Not where they find the same error in their parameters.
    """
    sharding, plan = gradients.sharding, gradients.plan
    assert sharding is not None
    alike = rule.per_gradient and not sharding.one_list
    return plan is not None and plan.reduction is not None and not alike


def tell_others(
    gradients: Gradients, rule: Rule, measure: Callable[[], object], *, names_culprits: bool
) -> None:
    """Measures a list that is refused, as the processes do that have gradients, and raises.

    Args:
        gradients: with their refusal.
        rule: that was to clip.
        measure: ends in an error on a CPU, in every process.
        names_culprits: the others will ask for names of gradients where a norm is NaN.

    Raises:
        TypeError, ValueError, RuntimeError: the refusal.
    """
    if is_told(gradients, rule):
        measure()
    raise_refusal(gradients, names_culprits=names_culprits and is_told(gradients, rule))


def raise_refusal(gradients: Gradients, *, names_culprits: bool) -> None:
    """Raises the refusal of a list, if there is one, after its norms were measured.

    Args:
        gradients: measured.
        names_culprits: the others will ask for names of gradients where a norm is NaN.

    Raises:
        TypeError, ValueError, RuntimeError: the refusal.
    """
    if gradients.refusal is None:
        return
    if names_culprits:
        assert gradients.sharding is not None
        everyones([], gradients.sharding.domain)
    raise gradients.refusal
