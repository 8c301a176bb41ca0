"""Small gradient lists, which the CPU packs into scratch of float64 or of float32."""

import math

import pytest
import torch
from cases import grad_of, parameters
from torch.autograd import forward_ad

import tritonclip
from tritonclip import ClipByGlobalNorm, ClipByNorm
from tritonclip.backends.cpu_backend import CpuLayout
from tritonclip.backends.packed import (
    LONG,
    MEASURED_ELEMENTS,
    PACKED_ELEMENTS,
    PACKED_TENSORS,
    SERIAL,
    WIDE_ELEMENTS,
    rows_of,
)

pytestmark = pytest.mark.usefixtures("operators")

# Of lists on both sides of WIDE_ELEMENTS: one row each, and rows of several lengths.
LISTS = {
    "one": [5],
    "a row each": [64, 1, 30, 0],
    "several rows each": [3000, 1, 0, 129],
    "float32 rows": [20_000, 7, 0, 128, 30_000],
    "measured in place": [7, 16_384, 0, 32_768],
    "nothing packed": [65_536],
    "copied by several threads": [10, 40_000, 0, 50_001, 300],
    "several parts": [8192] * 9,
    "parts without a rest": [SERIAL // 5] * 10,
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# What all elements of a gradient are multiplied by: squares that float32 does not hold, or half.
LARGE = {torch.float16: 6e4, torch.float64: 1e200}
SMALL = {torch.float16: 6e-8, torch.float64: 1e-200}


def gradients(sizes, dtype, factor):
    generator = torch.Generator().manual_seed(0)
    grads = []
    for i, n in enumerate(sizes):
        signs = torch.randint(0, 2, (n,), generator=generator) * 2.0 - 1
        grads.append((signs * (factor if i % 2 == 0 else 1.0)).to(dtype))
    return grads


def true_norm(grads):
    return math.hypot(*(math.hypot(*grad.double().tolist()) for grad in grads))


def test_lists_take_every_form_of_scratch():
    forms = {name: rows_of(torch.float32, sizes, flat=True) for name, sizes in LISTS.items()}
    assert forms["a row each"].counts == [1, 1, 1, 0]
    assert max(forms["several rows each"].counts) > 1
    assert sum(LISTS["float32 rows"]) > WIDE_ELEMENTS
    assert forms["float32 rows"].dtype == torch.float32
    assert forms["several rows each"].dtype == torch.float64
    assert forms["measured in place"].long == [1, 3]
    assert forms["nothing packed"].packed == []
    assert forms["copied by several threads"].packed == [1, 3, 0, 2, 4]
    assert forms["several rows each"].measured == [forms["several rows each"].n_packed]
    assert forms["nothing packed"].measured == []
    for name, n_parts in (("several parts", 3), ("parts without a rest", 2)):
        form = forms[name]
        assert len(form.measured) == n_parts
        assert sum(form.measured) == form.n_packed
        assert max(form.measured) * form.length <= SERIAL
    shared = forms["copied by several threads"]
    assert shared.measured == [shared.counts[1], shared.counts[3], 4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", LISTS.values(), ids=LISTS.keys())
@pytest.mark.parametrize("factor", ["ordinary", "large", "small", "zero"])
def test_norms_hold_where_float32_holds_no_squares(factor, sizes, dtype):
    factors = {
        "ordinary": 1.5,
        "large": LARGE.get(dtype, 1e30),
        "small": SMALL.get(dtype, 1e-30),
        "zero": 0.0,
    }
    grads = gradients(sizes, dtype, factors[factor])
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
    for grad, clipped in zip(grads, together, strict=True):
        (alone,) = parameters([grad])
        tritonclip.clip_([alone], ClipByNorm(max_norm))
        torch.testing.assert_close(grad_of(alone), clipped, rtol=0, atol=0, equal_nan=True)


def scratch_of(sizes, dtype):
    """The elements of scratch kept after a measurement, and the bytes that the layout counts."""
    tensors = [torch.ones(n, dtype=dtype) for n in sizes]
    layout = CpuLayout(tensors, flat=True)
    layout.bind(tensors, None).norm(2.0, None, per_gradient=True)
    kept = [scratch.elements for scratch in layout.scratch]
    return (kept[0] if kept else None), layout.n_bytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [[PACKED_ELEMENTS - 1], [PACKED_ELEMENTS // 2 - 1] * 2, [3] * PACKED_TENSORS],
    ids=["one", "two", "many"],
)
def test_small_list_keeps_scratch_and_counts_it(sizes, dtype):
    elements, n_bytes = scratch_of(sizes, dtype)
    assert elements.numel() >= sum(sizes)
    assert n_bytes >= elements.nbytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        [PACKED_ELEMENTS + 1],
        [PACKED_ELEMENTS - 1, 2],
        [3] * (PACKED_TENSORS + 1),
        [MEASURED_ELEMENTS, LONG],
    ],
    ids=["one", "two", "many", "long"],
)
def test_list_over_a_bound_keeps_no_scratch(sizes, dtype):
    """A plan lives as long as its list: long lists would double their memory."""
    elements, n_bytes = scratch_of(sizes, dtype)
    assert elements is None
    assert n_bytes < 8 * sum(sizes)


@pytest.mark.parametrize("n", [1, 2, 64, 1024, 2048])
def test_scratch_of_equal_powers_of_two_has_no_gaps(n):
    """Zeros between gradients would be measured too."""
    assert scratch_of([n] * 5, torch.float32)[0].numel() == 5 * n


@pytest.mark.parametrize("sizes", [[3] * 5, [1500] * 5, [7] * 400 + [2000], [LONG + 1] * 3])
def test_scratch_is_less_than_twice_as_long_as_its_gradients(sizes):
    assert sum(sizes) <= scratch_of(sizes, torch.float32)[0].numel() < 2 * sum(sizes)


def test_long_gradients_are_not_copied():
    elements, _ = scratch_of([LONG] * 20 + [3], torch.float32)
    assert elements.numel() < LONG


def test_list_of_float8_keeps_no_scratch():
    assert scratch_of([40, 3], torch.float8_e4m3fn)[0] is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [3.3, 1e3, 7e30])
def test_every_half_value_is_scaled_as_foreach_scales_it(dtype, norm):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    grads, expected = list(values.clone().split(4096)), list(values.clone().split(4096))
    given = torch.tensor(norm)
    tritonclip.clip_grads_with_norm_(parameters(grads), 1.0, given)
    torch._foreach_mul_(expected, 1.0 / (given + 1e-6))
    for grad, other in zip(grads, expected, strict=True):
        same = (grad.view(torch.int16) == other.view(torch.int16)) | (grad.isnan() & other.isnan())
        assert bool(same.all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_norm", [1e-3, 3.3, 7e4])
def test_every_half_value_is_scaled_by_its_own_norm_as_foreach_scales_it(dtype, max_norm):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    grads, expected = list(values.clone().split(1024)), list(values.clone().split(1024))
    norms = tritonclip.clip_(parameters(grads), ClipByNorm(max_norm, eps=0.5))
    # Not max_norm / ..., which torch computes as a product with the reciprocal.
    coefficients = (torch.full_like(norms, max_norm) / (norms + 0.5)).clamp(max=1.0)
    assert (coefficients < 1).sum() > 0
    torch._foreach_mul_(expected, list(coefficients.unbind()))
    for grad, other in zip(grads, expected, strict=True):
        assert torch.equal(grad.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("rule", [1.0, ClipByNorm(1.0)], ids=["global", "each"])
def test_writes_before_an_interrupt_count(rule, monkeypatch):
    """Autograd would go on with what is half clipped."""
    unscale = torch._amp_foreach_non_finite_check_and_unscale_

    def interrupted(tensors, *arguments):
        unscale(tensors, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", interrupted)
    grads = [torch.ones(40, dtype=torch.bfloat16) for _ in range(3)]
    before = [grad._version for grad in grads]
    with pytest.raises(KeyboardInterrupt):
        tritonclip.clip_(parameters(grads), rule)
    written = [not torch.equal(grad, torch.ones_like(grad)) for grad in grads]
    assert any(written)
    assert all(
        grad._version > old or not is_written
        for grad, old, is_written in zip(grads, before, written, strict=True)
    )
