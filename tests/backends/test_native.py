"""The loops of `native/`: every dtype and length, in both forms, by any number of threads."""

from __future__ import annotations

import itertools
import math
from array import array

import pytest
import reference
import torch
from cases import FLOATS, HALVES, assert_bits, bits, normal
from hypothesis import given
from hypothesis import strategies as st

from tritonclip.backends import native_loops
from tritonclip.backends.native_loops import CODES, loops
from tritonclip.engine import memory

if loops is None:
    pytest.skip("tritonclip was installed without its C extension", allow_module_level=True)

# Elements of a block, bytes that are compared before a write, and bytes that are written together:
# as `native/` has them.
BLOCK, COMPARED, GROUP = 32768, 4096, 256
EDGES = [n // item + more for n in (GROUP, COMPARED) for item in (2, 4, 8) for more in (-1, 0, 9)]
LENGTHS = (0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 256, 257, *EDGES)
LONG = (BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)


@pytest.fixture(params=[False, True], ids=["fastest", "portable"], autouse=True)
def _loops(request):
    """Both forms of the loops."""
    loops.set_portable(request.param)
    yield
    loops.set_portable(False)


def listed(tensors, threads=1):
    """The arguments that a list takes."""
    sizes = array("q", [tensor.numel() for tensor in tensors]).tobytes()
    return [tensor.data_ptr() for tensor in tensors], sizes, CODES[tensors[0].dtype], threads


def norm_of(tensors, threads=1, order=2.0):
    """The norm of a list."""
    return loops.norm(*listed(tensors, threads), order)


def norms_of(tensors, threads=1, order=2.0):
    """The norm of each gradient."""
    return loops.norms(*listed(tensors, threads), order)


def amid_canaries(tensor, offset):
    """A copy within memory of sevens, `offset` elements from an aligned address; and the memory."""
    memory = torch.full((tensor.numel() + 64,), 7.0, dtype=tensor.dtype)
    own = memory[16 + offset : 16 + offset + tensor.numel()]
    own.copy_(tensor)
    return own, memory


def assert_canaries(memory, own):
    start = own.storage_offset()
    assert bool((memory[:start] == 7).all())
    assert bool((memory[start + own.numel() :] == 7).all())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [*LENGTHS, *LONG])
def test_norm_is_that_of_float64(dtype, length):
    x = normal(length, dtype=dtype)
    # Squares of half types round seven times in float32: 2.1e-7 at most.
    tolerance = 2.1e-7 if dtype in (torch.float16, torch.bfloat16) else 1e-14
    assert norm_of([x]) == pytest.approx(reference.norm(x), rel=tolerance, abs=0)
    assert norms_of([x]) == [norm_of([x])]


@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_are_those_of_each(dtype):
    grads = [normal(n, dtype=dtype, seed=n) for n in (*LENGTHS, *LONG)]
    norms = norms_of(grads)
    assert norms == [norm_of([grad]) for grad in grads]
    assert norm_of(grads) == pytest.approx(math.hypot(*norms), rel=1e-14)


# Beside 2.
ORDERS = (0.0, 1.0, math.inf)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [*LENGTHS, *LONG])
@pytest.mark.parametrize("order", ORDERS)
def test_norm_of_other_orders_is_that_of_float64(dtype, length, order):
    x = normal(length, dtype=dtype)
    x[::3] *= -0.0
    # Magnitudes of half types round seven times in float32: 4.2e-7 at most.
    tolerance = {1.0: 4.2e-7 if dtype.itemsize == 2 else 1e-13}.get(order, 0.0)
    own, memory = amid_canaries(x, 1)
    norm = norm_of([own], order=order)
    assert norm == pytest.approx(reference.norm(x, order), rel=tolerance, abs=0)
    assert norms_of([own, own[:1]], order=order) == [norm, norm_of([own[:1]], order=order)]
    assert norm_of([own], 2, order) == norm
    assert_canaries(memory, own)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("order", ORDERS)
def test_norm_of_other_orders_joins_gradients(dtype, order):
    grads = [normal(n, dtype=dtype, seed=n) for n in (7, 0, 3 * loops.SHARED + 1, 1, BLOCK, 5)]
    norms = norms_of(grads, 2, order)
    joined = max(norms) if order == math.inf else math.fsum(norms)
    assert norm_of(grads, 2, order) == pytest.approx(joined, rel=1e-14)
    assert (norm_of(grads, 1, order), norms_of(grads, 1, order)) == (
        norm_of(grads, 2, order),
        norms,
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [5, 5000, 2 * BLOCK])
def test_norms_of_other_orders_keep_nan_and_inf(dtype, length):
    for values in ([math.inf], [math.nan, -math.inf], [-math.inf, -math.nan]):
        x = normal(length, dtype=dtype)
        x[: len(values)] = torch.tensor(values)
        for order in (1.0, math.inf):
            norm = norm_of([x, normal(3, dtype=dtype)], order=order)
            assert norm == math.inf if len(values) == 1 else math.isnan(norm)
        # Neither is 0.
        assert norm_of([x], order=0.0) == reference.norm(x, 0.0)


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


