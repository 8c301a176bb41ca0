"""The gradients of one call as matrices, for a rule that limits singular values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tritonclip.backends import choose, singular_values
from tritonclip.backends.interface import Batch, Clip
from tritonclip.backends.operators import TorchBatch, unscaled
from tritonclip.rules import Rule

if TYPE_CHECKING:
    from tritonclip.engine.gradients import Gradients


class SpectralBatch:
    """The gradients of a group in one call, as :class:`tritonclip.backends.units.TorchUnits`.

    Matrices over the limit are written a stack at a time; vectors, and what is not finite, are then
    scaled by their 2-norms through `batch`, the gradients in the hands of their backend. Partial
    norms are [3, n]: the 2-norm of each gradient, and what its largest singular value is at least
    and at most. `grads` have their shapes, `exempt` ones no limit; `dtype` is that of results.
    """

    def __init__(
        self,
        batch: Batch,
        grads: list[Tensor],
        exempt: Sequence[bool],
        dtype: torch.dtype,
        *,
        soft: bool,
    ) -> None:
        self._batch, self._grads, self._exempt = batch, grads, exempt
        self._dtype, self._soft = dtype, soft

    def measure(self) -> Tensor:
        """Measures norms and singular values."""
        grads, batch = self._grads, self._batch
        norms = batch.norms_each(batch.norm(2.0, per_gradient=True), 2.0)
        # By slices, not by an index tensor: that would be an upload.
        least, most = list(norms.unbind()), list(norms.unbind())
        matrices = [i for i, grad in enumerate(grads) if singular_values.is_matrix(grad)]
        for members in singular_values.stacks(grads, matrices):
            bounds = singular_values.extremes(singular_values.stack_of([grads[i] for i in members]))
            for values, bound in zip((least, most), bounds, strict=True):
                for i, value in zip(members, bound.unbind(), strict=True):
                    values[i] = value
        extremes = torch.stack([torch.stack(least), torch.stack(most)])
        # What is not finite has no singular values.
        extremes = torch.where(torch.isfinite(norms), extremes, norms)
        return torch.cat([norms.unsqueeze(0), extremes])

    def total_each(self, norms: Tensor, norm_type: float, grad_scale: float | Tensor) -> Tensor:
        """The largest singular value of each gradient, 1-d."""
        return unscaled(norms[1], 2.0, grad_scale).to(self._dtype)

    def scale_each_(self, norms: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
        """Clips the singular values of each gradient; waits for the device.

        Returns:
            The largest before clipping, and their coefficients, 1-d.
        """
        result = self.total_each(norms, 2.0, clip.grad_scale)
        limit, is_erased = float(clip.limit), clip.erase is not None and bool(clip.erase)
        scale, found = float(clip.grad_scale), unscaled(norms, 2.0, clip.grad_scale).tolist()
        limits, bounds = [], []
        for grad, exempt, size, least, most in zip(self._grads, self._exempt, *found, strict=True):
            by_norm = not (
                singular_values.is_matrix(grad) and math.isfinite(size) and 0 < limit < math.inf
            )
            limits.append(math.inf if exempt or not by_norm else self._norm_after(size, limit))
            most = math.nan if exempt or by_norm else min(most, size)
            bounds.append((least * scale, most * scale))
        after = torch.tensor(limits, dtype=norms.dtype, device=norms.device)
        written = set() if is_erased else self._clip_matrices_(bounds, limit, scale)
        batch: Batch | None = self._batch
        sizes = norms[0]
        if written and scale != 1:
            # Those that are clipped carry no loss scale any more.
            left = [i for i in range(len(limits)) if i not in written]
            sizes, after, grads = sizes[left], after[left], [self._grads[i] for i in left]
            on_host = bool(grads) and choose.host_decides(grads[0].device)
            batch = TorchBatch(grads, self._dtype, on_host=on_host) if grads else None
        if batch is not None:
            partials = batch.partials_each(sizes, 2.0)
            batch.scale_each_(partials, Clip(2.0, 0.0, after, clip.grad_scale, clip.erase))
        pairs = zip(found[1], self._exempt, strict=True)
        ratios = [1.0 if e else self._norm_after(s, limit) / s if s else 1.0 for s, e in pairs]
        return result, torch.tensor(ratios, dtype=result.dtype, device=result.device)

    def _clip_matrices_(
        self, bounds: list[tuple[float, float]], limit: float, scale: float
    ) -> set[int]:
        """Divides matrices over the limit by the loss scale and clips them; returns which."""
        written = set()
        made = singular_values.clipped(
            self._grads, bounds, limit, soft=self._soft, grad_scale=scale
        )
        for i, new in made:
            self._grads[i].copy_(new)
            written.add(i)
        return written

    def _norm_after(self, norm: float, limit: float) -> float:
        """What a singular value becomes; the limit for one that is not finite."""
        if not math.isfinite(norm):
            return limit
        if self._soft and limit:
            return norm / math.hypot(1.0, norm / limit)
        return min(norm, limit)


def batches_of(
    gradients: Gradients, rule: Rule, made: type[SpectralBatch] = SpectralBatch
) -> list[SpectralBatch]:
    """The gradients of a list that is not empty, one batch a group, of the class `made`.

    Raises TypeError for complex and sparse gradients.
    """
    plan = gradients.plan
    assert plan is not None
    unread = [i for i, grad in enumerate(gradients.tensors) if grad.is_complex()]
    unread += plan.sparse
    if unread:
        raise TypeError(
            f"{rule.name} takes real and dense matrices, and the gradients of "
            f"{gradients.labels(sorted(unread))} are complex or sparse; expected others: make an "
            "embedding with sparse=False, set need_clip = False on it, or clip by norm"
        )
    exempt = [False] * len(gradients.tensors)
    if rule.excludes:
        exempt = rule.exempt(gradients.owners())
    grads, batches = gradients.dense(), []
    for group in plan.groups:
        batch = group.layout.bind(*gradients.of_group(group.indices))
        batches.append(made(batch, group.of(grads), group.of(exempt), plan.dtype, soft=rule.soft))
    return batches
