"""The loops of `native/`, and what they refuse: every dtype, length and order, in both forms."""

import itertools
import math
from ctypes import c_float
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import reference
from helpers.cases import FLOATS, HALVES, assert_bits, normal, unchanged
from helpers.native_lists import (
    BLOCK,
    LENGTHS,
    LONG,
    ORDERS,
    amid_canaries,
    assert_canaries,
    every_half,
    flushed,
    listed,
    norm_of,
    norms_of,
)
from helpers.wrong_arguments import AT, check_wrong_arguments, packed
from tritonclip.backends import native
from tritonclip.backends.native import loops
from tritonclip.engine import memory

if loops is None:
    pytest.skip("tritonclip was installed without its C extension", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("both_forms")


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [*LENGTHS, *LONG])
@pytest.mark.parametrize("order", [2.0, *ORDERS])
def test_norm_is_that_of_float64(dtype, length, order):
    x = normal(length, dtype=dtype)
    x[::3] *= -0.0
    # Half types round seven times in float32: 4.2e-7 at most, and the root of squares half of it.
    half = dtype.itemsize == 2
    tolerance = {2.0: 2.1e-7 if half else 1e-14, 1.0: 4.2e-7 if half else 1e-13}.get(order, 0.0)
    own, memory = amid_canaries(x, 1)
    norm = norm_of([own], order=order)
    assert norm == pytest.approx(reference.norm(x, order), rel=tolerance, abs=0)
    assert norms_of([own, own[:1]], order=order) == [norm, norm_of([own[:1]], order=order)]
    assert norm_of([own], 2, order) == norm
    assert_canaries(memory, own)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("order", [1.0, math.inf])
def test_norm_of_other_orders_of_extreme_elements(dtype, order):
    """The least and the largest numbers of the dtype."""
    limits = torch.finfo(dtype)
    for value in (limits.smallest_normal / 8, limits.max):
        # One of them where a sum would not fit float64.
        n = 300 if dtype != torch.float64 or value < 1 or order == math.inf else 1
        x = torch.full((n,), value, dtype=dtype)
        assert norm_of([x], order=order) == pytest.approx(reference.norm(x, order), rel=1e-13)


@pytest.mark.covering(2)
@pytest.mark.parametrize("value", [2.0**-126, 2.0**-149, 2.0**-80, 2.0**64, 2.0**100, 3e38])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("length", [3, 5000])
def test_norm_of_squares_beyond_float32(dtype, value, length):
    x = torch.full((length,), value, dtype=torch.float64).to(dtype)
    assert norm_of([x]) == pytest.approx(reference.norm(x), rel=2.1e-7, abs=0)


@pytest.mark.covering(2)
@pytest.mark.parametrize("order", [2.0, *ORDERS])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [5, 5000, 2 * BLOCK])
def test_norm_keeps_nan_and_inf(dtype, length, order):
    for values in ([math.inf], [math.nan, -math.inf], [-math.inf, -math.nan]):
        x = normal(length, dtype=dtype)
        x[: len(values)] = torch.tensor(values)
        norm = norm_of([x, normal(3, dtype=dtype)], order=order)
        assert norm == math.inf if len(values) == 1 else math.isnan(norm)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("order", [2.0, *ORDERS])
def test_norm_joins_those_of_each_whatever_the_number_of_threads(dtype, order):
    grads = [normal(n, dtype=dtype, seed=n) for n in (7, 0, 3 * loops.SHARED + 1, 1, BLOCK, 5)]
    norms, whole = norms_of(grads, order=order), norm_of(grads, order=order)
    assert norms == [norm_of([grad], order=order) for grad in grads]
    joined = math.hypot(*norms) if order == 2 else max(norms) if order > 2 else math.fsum(norms)
    assert whole == pytest.approx(joined, rel=1e-14)
    for threads, _ in itertools.product((2, 3, 8), range(5)):
        assert (norms_of(grads, threads, order), norm_of(grads, threads, order)) == (norms, whole)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_is_measured(dtype):
    x = every_half(dtype)
    for one in x[x.isfinite()].view(-1, 256):
        assert norm_of([one]) == pytest.approx(reference.norm(one), rel=2.1e-7, abs=0)


