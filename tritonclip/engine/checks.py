"""Refusals: errors raised before anything is written, each with its remedy.

NaN and inf: which gradients are to blame, and the errors that name them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonclip.distributed.process_groups import everyones
from tritonclip.distributed.shards import refuse_fsdp_shards
from tritonclip.engine.memory import (
    Region,
    are_apart,
    find_overlap,
    has_overlap,
    is_freed,
    memory_of,
)
from tritonclip.rules import Rule

if TYPE_CHECKING:
    from tritonclip.distributed.reduction import Reduction
    from tritonclip.distributed.shards import Sharding
    from tritonclip.engine.gradients import Gradients


# Types that the library can read; subclasses may hold anything.
PLAIN = frozenset({Tensor, Parameter})


class OverlapError(ValueError):
    """Tensors share memory in a way in which they cannot be written."""


def some(labels: Sequence[str]) -> str:
    """Names for a message, at most eight of them."""
    more = f" and {len(labels) - 8} more" if len(labels) > 8 else ""
    return ", ".join(labels[:8]) + more


def refuse_kind(grad: Tensor, label: Callable[[], str]) -> None:
    """Refuses a gradient that is no plain floating-point or complex tensor."""
    if type(grad) not in PLAIN:
        raise TypeError(
            f"the gradient of {label()} is a {type(grad).__name__}, a tensor subclass that "
            "tritonclip cannot read; expected a plain tensor, or a DTensor of a DTensor parameter: "
            "pass the tensors that it is made of"
        )
    if grad.is_nested:
        raise TypeError(
            f"the gradient of {label()} is a nested tensor; expected a plain one: pass the tensors "
            "that it is made of"
        )
    if not (grad.is_floating_point() or grad.is_complex()):
        raise TypeError(
            f"the gradient of {label()} has dtype {grad.dtype}; expected a floating-point or "
            "complex dtype"
        )
    if grad.layout not in (torch.strided, torch.sparse_coo):
        raise TypeError(
            f"the gradient of {label()} has layout {grad.layout}; expected strided or sparse_coo: "
            "convert it with grad.to_dense() or grad.to_sparse_coo()"
        )


def refuse_overlap(grad: Tensor, label: Callable[[], str]) -> None:
    """Refuses a gradient whose elements share memory."""
    if has_overlap(grad):
        raise OverlapError(
            f"elements of the gradient of {label()} share memory (shape {tuple(grad.shape)}, "
            f"strides {grad.stride()}), so it cannot be scaled in place; expected a gradient "
            "without overlap: replace it by grad.clone()"
        )


def refuse_parts_in_common(regions: Sequence[tuple[int, Region]], gradients: Gradients) -> None:
    """Refuses gradients that share a part of their memory, which would be scaled twice.

    Args:
        regions: indices of gradients, and their memory.
        gradients: name them.
    """
    found = find_overlap([region for _, region in regions])
    if found is not None:
        first, second = (gradients.label(regions[at][0]) for at in found)
        raise _part_in_common(first, second)


def _part_in_common(first: str, second: str) -> OverlapError:
    return OverlapError(
        f"the gradients of {first} and {second} share a part of their memory, which would be "
        "scaled twice; expected gradients that share all of it, with one dtype, or none: "
        "replace one of them by grad.clone()"
    )


def refuse_repeated(gradients: Gradients, n: int) -> None:
    """Refuses one gradient met twice where there must be a norm for each of n."""
    if gradients.distinct is not None:
        again = min(set(range(n)).difference(gradients.distinct))
        raise ValueError(
            f"the gradient of {gradients.label_of(again)} has the memory of an earlier one, and a "
            f"compiled graph expects a norm for each of {n}; expected each gradient once: pass one "
            "of the two, or clip outside of the compiled region"
        )


def refuse_freed(grad: Tensor, label: Callable[[], str]) -> None:
    """Refuses a gradient that has elements and no memory."""
    parts = [grad]
    if grad.layout == torch.sparse_coo:
        parts = [grad._values(), grad._indices()]
    for part in parts:
        try:
            address = part.data_ptr()
        except RuntimeError:
            # A tensor without storage, as inside torch.func.
            continue
        if is_freed(part, address):
            raise ValueError(
                f"the gradient of {label()} has {part.numel()} elements and no memory: its storage "
                "was freed, or it is one of PyTorch's zero tensors; expected memory to read and "
                "write: clip before storage is freed, or replace a zero tensor by grad.clone()"
            )


def refuse_for_rule(gradients: Gradients, rule: Rule) -> None:
    """Refuses gradients that a rule has no meaning for."""
    if not rule.clamps and gradients.sharding is None:
        refuse_fsdp_shards(gradients.sources or ())
    plan = gradients.plan
    if plan is None:
        return
    if gradients.sharding is not None:
        _refuse_pieces(gradients, gradients.sharding, rule)
    if rule.clamps:
        if plan.pairs:
            places = gradients.indices_where(Tensor.is_complex)
            raise TypeError(
                f"{rule.name} cannot order complex gradients "
                f"({gradients.labels(places)}); expected real ones: clip by norm instead"
            )
        if plan.sparse and not rule.keeps_zero:
            raise ValueError(
                f"{rule} would change the implicit zeros of sparse gradients "
                f"({gradients.labels(plan.sparse)}); expected bounds that include 0, or dense "
                "gradients"
            )
    else:
        refuse_sparse_minimum(gradients, rule.norm_type)


def _refuse_pieces(gradients: Gradients, sharding: Sharding, rule: Rule) -> None:
    """Refuses pieces that a rule has no meaning for."""
    if rule.clamps and sharding.sums:
        partial = [i for i in range(len(gradients.tensors)) if gradients.piece(i).sums_over]
        raise TypeError(
            f"{rule.name} would clamp the parts of a sum, which does not clamp the sum: "
            f"the gradients of {gradients.labels(partial)} are DTensors with a Partial "
            "placement; expected Shard or Replicate: grad.redistribute() them, or clip by norm"
        )
    if rule.per_gradient and not sharding.one_list:
        raise ValueError(
            f"{rule.name} measures each gradient, and process_group does not say which "
            "tensors of its processes are pieces of one; expected DTensors without process_group, "
            "or a rule with one norm"
        )


def refuse_uncovered(reduction: Reduction) -> None:
    """Refuses the norm of all gradients where other processes may hold more of them."""
    uncovered = reduction.sharding.domain.uncovered
    if uncovered:
        raise ValueError(uncovered)


def refuse_sparse_minimum(gradients: Gradients, norm_type: float) -> None:
    """Refuses the smallest magnitude of a sparse gradient."""
    plan = gradients.plan
    if norm_type == -math.inf and plan is not None and plan.sparse:
        raise ValueError(
            "norm_type=-inf is not supported for sparse gradients "
            f"({gradients.labels(plan.sparse)}), whose implicit zeros count; expected another "
            "norm_type, or dense gradients"
        )


def refuse_other_model(rule: Rule, parameters: Sequence[Tensor]) -> None:
    """Refuses a rule that excludes parameters of another model only.

    Args:
        rule: that holds for some of the parameters.
        parameters: all that were passed, with gradients and without.
    """
    if rule.excludes and parameters and True not in rule.exempt(parameters):
        raise ValueError(
            f"exclude of {rule.name} names {rule.excludes} parameters, none of which is among the "
            f"{len(parameters)} that are clipped; expected parameters of this model: make the rule "
            "with those, or copy model and rule in one call, copy.deepcopy((model, rule))"
        )


def refuse_read_only(gradients: Gradients) -> None:
    """Refuses gradients made in inference mode, outside of it."""
    plan = gradients.plan
    if plan is None or not plan.inference or torch.is_inference_mode_enabled():
        return
    places = gradients.indices_where(Tensor.is_inference)
    raise RuntimeError(
        f"the gradients of {gradients.labels(places)} were made in inference mode, outside of "
        "which they cannot be written in place; no gradient was changed. Expected gradients made "
        "outside: replace these by grad.clone()"
    )


def refuse_negative(name: str, norm: Tensor) -> None:
    """Refuses a norm below 0 where it can be read at no cost."""
    if norm.device.type == "cpu" and (number := float(norm.detach())) < 0:
        raise ValueError(f"{name} must be 0 or more, got {number}")


def refuse_shared(lists: Sequence[Gradients]) -> None:
    """Refuses a gradient, or a part of one, under two rules, which would be scaled twice."""
    known: dict[int, tuple[Gradients, int]] = {}
    for gradients in lists:
        for index, grad in enumerate(gradients.tensors):
            address = grad.data_ptr() if grad.layout == torch.strided else 0
            if address in known:
                other, at = known[address]
                raise ValueError(
                    f"{other.label(at)} and {gradients.label(index)} share a gradient, but not a "
                    "rule; expected the same for both: one parameter group, and the same need_clip"
                )
            if address:
                known[address] = gradients, index
    planned = [(g, g.plan.spans) for g in lists if g.plan is not None]
    starts = [a for g, _ in planned for a in g.addresses or map(Tensor.data_ptr, g.readable)]
    if are_apart(starts, list(chain(*(spans for _, spans in planned)))):
        return
    every = [(g, at, memory_of(grad)) for g, _ in planned for at, grad in enumerate(g.tensors)]
    there = [(g, at, region) for g, at, region in every if region is not None]
    found = find_overlap([region for *_, region in there])
    if found is not None:
        first, second = (there[i][0].label(there[i][1]) for i in found)
        raise _part_in_common(first, second)


POLICIES = ("propagate", "error", "zero")
REMEDY = "No gradient was changed. To go on, pass nonfinite='propagate' or 'zero'"
TORCH_REMEDY = (
    "To disable this error and scale the gradients by the non-finite norm anyway, set "
    "`error_if_nonfinite=False`"
)


def unknown_policy(nonfinite: object) -> ValueError:
    """The error for a policy that is none of them."""
    remedy = "as torch's error_if_nonfinite=True, 'error' raises"
    if nonfinite == "skip":
        remedy = "only a ClippedOptimizer can skip a step"
    return ValueError(
        f"nonfinite must be 'propagate', 'error' or 'zero', got {nonfinite!r}; {remedy}"
    )


def raise_if_nonfinite(
    gradients: Gradients, rule: Rule, norm: Tensor, remedy: str, finite: Tensor | None = None
) -> None:
    """RuntimeError where a norm is not finite; waits for the device.

    Args:
        gradients: not written yet.
        rule: that is going to clip.
        norm: before clipping: 0-d, or 1-d for a rule that is per gradient.
        remedy: ends the message.
        finite: whether every norm is, of other processes too; None to ask `norm`.
    """
    if bool(torch.isfinite(norm).all() if finite is None else finite):
        return
    if rule.clamps:
        labels = _blamed(gradients, nonfinite_indices(gradients))
        raise RuntimeError(
            f"The gradients of {labels} are non-finite, so they cannot be "
            f"clipped by value. {remedy}"
        )
    if rule.per_gradient:
        places = (~torch.isfinite(norm)).nonzero().flatten().tolist()
        raise RuntimeError(
            f"The norms of order {rule.norm_type} of {_blamed(gradients, places)} are non-finite, "
            f"so they cannot be clipped. {remedy}"
        )
    labels = _blamed(gradients, nonfinite_indices(gradients))
    blame = (
        f"Non-finite gradients: {labels}"
        if labels
        else f"Every gradient is finite, but their norm does not fit {norm.dtype}"
    )
    raise RuntimeError(
        f"The total norm of order {rule.norm_type} for gradients from `parameters` is non-finite, "
        f"so it cannot be clipped. {remedy}. {blame}"
    )


def raise_if_any_nonfinite(gradients: Gradients, remedy: str) -> None:
    """RuntimeError for gradients with NaN or inf, which not every norm shows."""
    labels = _blamed(gradients, nonfinite_indices(gradients))
    if labels:
        raise RuntimeError(
            f"Some gradients are non-finite. {remedy}. Non-finite gradients: {labels}"
        )


def _blamed(gradients: Gradients, places: list[int]) -> str:
    """Some of the gradients to blame, of every process that shares the norm; "" for none."""
    plan = gradients.plan
    if plan is None or plan.reduction is None:
        return gradients.labels(places)
    ranks: dict[str, list[int]] = {}
    own = [gradients.label(i) for i in places]
    for rank, labels in everyones(own, plan.reduction.sharding.domain).items():
        for label in labels:
            ranks.setdefault(label, []).append(rank)
    return some([f"{label} (on rank {', '.join(map(str, at))})" for label, at in ranks.items()])


def nonfinite_indices(gradients: Gradients) -> list[int]:
    """Which gradients have a NaN or inf; waits for the device."""
    return gradients.indices_where(lambda g: not bool(torch.isfinite(_elements(g)).all()))


def _elements(grad: Tensor) -> Tensor:
    """A gradient's elements, in a dtype that can be asked for NaN; float8 cannot."""
    grad = grad.coalesce()._values() if grad.layout == torch.sparse_coo else grad
    return grad.float() if grad.dtype.itemsize == 1 else grad
