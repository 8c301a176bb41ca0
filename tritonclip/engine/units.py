"""Units of a call: the weights that they belong to for a rule by unit, or their norms alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from tritonclip.backends.choose import unit_layout_of
from tritonclip.backends.interface import UnitBatch, UnitLayout
from tritonclip.engine.arguments import PLAIN
from tritonclip.engine.memory import OFFSETS, is_freed
from tritonclip.engine.plan import Group, Plan
from tritonclip.modes import without_grad
from tritonclip.rules import Rule

if TYPE_CHECKING:
    from tritonclip.engine.gradients import Gradients

# Most that a gradient adds to its plan: four numbers, and the strides of its weights.
UNIT_BYTES = 256


class Units:
    """The gradients of one call with their weights, by group.

    Args:
        gradients: not empty, and made from parameters.
        rule: by unit.

    Attributes:
        batches: one a group of the plan.

    Raises:
        TypeError: sparse gradients; weights that cannot be read.
        ValueError: weights of another shape than their gradient, or without memory.
        RuntimeError: `exclude` named parameters that are gone.
    """

    def __init__(self, gradients: Gradients, rule: Rule) -> None:
        plan = gradients.plan
        assert plan is not None
        self._gradients, self._plan = gradients, plan
        parameters = gradients.owners() if gradients.tensors else []
        _refuse_sparse(gradients, plan)
        self._weights = list(map(weight_of, parameters))
        _refuse_weights(gradients, self._weights)
        # A rejected list may be so because its rule cannot be asked.
        exempt = rule.exempt(parameters) if parameters else []
        self.batches = [self._bind(number, exempt) for number in range(len(plan.groups))]

    def _bind(self, number: int, exempt: Sequence[bool]) -> UnitBatch:
        """The gradients and weights of a group, in the hands of its backend."""
        group = self._plan.groups[number]
        indices = range(len(self._weights)) if group.indices is None else group.indices
        copies, tensors = self._gradients.copies, self._gradients.tensors
        grads = [copies.get(i, tensors[i]) for i in indices]
        layout = _layout_of(self._plan, group, grads, [self._weights[i] for i in indices])
        limiting = [None if exempt[i] else self._weights[i] for i in indices]
        return layout.bind(grads, limiting)

    def measure(self) -> list[Tensor]:
        """The partial norms of each group."""
        return [batch.measure() for batch in self.batches]


def _layout_of(plan: Plan, group: Group, grads: list[Tensor], weights: list[Tensor]) -> UnitLayout:
    """The layout of a group by unit, made where none serves its weights."""
    layout = group.units
    if layout is None or not layout.serves(weights):
        if layout is None:
            plan.n_bytes += UNIT_BYTES * len(grads)
        group.units = layout = unit_layout_of(grads, weights, plan.dtype)
    return layout


@without_grad
def norms_by_unit(gradients: Gradients) -> list[Tensor]:
    """The 2-norm of each slice along the first dimension, 1-d in the wide dtype, for each gradient.

    Args:
        gradients: not empty, of two dimensions or more; no parameters are asked for.
    """
    plan = gradients.plan
    assert plan is not None
    norms: dict[int, Tensor] = {}
    for group in plan.groups:
        indices = range(len(gradients.tensors)) if group.indices is None else group.indices
        grads = [gradients.copies.get(i, gradients.tensors[i]) for i in indices]
        # Weights that are None limit nothing and are not read.
        batch = _layout_of(plan, group, grads, grads).bind(grads, [None] * len(grads))
        norms.update(zip(indices, batch.norms_of_units(batch.measure()), strict=True))
    return [norms[i] for i in range(len(norms))]


def weight_of(parameter: Tensor) -> Tensor:
    """A parameter, or the local tensor of a DTensor."""
    return parameter if type(parameter) in PLAIN else getattr(parameter, "_local_tensor", parameter)


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