def test_subnormal_halves_are_read_where_subnormal_floats_are_flushed():
    x = torch.full((300,), 2.0**-24, dtype=torch.float16)
    with flushed():
        assert norm_of([x]) == pytest.approx(math.sqrt(300) * 2.0**-24, rel=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_norm_of_zeros_is_0(dtype, zero):
    grads = [torch.full((n,), zero, dtype=dtype) for n in (0, 3, 300, BLOCK + 1)]
    assert norms_of(grads) == [0.0] * 4


def test_orders_without_loops_raise():
    for order in (0.0, 3.0, -1.0, -math.inf, math.nan):
        with pytest.raises(ValueError, match="order 1, 2 or inf"):
            norm_of([normal(3)], order=order)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("clamps", [False, True], ids=["products", "clamps"])
def test_writes_are_exact_and_stay_in_their_memory(clamps, dtype, length, offset):
    """Products are rounded once."""
    x = normal(length, dtype=dtype)
    own, memory = amid_canaries(x, offset)
    if clamps:
        loops.clamp_(*listed([own]), -0.5, 0.75)
        assert_bits([own], [x.clamp(-0.5, 0.75)])
    else:
        loops.multiply_(*listed([own]), 0.3)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert_bits([own], [(x.to(wide) * torch.tensor(0.3, dtype=wide)).to(dtype)])
    assert_canaries(memory, own)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (-0.0, 0.0)], ids=str)
def test_clamp_keeps_nan_and_the_sign_of_zero(dtype, bounds):
    x = torch.tensor([math.nan, -0.0, math.inf, -math.inf, 0.25, -1.0, 0.0, 2.0] * 5, dtype=dtype)
    for length in (7, 40):
        own = x[:length].clone()
        loops.clamp_(*listed([own]), *bounds)
        assert_bits([own], [x[:length].clamp(*bounds)])


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("max_norm", [0.0, 1e-40, 0.1, 1.0, 1e30, math.inf])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_coefficients_are_those_of_tensors(dtype, max_norm, eps):
    spread = (10.0 ** torch.linspace(-45, 38, 200, dtype=torch.float64)).tolist()
    norms = [0.0, 1.0, 1 + 2**-24, math.inf, *spread]
    limit, bounds = torch.tensor(max_norm, dtype=dtype), torch.tensor(norms, dtype=dtype) + eps
    expected = torch.where(bounds <= limit, 1.0, limit / bounds).tolist()
    wide = dtype == torch.float64
    assert loops.coefficients(norms, max_norm, eps, wide) == (expected, min(expected))
    found, least = loops.coefficients([math.nan, *norms], max_norm, eps, wide)
    assert math.isnan(found[0])
    assert math.isnan(least)
    assert found[1:] == expected


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("order", [2.0, *ORDERS])
@pytest.mark.parametrize(("limit", "scale"), [(1.0, 1.0), (1e9, 1.0), (1e9, 0.3), (0.5, 3.0)])
def test_clip_measures_and_multiplies(dtype, order, limit, scale):
    grads = [normal(n, dtype=dtype, seed=n) for n in (9, 0, 300)]
    expected = [grad.clone() for grad in grads]
    before: list[object] = []
    wide = dtype == torch.float64
    rounded = float if wide else lambda x: c_float(x).value
    norm = rounded(norm_of(expected, order=order) / (scale if order else 1.0))
    _, coefficient = loops.coefficients([norm], limit, 1e-6, wide)
    factor = rounded(coefficient / rounded(scale))
    loops.multiply_(*listed(expected), factor)
    found = loops.clip_(*listed(grads), order, limit, 1e-6, scale, wide, before.append, "written")
    assert found == norm
    assert_bits(grads, expected)
    assert before == ["written"] * (factor != 1)


