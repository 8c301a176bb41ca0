"""Limits, bounds and dimensions that have no meaning are refused, with a remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from helpers.cases import untouched
from helpers.refusals import Refused, each_refused
from tritonclip import functional

X, T = torch.ones(2, 3), torch.tensor
F8 = torch.float8_e4m3fn
# With arguments that types refuse.
norm: Any = functional.clip_by_norm
value: Any = functional.clip_by_value
BY_LIMIT: list[Callable[..., Any]] = [
    norm,
    functional.clip_by_average_norm,
    functional.clip_by_rms,
    functional.clip_by_global_norm,
    lambda x, norm: functional.clip_by_global_norm(x, 1.0, use_norm=norm),
]


def limits(*wrong: Any, by: Any = BY_LIMIT) -> list[Any]:
    return [partial(clip, X, limit) for clip in by for limit in wrong]


def norms(name: str, *wrong: Any) -> list[Any]:
    return [partial(norm, X, 1.0, **{name: one}) for one in wrong]


def bounds(name: str, *wrong: Any) -> list[Any]:
    return [partial(value, X, **{name: one}) for one in wrong]


REFUSED: list[Refused] = [
    (ValueError, "must be 0 or more", *limits(-1.0, math.nan, T(-1.0), T([1.0, -2.0]))),
    (TypeError, "clip in float32 or bfloat16", partial(norm, X.to(F8), 1.0)),
    (ValueError, "max_norm must be 0 or more", partial(norm, X, T(math.nan))),
    (TypeError, "must be a number", *limits(True, "1", None, 1j, T(1), by=BY_LIMIT[:4])),
    (TypeError, "must be a number or a floating", *limits(T([1j]), T(1.0).to(F8), by=BY_LIMIT[:4])),
    (ValueError, r"one-element tensor.*got shape \(3,\)", *limits(torch.ones(3))),
    (ValueError, r"norms over dim; got shape \(3,\)", partial(norm, X, torch.ones(3), dim=1)),
    (ValueError, r"got shape \(2, 2, 1\)", partial(norm, X, torch.ones(2, 2, 1), dim=1)),
    (
        ValueError,
        r"each at most once; got .* for a tensor of shape \(2, 3\)",
        *norms("dim", 2, -3, (), (0, 0), (1, -1)),
    ),
    (
        TypeError,
        r"dim must be an integer, a sequence of integers or None",
        *norms("dim", True, 1.0, "1", (0, True), [0.0], T(1)),
    ),
    (
        ValueError,
        "norm_type must be from 1 to inf, got",
        *norms("norm_type", 0.0, 0.5, -math.inf, math.nan, -2),
    ),
    # ClipByValue takes one for both sides, torch.clamp for the lower one.
    (
        TypeError,
        r"one without a name.*clip_by_value\(x, -0\.5, 0\.5\)",
        *(partial(value, X, bound) for bound in (0.5, None, T(0.5))),
    ),
    (
        TypeError,
        "expected both bounds, or one by its name",
        partial(value, X, 0.0, 1.0, 2.0),
        partial(value, X, 0.0, 1.0, max=1.0),
        partial(value, X, 0.0, min=0.0),
    ),
    (ValueError, "expected a bound, got None for both", partial(value, X, min=None, max=None)),
    (ValueError, "got min=1.0 and max=0.5", partial(value, X, min=1.0, max=0.5)),
    (ValueError, "no bound, got NaN", partial(value, X, min=0.0, max=math.nan)),
    (ValueError, "whole for torch.int64, got 0.5", partial(value, X.long(), min=0.5, max=2)),
    (ValueError, "max must be of integers for", partial(value, X.int(), max=T(0.5))),
    (TypeError, "min must be a", *bounds("min", True, "1", 1j, T([True]), T([1j]))),
    (
        ValueError,
        "does not broadcast to x of shape",
        *bounds("min", torch.zeros(2), torch.zeros(2, 2, 3), torch.zeros(4, 3)),
    ),
    (TypeError, "got float", partial(functional.clip_by_global_norm, [X, 1.0], 1.0)),
]


@each_refused(REFUSED)
def test_an_argument_is_refused_and_nothing_changes(call, error, message):
    with untouched([X]), pytest.raises(error, match=message):
        call()


def test_nan_as_a_known_norm_is_a_measurement():
    (clipped,), _ = functional.clip_by_global_norm([X], 1.0, use_norm=T(math.nan))
    assert bool(clipped.isnan().all())


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
