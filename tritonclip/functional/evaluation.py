"""Evaluation of a clip by norms, either by its formula or by the engine.

Where operators on the tensors are recorded, batched or traced, the formula is used, because it has
derivatives of every order. Elsewhere the engine clips copies in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tritonclip.backends import choose
from tritonclip.backends.operators import norms_of_units, wide_dtype
from tritonclip.engine import execute, units, verify
from tritonclip.engine.arguments import device_of
from tritonclip.engine.gradients import Gradients
from tritonclip.engine.memory import OverlapError
from tritonclip.engine.plan import refuse_freed, result_dtype
from tritonclip.functional import c_loops, formulas
from tritonclip.modes import is_jit_traced, is_traced
from tritonclip.rules import Measured, Norm, Rule

_LABEL_OF = "tensors[{}]".format
_get_requires_grad = attrgetter("requires_grad")


def is_readable(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors have memory to read now; warns once where kernels would have served them."""
    if is_traced() or is_jit_traced():
        return False
    transformed = torch._C._are_functorch_transforms_active()
    if not transformed and forward_ad._current_level < 0:
        return True
    for device in {x.device for x in tensors}:
        # This is called for its warning or error.
        choose.backend_name(device)
    return False


def is_recorded(tensors: Sequence[Tensor]) -> bool:
    """Whether autograd, a transform or a tracer has to see each operator on these tensors."""
    if not is_readable(tensors):
        return True
    return torch.is_grad_enabled() and True in map(_get_requires_grad, tensors)


def norm_of_all(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all tensors, at least one: 0-d, on the first one's device."""
    if is_recorded(tensors):
        return formulas.norms_of(tensors, 2.0, each=False)
    norm = c_loops.norm_of(list(tensors))
    return execute.measured_norm(_measured_list(tensors), Norm()) if norm is None else norm


def clip(
    tensors: Sequence[Tensor],
    limit: float | Tensor,
    norm_type: float = 2.0,
    *,
    each: bool,
    power: float = 0.0,
    norm: float | Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Scales at least one tensor to a limit, in new memory.

    Args:
        tensors: plain tensors, which count each time that they occur.
        limit: the largest norm: a number or a 0-d tensor.
        norm_type: the p of the p-norm.
        each: clips each tensor by its own norm, instead of all tensors by one.
        power: 0, 0.5 or 1; with `each`, norms are divided by numel**power.
        norm: a known norm, used instead of a measured one.

    Returns:
        The clipped tensors, and the norm before clipping, not divided: 0-d, or 1-d with `each`.
    """
    given = [value for value in (limit, norm) if isinstance(value, Tensor)]
    if is_recorded([*tensors, *given]):
        return formulas.clip(tensors, limit, norm_type, each=each, power=power, norm=norm)
    copies = _copies_of(tensors)
    gradients, rule = _list_of(copies), _Limit(limit, norm_type, each=each, power=power)
    if norm is None:
        measured = execute.clip_(gradients, rule)
        assert measured is not None
        return copies, measured
    wide = partial(formulas.as_wide, dtype=result_dtype(tensors), device=gradients.device)
    measured = wide(norm)
    # The coefficient 0/0 counts as 0.
    are_zeros = (measured == 0) & (wide(limit) == 0)
    execute.scale_(gradients, rule, torch.where(are_zeros, 1.0, measured))
    return copies, measured


class _Limit(Rule):
    """A limit of the norm of all tensors, or of each over a power of its number of elements."""

    def __init__(
        self, limit: float | Tensor, norm_type: float, *, each: bool, power: float
    ) -> None:
        self.norm_type, self.per_gradient = norm_type, each  # type: ignore[misc]  # a constant
        self._limit, self._power = limit, power

    def limit(self, measured: Measured) -> float | Tensor:
        """The limit of the norms before they are divided."""
        limit = self._limit
        if not self._power:
            return limit
        # At least 1, because inf * 0 would be NaN; tensors without elements have norm 0 anyway.
        counts = measured.sizes().clamp(min=1) ** self._power
        return counts * (limit.to(counts) if isinstance(limit, Tensor) else limit)


def norms_of_rows(rows: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each row of each matrix, 1-d in the wide dtype, without derivatives."""
    dense = [i for i, x in enumerate(rows) if x.numel() and x.is_contiguous()]
    norms: dict[int, Tensor] = {}
    if dense:
        gradients = _measured_list([rows[i] for i in dense] if len(dense) < len(rows) else rows)
        found = units.norms_by_unit(gradients)
        if gradients.plan is not None and gradients.plan.verifying:
            verify.Reference(gradients).check_units(found)
        norms.update(zip(dense, found, strict=True))
    for i in set(range(len(rows))).difference(norms):
        x = rows[i]
        if x.numel():
            norms[i] = norms_of_units(x)
        else:
            norms[i] = torch.zeros(len(x), dtype=wide_dtype(x.device), device=x.device)
    return [norms[i] for i in range(len(rows))]


def _measured_list(tensors: Sequence[Tensor]) -> Gradients:
    """A gradient list of these tensors, or of copies if some share memory, so that each counts."""
    try:
        gradients = _list_of(tensors)
    except OverlapError:
        return _list_of(_copies_of(tensors))
    return gradients if gradients.distinct is None else _list_of(_copies_of(tensors))


def _list_of(tensors: Sequence[Tensor]) -> Gradients:
    """A gradient list of these tensors; raises as `Gradients.take_` does."""
    return Gradients(device_of(tensors), _LABEL_OF).take_(list(tensors))


def _copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Dense copies, in which lazy negations and conjugates are carried out."""
    for i, x in enumerate(tensors):
        refuse_freed(x, partial(_LABEL_OF, i))
    copies = [torch.empty_like(x) for x in tensors]
    torch._foreach_copy_(copies, list(tensors))
    return copies
