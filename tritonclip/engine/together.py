"""Refusals that only one process of a domain meets: every process raises, and none waits.

The one that refuses its gradients enters the reduction as if it had none, and marks its numbers. On
a CPU, where numbers are read at once, all raise before anything is written. On an accelerator the
others have the norm NaN, as for a NaN of that process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from torch import Tensor

from tritonclip.distributed.collectives import everyones
from tritonclip.distributed.reduce import Refused
from tritonclip.engine.gradients import Gradients
from tritonclip.rules import Rule

_KINDS = (TypeError, ValueError, RuntimeError)


def reduce_(gradients: Gradients, norm: Callable[..., Tensor]) -> Tensor:
    """Calls a reduction of norms, which may be that of a list that is refused.

    Args:
        gradients: with their plan.
        norm: takes the device, and whether this process refuses its gradients.

    Raises:
        TypeError, ValueError, RuntimeError: that of the process that refuses its gradients.
    """
    plan = gradients.plan
    assert plan is not None
    try:
        return norm(device=plan.device, refused=gradients.refusal is not None)
    except Refused:
        # Of which one process has the reason.
        pass
    ask_others(gradients)
    raise AssertionError("a process refuses its gradients, and says nothing")


def ask_others(gradients: Gradients) -> None:
    """Raises the first refusal of any process; each of them calls this, and waits.

    Raises:
        TypeError, ValueError, RuntimeError: as that process does.
    """
    sharding, own, told = gradients.sharding, gradients.refusal, None
    assert sharding is not None
    if own is not None:
        told = next(at for at, kind in enumerate(_KINDS) if isinstance(own, kind)), str(own)
    for rank, found in everyones(told, sharding.domain).items():
        if found is not None:
            at, message = found
            raise _KINDS[at](
                f"rank {rank} refuses its gradients, so that no process clips: {message}"
            )


def tell_others(
    gradients: Gradients, rule: Rule, measure: Callable[[], object], *, names_culprits: bool
) -> None:
    """Measures a list that is refused, as the processes do that have gradients.

    Not where they find the same error in their parameters.

    Args:
        gradients: with their refusal.
        rule: that was to clip.
        measure: ends in an error on a CPU, in every process.
        names_culprits: the others will ask for names of gradients where a norm is NaN.
    """
    sharding, plan = gradients.sharding, gradients.plan
    assert sharding is not None
    alike = rule.per_gradient and not sharding.one_list
    if plan is None or plan.reduction is None or alike:
        return
    with suppress(TypeError, ValueError, RuntimeError):
        measure()
        if names_culprits:
            everyones([], sharding.domain)
