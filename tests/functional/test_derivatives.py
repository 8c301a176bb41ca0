"""Derivatives of first and second order are those of the formulas, by finite differences.

On a limit the derivative is the mean of both sides, which is what a central difference converges
to; a second one does not exist there, and the mean of both sides is compared with formulas.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from helpers.cases import FLOATS, FUNCTIONS, grad_of, normal
from helpers.lists import make, mixed, transposed
from tritonclip import functional

DOUBLE = torch.float64
ORDERS = [pytest.param(p, id=f"p={p}") for p in (1.0, 1.5, 2.0, 3.0, math.inf)]


def matrix():
    return normal((3, 4), DOUBLE)


def row():
    return normal(3, DOUBLE, seed=1)


def globally(max_norm, **options):
    """Both results of a clip of two tensors, as a tuple."""

    def function(x, y):
        (first, second), norm = functional.clip_by_global_norm((x, y), max_norm, **options)
        return first, second, norm

    return function


# Name: function and points, away from limits. The norm of `matrix` is 3.55, of both 3.79.
CASES = {
    "norm-clipped": (lambda x: functional.clip_by_norm(x, 0.5), (matrix,)),
    "norm-unclipped": (lambda x: functional.clip_by_norm(x, 50.0), (matrix,)),
    "norm-to-zero": (lambda x: functional.clip_by_norm(x, 0.0), (matrix,)),
    "norm-unlimited": (lambda x: functional.clip_by_norm(x, math.inf), (matrix,)),
    "norm-of-zero": (lambda x: functional.clip_by_norm(x * 0.0, 1.0), (matrix,)),
    "norm-of-each": (lambda x, y: functional.clip_by_norm([x, y], 1.5), (matrix, row)),
    "rows": (lambda x: functional.clip_by_norm(x, 1.5, dim=1), (matrix,)),
    "rows-of-order-3": (lambda x: functional.clip_by_norm(x, 1.5, dim=1, norm_type=3), (matrix,)),
    "average": (lambda x: functional.clip_by_average_norm(x, 0.1), (matrix,)),
    "average-unclipped": (lambda x: functional.clip_by_average_norm(x, 9.0), (matrix,)),
    "rms": (lambda x: functional.clip_by_rms(x, 0.1), (matrix,)),
    "rms-unclipped": (lambda x: functional.clip_by_rms(x, 9.0), (matrix,)),
    "value": (lambda x: functional.clip_by_value(x, -0.3, 0.4), (matrix,)),
    "value-least": (lambda x: functional.clip_by_value(x, min=-0.3), (matrix,)),
    "value-most": (lambda x: functional.clip_by_value(x, max=0.3), (matrix,)),
    "value-unlimited": (lambda x: functional.clip_by_value(x, min=-math.inf), (matrix,)),
    "value-equal": (lambda x: functional.clip_by_value(x, 0.5, 0.5), (matrix,)),
    "global-norm": (lambda x, y: functional.global_norm([x, y]), (matrix, row)),
    "global-clipped": (globally(1.0), (matrix, row)),
    "global-unclipped": (globally(9.0), (matrix, row)),
    "global-known": (globally(1.0, use_norm=2.0), (matrix, row)),
}


def check(function, *points):
    """First and second derivatives, one by one, and several at once as Jacobians take them."""
    given = [point.detach().requires_grad_() for point in points]
    gradcheck(function, given, check_batched_grad=True)
    gradgradcheck(function, given, check_batched_grad=True)


@pytest.mark.parametrize("name", CASES)
def test_derivatives_are_right_to_second_order(name):
    function, makers = CASES[name]
    check(function, *(make() for make in makers))


@pytest.mark.parametrize("limit", [0.01, 1e4], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("norm_type", ORDERS)
def test_derivatives_of_every_order_of_norm_are_right(norm_type, limit):
    check(lambda x: functional.clip_by_norm(x, limit, norm_type=norm_type), matrix())


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf], ids="p={}".format)
def test_derivatives_of_complex_tensors_are_right(norm_type):
    clip = lambda x: functional.clip_by_norm(x, 0.5, norm_type=norm_type)  # noqa: E731
    check(clip, normal(4, torch.complex128))


def test_derivatives_in_the_limits_are_right():
    x, limits = matrix(), torch.tensor([[0.5], [1.0], [9.0]], dtype=DOUBLE)
    check(lambda x, limits: functional.clip_by_norm(x, limits, dim=1), x, limits)
    for function in (
        lambda x, limit, norm: functional.clip_by_global_norm([x], limit, norm)[0][0],
        lambda x, limit, norm: functional.clip_by_rms(x, limit) * norm,
        lambda x, limit, norm: functional.clip_by_average_norm(x, limit) * norm,
    ):
        check(function, x, *torch.tensor([0.5, 2.0], dtype=DOUBLE))


def test_derivatives_in_the_bounds_are_right():
    low, high = normal(4, DOUBLE, seed=2).sub_(1.0), normal((3, 1), DOUBLE, seed=3).add_(1.0)
    check(functional.clip_by_value, matrix(), low, high)


AT_LIMIT = {
    "norm": lambda x: functional.clip_by_norm(x, 5.0),
    "norm-1": lambda x: functional.clip_by_norm(x, 7.0, norm_type=1.0),
    "row": lambda x: functional.clip_by_norm(x[None], 5.0, dim=1),
    "global": lambda x: functional.clip_by_global_norm([x], 5.0)[0][0],
    "average": lambda x: functional.clip_by_average_norm(x, 2.5),
    "value": lambda x: functional.clip_by_value(x, 3.0, 4.0),
    "value-of-tensors": lambda x: functional.clip_by_value(
        x, torch.tensor([3.0, 0.0], dtype=DOUBLE), torch.tensor([9.0, 4.0], dtype=DOUBLE)
    ),
}


@pytest.mark.parametrize("name", AT_LIMIT)
def test_derivative_at_the_limit_is_the_mean_of_both_sides(name):
    x = torch.tensor([3.0, 4.0], dtype=DOUBLE, requires_grad=True)
    assert AT_LIMIT[name](x).flatten().tolist() == [3.0, 4.0]
    gradcheck(AT_LIMIT[name], x)


def test_second_derivative_at_the_limit_is_the_mean_of_both_sides():
    hessians = [
        torch.autograd.functional.hessian(
            lambda x, limit=limit: functional.clip_by_norm(x, limit)[0],
            torch.tensor([3.0, 4.0], dtype=DOUBLE),
        )
        for limit in (5.0 - 1e-9, 5.0, 5.0 + 1e-9)
    ]
    torch.testing.assert_close(hessians[1], (hessians[0] + hessians[2]) / 2, rtol=1e-6, atol=1e-9)
    assert bool((hessians[0] != 0).all())


AT_ZERO = {
    "norm": lambda x: functional.clip_by_norm(x, 1.0),
    "row": lambda x: functional.clip_by_norm(x[None], 1.0, dim=1),
    "norm-1": lambda x: functional.clip_by_norm(x, 1.0, norm_type=1.0),
    "norm-3/2": lambda x: functional.clip_by_norm(x, 1.0, norm_type=1.5),
    "norm-inf": lambda x: functional.clip_by_norm(x, 1.0, norm_type=math.inf),
    "global": lambda x: functional.clip_by_global_norm([x], 1.0)[0][0],
    "average": lambda x: functional.clip_by_average_norm(x, 1.0),
    "rms": lambda x: functional.clip_by_rms(x, 1.0),
    "value": lambda x: functional.clip_by_value(x, -1.0, 1.0),
}


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32], ids=str)
@pytest.mark.parametrize("name", AT_ZERO)
def test_derivatives_at_zero_are_those_of_the_identity(name, dtype):
    x = torch.zeros(3, dtype=dtype, requires_grad=True)
    (slope,) = torch.autograd.grad(AT_ZERO[name](x).sum(), x, create_graph=True)
    assert slope.tolist() == [1.0, 1.0, 1.0]
    if dtype == DOUBLE:
        check(AT_ZERO[name], x)


def test_limit_of_zero_has_derivative_zero_at_zero():
    check(lambda x: functional.clip_by_norm(x, 0.0), torch.zeros(3, dtype=DOUBLE))


@pytest.mark.parametrize(
    "norm",
    [
        lambda x: functional.global_norm([x]),
        lambda x: functional.clip_by_global_norm([x], 1.0)[1],
    ],
    ids=["alone", "of a clip"],
)
def test_norm_has_derivative_zero_at_zero(norm):
    """The mean of the slopes on all sides; the second derivative is finite too."""
    x = torch.zeros(3, dtype=DOUBLE, requires_grad=True)
    gradcheck(norm, x)
    (slope,) = torch.autograd.grad(norm(x), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x, allow_unused=True)
    assert slope.tolist() == [0.0, 0.0, 0.0]
    assert curvature is None or curvature.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("value", [1e30, 1e-30, 3e38])
def test_derivatives_survive_squares_that_overflow_or_vanish(device, value):
    """Of x * limit / norm, a direction across x shrinks as x does, and x itself does not move."""
    x = torch.tensor([0.6, 0.8], device=device).mul_(value).requires_grad_()
    along, across = torch.tensor([0.6, 0.8]), torch.tensor([0.8, -0.6])
    for y in (
        functional.clip_by_norm(x, value / 2),
        functional.clip_by_norm(x[None], value / 2, dim=1)[0],
        functional.clip_by_global_norm([x], value / 2)[0][0],
    ):
        slopes = [
            torch.autograd.grad(y, x, way.to(device), retain_graph=True)[0].cpu()
            for way in (along, across)
        ]
        torch.testing.assert_close(slopes[0], torch.zeros(2), rtol=0, atol=1e-6)
        torch.testing.assert_close(slopes[1], across / 2, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_derivatives_of_narrow_tensors_are_those_of_float64(device, dtype):
    tensors = [
        normal(size, dtype, device, seed).requires_grad_() for seed, size in enumerate((7, 9))
    ]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    for given in (tensors, wide):
        clipped, norm = functional.clip_by_global_norm(given, 0.5)
        (sum((y * y[0]).sum() for y in clipped) + norm).backward()
    for x, truth in zip(tensors, wide, strict=True):
        # Each element of a clipped tensor, and each product with it, is rounded once.
        torch.testing.assert_close(
            grad_of(x).double(),
            grad_of(truth),
            rtol=8 * torch.finfo(dtype).eps,
            atol=torch.finfo(dtype).eps,
        )


def slopes_of(function, tensors, limit, ways):
    """Derivatives in tensors, of results times `ways`; of all results that have one there."""
    own = [x.detach().clone().requires_grad_() for x in tensors]
    results = function(own, limit)
    kept = [i for i, way in enumerate(ways) if way is not None]
    return torch.autograd.grad(
        [results[i] for i in kept], own, [ways[i] for i in kept], allow_unused=True
    )


def wide_slopes_of(function, tensors, limit, ways):
    """The same of the same numbers in float64."""
    lists = [[x if x is None else x.to(wide_of(x.dtype)) for x in xs] for xs in (tensors, ways)]
    return slopes_of(function, lists[0], limit, lists[1])


def wide_of(dtype):
    return torch.complex128 if dtype.is_complex else DOUBLE


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("limit", [0.5, 1e6, 0.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
@pytest.mark.parametrize("some", [make, transposed, mixed])
@pytest.mark.parametrize("unused", [False, True])
def test_derivatives_of_lists_are_those_of_float64(name, limit, dtype, some, unused):
    if dtype.is_complex and name == "value":
        pytest.skip("complex numbers have no order")
    tensors = some(dtype)
    ways: list[Tensor | None] = [torch.randn_like(x) for x in tensors]
    # As of a sum: elements that share memory.
    ways[3] = torch.ones((), dtype=tensors[3].dtype).expand(tensors[3].shape)
    if unused:
        ways[0] = None
    ours = slopes_of(FUNCTIONS[name], tensors, limit, ways)
    truth = wide_slopes_of(FUNCTIONS[name], tensors, limit, ways)
    for x, y in zip(ours, truth, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            # Two products that may cancel, of numbers up to 4, and their sum are rounded.
            eps = torch.finfo(x.dtype).eps
            torch.testing.assert_close(x.to(y.dtype), y, rtol=2 * eps, atol=8 * eps)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, 1e30, 1e-30, 1e-44, 5e37], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_at_extremes_are_those_of_float64(name, value):
    if name == "rms" and value == 1e-44:
        pytest.skip("a limit of the norm, sqrt(3) times 5e-45, is a few multiples of 2^-149")
    tensors = [torch.full((3,), value), normal(4) * (value / 9)]
    limit = value / 2 if 0 < value < math.inf else 0.5
    # In float64, the same limit as in float32.
    limit = float(torch.tensor(limit))
    given = FUNCTIONS[name], tensors, limit, [torch.randn_like(x) for x in tensors]
    for x, y in zip(slopes_of(*given), wide_slopes_of(*given), strict=True):
        # Two roundings to multiples of 2^-149, where they are subnormal.
        atol = max(1e-6 * float(y.nan_to_num(0, 0, 0).abs().max()), 2.0**-148)
        torch.testing.assert_close(x.double(), y, rtol=2e-6, atol=atol, equal_nan=True)


def test_derivatives_of_norms_are_those_of_float64():
    tensors = [*make(torch.float32), torch.zeros(3)]
    for measure in (
        lambda x, limit: [functional.global_norm(x)],
        lambda x, limit: [functional.clip_by_global_norm(x, limit)[1]],
        lambda x, limit: [functional.clip_by_norm(x, torch.tensor(limit))[3]],
    ):
        given = measure, tensors, 0.5, [torch.tensor(2.5).expand(measure(tensors, 0.5)[0].shape)]
        for x, y in zip(slopes_of(*given), wide_slopes_of(*given), strict=True):
            if x is not None:
                torch.testing.assert_close(x.double(), y, rtol=2e-6, atol=1e-6)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bounds", [(-1.0, 0.3), (None, 0.3), (0.5, 0.5), (-math.inf, -1e30)])
@pytest.mark.parametrize("value", [None, -1.0, 0.3, 0.5, math.nan, math.inf, -math.inf], ids=str)
def test_derivatives_by_value_are_the_means_of_both_sides(value, bounds, dtype):
    x = normal(70, dtype)
    if value is not None:
        x[8] = value
    way, slope = torch.randn_like(x), torch.ones(70, dtype=dtype)
    low, high = (
        None if b is None or b == -math.inf else torch.tensor(b, dtype=DOUBLE).to(dtype)
        for b in bounds
    )
    if low is not None:
        slope *= 1 - (x < low).to(dtype) - (x == low).to(dtype) / 2
    if high is not None:
        high = high.clamp(min=torch.finfo(dtype).min)
        slope *= 1 - (x > high).to(dtype) - (x == high).to(dtype) / 2
    if bounds[0] == bounds[1]:
        slope[~x.isnan()] = 0
    clamp = lambda x, _: [functional.clip_by_value(x[0], *bounds)]  # noqa: E731
    torch.testing.assert_close(slopes_of(clamp, [x], 0, [way])[0], way * slope, rtol=0, atol=0)


def test_derivatives_reach_only_tensors_that_want_them(device):
    x, y = normal(3, device=device).requires_grad_(), normal(3, device=device, seed=1)
    (_, second), norm = functional.clip_by_global_norm([x, y], 0.5)
    # The second moves with the norm, which moves with the first.
    assert second.requires_grad
    (slope,) = torch.autograd.grad(second.sum() + norm, x)
    assert bool((slope != 0).all())
    assert not y.requires_grad


def test_without_grad_mode_nothing_is_recorded(device):
    x = normal(3, device=device).requires_grad_()
    with torch.no_grad():
        for y in (functional.clip_by_norm(x, 0.5), functional.clip_by_value(x, -0.1, 0.1)):
            assert not y.requires_grad
