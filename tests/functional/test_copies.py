"""Short lists on a CPU, which are copied and clipped in place, against products of long ones."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from cases import FLOATS, assert_bits, normal
from torch.utils._python_dispatch import TorchDispatchMode

from tritonclip import functional
from tritonclip.functional import by_engine

SHAPES = ((40,), (), (0,), (3, 70), (1,))
FUNCTIONS = {
    "global": lambda x, limit: functional.clip_by_global_norm(x, limit)[0],
    "norm": functional.clip_by_norm,
    "norm-inf": lambda x, limit: functional.clip_by_norm(x, limit, norm_type=math.inf),
}


def make(dtype):
    return [normal(shape, dtype, seed=seed) for seed, shape in enumerate(SHAPES)]


def repeated(dtype):
    """One tensor twice, and one of shared elements."""
    tensors = make(dtype)
    return [*tensors, tensors[0], tensors[4].expand(3)]


def transposed(dtype):
    """One is dense in another order of its dimensions."""
    return [*make(dtype), normal((6, 5), dtype, seed=8).t()]


@pytest.fixture
def as_if_long(monkeypatch):
    """Runs a function with every list taken for a long one."""

    def run(function, *arguments):
        with monkeypatch.context() as patched:
            patched.setattr(by_engine, "SHORT", -1)
            return function(*arguments)

    return run


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("limit", [0.5, 1e6, 0.0, -0.0, math.inf])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=str)
@pytest.mark.parametrize("some", [repeated, transposed])
def test_short_lists_have_the_bits_of_long_ones(function, limit, dtype, some, as_if_long):
    tensors = some(dtype)
    before = [x.clone() for x in tensors]
    assert_bits(function(tensors, limit), as_if_long(function, tensors, limit))
    assert_bits(tensors, before)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -0.0, 1e30, 1e-30], ids=str)
def test_short_lists_have_the_bits_of_long_ones_at_extremes(function, value, as_if_long):
    tensors = [*make(torch.float32), torch.full((3,), value)]
    ours, theirs = function(tensors, 0.5), as_if_long(function, tensors, 0.5)
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x.isnan(), y.isnan())
        assert_bits([x.nan_to_num(7.0)], [y.nan_to_num(7.0)])


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_order_minus_inf_has_the_bits_of_long_ones(limit, as_if_long):
    """A tensor of norm 0 may have elements that are not."""
    tensors = [torch.tensor([0.0, 5.0]), torch.tensor([3.0, 5.0])]
    function = partial(functional.clip_by_norm, norm_type=-math.inf)
    assert_bits(function(tensors, limit), as_if_long(function, tensors, limit))


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_memory_that_was_freed_is_refused(function):
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"tensors\[1\] has 1000 elements and no memory"):
        function([torch.ones(3), freed], 1.0)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_modes_see_products(function, as_if_long):
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    seen = []
    for run in (lambda f, *a: f(*a), as_if_long):
        names: list[str] = []
        with Names():
            run(function, make(torch.float32), 0.5)
        seen.append(names)
    assert seen[0] == seen[1]


def test_short_lists_may_have_gaps(as_if_long):
    """The squares of float64 are added up in the order of memory, where a copy has no gaps."""
    tensors = [normal((6, 5), torch.float64)[:, ::2]]
    ours, theirs = (
        run(functional.clip_by_norm, tensors, 0.5) for run in (lambda f, *a: f(*a), as_if_long)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)


@pytest.mark.parametrize("without_foreach", [False, True])
def test_short_lists_share_no_memory(without_foreach, monkeypatch):
    if without_foreach:
        monkeypatch.setattr(by_engine, "_clone_in_one_call", None)
    tensors = repeated(torch.float32)
    clipped, _ = functional.clip_by_global_norm(tensors, 1e6)
    known = {x.data_ptr() for x in tensors if x.numel()}
    own = [x.data_ptr() for x in clipped if x.numel()]
    assert known.isdisjoint(own)
    assert len(set(own)) == len(own)


@pytest.mark.parametrize("n", [by_engine.SHORT, by_engine.SHORT + 1])
def test_lists_about_the_longest_short_one_are_clipped(n):
    x = torch.ones(n)
    (clipped,), norm = functional.clip_by_global_norm([x], 1.0)
    assert float(norm) == pytest.approx(math.sqrt(n), rel=1e-6)
    assert float(clipped.double().norm()) == pytest.approx(1.0, rel=1e-6)
    assert bool((x == 1).all())
