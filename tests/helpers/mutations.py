"""Lists of parameters, and ways to change them between calls that a cache could overlook.

A call is compared with the reference: its norm, and every byte of all memory, old gradients and
gaps included.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonclip
from helpers import reference
from helpers.cases import assert_norm, grad_of, normal
from helpers.memories import elements
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue


class Subclass(Tensor):
    """What the library refuses."""


def memory(tensor: Tensor) -> Tensor:
    """All bytes of what a tensor is a view of."""
    storage = elements(tensor).untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))


class World:
    """Parameters and gradients, and the memory of gradients that are none any more."""

    def __init__(self, device: torch.device, shapes: Iterable[tuple[int, ...]]) -> None:
        self.device = device
        self.params: list[Tensor] = []
        self.retired: list[Tensor] = []
        # Two parameters whose gradients have a part of their memory in common.
        self.in_common: tuple[Tensor, ...] = ()
        self.filled = 0
        for shape in shapes:
            self.add(shape, torch.float32)

    def add(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.params.append(torch.nn.Parameter(torch.zeros(0, device=self.device)))
        self.renew(-1, shape, dtype)

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a gradient, with as much again behind it."""
        n = math.prod(shape)
        return torch.zeros(2 * n + 8, dtype=dtype, device=self.device)[:n].view(shape)

    def renew(self, i: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Makes another gradient, after the old one was let go."""
        self.give(i, None)
        self.params[i].data = torch.zeros(shape, dtype=dtype, device=self.device)
        self.params[i].grad = self.room(shape, dtype)

    def give(self, i: int, grad: Tensor | None) -> None:
        """Makes a tensor the gradient of a parameter of its shape and dtype."""
        self.params[i].grad = None
        if grad is not None:
            self.params[i].data = torch.zeros(grad.shape, dtype=grad.dtype, device=self.device)
            self.params[i].grad = grad

    def own(self, i: int) -> Tensor:
        """A gradient that may be changed in place: plain, and no view of another's memory."""
        grad = self.params[i].grad
        if grad is None or grad.layout != torch.strided or grad.is_neg():
            self.renew(i, (4, 5), torch.float32)
        else:
            rest = [*self.params[:i], *self.params[i:][1:]]
            others = [p.grad for p in rest if p.grad is not None]
            base = memory(grad).data_ptr()
            if any(memory(other).data_ptr() == base for other in others):
                self.renew(i, tuple(grad.shape), grad.dtype)
        return grad_of(self.params[i])

    def mend(self) -> None:
        """Replaces what was refused."""
        for param in self.in_common:
            param.grad = None
        self.in_common = ()
        for i, param in enumerate(self.params):
            if param.grad is not None and is_refused(param.grad):
                self.renew(i, tuple(param.grad.shape), torch.float32)

    def fill(self) -> None:
        """New values in every gradient, as accumulation writes them."""
        for param in self.params:
            self.filled += 1
            if param.grad is not None and not is_refused(param.grad):
                held = elements(param.grad)
                held.copy_(normal(held.shape, held.dtype, self.device, self.filled))


def is_refused(grad: Tensor) -> bool:
    """Whether no rule takes a gradient: an integer, a subclass, elements that share memory."""
    layout = (elements(grad).shape, elements(grad).stride())
    return (
        type(grad) is not Tensor
        or not (grad.is_floating_point() or grad.is_complex())
        or any(size > 1 and not stride for size, stride in zip(*layout, strict=True))
    )


def chosen(params: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that a call clips: those to clip, the very memory of another one once."""
    once: dict[object, Tensor] = {}
    for param in params:
        grad = param.grad
        if grad is None or not getattr(param, "need_clip", True):
            continue
        held = elements(grad)
        layout = sorted((s, n) for n, s in zip(held.shape, held.stride(), strict=True) if n > 1)
        key = (held.data_ptr(), grad.dtype, *layout) if grad.numel() else id(grad)
        once.setdefault(key, grad)
    return list(once.values())


def assert_measured(measured: Tensor, grads: list[Tensor], rule: Any) -> None:
    dtypes = {grad.dtype for grad in grads}
    wide = torch.float64 in dtypes
    assert measured.dtype == (torch.float64 if wide else torch.float32)
    norms = reference.norms if rule.per_gradient else reference.total_norm
    truth = norms([grad.resolve_neg() for grad in grads], rule.norm_type)
    # Between float64 gradients, those of other dtypes are right to 1e-6 all the same.
    assert_norm(measured if wide and len(dtypes) == 1 else measured.float(), truth)


def assert_clips(world: World, rule: Any, handed_over: Any, params: Iterable[Tensor]) -> None:
    """One call: norms, and every byte of every memory that is or was a gradient's."""
    world.fill()
    params = list(params)
    grads = chosen(params)
    everything = [p.grad for p in world.params if p.grad is not None] + world.retired
    memories = {memory(t).data_ptr(): memory(t) for t in everything if memory(t).numel()}
    expected = {address: bytes_.cpu().clone() for address, bytes_ in memories.items()}
    before = [grad.clone() for grad in grads if not is_refused(grad)]

    refusal: Any = contextlib.nullcontext()
    in_common = [p for p in params if any(p is one for one in world.in_common)]
    if sum(getattr(p, "need_clip", True) for p in in_common) > 1:
        refusal = pytest.raises(ValueError, match="overlap in memory")
    elif any(map(is_refused, grads)) or (
        isinstance(rule, ClipByValue) and any(map(Tensor.is_complex, grads))
    ):
        refusal = pytest.raises((TypeError, ValueError))
    with refusal:
        measured = tritonclip.clip_(handed_over, rule)
        if measured is not None:
            assert_measured(measured, before, rule)
        values = [elements(old).resolve_neg() for old in before]
        formula = reference.clipped(values, rule, measured)
        for grad, expected_values in zip(grads, formula, strict=True):
            held = elements(grad)
            if held.numel():
                bytes_ = expected[memory(grad).data_ptr()]
                image = torch.empty(0, dtype=held.dtype).set_(
                    bytes_.untyped_storage(), held.storage_offset(), held.shape, held.stride()
                )
                image = torch._neg_view(image) if held.is_neg() else image
                image.copy_(expected_values)
    for address, bytes_ in memories.items():
        assert torch.equal(bytes_.cpu(), expected[address])


SHAPES = [(), (0,), (1,), (7,), (33,), (4, 5), (5, 4), (20,), (2, 3, 4), (24,)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
# The same bytes seen as another dtype: as many elements, or twice as many.
SAME_BYTES = {
    torch.float16: torch.bfloat16,
    torch.bfloat16: torch.float16,
    torch.float32: torch.bfloat16,
    torch.float64: torch.complex64,
    torch.complex64: torch.float64,
}
RULES = {
    "global": ClipByGlobalNorm(0.5),
    "global-within": ClipByGlobalNorm(1e6),
    "global-inf": ClipByGlobalNorm(0.5, norm_type=math.inf),
    "by-norm": ClipByNorm(0.5),
    "by-norm-p3": ClipByNorm(0.5, norm_type=3.0),
    "by-value": ClipByValue(-0.3, 0.2),
}
FORMS: dict[str, Callable[[list[Tensor]], Any]] = {
    "list": lambda params: params,
    "tuple": tuple,
    "generator": iter,
    "pairs": lambda params: [(f"p{i}", p) for i, p in enumerate(params)],
}


def after(world: World, i: int) -> int:
    return (i + 1) % len(world.params)


def transpose(world: World, i: int, shape: Any, dtype: Any) -> None:
    if world.own(i).dim() != 2:
        world.renew(i, (4, 5), dtype)
    grad_of(world.params[i]).t_()


def spread(world: World, i: int, shape: Any, dtype: Any) -> None:
    """The same address, dtype and shape, with a gap after each element; and back again."""
    grad = world.own(i)
    if grad.is_contiguous():
        end = grad.storage_offset() + 2 * grad.numel()
        if memory(grad).numel() < end * grad.itemsize:
            world.renew(i, tuple(grad.shape), grad.dtype)
            grad = grad_of(world.params[i])
        grad.as_strided_(grad.shape, [2 * stride for stride in grad.stride()])
    else:
        grad.as_strided_(grad.shape, torch.empty(grad.shape, device="meta").stride())


def overlap(world: World, i: int, shape: Any, dtype: Any) -> None:
    grad = world.own(i)
    grad.as_strided_((max(grad.numel(), 2),), (0,))


def reshape(world: World, i: int, shape: Any, dtype: Any) -> None:
    grad = world.own(i)
    grad.data = world.room(shape, grad.dtype)


def retype(world: World, i: int, shape: Any, dtype: Any) -> None:
    grad = world.own(i)
    grad.data = torch.zeros(grad.shape, dtype=dtype, device=world.device)


def reinterpret(world: World, i: int, shape: Any, dtype: Any) -> None:
    grad = world.own(i)
    if grad.is_contiguous() and grad.stride()[-1:] == (1,):
        grad.data = grad.data.view(SAME_BYTES[grad.dtype])


def to_integer(world: World, i: int, shape: Any, dtype: Any) -> None:
    world.renew(i, (4, 5), torch.float32)
    grad = grad_of(world.params[i])
    grad.data = grad.data.view(torch.int32)


def to_sparse(world: World, i: int, shape: Any, dtype: Any) -> None:
    values = world.room((3,), torch.float32)
    index = torch.tensor([[0, 2, 5]], device=world.device)
    world.give(
        i, torch.sparse_coo_tensor(index, values, (7,), is_coalesced=True, check_invariants=True)
    )


def negate(world: World, i: int, shape: Any, dtype: Any) -> None:
    """The same memory, read with the other sign."""
    if world.own(i).is_complex():
        world.renew(i, shape, torch.float32)
    world.give(i, torch._neg_view(grad_of(world.params[i])))


def shift(world: World, i: int, shape: Any, dtype: Any) -> None:
    """Another address in the same memory."""
    world.renew(i, shape, dtype)
    grad = grad_of(world.params[i])
    grad.data = grad.as_strided(grad.shape, grad.stride(), 3)


def recreate(world: World, i: int, shape: Any, dtype: Any) -> None:
    grad = world.own(i)
    shape, dtype = tuple(grad.shape), grad.dtype
    del grad
    world.renew(i, shape, dtype)


def recreate_in_place(world: World, i: int, shape: Any, dtype: Any) -> None:
    """The address that was there, with another dtype and shape."""
    memory_of_old = memory(world.own(i))
    world.give(i, None)
    n = math.prod(shape)
    if n * dtype.itemsize <= memory_of_old.numel() // 8 * 8:
        world.give(i, memory_of_old[: n * dtype.itemsize].view(dtype).view(shape))


def zero_grad(world: World, *, set_to_none: bool) -> None:
    """What an optimizer and `backward` leave behind."""
    for i, param in enumerate(world.params):
        # backward adds to gradients of the parameter's own kind only.
        kinds = [(t.dtype, t.layout, t.shape, t.is_contiguous()) for t in (param, world.own(i))]
        if kinds[0] != kinds[1]:
            world.renew(i, (4, 5), torch.float32)
    torch.optim.SGD(world.params).zero_grad(set_to_none)
    sum(
        (param.abs().sum() + param.sum().abs()).to(torch.float64) for param in world.params
    ).backward()  # type: ignore[union-attr]


def swap(world: World, i: int, shape: Any, dtype: Any) -> None:
    """Two gradients of one size exchange their memory."""
    j = after(world, i)
    for k in (i, j):
        world.own(k)
        world.renew(k, shape, dtype)
    one, other = grad_of(world.params[i]), grad_of(world.params[j])
    one.data, other.data = other.data, one.data


def tie(world: World, i: int, shape: Any, dtype: Any) -> None:
    world.give(after(world, i), world.own(i))


def alias(world: World, i: int, shape: Any, dtype: Any) -> None:
    world.give(after(world, i), world.own(i).detach())


def share_part(world: World, i: int, shape: Any, dtype: Any) -> None:
    """The form and the dtype that were there, from one element further on in another's memory."""
    j = after(world, i)
    world.renew(i, (4, 5), torch.float32)
    grad = grad_of(world.params[i])
    world.give(j, grad.as_strided(grad.shape, grad.stride(), 1))
    world.in_common = world.params[i], world.params[j]


def toggle(world: World, i: int, shape: Any, dtype: Any) -> None:
    param: Any = world.params[i]
    param.need_clip = not getattr(param, "need_clip", True)


def remove(world: World, i: int, shape: Any, dtype: Any) -> None:
    if len(world.params) > 2:
        del world.params[i]


def replace_parameter(world: World, i: int, shape: Any, dtype: Any) -> None:
    """Another parameter in the same place of the list, with the very gradient."""
    grad = world.own(i)
    world.params[i] = torch.nn.Parameter(torch.zeros(0, device=world.device))
    world.give(i, grad)


MUTATIONS: dict[str, Callable[[World, int, Any, Any], object]] = {
    "filled": lambda world, i, shape, dtype: None,
    "none": lambda world, i, shape, dtype: world.give(i, None),
    "made-anew": lambda world, i, shape, dtype: world.renew(i, shape, dtype),
    "recreated": recreate,
    "recreated-in-place": recreate_in_place,
    "zero-grad-to-none": lambda world, *_: zero_grad(world, set_to_none=True),
    "zero-grad-to-zero": lambda world, *_: zero_grad(world, set_to_none=False),
    "resized": lambda world, i, shape, _: world.own(i).resize_(shape),
    "reshaped": reshape,
    "retyped": retype,
    "reinterpreted": reinterpret,
    "transposed": transpose,
    "spread": spread,
    "shifted": shift,
    "negated": negate,
    "overlapping": overlap,
    "integer": to_integer,
    "subclass": lambda world, i, *_: world.give(i, world.own(i).as_subclass(Subclass)),
    "sparse": to_sparse,
    "swapped": swap,
    "tied": tie,
    "aliased": alias,
    "part-in-common": share_part,
    "rotated": lambda world, *_: world.params.append(world.params.pop(0)),
    "need-clip": toggle,
    "added": lambda world, i, shape, dtype: world.add(shape, dtype),
    "removed": remove,
    "replaced": replace_parameter,
}


def take_step(world: World, step: tuple[Any, ...]) -> None:
    """Changes the list in one way, and clips it."""
    mutation, i, shape, dtype, keep, rule, form = step
    i %= len(world.params)
    world.mend()
    old = world.params[i].grad
    if keep and old is not None:
        # Whoever still knows the old address would write here.
        world.retired = [*world.retired[-4:], elements(old).detach()]
    del old
    MUTATIONS[mutation](world, i, shape, dtype)
    assert_clips(world, RULES[rule], FORMS[form](world.params), world.params)
