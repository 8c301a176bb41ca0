"""The gradients of a call beside the weights that they belong to, for a rule by unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tritonclip.backends.choose import unit_layout_of
from tritonclip.backends.interface import UnitBatch
from tritonclip.distributed.reduction import Exchange, Measured, Places, Reduction, Share
from tritonclip.distributed.refusals import reduced_norm
from tritonclip.distributed.shards import piece_of
from tritonclip.engine.gradients import Gradients, gradient_of
from tritonclip.engine.memory import OFFSETS, is_freed
from tritonclip.engine.plan import Plan
from tritonclip.rules import Rule

# Most that a gradient adds to its plan: four numbers, and the strides of its weights.
UNIT_BYTES = 256


class Units:
    """The gradients of one call, by group, beside their weights.

    Args:
        gradients: not empty, and made from parameters.
        rule: by unit.

    Attributes:
        batches: one a group of the plan.

    Raises:
        TypeError: sparse gradients; weights that cannot be read; DTensors whose units are split.
        ValueError: weights of another shape than their gradient, or without memory.
        RuntimeError: `exclude` named parameters that are gone.
    """

    def __init__(self, gradients: Gradients, rule: Rule) -> None:
        plan = gradients.plan
        assert plan is not None
        self._gradients, self._plan = gradients, plan
        parameters = parameters_of(gradients) if gradients.tensors else []
        _refuse_sparse(gradients, plan)
        _refuse_split(gradients, parameters)
        self._weights = weights_of(parameters)
        _refuse_weights(gradients, self._weights)
        # A list that is refused may be so because its rule cannot be asked.
        exempt = rule.exempt(parameters) if parameters else []
        self.batches = [self._bind(number, exempt) for number in range(len(plan.groups))]

    def _bind(self, number: int, exempt: Sequence[bool]) -> UnitBatch:
        """The gradients and weights of a group, in the hands of its backend."""
        group = self._plan.groups[number]
        indices = range(len(self._weights)) if group.indices is None else group.indices
        grads = [self._gradients.tensors[i] for i in indices]
        weights = [self._weights[i] for i in indices]
        layout = group.units
        if layout is None or not layout.serves(weights):
            if layout is None:
                self._plan.n_bytes += UNIT_BYTES * len(grads)
            layout = unit_layout_of(grads, weights, self._plan.dtype, flat=group.flat)
            group.units = layout
        limiting = [None if exempt[i] else self._weights[i] for i in indices]
        return layout.bind(grads, limiting)

    def measure(self) -> Exchange[tuple[list[Tensor], Tensor | None]]:
        """The partial norms of each group; and those of each parameter's gradient, if reduced."""
        partials = [batch.measure() for batch in self.batches]
        reduction = self._plan.reduction
        if reduction is None:
            return partials, None
        return (yield from self._reduce(reduction, partials))

    def _reduce(
        self, reduction: Reduction, partials: list[Tensor]
    ) -> Exchange[tuple[list[Tensor], Tensor]]:
        """Makes norms of pieces those of whole gradients and weights, by one all-reduce.

        Slices along the first dimension are whole here; a gradient that is one unit may not be.
        """
        n, device = reduction.sharding.n_parameters, self._plan.device
        gradients, weights = [], []
        for batch, norms, share in zip(self.batches, partials, reduction.shares, strict=True):
            gradients.append((batch.norms_each(norms), share))
            weights.append((batch.weight_norms_each(norms), _below(share, n)))
        weights += self._absent(n, device)
        doubled = replace(reduction, sharding=replace(reduction.sharding, n_parameters=2 * n))
        reduced = yield from reduced_norm(
            self._gradients, partial(doubled.norm, gradients + weights, norm_type=2.0, each=True)
        )
        whole = []
        for batch, norms, share in zip(self.batches, partials, reduction.shares, strict=True):
            places = share.places.on(device)
            gradients, limits = (part[places].to(norms.device) for part in reduced.split(n))
            whole.append(batch.with_whole(norms, gradients, limits))
        return whole, reduced[:n]

    def _absent(self, n: int, device: torch.device) -> list[Measured]:
        """Weights that are one unit with those of other processes, and have no gradient here."""
        sharding, measured = self._gradients.sharding, []
        assert sharding is not None
        for at, parameter in zip(sharding.absent, self._gradients.absent, strict=True):
            if parameter.dim() < 2 and parameter.requires_grad:
                piece = piece_of(parameter, at, sharding)
                share = Share(piece, Places([n + at]), narrow=False)
                measured.append((_norm_of(weights_of([parameter])[0], device), share))
        return measured


