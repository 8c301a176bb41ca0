"""The loops of `native/` that measure: every dtype, length and order, in both forms."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from helpers import reference
from helpers.cases import FLOATS, HALVES, normal
from helpers.native_lists import (
    BLOCK,
    LENGTHS,
    LONG,
    ORDERS,
    amid_canaries,
    assert_canaries,
    every_half,
    flushed,
    norm_of,
    norms_of,
)
from tritonclip.backends.native import loops

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
