"""Binds gradients by rows: together with their weights for a rule by unit, or alone."""

from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from tritonclip.backends.choose import layout_of
from tritonclip.backends.interface import Batch
from tritonclip.backends.operators import count_rows, norms_of_rows
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.memory import OFFSETS, is_freed
from tritonclip.engine.plan import Plan
from tritonclip.engine.plan_cache import guards_of
from tritonclip.modes import PLAIN, without_grad

# The most bytes that a gradient adds to its plan beside its layout: numbers, guards of weights.
ROW_BYTES = 512


def batches_of(gradients: Gradients) -> list[Batch]:
    """Binds the gradients of a list with their weights for a rule by unit: a batch for each group.

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
    return _bind(gradients, plan, weights)


def _bind(gradients: Gradients, plan: Plan, weights: Sequence[Tensor]) -> list[Batch]:
    """Binds the gradients of each group, and their weights if any, to layouts by rows.

    The plan keeps the layouts. They are made again where the weights have another form than before.
    """
    grads, at, addresses = (
        gradients.dense(),
        gradients.addresses,
        list(map(Tensor.data_ptr, weights)),
    )
    guards, layouts = plan.rows or (None, None)
    # A nested parameter would have a nested gradient, so that the guards meet no nested weights.
    if not (guards.check(*weights) if guards and weights else not guards and not weights):
        layouts = None
    if weights and (layouts is None or min(addresses) < OFFSETS):
        _refuse_weights(gradients, weights)
    if at is None:
        at = list(map(Tensor.data_ptr, grads))
    sides = [(grads, at), (weights, addresses)] if weights else [(grads, at)]
    of_groups = [
        [list(chain.from_iterable(map(group.of, items))) for items in zip(*sides, strict=True)]
        for group in plan.groups
    ]
    if layouts is None:
        layouts = []
        for group, (tensors, _) in zip(plan.groups, of_groups, strict=True):
            n = len(group.of(grads))
            layouts.append(layout_of(tensors[:n], tensors[n:]))
            layouts[-1].dtype = plan.dtype
        if plan.guards is not None:
            if plan.rows is None:
                plan.n_bytes += sum(layout.n_bytes for layout in layouts) + ROW_BYTES * len(grads)
            plan.rows = guards_of(weights) if weights else None, layouts
    return [
        layout.bind(tensors, ats) for layout, (tensors, ats) in zip(layouts, of_groups, strict=True)
    ]


@without_grad
def norms_by_unit(gradients: Gradients) -> list[Tensor]:
    """The 2-norms of slices along the first dimension: for each gradient 1-d, in the wide dtype.

    Gradients have two dimensions or more. Weights are not read.
    """
    plan, grads = gradients.plan, gradients.dense()
    assert plan is not None
    norms: dict[int, Tensor] = {}
    for group, batch in zip(plan.groups, _bind(gradients, plan, ()), strict=True):
        indices = group.of(range(len(grads)))
        of_rows = batch.norm(2.0, "rows")[0].split(batch.sizes)
        for i, own in zip(indices, of_rows, strict=True):
            n = count_rows(grads[i])
            # Kernels return a norm for each chunk of a long row.
            norms[i] = own if len(own) == n else norms_of_rows(own.view(n, -1), own.dtype)
    return [norms[i] for i in range(len(norms))]


def weight_of(parameter: Tensor) -> Tensor:
    """The parameter itself, or the local tensor of a DTensor."""
    return parameter if type(parameter) in PLAIN else getattr(parameter, "_local_tensor", parameter)


def _refuse_weights(gradients: Gradients, weights: Sequence[Tensor]) -> None:
    for index, (grad, weight) in enumerate(zip(gradients.tensors, weights, strict=True)):
        freed = weight.data_ptr() < OFFSETS and is_freed(weight, weight.data_ptr())
        # A wrapper subclass has no memory of its own, or `__tensor_flatten__` says that it is one.
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
