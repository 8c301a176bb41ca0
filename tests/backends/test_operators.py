"""The torch backend on a CPU: norms of every magnitude, products of every half value, clamps."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import tritonclip
from helpers.cases import HALVES, assert_bits, grad_of, parameters
from helpers.native_lists import every_half
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByUnitNorm, ClipByValue, ClipState
from tritonclip.backends.operators import PIECE, SMALL, combine, combine_numbers, split_flat
from tritonclip.backends.torch import ALL_PACKED, LONG_PIECE, PACKED, ROW

pytestmark = pytest.mark.usefixtures("operators")

LISTS = {
    "one": [5],
    "some empty": [64, 1, 30, 0],
    "rows and a rest": [SMALL + ROW + 1, 7, 0, SMALL, PACKED, PACKED + 1, 80_000],
    "more small ones than are packed": [SMALL - 1] * (ALL_PACKED // SMALL + 2),
    "few of medium size": [7, 0, 48_000, 1, 10_080],
    "pieces and a rest": [2 * PIECE + 5, 3],
    "long pieces and a rest": [LONG_PIECE + ROW + 5, 3],
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


# By a name: what all elements of a gradient of a dtype are multiplied by.
FACTORS: dict[str, Callable[[torch.dtype], float]] = {
    "ordinary": lambda dtype: 1.5,
    # Squares that float32 does not hold, or half.
    "large": lambda dtype: {torch.float16: 6e4, torch.float64: 1e200}.get(dtype, 1e30),
    "small": lambda dtype: {torch.float16: 6e-8, torch.float64: 1e-200}.get(dtype, 1e-30),
    "zero": lambda dtype: 0.0,
}


def gradients(sizes, dtype, factor):
    generator = torch.Generator().manual_seed(0)
    grads = []
    for i, n in enumerate(sizes):
        signs = torch.randint(0, 2, (n,), generator=generator) * 2.0 - 1
        grads.append((signs * (factor if i % 2 == 0 else 1.0)).to(dtype))
    return grads


def true_norm(grads):
    return math.hypot(*(math.hypot(*grad.double().tolist()) for grad in grads))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", LISTS.values(), ids=LISTS.keys())
@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
def test_norms_hold_where_float32_holds_no_squares(factor, sizes, dtype):
    grads = gradients(sizes, dtype, factor(dtype))
    params = parameters(grads)
    norm = tritonclip.clip_(params, ClipByGlobalNorm(math.inf))
    assert norm.item() == pytest.approx(true_norm(grads), rel=1e-6, abs=0)
    norms = tritonclip.clip_(params, ClipByNorm(math.inf))
    assert norms.tolist() == pytest.approx([true_norm([g]) for g in grads], rel=1e-6, abs=0)


# What the first gradient has, and what the last one has.
BAD: list[tuple[list[float], list[float]]]
BAD = [([math.nan], []), ([math.inf], []), ([-math.inf], []), ([math.inf, -math.inf], [])]
BAD += [([math.inf], [math.nan]), ([math.nan], [math.inf])]


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", LISTS.values(), ids=LISTS.keys())
@pytest.mark.parametrize("bad", BAD, ids=str)
def test_elements_that_are_not_finite_are_told_from_the_others(bad, sizes, dtype):
    grads = gradients([*sizes, 8], dtype, 2.0)
    for grad, values in zip((grads[0], grads[-1]), bad, strict=True):
        grad[len(grad) - len(values) :] = torch.tensor(values, dtype=dtype)
    norms = tritonclip.clip_(parameters(grads), ClipByNorm(math.inf))
    assert norms.tolist() == pytest.approx([true_norm([g]) for g in grads], rel=1e-6, nan_ok=True)
    norm = tritonclip.clip_(parameters(grads), ClipByGlobalNorm(1.0))
    has_nan = any(map(math.isnan, itertools.chain(*bad)))
    assert norm.item() == pytest.approx(math.nan if has_nan else math.inf, nan_ok=True)


# Of torch itself, when it first makes a dual tensor.
@pytest.mark.parametrize("n", [5, 5000, 40_000])
def test_tangents_are_scaled_with_their_gradients(n):
    with forward_ad.dual_level():
        (param,) = parameters([torch.zeros(n)])
        param.grad = forward_ad.make_dual(torch.ones(n), torch.ones(n))
        tritonclip.clip_grads_with_norm_([param], 1.0, torch.tensor(10.0))
        primal, tangent = forward_ad.unpack_dual(param.grad)
        torch.testing.assert_close(primal, torch.full((n,), 0.1))
        torch.testing.assert_close(tangent, torch.full((n,), 0.1))


def test_squares_below_the_last_place_of_float64_count_in_long_lists():
    n = 2**19 - 1
    grad = torch.full((n,), math.sqrt(0.998 * 2.0**-53), dtype=torch.float64)
    grad[0] = 1.0
    norm = tritonclip.clip_(parameters([grad]), ClipByGlobalNorm(math.inf))
    assert norm.item() == pytest.approx(true_norm([grad]), rel=2e-13)


def test_rows_whose_sums_round_most_are_right_to_six_digits():
    """Eight ones before squares of half a unit in the last place, which a lane loses one by one."""
    row = torch.full((128,), 2.0**-12)
    row[:8] = 1.0
    grads = [row.repeat(300), row.repeat(10)]
    norms = tritonclip.clip_(parameters(grads), ClipByNorm(math.inf))
    assert norms.tolist() == pytest.approx([true_norm([g]) for g in grads], rel=1e-6)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("norm", [3.3, 1e3, 7e30])
def test_every_half_value_is_scaled_as_foreach_scales_it(dtype, norm):
    grads, expected = (list(every_half(dtype).split(4096)) for _ in range(2))
    given = torch.tensor(norm)
    tritonclip.clip_grads_with_norm_(parameters(grads), 1.0, given)
    torch._foreach_mul_(expected, 1.0 / (given + 1e-6))
    assert_bits(grads, expected)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("max_norm", [1e-3, 3.3, 7e4])
def test_every_half_value_is_scaled_by_its_own_norm_as_foreach_scales_it(dtype, max_norm):
    values = every_half(dtype)
    values = values[values.isfinite()]
    grads, expected = (list(values.clone().split(1024)) for _ in range(2))
    norms = tritonclip.clip_(parameters(grads), ClipByNorm(max_norm, eps=0.5))
    # Not max_norm / ..., which torch computes as a product with the reciprocal.
    coefficients = (torch.full_like(norms, max_norm) / (norms + 0.5)).clamp(max=1.0)
    assert (coefficients < 1).sum() > 0
    torch._foreach_mul_(expected, list(coefficients.unbind()))
    assert_bits(grads, expected)


def test_gradients_too_long_to_be_packed_are_each_scaled_by_their_norm():
    grads = [torch.full((PACKED + 1,), value) for value in (2.0, 3.0)]
    norms = tritonclip.clip_(parameters(grads), ClipByNorm(1.0))
    assert norms.tolist() == pytest.approx([value * math.sqrt(PACKED + 1) for value in (2.0, 3.0)])
    assert [true_norm([grad]) for grad in grads] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("rule", [1.0, ClipByNorm(1.0)], ids=["global", "each"])
def test_gradients_within_their_limit_are_not_written(rule):
    small, large = torch.full((3,), 0.1), torch.full((3,), 5.0)
    before = small._version, large._version
    tritonclip.clip_(parameters([small]), rule)
    assert small._version == before[0]
    tritonclip.clip_(parameters([small, large]), ClipByNorm(1.0))
    assert small._version == before[0]
    assert large._version > before[1]


def test_a_gradient_of_zeros_is_kept_where_its_limit_is_no_number():
    rule, state = tritonclip.ClipByOwnHistory(1.7, warmup=2, max_norm=math.inf), ClipState()
    params = parameters([torch.zeros(3), torch.ones(4)])
    for _ in range(4):
        norms = tritonclip.clip_(params, rule, state=state)
        assert norms.tolist() == [0.0, 2.0]
        assert torch.equal(grad_of(params[0]), torch.zeros(3))


@pytest.mark.parametrize("n_small", [1, 300])
def test_clip_by_value_of_dual_gradients_clamps_values_and_tangents(n_small):
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (5000, *[5] * n_small)]
    with forward_ad.dual_level():
        params[0].grad = torch.ones(5000)
        for param in params[1:]:
            param.grad = forward_ad.make_dual(torch.ones(5), torch.ones(5))
        tritonclip.clip_(params, ClipByValue(0.5))
        assert all((grad_of(param) == 0.5).all() for param in params)
        for param in params[1:]:
            tangent = forward_ad.unpack_dual(grad_of(param)).tangent
            assert tangent is not None
            assert not tangent.any()


ORDERS = (1.0, 1.5, 2.0, 3.0, 100.0, math.inf)
PARTS = {
    "one": [3.0],
    "some": [3.0, 0.0, 4.0],
    "zeros": [-0.0, 0.0],
    "huge": [1e300, 3e300],
    "tiny": [1e-300, 3e-300],
    "inf": [1.0, math.inf, 0.0],
    "nan": [math.inf, math.nan, 1.0],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_numbers_are_joined_as_tensors_are(parts, order):
    expected = float(combine(torch.tensor(parts, dtype=torch.float64), order))
    found = combine_numbers(parts, order)
    assert found == pytest.approx(expected, rel=1e-14, abs=0, nan_ok=True)
    assert math.copysign(1.0, found) == 1.0


GRID = torch.arange(120.0).view(10, 12)
TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda grid: grid,
    "columns": lambda grid: grid[:, :4],
    "transposed": lambda grid: grid.t(),
    "one-row": lambda grid: grid[:1, ::3],
    "row-of-rows": lambda grid: grid.view(1, 10, 12)[:, :, ::2],
    "gaps": lambda grid: grid.view(-1)[::2],
    "number": lambda grid: grid[3, 4],
    "nothing": lambda grid: grid[:0, ::2],
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("writable", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("size", [1, 3, 4, 40, 60, 119, 120, 121])
@pytest.mark.parametrize("name", TENSORS)
def test_split_flat_yields_every_element_once(name, size, writable):
    tensor = TENSORS[name](GRID.clone())
    pieces = list(split_flat(tensor, size, writable=writable))
    assert all(piece.numel() <= size for piece in pieces)
    elements = [number for piece in pieces for number in piece.flatten().tolist()]
    assert sorted(elements) == sorted(tensor.flatten().tolist())
    if writable:
        for piece in pieces:
            piece.fill_(-1.0)
        assert bool((tensor == -1.0).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", [ClipByGlobalNorm(1.0), ClipByNorm(1.0), ClipByUnitNorm(1.0)])
def test_nan_is_gone_with_the_next_gradients(rule, dtype):
    """Memory that calls share has no NaN left, behind gradients neither."""
    grads = [torch.full((3, 5), math.nan, dtype=dtype) for _ in range(30)]
    params = [torch.ones(3, 5, dtype=dtype, requires_grad=True) for _ in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    tritonclip.clip_(params, rule)
    for grad in grads:
        grad.fill_(2.0)
    norm = tritonclip.clip_(params, rule)
    assert norm is not None
    assert norm.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)
