"""Names of other libraries, and values that are no rules, get an error with what to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tritonclip
from helpers.cases import parameter
from tritonclip import ClipByQuantile, ClippedOptimizer, clip_


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


def on_one(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(parameter(torch.ones(2)), *args, **kwargs)


GROUPS = optimizer().param_groups
# The call, and the remedy at the end of its error.
VALUES: list[tuple[Callable[[], object], str]] = [
    (lambda: on_one(clip_, None), "float('inf') measures and clips nothing"),
    (lambda: on_one(clip_, "1.0"), "of type str; convert text by float()"),
    (lambda: on_one(clip_, (-0.5, 0.5)), "write ClipByValue(-0.5, 0.5) for two bounds"),
    (
        lambda: on_one(clip_, optimizer()),
        "it clips in its step, and comes first: ClippedOptimizer(optimizer, 1.0)",
    ),
    (lambda: on_one(clip_, 1.0, nonfinite="skip"), "only a ClippedOptimizer can skip a step"),
    (
        lambda: on_one(clip_, 1.0, nonfinite=True),
        "as torch's error_if_nonfinite=True, 'error' raises",
    ),
    (lambda: clip_(GROUPS, 1.0), '[p for g in groups for p in g["params"]]'),  # type: ignore[arg-type]
    (lambda: on_one(tritonclip.clip_grad_norm_, None), "float('inf') clips nothing"),
    (
        lambda: on_one(tritonclip.clip_grad_value_, (-1, 1)),
        "clip_(parameters, ClipByValue(-0.5, 0.5))",
    ),
    (lambda: ClipByQuantile(90), "must lie between 0 and 1, got 90.0; write 0.9 for 90%"),
]


@pytest.mark.parametrize(("call", "remedy"), VALUES)
def test_wrong_value_gets_a_remedy(call, remedy):
    with pytest.raises((TypeError, ValueError), match=re.escape(remedy) + "$"):
        call()


@pytest.mark.parametrize("limit", [1.0, tritonclip.ClipByNorm(1.0)], ids=["number", "rule"])
def test_limit_and_rule_are_the_argument_max_norm(limit):
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    twin = weight.grad.clone()

    ClippedOptimizer(torch.optim.SGD([weight], lr=1.0), max_norm=limit).step()
    tritonclip.clip_tensors_([twin], max_norm=limit)

    assert weight.tolist() == (-twin).tolist()
    assert on_one(clip_, max_norm=limit) is not None
    assert twin.norm().item() == pytest.approx(1.0)


NAMES = {
    "clip": "clip_",
    "clip_grad_norm": "clip_grad_norm_",
    "ClipGradByGlobalNorm": "ClipByGlobalNorm",
    "ClipGradByNorm": "ClipByNorm",
    "ClipGradByValue": "ClipByValue",
    "AutoClip": "ClipByQuantile",
    "ZClip": "ClipByZScore",
    "AdaGC": "ClipByOwnHistory",
    "AGC": "ClipByUnitNorm",
    "adaptive_clip_grad": "ClipByUnitNorm",
    "clip_by_global_norm": "functional.clip_by_global_norm",
    "Clipping": "integrations.lightning.Clipping",
}


@pytest.mark.parametrize(("name", "match"), NAMES.items())
def test_name_from_elsewhere_gets_its_match(name, match):
    with pytest.raises(AttributeError, match=rf"{name}'; here it is tritonclip\.{match}"):
        getattr(tritonclip, name)
    assert not hasattr(tritonclip, name)


def test_import_of_a_name_from_elsewhere_gets_pythons_error():
    with pytest.raises(ImportError, match="cannot import name 'clip' from 'tritonclip'"):
        exec("from tritonclip import clip")


def test_other_names_get_pythons_errors():
    with pytest.raises(AttributeError, match=r"^module 'tritonclip' has no attribute 'it'$"):
        _ = tritonclip.it
    with pytest.raises(ImportError, match="cannot import name 'it'"):
        exec("from tritonclip import it")
