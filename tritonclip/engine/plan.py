"""Plans: everything derived from a gradient list that does not change between calls."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tritonclip.backends.batch import Layout
from tritonclip.backends.unit_batch import UnitLayout
from tritonclip.distributed.reduce import Reduction


@dataclass(frozen=True, slots=True)
class View:
    """How a gradient is read by verbs, where not as it is.

    Attributes:
        index: of the gradient in the list.
        pairs: a complex gradient is read as pairs of reals.
        size: elements of a flat view, for a gradient dense in another order of its dimensions
            whose verbs want it contiguous; None to keep the shape.
    """

    index: int
    pairs: bool
    size: int | None

    def of(self, grad: Tensor) -> Tensor:
        """The view of a gradient."""
        if self.pairs:
            grad = torch.view_as_real(grad.conj() if grad.is_conj() else grad)
        return grad if self.size is None else grad.as_strided((self.size,), (1,))


@dataclass(slots=True)
class Group:
    """Gradients that one launch serves: of one device, dtype and density.

    Attributes:
        indices: in the list; None for all of it.
        device: of the gradients.
        dtype: of the gradients; real, also where they are complex.
        flat: each is dense in memory.
        pairs: they are complex.
        layout: for norms and scaling.
        clamping: for clamping, where the sign of an element counts: another layout where the first
            reads lazily negated gradients without their sign.
        units: for a rule by unit, made where one is first met.
    """

    indices: Sequence[int] | None
    device: torch.device
    dtype: torch.dtype
    flat: bool
    pairs: bool
    layout: Layout
    clamping: Layout
    units: UnitLayout | None = None


@dataclass(slots=True)
class Plan:
    """All that is known of a gradient list.

    Attributes:
        groups: of all gradients; none where only other processes have any.
        views: gradients that verbs do not read as they are.
        device: of results: the first gradient's.
        dtype: of results: float64 where any gradient is, else float32.
        sparse: indices of sparse gradients, of which the values are clipped.
        pairs: complex gradients are among them.
        empty: no gradient has an element.
        inference: gradients made in inference mode are among them.
        requires_grad: gradients that autograd can differentiate are among them.
        ordinary: none of them is complex, sparse, made in inference mode, a piece, or a shard of
            FullyShardedDataParallel: every rule takes them.
        verifying: the calls that it serves are to be checked.
        only_group: the one group of an ordinary list that has elements; None for other lists, and
            where calls are checked.
        addresses: those last seen, of distinct gradients.
        n_addresses: how many of them are not 0, the address of gradients without elements.
        spans: bytes from the first to the last of each gradient; 0 for those without elements.
        n_bytes: of memory that it takes on the host, at most.
        guards: compare the form of a list; None for a plan that serves one call.
        reduction: of norms, over the processes that hold the other pieces; None without any.
        sizes: elements of each gradient, on the device of results; None before a rule asks.
    """

    groups: tuple[Group, ...]
    views: tuple[View, ...]
    device: torch.device
    dtype: torch.dtype
    sparse: tuple[int, ...]
    pairs: bool
    empty: bool
    inference: bool
    requires_grad: bool
    ordinary: bool = False
    verifying: bool = False
    only_group: Group | None = None
    addresses: list[int] | None = None
    n_addresses: int = 0
    spans: list[int] = field(default_factory=list)
    n_bytes: int = 0
    guards: Any = None
    reduction: Reduction | None = None
    sizes: Tensor | None = None

    def readable(self, grads: list[Tensor]) -> list[Tensor]:
        """The tensors of a list of this form that verbs read and write."""
        if self.views:
            grads = list(grads)
            for view in self.views:
                grads[view.index] = view.of(grads[view.index])
        return grads
