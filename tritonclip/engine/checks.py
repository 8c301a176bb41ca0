"""The checks of a call, which raise before anything is written, and its policies for NaN."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonclip.distributed.shards import Sharding
from tritonclip.engine.arguments import refuse_fsdp_shards
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.norms import Norms
from tritonclip.messages import warn_user
from tritonclip.rules import Rule


def check(gradients: Gradients, rule: Rule) -> None:
    """Refuses gradients that cannot be written, or that the rule is not defined for."""
    if not rule.clamps and gradients.sharding is None:
        refuse_fsdp_shards(gradients.sources or ())
    plan = gradients.plan
    if plan is None:
        return
    refuse_read_only(gradients)
    if plan.sharding is not None:
        _refuse_shards(gradients, rule, plan.sharding)
    if not rule.clamps:
        return
    if plan.pairs:
        indices = gradients.indices_where(Tensor.is_complex)
        raise TypeError(
            f"{rule.name} cannot order complex gradients "
            f"({gradients.labels(indices)}); expected real ones: clip by norm instead"
        )
    if plan.sparse and not rule.keeps_zero:
        raise ValueError(
            f"{rule} would change the implicit zeros of sparse gradients "
            f"({gradients.labels(plan.sparse)}); expected bounds that include 0, or dense "
            "gradients"
        )


def _refuse_shards(gradients: Gradients, rule: Rule, sharding: Sharding) -> None:
    """Refuses a rule that needs whole gradients where only their shards are here."""
    if rule.clamps and (sums := gradients.terms()):
        raise TypeError(
            f"{rule.name} would clamp the parts of a sum, which does not clamp the sum: "
            f"the gradients of {gradients.labels(sums)} are DTensors with a Partial "
            "placement; expected Shard or Replicate: grad.redistribute() them, or clip by norm"
        )
    if rule.per_unit and gradients.tensors:
        _refuse_split(gradients)
    if rule.per_gradient and not sharding.domain.one_list:
        raise ValueError(
            f"{rule.name} measures each gradient, and process_group does not say which "
            "tensors of its processes are pieces of one; expected DTensors without "
            "process_group, or a rule with one norm"
        )


def _refuse_split(gradients: Gradients) -> None:
    """Refuses DTensors whose units are split over processes; a parameter may be one unit."""
    for index, parameter in enumerate(gradients.owners()):
        expected = getattr(parameter, "placements", ())
        found = getattr(parameter.grad, "placements", ())
        mesh = getattr(parameter, "device_mesh", None)
        sizes = () if mesh is None else tuple(mesh.shape)
        # Shard(0) and _StridedShard(0) split a parameter between its rows.
        if expected != found or not all(
            placement.is_replicate() or getattr(placement, "dim", None) == 0 or size == 1
            for placement, size in zip(found, sizes, strict=True)
        ):
            raise TypeError(
                f"{gradients.label(index)} has the placements {expected} and its gradient {found}; "
                "a rule by unit expects the same for both, and rows that are whole on their "
                "process: Replicate or Shard(0), as fully_shard makes them. Clip such a model by "
                "norm, or set need_clip = False on these parameters"
            )


def warn_if_no_parameters(sources: Sequence[Tensor]) -> None:
    """Warns if no tensor has a gradient and some can hardly be parameters.

    Losses and activations are not leaves. Gradients and the values of a state_dict do not require
    grad. Frozen parameters raise no warning.
    """
    if not sources or any(isinstance(source, Parameter) for source in sources):
        return
    if all(source.requires_grad and source.is_leaf for source in sources):
        return
    warn_user(
        "no tensor that was passed as a parameter has a gradient, and none is a parameter, so that "
        "nothing is clipped; expected parameters, such as model.parameters(). To clip gradients "
        "themselves, pass them to clip_tensors_",
        once=True,
    )


def refuse_read_only(gradients: Gradients) -> None:
    """Raises outside of inference mode for gradients that were made inside of it."""
    plan = gradients.plan
    if plan is None or not plan.inference or torch.is_inference_mode_enabled():
        return
    indices = gradients.indices_where(Tensor.is_inference)
    raise RuntimeError(
        f"the gradients of {gradients.labels(indices)} were made in inference mode, outside of "
        "which they cannot be written in place; no gradient was changed. Expected gradients made "
        "outside: replace these by grad.clone()"
    )


Nonfinite = Literal["propagate", "error", "zero"]
POLICIES = get_args(Nonfinite)
REMEDY = "No gradient was changed. To go on, pass nonfinite='propagate' or 'zero'"
TORCH_REMEDY = (
    "To disable this error and scale the gradients by the non-finite norm anyway, set "
    "`error_if_nonfinite=False`"
)


def unknown_policy(nonfinite: object) -> ValueError:
    """The error for an unknown policy."""
    remedy = "as torch's error_if_nonfinite=True, 'error' raises"
    if nonfinite == "skip":
        remedy = "only a ClippedOptimizer can skip a step"
    return ValueError(
        f"nonfinite must be 'propagate', 'error' or 'zero', got {nonfinite!r}; {remedy}"
    )


def check_policy(nonfinite: object) -> None:
    """Raises ValueError for an unknown policy."""
    if nonfinite not in POLICIES:
        raise unknown_policy(nonfinite)


def raise_if_nonfinite(norms: Norms, remedy: str, rule: Rule | None = None) -> None:
    """Raises RuntimeError if a norm is not finite; waits for the device.

    `remedy` ends the message. `rule` is the one that was to clip, or None for a measurement.
    """
    gradients, norm = norms.gradients, norms.norm()
    if bool(torch.isfinite(norm).all()):
        return
    if rule is not None and rule.clamps:
        labels = gradients.culprits(nonfinite_indices(gradients))
        raise RuntimeError(
            f"The gradients of {labels} are non-finite, so they cannot be "
            f"clipped by value. {remedy}"
        )
    if norms.per_gradient:
        indices = (~torch.isfinite(norms.here(norm))).nonzero().flatten().tolist()
        raise RuntimeError(
            f"The norms of order {norms.norm_type} of {gradients.culprits(indices)} are "
            f"non-finite, so they cannot be clipped. {remedy}"
        )
    labels = gradients.culprits(nonfinite_indices(gradients))
    blame = (
        f"Non-finite gradients: {labels}"
        if labels
        else f"Every gradient is finite, but their norm does not fit {norm.dtype}"
    )
    # PyTorch says so too; our other functions also clip tensors that are no gradients.
    source = " for gradients from `parameters`" if remedy == TORCH_REMEDY else ""
    raise RuntimeError(
        f"The total norm of order {norms.norm_type}{source} is non-finite, "
        f"so it cannot be clipped. {remedy}. {blame}"
    )


def raise_if_unlimited(rule: Rule, norms: Norms, remedy: str) -> None:
    """Raises RuntimeError if a finite norm has a limit that is NaN or negative; waits."""
    if bool(norms.is_finite()):
        return
    lacking = norms.lack_weights()
    if lacking is not None and bool(lacking.any()):
        labels = norms.gradients.culprits(lacking.nonzero().flatten().tolist())
        raise RuntimeError(
            f"The weights of {labels} are NaN, so {rule.name} has no limit for their gradients. "
            f"{remedy}"
        )
    if norms.limit is not None:
        raise RuntimeError(
            f"The limit of {rule.name} is NaN or negative, so the gradients cannot be clipped by "
            f"it; expected 0 or more. {remedy}"
        )


def nonfinite_indices(gradients: Gradients) -> list[int]:
    """The indices of the gradients with a NaN or inf; waits for the device."""

    def is_nonfinite(grad: Tensor) -> bool:
        grad = grad.coalesce()._values() if grad.layout == torch.sparse_coo else grad
        return not bool(torch.isfinite(grad).all())

    return gradients.indices_where(is_nonfinite)
