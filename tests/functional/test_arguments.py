"""Limits, bounds and dimensions that have no meaning are refused, with a remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.cases import untouched
from tritonclip import functional

X = torch.ones(2, 3)
F8 = torch.float8_e4m3fn
BY_LIMIT: dict[str, Callable[..., Any]] = {
    "norm": functional.clip_by_norm,
    "average": functional.clip_by_average_norm,
    "rms": functional.clip_by_rms,
    "global": functional.clip_by_global_norm,
    "known": lambda x, norm: functional.clip_by_global_norm(x, 1.0, use_norm=norm),
}


@pytest.mark.parametrize("limit", [-1.0, math.nan, torch.tensor(-1.0), torch.tensor([1.0, -2.0])])
@pytest.mark.parametrize("name", BY_LIMIT)
def test_negative_and_nan_limits_are_refused(name, limit):
    with pytest.raises(ValueError, match="must be 0 or more, got"):
        BY_LIMIT[name](X, limit)


def test_nan_as_a_limit_is_refused_and_as_a_known_norm_is_a_measurement():
    nan = torch.tensor(math.nan)
    with pytest.raises(ValueError, match="max_norm must be 0 or more"):
        functional.clip_by_norm(X, nan)
    (clipped,), _ = functional.clip_by_global_norm([X], 1.0, use_norm=nan)
    assert bool(clipped.isnan().all())


def test_float8_is_refused():
    with pytest.raises(TypeError, match="clip in float32 or bfloat16"):
        functional.clip_by_norm(X.to(F8), 1.0)


@pytest.mark.parametrize(
    "limit", [True, "1", None, 1j, torch.tensor(1), torch.tensor([1j]), torch.tensor(1.0).to(F8)]
)
@pytest.mark.parametrize("name", ["norm", "average", "rms", "global"])
def test_limits_that_are_no_numbers_are_refused(name, limit):
    with pytest.raises(TypeError, match="must be a number"):
        BY_LIMIT[name](X, limit)


@pytest.mark.parametrize("name", BY_LIMIT)
def test_several_limits_without_dimensions_are_refused(name):
    with pytest.raises(ValueError, match=r"one-element tensor.*got shape \(3,\)"):
        BY_LIMIT[name](X, torch.ones(3))


@pytest.mark.parametrize("shape", [(3,), (2, 2, 1)], ids=str)
def test_limits_that_do_not_broadcast_are_refused(shape):
    message = rf"broadcasts to the norms over dim; got shape {re.escape(str(shape))}"
    with pytest.raises(ValueError, match=message):
        functional.clip_by_norm(X, torch.ones(shape), dim=1)


@pytest.mark.parametrize("dim", [2, -3, (), (0, 0), (1, -1)], ids=str)
def test_dimensions_that_a_tensor_lacks_are_refused(dim):
    message = r"each at most once; got .* for a tensor of shape \(2, 3\)"
    with pytest.raises(ValueError, match=message):
        functional.clip_by_norm(X, 1.0, dim=dim)


@pytest.mark.parametrize("dim", [True, 1.0, "1", (0, True), [0.0], torch.tensor(1)], ids=str)
def test_dimensions_that_are_no_integers_are_refused(dim):
    with pytest.raises(TypeError, match=r"dim must be an integer, a sequence of integers or None"):
        functional.clip_by_norm(X, 1.0, dim=dim)


@pytest.mark.parametrize("norm_type", [0.0, 0.5, -math.inf, math.nan, -2])
def test_orders_below_1_are_refused(norm_type):
    with pytest.raises(ValueError, match="norm_type must be from 1 to inf, got"):
        functional.clip_by_norm(X, 1.0, norm_type=norm_type)


@pytest.mark.parametrize("bound", [0.5, None, torch.tensor(0.5)], ids=str)
def test_value_refuses_a_single_bound_without_its_name(bound):
    """ClipByValue takes it for both sides, torch.clamp for the lower one."""
    clip: Any = functional.clip_by_value
    with pytest.raises(TypeError, match=r"one without a name.*clip_by_value\(x, -0\.5, 0\.5\)"):
        clip(X, bound)


@pytest.mark.parametrize(
    "bounds", [((0.0, 1.0, 2.0), {}), ((0.0, 1.0), {"max": 1.0}), ((0.0,), {"min": 0.0})], ids=str
)
def test_value_refuses_a_bound_too_many(bounds):
    clip: Any = functional.clip_by_value
    positional, named = bounds
    with pytest.raises(TypeError, match="expected both bounds, or one by its name"):
        clip(X, *positional, **named)


@pytest.mark.parametrize(
    ("x", "low", "high", "message"),
    [
        (X, None, None, "expected a bound, got None for both"),
        (X, 1.0, 0.5, r"min must not exceed max, got min=1.0 and max=0.5"),
        (X, 0.0, math.nan, "max must be a number or None for no bound, got NaN"),
        (X.long(), 0.5, 2, r"bounds must be whole for torch.int64, got 0.5"),
        (X.int(), None, torch.tensor(0.5), "max must be of integers for"),
    ],
    ids=["none", "crossing", "nan", "fractions", "floating"],
)
def test_value_refuses_bounds_without_a_meaning(x, low, high, message):
    with pytest.raises(ValueError, match=message):
        functional.clip_by_value(x, min=low, max=high)


@pytest.mark.parametrize("bound", [True, "1", 1j, torch.tensor([True]), torch.tensor([1j])])
def test_value_refuses_bounds_that_are_no_real_numbers(bound):
    with pytest.raises(TypeError, match="min must be a"):
        functional.clip_by_value(X, min=bound)


@pytest.mark.parametrize("shape", [(2,), (2, 2, 3), (4, 3)], ids=str)
def test_value_refuses_bounds_that_do_not_broadcast_into_the_tensor(shape):
    with pytest.raises(ValueError, match="does not broadcast to x of shape"):
        functional.clip_by_value(X, min=torch.zeros(shape))


def test_a_call_that_raises_has_changed_nothing():
    x = torch.tensor([3.0, 4.0])
    with untouched([x]), pytest.raises(TypeError):
        functional.clip_by_global_norm([x, 1.0], 1.0)


def test_dir_shows_the_functions_only():
    assert dir(functional) == sorted(functional.__all__)


@pytest.mark.parametrize("name", ["clip", "adaptive_clip_grad"])
def test_functional_knows_names_from_elsewhere(name):
    with pytest.raises(AttributeError, match=rf"\.functional' .*'{name}'; here it is"):
        getattr(functional, name)


def test_other_names_get_pythons_errors():
    missing = "^module 'tritonclip.functional' has no attribute 'it'$"
    module: Any = functional
    with pytest.raises(AttributeError, match=missing):
        _ = module.it
    with pytest.raises(ImportError, match="cannot import name 'it'"):
        exec("from tritonclip.functional import it")
