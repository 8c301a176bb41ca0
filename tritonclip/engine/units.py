"""Units of a call: the weights that they belong to for a rule by unit, or their norms alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tritonclip.backends.choose import unit_layout_of
from tritonclip.backends.units import TorchUnitLayout, TorchUnits
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.memory import OFFSETS, is_freed
from tritonclip.engine.plan import Plan
from tritonclip.engine.plan_cache import guards_of
from tritonclip.modes import PLAIN, without_grad

# Most that a gradient adds to its plan: four numbers, the guard of its weights, and for Triton both
# addresses in each of eight tables.
UNIT_BYTES = 640


def batches_of(gradients: Gradients) -> list[TorchUnits]:
    """The gradients of a list with their weights, for a rule by unit: one batch a group.

    TypeError for sparse gradients, and for weights that cannot be read; ValueError for weights of
    another shape than their gradient, or without memory.
    """
    plan = gradients.plan
    assert plan is not None
    if plan.sparse:
        raise TypeError(
            "a rule by unit compares each row with its weights, and sparse gradients "
            f"({gradients.labels(plan.sparse)}) have some of the rows only; expected dense ones: "
            "make the embedding with sparse=False, or set need_clip = False on its weight"
        )
    weights = gradients.owners() if gradients.tensors else []
    if not PLAIN.issuperset(map(type, weights)):
        weights = list(map(weight_of, weights))
    layouts, addresses = _known_layouts(plan, weights), list(map(Tensor.data_ptr, weights))
    if layouts is None or min(addresses, default=OFFSETS) < OFFSETS:
        _refuse_weights(gradients, weights)
    return _bind(gradients, weights, layouts, addresses)


def _known_layouts(plan: Plan, weights: Sequence[Tensor]) -> Sequence[TorchUnitLayout] | None:
    """The layouts of the groups, where they were made for weights of this form."""
    # PyTorch gives no nested parameter a gradient of another kind, so that the guards meet none.
    return plan.units[1] if plan.units is not None and plan.units[0].check(*weights) else None


def _bind(
    gradients: Gradients,
    weights: Sequence[Tensor],
    layouts: Sequence[TorchUnitLayout] | None,
    addresses: Sequence[int],
) -> list[TorchUnits]:
    """The gradients and weights of each group, in the hands of its backend.

    Without layouts, new ones are made, which a plan for several calls keeps. `addresses` are of the
    weights.
    """
    plan, grads, at = gradients.plan, gradients.dense(), gradients.addresses
    assert plan is not None
    if at is None:
        at = list(map(Tensor.data_ptr, grads))
    if layouts is None:
        layouts = [
            unit_layout_of(group.of(grads), group.of(weights), plan.dtype) for group in plan.groups
        ]
        if plan.guards is not None:
            if plan.units is None:
                plan.n_bytes += UNIT_BYTES * len(weights)
            plan.units = guards_of(weights), layouts
    return [
        layout.bind(group.of(grads), group.of(weights), group.of(at) + group.of(addresses))
        for group, layout in zip(plan.groups, layouts, strict=True)
    ]


@without_grad
def norms_by_unit(gradients: Gradients) -> list[Tensor]:
    """The 2-norm of each slice along the first dimension, 1-d in the wide dtype, for each gradient.

    Gradients have two dimensions or more; no parameters are asked for.
    """
    plan, grads = gradients.plan, gradients.dense()
    assert plan is not None
    # In place of weights, which are not read.
    addresses = list(map(Tensor.data_ptr, grads))
    batches = _bind(gradients, grads, _known_layouts(plan, grads), addresses)
    norms: dict[int, Tensor] = {}
    for group, batch in zip(plan.groups, batches, strict=True):
        norms.update(zip(group.of(range(len(grads))), batch.norms_of_units(), strict=True))
    return [norms[i] for i in range(len(norms))]


def weight_of(parameter: Tensor) -> Tensor:
    """A parameter, or the local tensor of a DTensor."""
    return parameter if type(parameter) in PLAIN else getattr(parameter, "_local_tensor", parameter)


def _refuse_weights(gradients: Gradients, weights: Sequence[Tensor]) -> None:
    for index, (grad, weight) in enumerate(zip(gradients.tensors, weights, strict=True)):
        freed = weight.data_ptr() < OFFSETS and is_freed(weight, weight.data_ptr())
        # A wrapper subclass has no memory, whether torch.compile knows how to open it or not.
        if type(weight) not in PLAIN and (freed or hasattr(weight, "__tensor_flatten__")):
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
        if freed:
            raise ValueError(
                f"the parameter {gradients.label(index)} has {weight.numel()} elements and no "
                "memory: its storage was freed; expected weights to read: clip while they are there"
            )
