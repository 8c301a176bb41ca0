"""No cache serves a stale pointer, shape, dtype or device: lists change between calls.

Each step changes a list of parameters in one of the ways that a cache could overlook, clips it, and
compares the norm and every byte of all memory, old gradients and gaps included, with the reference.
"""

import contextlib
import importlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tritonclip
from helpers import reference
from helpers.cases import CHUNK, INTERPRETED, assert_norm, grad_of, normal, parameters, unchanged
from helpers.memories import elements
from helpers.workers import run_in_threads
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue

# Kernels read runs of memory; gradients with gaps go to the torch backend, which is said once.
pytestmark = pytest.mark.filterwarnings("ignore:tritonclip's kernels read:UserWarning")


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
    if not memory(grad).numel():
        # It was freed, or never had elements.
        world.renew(i, shape, dtype)
        grad = grad_of(world.params[i])
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


LARGE = (129, 128)


@pytest.mark.covering(1 if INTERPRETED else 2)
@pytest.mark.parametrize("rule", ["global", "by-norm", "by-value"])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_clip_after_one_change_is_right(device, mutation, rule):
    """Clip, change, clip, change back where that is possible, clip."""
    world = World(device, [(4, 5), (4, 5), (7,)])
    for keep in (True, False):
        for change in ("filled", mutation, mutation):
            take_step(world, (change, 1, (5, 4), torch.float32, keep, rule, "list"))


@pytest.mark.covering(1)
@pytest.mark.parametrize("tied", [tie, alias])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_clip_after_one_change_of_a_tied_list_is_right(device, mutation, tied):
    """A list with a gradient twice is known without the second."""
    world = World(device, [(4, 5), (4, 5), (4, 5)])
    tied(world, 0, (4, 5), torch.float32)
    for change in ("filled", "filled", mutation, "filled"):
        take_step(world, (change, 1, (5, 4), torch.float32, True, "by-norm", "list"))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("known", ["same", "moved"], ids="{}-addresses-before".format)
def test_clip_refuses_parts_in_common_that_arise_in_a_known_list(device, rule, known):
    """The list has the form that it had, and two of its gradients have moved into each other."""
    whole = torch.ones(40, device=device)
    params = parameters([whole[start : start + 4] for start in (0, 10, 20)])
    tritonclip.clip_(params, RULES[rule])
    if known == "moved":
        params[0].grad = whole[30:34]
        tritonclip.clip_(params, RULES[rule])
    params[2].grad = whole[12:16]
    for _ in range(2):
        with unchanged([whole]), pytest.raises(ValueError, match="overlap in memory"):
            tritonclip.clip_(params, RULES[rule])
    params[2].grad = whole[14:18]
    tritonclip.clip_(params, RULES[rule])


def test_clip_of_columns_that_move_between_each_other_is_right(device):
    """No byte is shared, though each gradient lies around others."""
    whole = torch.ones(3, 8, device=device)
    columns = [whole[:, at] for at in range(8)]
    params = parameters(columns[:2])
    tritonclip.clip_(params, ClipByGlobalNorm(1.0, eps=0.0))
    for one, other in ((2, 5), (3, 4), (5, 3)):
        whole.fill_(1.0)
        params[0].grad, params[1].grad = columns[one], columns[other]
        norm = tritonclip.clip_(params, ClipByGlobalNorm(1.0, eps=0.0))
        assert_norm(norm, math.sqrt(6))
        expected = torch.ones(3, 8)
        expected[:, [one, other]] = (torch.ones(()) / norm.cpu()).item()
        assert torch.equal(whole.cpu(), expected)


STEPS = st.tuples(
    st.sampled_from(list(MUTATIONS)),
    st.integers(0, 5),
    st.sampled_from([*SHAPES, *SHAPES, LARGE]),
    st.sampled_from([torch.float32, *DTYPES]),
    st.booleans(),
    st.sampled_from(list(RULES)),
    st.sampled_from(["list", *FORMS]),
)


@given(steps=st.lists(STEPS, min_size=1, max_size=12))
def test_clip_after_any_changes_is_right(device, steps):
    world = World(device, [(4, 5), (4, 5), (), (7,)])
    for step in steps:
        take_step(world, step)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available()")
@pytest.mark.parametrize("rule", RULES)
def test_clip_after_a_move_to_another_device_is_right(rule):
    """The same parameters and gradients, as `model.to(...)` moves them."""
    world = World(torch.device("cpu"), [(4, 5), LARGE, (7,)])
    for name in ("cpu", "cuda", "cpu", "cuda"):
        world.device = torch.device(name)
        for param in world.params:
            grad = grad_of(param)
            world.retired.append(grad.detach())
            param.data, grad.data = param.data.to(name), grad.data.to(name)
        assert_clips(world, RULES[rule], world.params, world.params)


THREADS = 6
SIZES = (3, 0, CHUNK + 1, 20)


@pytest.mark.covering(1)
@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.skipif(INTERPRETED, reason="the interpreter of Triton is not thread-safe")
@pytest.mark.parametrize("rule", ["global", "by-norm", "by-value"])
def test_threads_clip_their_own_gradients(backend, rule):
    """Every thread clips gradients of the same sizes, at addresses that come and go."""

    def work(thread: int) -> None:
        world = World(backend.device, [(size,) for size in SIZES])
        world.filled = 1000 * thread
        with tritonclip.use_backend(backend.name):
            for turn in range(60):
                if turn % 3:
                    world.renew(turn % len(SIZES), (SIZES[turn % len(SIZES)],), torch.float32)
                assert_clips(world, RULES[rule], world.params, world.params)

    run_in_threads(work, THREADS)


@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.parametrize("lists", [1, 45], ids=["one-list", "more-lists-than-are-remembered"])
def test_threads_get_tables_of_their_own_gradients(device, monkeypatch, lists):
    """All lists have equal sizes, or there are so many that each table is soon forgotten."""
    pytest.importorskip("triton", reason="tritonclip.kernels needs triton")
    ChunkTables = importlib.import_module("tritonclip.kernels.tables").ChunkTables
    launch = importlib.import_module("tritonclip.kernels.launch")
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 1)
    sizes_of = [(3, 0, CHUNK + 1 + index) for index in range(lists)]
    known = [ChunkTables(device, torch.float32, sizes) for sizes in sizes_of]

    def work(thread: int) -> None:
        for turn in range(150):
            index = (turn + 7 * thread) % lists
            sizes = sizes_of[index]
            grads = [torch.empty(size, device=device) for size in sizes]
            for _ in range(2):
                table = known[index].table([grad.data_ptr() for grad in grads])
                addresses, lengths, first_chunks, owners = (t.tolist() for t in table.arguments)
                assert addresses == [grad.data_ptr() for grad in grads]
                assert (tuple(lengths), first_chunks, owners) == (sizes, [0, 1, 2], [0, 1, 2, 2])

    run_in_threads(work, THREADS)