@pytest.mark.parametrize("value", [2.0**-126, 2.0**-149, 2.0**-80, 2.0**64, 2.0**100, 3e38])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("length", [3, 5000])
def test_norm_of_squares_beyond_float32(dtype, value, length):
    x = torch.full((length,), value, dtype=torch.float64).to(dtype)
    assert norm_of([x]) == pytest.approx(reference.norm(x), rel=2.1e-7, abs=0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [5, 5000])
def test_norm_keeps_nan_and_inf(dtype, length):
    for values, expected in (([math.inf], math.inf), ([math.nan, -math.inf], math.nan)):
        x = normal(length, dtype=dtype)
        x[: len(values)] = torch.tensor(values)
        norm = norm_of([x])
        assert norm == expected or (math.isnan(norm) and math.isnan(expected))


@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_of_all_numbers_of_threads_are_the_same_bits(dtype):
    grads = [normal(n, dtype=dtype, seed=n) for n in (7, 0, 3 * loops.SHARED + 1, 1, BLOCK, 5)]
    alone = norms_of(grads), norm_of(grads)
    for threads, _ in itertools.product((2, 3, 8), range(5)):
        shared = norms_of(grads, threads), norm_of(grads, threads)
        assert shared == alone


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("length", LENGTHS)
def test_products_are_rounded_once_and_stay_in_their_memory(dtype, length, offset):
    x = normal(length, dtype=dtype)
    own, memory = amid_canaries(x, offset)
    loops.multiply_(*listed([own]), 0.3)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert_bits([own], [(x.to(wide) * torch.tensor(0.3, dtype=wide)).to(dtype)])
    assert_canaries(memory, own)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("length", LENGTHS)
def test_clamps_are_exact_and_stay_in_their_memory(dtype, length, offset):
    x = normal(length, dtype=dtype)
    own, memory = amid_canaries(x, offset)
    loops.clamp_(*listed([own]), -0.5, 0.75)
    assert_bits([own], [x.clamp(-0.5, 0.75)])
    assert_canaries(memory, own)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [5, 40])
def test_clamp_keeps_nan_and_the_sign_of_zero(dtype, length):
    x = torch.zeros(length, dtype=dtype)
    x[:5] = torch.tensor([math.nan, -0.0, math.inf, -math.inf, 0.25])
    loops.clamp_(*listed([x]), -1.0, 1.0)
    assert x[0].isnan()
    assert bool(x[1].signbit())
    assert x[2:5].tolist() == [1.0, -1.0, 0.25]


@pytest.mark.parametrize("dtype", FLOATS)
def test_clamp_to_a_bound_of_zero_keeps_its_sign(dtype):
    x = torch.tensor([-1.0, -0.0, 0.0, 2.0] * 3, dtype=dtype)
    expected = x.clamp(-0.0, 0.0)
    loops.clamp_(*listed([x]), -0.0, 0.0)
    assert_bits([x], [expected])


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


