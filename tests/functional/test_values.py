"""Every function gives the values of its formula, in new memory, on every backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

import tritonclip
from helpers import reference
from helpers.cases import (
    FLOATS,
    NORM_TYPES,
    assert_bits,
    assert_norm,
    normal,
    parameters,
    unchanged,
)
from helpers.processes import in_processes
from helpers.spread import mesh_of, parameter
from tritonclip import ClipByGlobalNorm, ClipByNorm, functional
from tritonclip.engine.plan_cache import plans

SHAPES = ((40,), (), (0,), (3, 700), (1,))
MIXED = (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float16)
DTYPES = pytest.mark.parametrize("dtype", [*FLOATS, pytest.param(None, id="mixed")])
FUNCTIONS = {
    "value": lambda x: functional.clip_by_value(x, -0.25, 0.5),
    "norm": lambda x: functional.clip_by_norm(x, 0.5),
    "norm-1": lambda x: functional.clip_by_norm(x, 0.5, norm_type=1.0),
    "average": lambda x: functional.clip_by_average_norm(x, 0.01),
    "rms": lambda x: functional.clip_by_rms(x, 0.5),
    "global": lambda x: functional.clip_by_global_norm(x, 0.5)[0],
}
BY_NORM = [*FUNCTIONS][1:]
# And what others become.
NONFINITE = [(math.nan, math.nan), (math.inf, 0.0)]


def make(device, dtype=None):
    forms = zip(SHAPES, MIXED if dtype is None else [dtype] * len(SHAPES), strict=True)
    return [normal(*form, device, seed) for seed, form in enumerate(forms)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("limit", [0.5, 1e6, 0.0, math.inf])
@DTYPES
def test_clip_by_global_norm_is_the_stated_formula(device, dtype, limit):
    tensors = make(device, dtype)
    clipped, norm = functional.clip_by_global_norm(tensors, limit)
    # Norms of narrower tensors are right to 1e-6, also in float64.
    assert_norm(norm.float() if dtype is None else norm, reference.total_norm(tensors))
    assert norm.dtype == (torch.float64 if dtype in (None, torch.float64) else torch.float32)
    assert norm.device == device
    by = reference.coefficient(norm, limit, eps=0.0)
    assert_bits(clipped, [reference.scaled(x, by) for x in tensors])


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_clip_by_norm_is_the_in_place_call_without_eps(device, norm_type):
    tensors = make(device)
    ours = functional.clip_by_norm(tensors, 0.5, norm_type=norm_type)
    tritonclip.clip_(parameters(tensors), ClipByNorm(0.5, norm_type, eps=0.0))
    assert_bits(ours, tensors)


@DTYPES
def test_clip_by_global_norm_is_the_in_place_call_without_eps(device, dtype):
    tensors = make(device, dtype)
    ours, norm = functional.clip_by_global_norm(tensors, 0.5)
    measured = tritonclip.clip_(parameters(tensors), ClipByGlobalNorm(0.5, eps=0.0))
    assert_bits([*ours, norm], [*tensors, measured])


@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_by_rms_and_average_norm_are_norms_over_counts(device, dtype):
    tensors = make(device, dtype)
    norms = torch.tensor(reference.norms(tensors), dtype=torch.float64)
    for function, over in (
        (functional.clip_by_average_norm, lambda n: max(n, 1)),
        (functional.clip_by_rms, lambda n: math.sqrt(max(n, 1))),
    ):
        for x, norm, y in zip(tensors, norms, function(tensors, 0.25), strict=True):
            coefficient = min(1.0, 0.25 * over(x.numel()) / max(float(norm), 1e-300))
            # Of a coefficient in float32 from a norm that is right to 1e-6, and of the product.
            torch.testing.assert_close(
                y.double(), x.double() * coefficient, rtol=1.2e-6 + torch.finfo(dtype).eps, atol=0
            )


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [0, -1, (0, 2), [1, 2]], ids=str)
def test_clip_by_norm_over_dimensions_measures_each_slice(device, dtype, dim):
    x = normal((3, 4, 5), dtype, device)
    check_slices(x, 1.5, dim, rtol=1.2e-6 + torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dim", [0, (0, 2), 1], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64], ids=str)
def test_clip_by_norm_over_dimensions_of_a_large_tensor(dtype, dim):
    """In pieces, the last of which is shorter."""
    check_slices(
        normal((61, 67, 71), dtype), 7.0, dim, rtol=1.3e-6 + torch.finfo(dtype).eps, atol=1e-5
    )


def check_slices(x, limit, dim, **tolerance):
    """By the formula, and some are clipped."""
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
    norms = torch.linalg.vector_norm(wide, dim=dim, keepdim=True)
    assert int((norms > limit).sum()) > 0
    y = functional.clip_by_norm(x, limit, dim)
    assert y.dtype == x.dtype
    torch.testing.assert_close(y.to(wide.dtype), wide * (limit / norms).clamp(max=1.0), **tolerance)


def test_slices_within_the_limit_keep_their_bits(device):
    x = torch.tensor([[-3.0, 0.0, 0.1], [4.0, 0.0, 12.0]], device=device)
    assert_bits([functional.clip_by_norm(x, 13.0, dim=1)], [x])


def test_clip_by_norm_takes_a_limit_for_each_slice(device):
    x = torch.ones(3, 4, device=device)
    limits = torch.tensor([[1.0], [2.0], [4.0]], device=device)
    assert functional.clip_by_norm(x, limits, dim=1)[:, 0].tolist() == [0.5, 1.0, 1.0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_by_value_is_the_stated_formula(device, dtype):
    tensors = make(device, dtype)
    ours = functional.clip_by_value(tensors, -0.1, 0.7)
    assert_bits(ours, [reference.clamped(x, -0.1, 0.7) for x in tensors])


@pytest.mark.parametrize("scale", [1.0, 1e-5], ids=["clipped", "within"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_inputs_stay_and_results_share_no_memory(device, name, scale):
    """Results have the dtypes, the shapes and the devices of inputs, and their bits within."""
    tensors = [x * scale for x in make(device)]
    with unchanged(tensors):
        made = FUNCTIONS[name](tensors)
        for x, y in zip(tensors, made, strict=True):
            assert (x.dtype, x.shape, x.device) == (y.dtype, y.shape, y.device)
        if scale < 1:
            assert_bits(made, tensors)
        for one in made:
            one.fill_(7.0)


@DTYPES
def test_limits_on_the_device_give_the_bits_of_numbers(device, dtype):
    """Nothing is read back: on a GPU kernels scale copies of half types."""
    tensors, limit = make(device, dtype), torch.tensor(1.7, device=device)
    ours, norm = functional.clip_by_global_norm(tensors, limit)
    expected, known = functional.clip_by_global_norm(tensors, float(limit))
    assert_bits([*ours, norm], [*expected, known])


def test_norms_are_measured_by_the_chosen_backend(backend):
    # Neither is served by the loops in one call, which needs no plan.
    x, limit = normal((3, 111), device=backend.device).t(), torch.ones((), device=backend.device)
    for measure in (functional.global_norm, lambda x: functional.clip_by_norm(x, limit)):
        plans.clear()
        measure(x)
        assert plans._last is not None
        plan = plans._last[0]
        assert type(plan.groups[0].layout).__module__.endswith(backend.module)


@pytest.mark.parametrize("value", [1e30, 1e-30])
def test_squares_that_overflow_or_vanish_are_survived(device, value):
    x = torch.full((1000,), value, device=device)
    norm = reference.norm(x)
    for y in (
        functional.clip_by_norm(x, value),
        functional.clip_by_global_norm([x], value)[0][0],
        functional.clip_by_norm(x[None], value, dim=1)[0],
    ):
        assert_norm(functional.global_norm(y), value)
    assert_norm(functional.global_norm([x]), norm)


def test_float16_norm_over_its_range_is_survived(device):
    x = torch.full((1000,), 60000.0, dtype=torch.float16, device=device)
    clipped, norm = functional.clip_by_global_norm([x], 1.0)
    assert_norm(norm, reference.norm(x))
    # Elements of 0.0316 are rounded to 11 bits.
    torch.testing.assert_close(float(functional.global_norm(clipped)), 1.0, rtol=2**-11, atol=0)


@pytest.mark.parametrize(("value", "others"), NONFINITE)
@pytest.mark.parametrize("name", BY_NORM)
def test_nan_and_inf_spread_as_in_place(device, name, value, others):
    x = torch.tensor([1.0, value, 2.0], device=device)
    y = FUNCTIONS[name]([x])[0].cpu()
    torch.testing.assert_close(y, torch.tensor([others, math.nan, others]), equal_nan=True)


@pytest.mark.parametrize(("value", "other"), NONFINITE)
def test_a_global_norm_that_is_not_finite_reaches_every_tensor(device, value, other):
    """NaN makes all NaN; inf zeroes what is finite, where TensorFlow makes all NaN."""
    tensors = [torch.tensor([value], device=device), torch.ones(2, device=device)]
    clipped, norm = functional.clip_by_global_norm(tensors, 6.0)
    assert_bits([norm, *clipped], map(torch.tensor, (value, [math.nan], [other, other])))


def test_no_limit_clips_nothing_of_an_infinite_norm(device):
    x = torch.tensor([1.0, math.inf], device=device)
    assert functional.clip_by_norm(x, math.inf).tolist() == [1.0, math.inf]
    assert functional.clip_by_norm(x[None], math.inf, dim=1).tolist() == [[1.0, math.inf]]
    assert functional.clip_by_global_norm([x], math.inf)[0][0].tolist() == [1.0, math.inf]


def test_limit_and_norm_of_zero_give_zero(device):
    x = torch.zeros(3, device=device)
    for y in (
        functional.clip_by_norm(x, 0.0),
        functional.clip_by_norm(x, torch.zeros((), device=device)),
        functional.clip_by_norm(x[None], 0.0, dim=1)[0],
        functional.clip_by_global_norm([x], 0.0)[0][0],
        functional.clip_by_rms(x, 0.0),
        functional.clip_by_average_norm(x, 0.0),
    ):
        assert y.tolist() == [0.0, 0.0, 0.0]


def test_limits_of_counts_may_be_tensors(device):
    x = normal(100, device=device)
    # The product of limit and count would not fit the limit's dtype.
    half = torch.tensor(1000.0, dtype=torch.float16, device=device)
    large = torch.full((100,), 2e4, device=device)
    assert_norm(functional.global_norm(functional.clip_by_average_norm(large, half)), 1e5)
    for function in (functional.clip_by_rms, functional.clip_by_average_norm):
        tensors, small = [x, x[:7]], torch.tensor(0.01, device=device)
        for ours, expected in zip(function(tensors, small), function(tensors, 0.01), strict=True):
            torch.testing.assert_close(ours, expected, rtol=3e-7, atol=0)


def test_a_tensor_met_twice_counts_twice(device):
    x = torch.tensor([3.0, 4.0], device=device)
    clipped, norm = functional.clip_by_global_norm([x, x, x[:0], x], 1.0)
    assert_norm(norm, math.sqrt(75.0))
    assert_bits([clipped[0], clipped[1]], [clipped[3], clipped[3]])


def test_tensors_that_share_a_part_of_their_memory_count_both(device):
    x = torch.arange(5.0, device=device)
    assert_norm(functional.global_norm([x[:3], x[1:]]), math.sqrt(5.0 + 30.0))


def test_expanded_tensors_are_measured(device):
    x = torch.tensor([[3.0]], device=device).expand(4, 4)
    assert_norm(functional.global_norm([x]), 12.0)
    assert_norm(functional.global_norm([functional.clip_by_norm(x, 6.0)]), 6.0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_views_of_any_strides_are_clipped(device, name):
    whole = normal((6, 8), device=device)
    views = [whole.t(), whole[::2, 1::3], torch._neg_view(whole[0])]
    expected = FUNCTIONS[name]([view.clone().resolve_neg() for view in views])
    assert_bits(FUNCTIONS[name](views), expected)


@pytest.mark.parametrize("name", BY_NORM)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_tensors_are_scaled_by_modulus(device, name, dtype):
    x = normal(20, dtype, device)
    p = 1.0 if name == "norm-1" else 2.0
    limit = {"average": 0.01 * 20, "rms": 0.5 * math.sqrt(20)}.get(name, 0.5)
    expected = x.cpu() * (limit / reference.norm(x, p))
    torch.testing.assert_close(FUNCTIONS[name]([x.conj()])[0].cpu(), expected.conj())


def test_complex_infinity_spares_the_other_part(device):
    """A product of complex numbers would make NaN of inf times 0."""
    x = torch.tensor([complex(math.inf, 1.0)], device=device)
    y = torch.view_as_real(functional.clip_by_norm(x, math.inf))
    assert y.tolist() == [[math.inf, 1.0]]


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_complex_norms_over_dimensions_are_those_of_moduli(device, norm_type):
    x = normal((3, 5), torch.complex64, device)
    ours = functional.clip_by_norm(x, 0.3, dim=1, norm_type=norm_type)
    rows = [functional.clip_by_norm(row, 0.3, norm_type=norm_type) for row in x]
    torch.testing.assert_close(ours, torch.stack(rows))


def test_known_norm_is_used_and_returned(device):
    x = torch.tensor([3.0, 4.0], device=device)
    for known in (10.0, torch.tensor([10.0], device=device)):
        (y,), norm = functional.clip_by_global_norm([x], 1.0, use_norm=known)
        torch.testing.assert_close(y, x / 10)
        assert norm.shape == ()
        assert float(norm) == 10.0


@in_processes(2)
def test_known_norm_may_be_that_of_distributed_tensors():
    known = tritonclip.get_total_norm([parameter((8, 3), mesh_of(-1), [Shard(0)]).grad])
    (clipped,), norm = functional.clip_by_global_norm([torch.ones(3)], 1.0, known)
    assert_norm(norm, float(known))
    torch.testing.assert_close(clipped, torch.ones(3) / float(known))


def test_without_tensors_the_norm_is_zero():
    trees: tuple[Any, ...] = ([], [None, None], {})
    for tree in trees:
        clipped, norm = functional.clip_by_global_norm(tree, 1.0)
        assert clipped == tree
        assert float(norm) == 0.0
    assert functional.clip_by_norm([], 1.0) == []


@given(
    values=st.lists(st.lists(st.floats(-8.0, 8.0, width=32), max_size=9), min_size=1, max_size=4),
    limit=st.floats(2.0**-10, 2.0**10),
)
def test_results_are_within_the_limit_and_keep_direction(device, values, limit):
    tensors = [torch.tensor(row, dtype=torch.float32, device=device) for row in values]
    clipped, norm = functional.clip_by_global_norm(tensors, limit)
    # The norm is right to 1e-6; the coefficient and each element are off by 2**-24.
    assert reference.total_norm(clipped) <= limit * (1 + 1.3e-6)
    if float(norm) <= limit:
        assert_bits(clipped, tensors)
    for x, y in zip(tensors, clipped, strict=True):
        assert bool((y * x >= 0).all())


def test_verify_checks_the_norms_of_the_functions(device):
    tensors = make(device)
    with tritonclip.verify():
        functional.clip_by_global_norm(tensors, 0.5)
        functional.clip_by_norm(tensors, 0.5)
        functional.clip_by_rms(tensors, 0.5)
