"""The plan of a gradient list, and how one is made for a list that has none.

`make_plan` checks the gradients, groups them, and chooses a backend for each group. It changes
nothing and knows its arguments only.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from tritonclip.backends.choose import layout_of
from tritonclip.backends.interface import Layout
from tritonclip.backends.operators import WIDE
from tritonclip.distributed.domain import Domain
from tritonclip.distributed.shards import WHOLE_SHARD, Shard, Sharding
from tritonclip.engine.arguments import LabelOf
from tritonclip.engine.memory import OFFSETS, OverlapError, find_overlap, is_freed, memory_of
from tritonclip.engine.reading import as_real, copy_of, needs_copy
from tritonclip.modes import PLAIN, without_grad

T = TypeVar("T")


@dataclass(slots=True)
class Group:
    """Gradients that one launch serves: of one device, dtype and shard.

    Attributes:
        indices: in the list; None for all of it.
        device: of the gradients.
        dtype: of the gradients; real, also where they are complex.
        pairs: they are complex.
        layout: of the backend that serves them.
        shard: that lies here of each, in a list over processes; there, too,
        positions: of these gradients among the parameters that are to be clipped.
    """

    indices: Sequence[int] | None
    device: torch.device
    dtype: torch.dtype
    pairs: bool
    layout: Layout
    shard: Shard = WHOLE_SHARD
    positions: tuple[int, ...] = ()

    def of(self, items: Sequence[T]) -> list[T]:
        """The items of the group, from one item for each gradient of the list."""
        return [*items] if self.indices is None else [items[i] for i in self.indices]


@dataclass(slots=True)
class Plan:
    """Everything derived from a gradient list that does not change between calls.

    Attributes:
        groups: of all gradients; none where only other processes have any.
        device: of results: the first gradient's.
        dtype: of results: float64 if any gradient is float64, else float32.
        verifying: the calls that it serves are to be checked.
        requires_grad: autograd may record the verbs: it can differentiate some of the gradients, or
            other processes have parts of them.
        staged: indices of gradients that are read from a copy.
        sparse: indices of sparse gradients, of which the values are clipped.
        pairs: complex gradients are among them.
        inference: gradients made in inference mode are among them.
        ordinary: whole, dense and real gradients made outside of inference mode, none of them
            staged: every rule takes them.
        only_group: the one group of an ordinary list that has elements; None for other lists, and
            where calls are checked.
        addresses: those last seen, of distinct gradients.
        spans: bytes from the first to the last of each gradient; 0 for those without elements.
        n_bytes: of memory that it takes on the host, at most.
        guards: compare the form of a list; None for a plan that serves one call.
        sharding: how the list lies over processes; None for a list of plain tensors.
        domain: the processes that norms are reduced over; None where no others have shards.
        sizes: elements of each gradient, on the device of results; None before a rule asks.
        rows: guards of weights, or None for no weights, and with such the layout of each group by
            rows; None before the first.
    """

    groups: tuple[Group, ...]
    device: torch.device
    dtype: torch.dtype
    verifying: bool
    requires_grad: bool
    staged: tuple[int, ...] = ()
    sparse: tuple[int, ...] = ()
    pairs: bool = False
    inference: bool = False
    ordinary: bool = False
    only_group: Group | None = None
    addresses: list[int] | None = None
    spans: list[int] = field(default_factory=list)
    n_bytes: int = 0
    guards: Any = None
    sharding: Sharding | None = None
    domain: Domain | None = None
    sizes: Tensor | None = None
    rows: tuple[Any, Sequence[Layout]] | None = None


# Floating-point dtypes of one byte, for which PyTorch has no arithmetic.
FLOAT8 = frozenset(
    x
    for x in vars(torch).values()
    if isinstance(x, torch.dtype) and x.is_floating_point and x.itemsize == 1
)
# Most that a gradient takes in a plan, beside scratch: 288 bytes where it has one dimension, 368
# where it has four, 488 where it is then read as a view (glibc's mallinfo2, torch 2.13).
GRADIENT_BYTES = 512

# The gradients of a group share their device, their dtype, whether they are complex, and their
# shard.
_Kind = tuple[torch.device, torch.dtype, bool, Shard]


@without_grad
def make_plan(
    tensors: Sequence[Tensor],
    addresses: Sequence[int] | None,
    label_of: LabelOf,
    device: torch.device,
    *,
    verifying: bool,
    whole: bool = True,
    sharding: Sharding | None = None,
) -> tuple[Plan, list[int] | None, dict[int, Tensor], list[Tensor]]:
    """Checks gradients, drops repeated ones, and makes a plan of the others.

    No other process has a part of `whole` gradients. Those whose shards differ are in different
    groups. `device` is that of results where there is no gradient. Raises as `Gradients.take_`
    does.

    Returns:
        The plan, which may serve other lists where none was dropped and all have addresses; the
        indices of gradients that are not the very memory of an earlier one, None for all; of these
        the copies that are staged, by their index; and the tensors that verbs read and write.
    """
    grads = list(tensors)
    for index, grad in enumerate(grads):
        label = partial(label_of, index)
        _refuse_kind(grad, label)
        if addresses is None or addresses[index] < OFFSETS:
            refuse_freed(grad, label)
    regions = list(map(memory_of, grads))
    distinct = unique_indices(
        [id(g) if r is None else (g.dtype, r) for g, r in zip(grads, regions, strict=True)]
    )
    kept = range(len(grads)) if distinct is None else distinct
    grads, regions = [grads[i] for i in kept], [regions[i] for i in kept]
    sparse: list[int] = []
    copies: dict[int, Tensor] = {}
    members: dict[_Kind, list[int]] = {}
    readable: list[Tensor] = []
    placed = [] if sharding is None else list(sharding.shards.items())
    for index, grad in enumerate(grads):
        if needs_copy(grad):
            _refuse_overlap(grad, partial(label_of, kept[index]))
            copies[index] = copy_of(grad)
        values = copies.get(index, grad)
        if values.layout == torch.sparse_coo:
            sparse.append(index)
            values = values._values()
        readable.append(as_real(values))
        shard = placed[kept[index]][1] if placed else WHOLE_SHARD
        key = (grad.device, grad.dtype.to_real(), grad.is_complex(), shard)
        members.setdefault(key, []).append(index)
    if found := find_overlap(regions):
        first, second = (label_of(kept[i]) for i in found)
        raise OverlapError(
            f"the gradients of {first} and {second} overlap in memory, so a part would be scaled "
            "twice; replace one of them by grad.clone()"
        )
    n = len(readable)
    groups = []
    for (device, dtype, pairs, shard), indices in members.items():
        tensors = readable if len(indices) == n else [readable[i] for i in indices]
        layout = layout_of(tensors)
        at = tuple(placed[kept[i]][0] for i in indices) if placed else ()
        own = None if len(indices) == n else indices
        groups.append(Group(own, device, dtype, pairs, layout, shard, at))
    plan = Plan(
        groups=tuple(groups),
        staged=tuple(copies),
        device=grads[0].device if grads else device,
        dtype=torch.float64 if sharding and sharding.is_wide else result_dtype(grads),
        sparse=tuple(sparse),
        pairs=any(group.pairs for group in groups),
        inference=any(map(Tensor.is_inference, grads)),
        requires_grad=sharding is not None or any(grad.requires_grad for grad in grads),
        verifying=verifying,
        # No array: these numbers are added to addresses in every step of a training loop.
        spans=[0 if r is None else r.end - r.start for r in regions],
        n_bytes=GRADIENT_BYTES * n + sum(group.layout.n_bytes for group in groups),
        sharding=sharding,
        domain=sharding.domain if sharding and sharding.domain.is_spread else None,
    )
    whole = whole and sharding is None
    plan.ordinary = whole and not (copies or sparse or plan.pairs or plan.inference)
    if plan.ordinary and len(groups) == 1 and not verifying:
        plan.only_group = groups[0]
    for group in groups:
        group.layout.dtype = plan.dtype
    return plan, distinct, copies, readable


def unique_indices(keys: Iterable[Hashable]) -> list[int] | None:
    """Indices of keys that are not an earlier one again; None for all."""
    first: dict[Hashable, int] = {}
    index = -1
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    return list(first.values()) if len(first) <= index else None


def result_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype of norms: float64 if any tensor is float64, else float32."""
    narrow = WIDE.isdisjoint({x.dtype for x in tensors})
    return torch.float32 if narrow else torch.float64