def test_factors_of_one_write_nothing():
    grads = [normal(9), normal(9), normal(9)]
    expected = [grads[0] * 0.5, grads[1].clone(), grads[2] * 2]
    loops.multiply_each_(*listed(grads), [0.5, 1.0, 2.0])
    assert_bits(grads, expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_writes_of_several_threads_are_those_of_one(dtype):
    sizes = (5, 0, 2 * loops.SHARED + 3, BLOCK, 1)
    for verb, arguments in (
        (loops.multiply_, (0.3,)),
        (loops.multiply_each_, ([0.5, 1.0, 0.25, 3.0, 0.125],)),
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
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    expected = (x.float() * factor).to(dtype)
    loops.multiply_(*listed([x]), factor)
    assert torch.equal(x.isnan(), expected.isnan())
    assert_bits([x[~x.isnan()]], [expected[~expected.isnan()]])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("low", "high"),
    [
        (-1.5, 0.75),
        (0.0, 2.0),
        (-0.0, 0.0),
        (-2.0, -0.0),
        (0.5, math.inf),
        (-math.inf, -(2.0**-14)),
    ],
)
def test_every_half_is_clamped_as_torch_does(dtype, low, high):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    expected = torch.where(x.isnan(), x, x.clamp(low, high))
    # Once amid others, once as the last elements of a gradient.
    last = list(x.clone().split(5))
    loops.clamp_(*listed([x]), low, high)
    loops.clamp_(*listed(last), low, high)
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


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_is_measured(dtype):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    for one in x[x.isfinite()].view(-1, 256):
        assert norm_of([one]) == pytest.approx(reference.norm(one), rel=2.1e-7, abs=0)


def test_subnormal_halves_are_read_where_subnormal_floats_are_flushed():
    x = torch.full((300,), 2.0**-24, dtype=torch.float16)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        assert norm_of([x]) == pytest.approx(math.sqrt(300) * 2.0**-24, rel=1e-6)
    finally:
        torch.set_flush_denormal(False)


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
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        loops.clamp_(*listed([clamped]), -1.0, 1.0)
    finally:
        torch.set_flush_denormal(False)
    assert_bits([clamped], [x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_threads_flush_subnormal_floats_where_the_caller_does(dtype):
    tiny = torch.finfo(dtype).tiny
    x = torch.full((8 * loops.SHARED,), tiny / 4, dtype=dtype)
    y = torch.full((8 * loops.SHARED,), tiny, dtype=dtype)
    # Threads begin before the mode is set, and keep theirs.
    norm_of([x], 2)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        found = {norm_of([x], 2) for _ in range(5)}
        alone = norm_of([x])
        loops.multiply_(*listed([y], 2), 0.25)
    finally:
        torch.set_flush_denormal(False)
    assert found == {alone}
    assert not y.any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_norm_of_zeros_is_0(dtype, zero):
    grads = [torch.full((n,), zero, dtype=dtype) for n in (0, 3, 300, BLOCK + 1)]
    assert norms_of(grads) == [0.0] * 4


RUNS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), min_size=1, max_size=9)


@given(RUNS)
def test_runs_are_apart_exactly_where_no_byte_is_shared(runs):
    starts, spans = [start for start, _ in runs], [span for _, span in runs]
    met = [byte for start, span in runs for byte in range(start, start + span)]
    assert loops.are_apart(starts, spans) == (len(set(met)) == len(met))


def test_are_apart_is_the_same_without_the_extension(monkeypatch):
    monkeypatch.setattr(memory, "loops", None)
    for runs in itertools.product([(0, 2), (1, 1), (2, 3), (1, 0), (4, 1)], repeat=3):
        starts, spans = [start for start, _ in runs], [span for _, span in runs]
        assert memory.are_apart(starts, spans) == loops.are_apart(starts, spans)


def test_many_runs_are_sorted():
    starts = [(7919 * i) % 10_007 * 8 for i in range(10_000)]
    assert loops.are_apart(starts, [8] * 10_000)
    assert not loops.are_apart(starts, [8] * 9_999 + [9 * 8])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([1], b"", 2, 1), ValueError),
        (([], b"", 4, 1), ValueError),
        (([], b"", -1, 1), ValueError),
        ((["a"], bytes(8), 2, 1), TypeError),
        (((), b"", 2, 1), SystemError),
        (([], "", 2, 1), TypeError),
        (([], b"", 2), TypeError),
    ],
    ids=["sizes", "dtype", "negative", "address", "tuple", "text", "too few"],
)
def test_wrong_arguments_raise(arguments, error):
    for verb in (loops.norm, loops.norms):
        with pytest.raises(error):
            verb(*arguments, 2.0)


def test_orders_without_loops_raise():
    for order in (3.0, -1.0, -math.inf, math.nan):
        with pytest.raises(ValueError, match="order 0, 1, 2 or inf"):
            norm_of([normal(3)], order=order)


def test_factors_and_spans_have_to_be_as_many():
    x = normal(3)
    with pytest.raises(ValueError, match="a factor for each"):
        loops.multiply_each_(*listed([x]), [1.0, 2.0])
    with pytest.raises(TypeError):
        loops.multiply_each_(*listed([x]), ["1"])
    with pytest.raises(ValueError, match="a span for each"):
        loops.are_apart([1, 2], [1])
    assert_bits([x], [normal(3)])


def test_nothing_is_measured_and_written():
    for order in (*ORDERS, 2.0):
        assert loops.norm([], b"", 2, 1, order) == 0.0
        assert loops.norms([], b"", 2, 1, order) == []
    loops.clamp_([], b"", 2, 1, -1.0, 1.0)


def test_threads_are_those_of_torch():
    assert native_loops.has_threads
    assert loops.SHARED >= BLOCK
    x = normal(loops.SHARED)
    assert bits(torch.tensor(norm_of([x], 2))) == bits(torch.tensor(norm_of([x])))
