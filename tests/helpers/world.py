"""Parameters and gradients that change between calls, and the memory of earlier gradients.

A call is compared with the reference: its norm, and every byte of all memory, old gradients and
gaps included.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonclip
from helpers import reference
from helpers.cases import assert_norm, grad_of, normal
from helpers.memories import Follower, assert_near, elements
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue

# Rules that the reference has bit for bit.
EXACT = (ClipByGlobalNorm, ClipByNorm, ClipByValue)


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


def owners_of(grads: list[Tensor], params: list[Tensor]) -> list[int]:
    """Where the first parameter to clip of each gradient stands."""
    places: dict[int, int] = {}
    for i, param in enumerate(params):
        if getattr(param, "need_clip", True):
            places.setdefault(id(param.grad), i)
    return [places[id(grad)] for grad in grads]


def has_no_units(grad: Tensor, weight: Tensor) -> bool:
    """Whether a rule by unit refuses a gradient."""
    return grad.layout == torch.sparse_coo or grad.shape != weight.shape


def assert_measured(measured: Tensor, grads: list[Tensor], rule: Any) -> None:
    dtypes = {grad.dtype for grad in grads}
    wide = torch.float64 in dtypes
    assert measured.dtype == (torch.float64 if wide else torch.float32)
    norms = reference.norms if rule.per_gradient else reference.total_norm
    truth = norms([grad.resolve_neg() for grad in grads], rule.norm_type)
    # Between float64 gradients, those of other dtypes are right to 1e-6 all the same.
    assert_norm(measured if wide and len(dtypes) == 1 else measured.float(), truth)


def assert_clips(world: World, rule: Any, handed_over: Any, params: Iterable[Tensor]) -> None:
    """One call: norms, and every byte of every memory that is or was a gradient's.

    `rule`: one that the reference has bit for bit, or a Follower.
    """
    world.fill()
    follower = rule if isinstance(rule, Follower) else Follower(rule)
    rule, params = follower.rule, list(params)
    grads = chosen(params)
    owners = owners_of(grads, params)
    weights = [params[i].detach() for i in owners]
    if rule.per_unit:
        for i, weight in enumerate(weights):
            weight.copy_(normal(weight.shape, weight.dtype, world.device, world.filled + i))
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
    elif rule.per_unit and any(map(has_no_units, grads, weights)):
        refusal = pytest.raises((TypeError, ValueError), match=r"sparse|shape|weight")
    options = follower.options(params)
    left_alone = True
    with refusal:
        measured = tritonclip.clip_(handed_over, rule, **options)
        left_alone = False

        if measured is not None:
            assert_measured(measured, before, rule)
        if isinstance(rule, EXACT) and not options:
            values = [elements(old).resolve_neg() for old in before]
            formula = reference.clipped(values, rule, measured)
        else:
            formula = [elements(grad).clone() for grad in grads]
            # A list that is all float64 by now may remember norms of other dtypes.
            double = not options and all(grad.dtype == torch.float64 for grad in grads)
            truths = follower.truths(before, weights, owners)
            for grad, truth in zip(formula, truths, strict=True):
                assert_near(grad, truth, double=double)
        for grad, expected_values in zip(grads, formula, strict=True):
            held = elements(grad)
            if held.numel():
                bytes_ = expected[memory(grad).data_ptr()]
                image = torch.empty(0, dtype=held.dtype).set_(
                    bytes_.untyped_storage(), held.storage_offset(), held.shape, held.stride()
                )
                image = torch._neg_view(image) if held.is_neg() else image
                image.copy_(expected_values)
    if left_alone:
        follower.assert_left_alone()
    for address, bytes_ in memories.items():
        assert torch.equal(bytes_.cpu(), expected[address])
