"""No cache serves a stale pointer, shape, dtype or device: lists change between calls.

Each step changes a list of parameters in one of the ways that a cache could overlook, clips it, and
compares the norm and every byte of all memory, old gradients and gaps included, with the reference.
"""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tritonclip
from helpers.cases import CHUNK, INTERPRETED, assert_norm, grad_of, parameters, unchanged
from helpers.mutations import (
    DTYPES,
    FORMS,
    MUTATIONS,
    RULES,
    SHAPES,
    World,
    alias,
    assert_clips,
    take_step,
    tie,
)
from helpers.workers import run_in_threads
from tritonclip import ClipByGlobalNorm

# Kernels read runs of memory; gradients with gaps go to the torch backend, which is said once.
pytestmark = pytest.mark.filterwarnings("ignore:tritonclip's kernels read:UserWarning")

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
