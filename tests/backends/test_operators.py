"""The torch backend on a CPU: norms of every magnitude, products of every half value, clamps."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import tritonclip
from helpers.cases import FLOATS, HALVES, assert_bits, check_clip, grad_of, normal, parameters
from helpers.native_lists import every_half
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, ClipState
from tritonclip.backends.operators import LONG_PIECE, PIECE, ROW, SMALL, TOGETHER, split_flat

pytestmark = pytest.mark.usefixtures("operators")

LISTS = {
    "one": [5],
    "some empty": [64, 1, 30, 0],
    "rows and a rest": [SMALL + ROW + 1, 7, 0, SMALL, TOGETHER, TOGETHER + 1, 20_000],
    "small ones of several pieces": [SMALL - 1] * (LONG_PIECE // SMALL + 2),
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


@pytest.mark.parametrize("sizes", LISTS.values(), ids=LISTS.keys())
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_is_told_from_the_others(value, sizes):
    grads = gradients(sizes, torch.float32, 2.0)
    grads[0][-1] = value
    norms = tritonclip.clip_(parameters(grads), ClipByNorm(math.inf))
    expected = [true_norm([g]) for g in grads]
    assert norms.tolist() == pytest.approx(expected, rel=1e-6, nan_ok=True)
    norm = tritonclip.clip_(parameters(grads), ClipByGlobalNorm(math.inf))
    assert norm.item() == pytest.approx(abs(value), nan_ok=True)


@pytest.mark.parametrize("sizes", LISTS.values(), ids=LISTS.keys())
@pytest.mark.parametrize("values", [(math.inf, math.nan), (math.nan, math.inf)], ids=str)
def test_inf_in_one_gradient_and_nan_in_another_is_nan(values, sizes):
    grads = gradients([*sizes, 8], torch.float32, 2.0)
    grads[0][0], grads[-1][0] = values
    norm = tritonclip.clip_(parameters(grads), ClipByGlobalNorm(1.0))
    assert norm.isnan()
    assert all(grad.isnan().all() for grad in grads)


# Of torch itself, when it first makes a dual tensor.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("max_norm", [1.0, 2.5])
def test_coefficients_of_each_gradient_are_those_of_one_alone(dtype, max_norm):
    """NaN, inf, nothing, clipped and unclipped beside one another."""
    values = [1.0, 3.0, 0.0, math.inf, math.nan, 2.0, 1e4, 0.5]
    grads = [torch.tensor([v, 0.0], dtype=dtype) for v in values]
    together = [grad.clone() for grad in grads]
    tritonclip.clip_(parameters(together), ClipByNorm(max_norm))
    for one in parameters(grads):
        tritonclip.clip_([one], ClipByNorm(max_norm))
    assert_bits(grads, together)


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


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("n", [SMALL, SMALL + 5, 3 * SMALL])
@pytest.mark.parametrize("bad", [[math.inf], [math.inf, -math.inf], [-math.inf], [math.nan]])
def test_a_half_type_with_elements_that_are_not_finite_has_such_a_norm(dtype, n, bad):
    grad = normal(n, dtype)
    grad[7 : 7 + len(bad)] = torch.tensor(bad, dtype=dtype)
    norm = tritonclip.clip_(parameters([normal(n, dtype, seed=1), grad]), math.inf)
    assert norm.item() == pytest.approx(math.nan if math.isnan(bad[0]) else math.inf, nan_ok=True)


@pytest.mark.parametrize("rule", [1.0, ClipByNorm(1.0)], ids=["global", "each"])
def test_gradients_within_their_limit_are_not_written(rule):
    small, large = torch.full((3,), 0.1), torch.full((3,), 5.0)
    before = small._version, large._version
    tritonclip.clip_(parameters([small]), rule)
    assert small._version == before[0]
    tritonclip.clip_(parameters([small, large]), ClipByNorm(1.0))
    assert small._version == before[0]
    assert large._version > before[1]


@pytest.mark.parametrize("order", [1, -1], ids=["last", "first"])
def test_nan_spreads_in_its_gradient_beside_others_within_their_limit(order):
    grads = [torch.tensor([0.1, 0.1]), torch.tensor([math.nan, 5.0])][::order]
    tritonclip.clip_(parameters(grads), ClipByNorm(1.0))
    within, bad = grads[::order]
    assert bad.isnan().all()
    assert torch.equal(within, torch.tensor([0.1, 0.1]))


def test_a_gradient_of_zeros_is_kept_where_its_limit_is_no_number():
    rule, state = tritonclip.ClipByOwnHistory(1.7, warmup=2, max_norm=math.inf), ClipState()
    params = parameters([torch.zeros(3), torch.ones(4)])
    for _ in range(4):
        norms = tritonclip.clip_(params, rule, state=state)
        assert norms.tolist() == [0.0, 2.0]
        assert torch.equal(grad_of(params[0]), torch.zeros(3))


# Numbers of elements, 2-d where they are negative.
CLAMPED = {
    "some empty": [0, 7, 0] * 100,
    "beside 2-d and large ones": [9, -12, 4096, 9, 9] * 100,
    "large": [4096, 4097] * 20,
}


def small_gradients(sizes, dtype):
    return [
        (0.01 * normal(abs(n), torch.float32, seed=i)).to(dtype).view((-1,) if n >= 0 else (-1, 3))
        for i, n in enumerate(sizes)
    ]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", CLAMPED.values(), ids=CLAMPED)
@pytest.mark.parametrize("every", [1, 7, 10**9])
def test_each_gradient_is_clamped(sizes, dtype, every):
    grads = small_gradients(sizes, dtype)
    for i, grad in enumerate(grads):
        if grad.numel() and i % every == every - 1:
            grad.view(-1)[-1] = 2.0
    check_clip(grads, ClipByValue(-1.0, 0.5))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_gradients_are_clamped_under_autocast(dtype, autocast):
    grads = small_gradients([4] * 9, dtype)
    grads[3][0] = 2.0
    with torch.autocast("cpu", dtype=autocast):
        tritonclip.clip_(parameters(grads), ClipByValue(-1.0, 0.5))
    assert grads[3][0] == 0.5


OUTLIERS = {"none": (), "few": (0, 5, 1700, 2999), "most": range(1800, 3000), "all": range(3000)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("value", [5.0, torch.nan, -torch.inf], ids=str)
@pytest.mark.parametrize("outliers", OUTLIERS.values(), ids=OUTLIERS)
def test_clip_by_value_finds_outliers_among_many_small_gradients(outliers, value):
    grads = [1e-3 * normal(1 + i % 60, seed=i) for i in range(3000)]
    for place in outliers:
        grads[place][-1] = value
    check_clip(grads, ClipByValue(-0.5, 0.25))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1000, 4095])
def test_clip_by_value_of_medium_gradients(dtype, size):
    grads = [normal(size, dtype, seed=i).clamp_(-1, 1) for i in range(80)]
    grads[50][7] = 3.0
    check_clip(grads, ClipByValue(-1.5, 2.0))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
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
    tensor = TENSORS[name](GRID)
    pieces = list(split_flat(tensor, size, writable=writable))
    assert all(piece.numel() <= size for piece in pieces)
    elements = [number for piece in pieces for number in piece.flatten().tolist()]
    assert sorted(elements) == sorted(tensor.flatten().tolist())


@pytest.mark.parametrize("name", TENSORS)
def test_split_flat_for_writing_yields_views(name):
    tensor = TENSORS[name](GRID.clone())
    for piece in split_flat(tensor, 4, writable=True):
        piece.fill_(-1.0)
    assert bool((tensor == -1.0).all())