def _refuse_kind(grad: Tensor, label: Callable[[], str]) -> None:
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
    if grad.dtype in FLOAT8:
        raise TypeError(
            f"the gradient of {label()} has dtype {grad.dtype}; clip in float32 or bfloat16, "
            "before it is converted"
        )
    if grad.layout not in (torch.strided, torch.sparse_coo):
        raise TypeError(
            f"the gradient of {label()} has layout {grad.layout}; expected strided or sparse_coo: "
            "convert it with grad.to_dense() or grad.to_sparse_coo()"
        )


def _refuse_overlap(grad: Tensor, label: Callable[[], str]) -> None:
    if grad.layout == torch.sparse_coo:
        # Coalescing makes new values.
        if not grad.is_coalesced():
            return
        grad = grad._values()
    # As those of an expanded one do.
    if any(n > 1 and not step for n, step in zip(grad.shape, grad.stride(), strict=True)):
        raise OverlapError(
            f"elements of the gradient of {label()} share memory (shape {tuple(grad.shape)}, "
            f"strides {grad.stride()}), so it cannot be scaled in place; expected a gradient "
            "without overlap: replace it by grad.clone()"
        )


def refuse_freed(grad: Tensor, label: Callable[[], str]) -> None:
    """ValueError for a gradient that has elements and no memory."""
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
