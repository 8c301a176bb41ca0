"""Norms of a gradient list before clipping: partial ones by group, and put together."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonclip.backends.batch import Batch, PartialNorms
from tritonclip.backends.torch_backend import unscaled, wide_dtype
from tritonclip.engine.gradients import Gradients
from tritonclip.grad_mode import outside_inference


class Norms(NamedTuple):
    """Partial norms of all groups, and where those of each group begin.

    Attributes:
        batches: the gradients of each group, in the hands of its backend.
        partials: for each group those of all groups, on its device; numbers where the host decides
            for all groups; a single group's in the form of its backend.
        starts: index of a group's first partial.
        norm_type: p of the p-norm.
        per_gradient: partials give the norm of each gradient.
        grad_scale: the loss scale that gradients and partials still carry.
        gradients: the list that was measured.
        reduced: where pieces lie over several processes, the norm of all, or with `per_gradient` of
            each parameter's gradient; float64, 1-d.
    """

    batches: list[Batch]
    partials: list[PartialNorms]
    starts: list[int]
    norm_type: float
    per_gradient: bool
    grad_scale: float | Tensor
    gradients: Gradients
    reduced: Tensor | None = None

    def norm(self) -> Tensor:
        """The norm before clipping, or one for each gradient, of other processes too."""
        plan = self.gradients.plan
        if self.reduced is not None and self.per_gradient and plan is not None:
            return unscaled(self.reduced, self.norm_type, self.grad_scale).to(plan.dtype)
        return total(self)

    def sizes(self) -> Tensor:
        """The number of elements of each of these gradients; uploaded once for a plan."""
        gradients, plan = self.gradients, self.gradients.plan
        assert plan is not None
        if plan.sizes is None:
            whole = gradients.tensors
            if self.reduced is not None and gradients.sources is not None:
                whole = [p for p in gradients.sources if getattr(p, "need_clip", True)]
            sizes = [tensor.numel() for tensor in whole]
            uploaded = outside_inference(torch.tensor)
            plan.sizes = uploaded(sizes, dtype=wide_dtype(plan.device), device=plan.device)
        return plan.sizes

    def positions(self) -> tuple[Sequence[int] | None, int]:
        """Where the gradients stand among the parameters, and how many parameters there are."""
        gradients = self.gradients
        if self.reduced is not None and gradients.sources is not None:
            wanted = [getattr(p, "need_clip", True) for p in gradients.sources]
            there = None if all(wanted) else [i for i, own in enumerate(wanted) if own]
            return there, len(wanted)
        return gradients.places(), gradients.n_parameters


def total(norms: Norms) -> Tensor:
    """The norm before clipping, divided by the loss scale: 0-d, or 1-d in order per gradient."""
    if norms.reduced is not None:
        return _total_of_pieces(norms)
    gradients, results = norms.gradients, []
    for batch, partials, start in zip(norms.batches, norms.partials, norms.starts, strict=True):
        if not norms.per_gradient:
            assert gradients.plan is not None
            norm = batch.total(partials, norms.norm_type, norms.grad_scale)
            return norm.to(gradients.plan.device)
        results.append(batch.total_each(partials, start, norms.norm_type, norms.grad_scale))
    return in_order(gradients, results)


def _total_of_pieces(norms: Norms) -> Tensor:
    """As `total`, from norms that are reduced already."""
    plan = norms.gradients.plan
    assert plan is not None
    assert plan.reduction is not None
    assert norms.reduced is not None
    reduced = unscaled(norms.reduced, norms.norm_type, norms.grad_scale).to(plan.dtype)
    if norms.per_gradient:
        return reduced[plan.reduction.places.on(plan.device)]
    return reduced.reshape(())


def is_finite(norms: Norms) -> Tensor:
    """Whether every norm is finite, also those of gradients that only other processes have; 0-d."""
    return torch.isfinite(norms.norm()).all()


def in_order(gradients: Gradients, results: list[Tensor]) -> Tensor:
    """Norms by group as one tensor in the order of the gradient list."""
    if len(results) == 1:
        return results[0]
    plan = gradients.plan
    assert plan is not None
    joined = torch.cat([result.to(plan.device) for result in results])
    indices = [index for group in plan.groups for index in group.indices or ()]
    order = sorted(range(len(indices)), key=indices.__getitem__)
    # By slices, not by an index tensor: that would be an upload, which no graph can capture.
    pieces = joined.split(1)
    return torch.cat([pieces[i] for i in order])