def parameters_of(gradients: Gradients) -> list[Tensor]:
    """The parameter of each gradient, in order."""
    parameters = gradients.parameters
    if parameters is None:
        assert gradients.sources is not None
        parameters = [p for p in gradients.sources if gradient_of(p) is not None]
    once = gradients.distinct
    return list(parameters) if once is None else [parameters[i] for i in once]


def weights_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The local tensors of parameters, detached."""
    local = [getattr(parameter, "_local_tensor", parameter) for parameter in parameters]
    return [weight.detach() for weight in local]


def _norm_of(weight: Tensor, device: torch.device) -> Tensor:
    """The 2-norm of a small weight, float64[1]."""
    wide = weight.to(torch.complex128 if weight.is_complex() else torch.float64)
    norm: Tensor = torch.linalg.vector_norm(wide)
    return norm.reshape(1).to(device)


def _below(share: Share, n: int) -> Share:
    """The share of weights, whose norms stand below those of n gradients."""
    places = Places([n + place for place in share.places.positions])
    return Share(share.piece, places, narrow=False)


def _refuse_sparse(gradients: Gradients, plan: Plan) -> None:
    if plan.sparse:
        raise TypeError(
            "a rule by unit compares each row with its weights, and sparse gradients "
            f"({gradients.labels(plan.sparse)}) have some of the rows only; expected dense ones: "
            "make the embedding with sparse=False, or set need_clip = False on its weight"
        )


def _refuse_weights(gradients: Gradients, weights: Sequence[Tensor]) -> None:
    """Refuses weights that are no plain tensors, have another shape, or no memory."""
    for index, (grad, weight) in enumerate(zip(gradients.tensors, weights, strict=True)):
        if hasattr(weight, "__tensor_flatten__"):
            raise TypeError(
                f"the parameter {gradients.label(index)} is a {type(weight).__name__}, a tensor "
                "subclass that tritonclip cannot read; expected a plain tensor or a DTensor: set "
                "need_clip = False on it, or clip by another rule"
            )
        if weight.shape != grad.shape:
            raise ValueError(
                f"the parameter {gradients.label(index)} has shape {tuple(weight.shape)} and its "
                f"gradient {tuple(grad.shape)}; expected the same: clip before the parameter "
                "changes, or call backward again"
            )
        if weight.data_ptr() < OFFSETS and is_freed(weight, weight.data_ptr()):
            raise ValueError(
                f"the parameter {gradients.label(index)} has {weight.numel()} elements and no "
                "memory: its storage was freed; expected weights to read: clip while they are there"
            )


def _refuse_split(gradients: Gradients, parameters: Sequence[Tensor]) -> None:
    """Refuses DTensors whose units lie on several processes, unless they are one unit."""
    if gradients.sharding is None:
        return
    for index, parameter in enumerate(parameters):
        own = getattr(parameter, "placements", ())
        found = getattr(parameter.grad, "placements", ())
        if own != found or not all(
            placement.is_replicate() or _splits_rows(placement) or n_processes == 1
            for placement, n_processes in zip(found, _sizes(parameter), strict=True)
        ):
            raise TypeError(
                f"{gradients.label(index)} has the placements {own} and its gradient {found}; a "
                "rule by unit expects the same for both, and rows that are whole on their process: "
                "Replicate or Shard(0), as fully_shard makes them. Clip such a model by norm, or "
                "set need_clip = False on these parameters"
            )


def _sizes(parameter: Tensor) -> tuple[int, ...]:
    """The processes along each dimension of a DTensor's mesh; () for a plain tensor."""
    mesh = getattr(parameter, "device_mesh", None)
    return () if mesh is None else tuple(mesh.shape)


def _splits_rows(placement: object) -> bool:
    """Whether a placement gives each process some of the rows; of _StridedShard too."""
    return getattr(placement, "dim", None) == 0