@pytest.mark.parametrize("value", [1e200, 1e-200], ids=["squares overflow", "squares vanish"])
def test_clip_leaves_numbers_that_need_care(value):
    grad = torch.full((5,), value, dtype=torch.float64)
    before: list[object] = []
    with unchanged([grad]):
        assert loops.clip_(*listed([grad]), 2.0, 1.0, 0.0, 1.0, True, before.append, 0) is None
    assert not before


def test_clip_that_is_interrupted_before_its_write_writes_nothing():
    grad, interrupt = torch.full((5,), 3.0), Mock(side_effect=KeyboardInterrupt)
    with unchanged([grad]), pytest.raises(KeyboardInterrupt):
        loops.clip_(*listed([grad]), 2.0, 1.0, 0.0, 1.0, False, interrupt, None)


@pytest.mark.parametrize("dtype", FLOATS)
def test_writes_of_several_threads_are_those_of_one(dtype):
    sizes = (5, 0, 2 * loops.SHARED + 3, BLOCK, 1)
    for verb, arguments in (
        (loops.multiply_, (0.3,)),
        (loops.multiply_, ([0.5, 1.0, 0.25, 3.0, 0.125],)),
        (loops.clamp_, (-0.5, 0.5)),
    ):
        alone = [normal(n, dtype=dtype, seed=n) for n in sizes]
        shared = [grad.clone() for grad in alone]
        verb(*listed(alone), *arguments)
        verb(*listed(shared, 3), *arguments)
        assert_bits(shared, alone)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("factor", [1.5, 0.3, 2.0**-9, 2.0**-14, 3e4, math.inf, math.nan])
def test_every_half_is_converted_as_torch_does(dtype, factor):
    x = every_half(dtype)
    expected = (x.float() * factor).to(dtype)
    loops.multiply_(*listed([x]), factor)
    assert torch.equal(x.isnan(), expected.isnan())
    assert_bits([x[~x.isnan()]], [expected[~expected.isnan()]])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "bounds",
    [
        *[(-1.5, 0.75), (0.0, 2.0), (-0.0, 0.0), (-2.0, -0.0)],
        *[(0.5, math.inf), (-math.inf, -(2.0**-14))],
    ],
)
def test_every_half_is_clamped_as_torch_does(dtype, bounds):
    x = every_half(dtype)
    expected = torch.where(x.isnan(), x, x.clamp(*bounds))
    # Once amid others, once as the last elements of a gradient.
    last = list(x.clone().split(5))
    loops.clamp_(*listed([x]), *bounds)
    loops.clamp_(*listed(last), *bounds)
    assert_bits([x, torch.cat(last)], [expected, expected])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [5, 300])
def test_gradients_between_the_addresses_of_elements(dtype, length):
    x = normal(length, dtype=dtype)
    memory = bytearray(1 + x.numel() * x.element_size())
    own = torch.frombuffer(memory, dtype=dtype, offset=1)
    own.copy_(x)
    assert own.data_ptr() % x.element_size()
    assert norm_of([own]) == norm_of([x])
    loops.multiply_(*listed([own]), 3.0)
    loops.clamp_(*listed([own]), -1.0, 1.0)
    assert_bits([own], [(x * 3).clamp(-1, 1)])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("share", [0.001, 0.02, 0.5, 1.0])
