"""The gradient list of a call that takes the gradients themselves, as `get_total_norm` does."""

from __future__ import annotations

from torch.nn import Module

from tritonclip.distributed.domain import Holders
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.pieces import are_pieces_
from tritonclip.engine.refusals import PLAIN
from tritonclip.engine.sources import LabelOf, are_tensors, as_list, device_of, refuse_no_tensors


def of_tensors(
    tensors: object,
    label_of: LabelOf = "tensors[{}]".format,
    holders: Holders | None = None,
    *,
    tells: bool = False,
) -> Gradients:
    """The gradients that are the tensors themselves, None left out; raises as `of_parameters`."""
    if isinstance(tensors, Module):
        raise TypeError(
            f"tensors must be the gradients, got {type(tensors).__name__}, a module; expected "
            "[p.grad for p in module.parameters() if p.grad is not None], or norms_by_name(module)"
        )
    items = tensors if type(tensors) is list else as_list(tensors)
    if not are_tensors(items):
        numbered = [(place, item) for place, item in enumerate(items) if item is not None]
        refuse_no_tensors(
            numbered, "tensors", "the gradients: [p.grad for p in ... if p.grad is not None]"
        )
        items, label_of = [item for _, item in numbered], _picked(label_of, numbered)
    gradients = Gradients(items, device_of(items), label_of)
    if holders is not None or not PLAIN.issuperset(map(type, items)):
        are_pieces_(gradients, items, items, holders, label_of, tells=tells)
    return gradients


def _picked(label_of: LabelOf, numbered: list[tuple[int, object]]) -> LabelOf:
    return lambda index: label_of(numbered[index][0])