def test_clamp_however_many_elements_are_outside(dtype, share):
    """In no groups, in some or most, and in none again, over several blocks."""
    n = 5 * BLOCK + 5
    x, chosen = normal(n, dtype=dtype) / 100, torch.rand(n, generator=torch.Generator()) < share
    chosen[: n // 4] = chosen[-n // 4 :] = False
    chosen[-1] = True
    x[chosen] *= 1000
    expected = x.clamp(-1, 1)
    loops.clamp_(*listed([x]), -1.0, 1.0)
    assert_bits([x], [expected])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_clamp_keeps_subnormal_floats_where_others_are_flushed(dtype):
    x = torch.full((40,), torch.finfo(dtype).tiny / 4, dtype=dtype)
    clamped = x.clone()
    # One is outside, so that its stretch is written.
    clamped[1], x[1] = 2.0, 1.0
    with flushed():
        loops.clamp_(*listed([clamped]), -1.0, 1.0)
    assert_bits([clamped], [x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_threads_flush_subnormal_floats_where_the_caller_does(dtype):
    tiny = torch.finfo(dtype).tiny
    x = torch.full((8 * loops.SHARED,), tiny / 4, dtype=dtype)
    y = torch.full((8 * loops.SHARED,), tiny, dtype=dtype)
    # Threads begin before the mode is set, and keep theirs.
    norm_of([x], 2)
    with flushed():
        assert {norm_of([x], 2) for _ in range(5)} == {norm_of([x])}
        loops.multiply_(*listed([y], 2), 0.25)
    assert not y.any()


RUNS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), min_size=1, max_size=9)


@given(RUNS)
def test_runs_are_apart_exactly_where_no_byte_is_shared(runs):
    starts, spans = [start for start, _ in runs], [span for _, span in runs]
    met = [byte for start, span in runs for byte in range(start, start + span)]
    assert loops.are_apart(starts, spans) == (len(set(met)) == len(met))


def test_are_apart_is_the_same_without_the_extension():
    for runs in itertools.product([(0, 2), (1, 1), (2, 3), (1, 0), (4, 1)], repeat=3):
        starts, spans = [start for start, _ in runs], [span for _, span in runs]
        assert memory.apart_in_python(starts, spans) == loops.are_apart(starts, spans)


def test_many_runs_are_sorted():
    starts = [(7919 * i) % 10_007 * 8 for i in range(10_000)]
    assert loops.are_apart(starts, [8] * 10_000)
    assert not loops.are_apart(starts, [8] * 9_999 + [9 * 8])


LIST = "addresses, sizes, dtype, threads"
BY_UNIT = "addresses or 0, sizes, dtype, threads, rows"
VERBS = {
    "norm": f"{LIST}, order",
    "norms": f"{LIST}, order",
    "coefficients": "numbers, factors, number, flag",
    "multiply_": f"{LIST}, factors",
    "unit_norms": f"{BY_UNIT}, address",
    "unit_factors": "address, counts, factors, number, number, flag, dtype",
    "multiply_units_": f"{BY_UNIT}, bytes",
    "clip_": f"{LIST}, order, number, number, number, flag, call, any",
    "clamp_": f"{LIST}, number, number",
    "are_apart": "addresses or 0, addresses or 0",
    "use_plain_loops": "flag",
}


# In a process of its own, which has one form.
@pytest.mark.covering(0)
def test_wrong_arguments_raise_and_change_nothing():
    check_wrong_arguments(VERBS)


def test_an_argument_that_empties_the_list_is_refused():
    class Emptying:
        def __index__(self):
            addresses.clear()
            return 2

    addresses = [AT]
    with pytest.raises(ValueError, match="as many sizes as addresses"):
        loops.norm(addresses, packed(2), Emptying(), 1, 2.0)


def test_nothing_is_measured_and_written():
    for order in (*ORDERS, 2.0):
        assert loops.norm([], b"", 2, 1, order) == 0.0
        assert loops.norms([], b"", 2, 1, order) == []
    loops.clamp_([], b"", 2, 1, -1.0, 1.0)


def test_threads_are_those_of_torch():
    """As many as it has, where more are asked for than any machine has."""
    assert native.has_threads
    assert loops.SHARED >= BLOCK
    x = normal(loops.SHARED)
    assert norm_of([x], 2**60) == norm_of([x], 2) == norm_of([x])
