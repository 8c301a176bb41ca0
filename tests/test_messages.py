"""Warnings point to the user's line, and errors say what to write.

Names of other libraries, and values that are no rules, get an error with what to write here.
"""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonclip
from helpers.cases import parameter, parameters
from helpers.serving import forget_plans
from tritonclip import ClippedOptimizer, clip_
from tritonclip.backends import choose
from tritonclip.rules import known_rule

CALLS: dict[str, Callable[[list[Tensor]], Any]] = {
    "clip_": lambda params: tritonclip.clip_(params, 1.0),
    "clip_grad_norm_": lambda params: tritonclip.clip_grad_norm_(params, 1.0),
    "norms_by_name": tritonclip.norms_by_name,
    "step": lambda params: tritonclip.ClippedOptimizer(torch.optim.SGD(params), 1.0).step(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_warning_names_the_line_that_called(call, monkeypatch):
    monkeypatch.setattr(choose, "loops", None)
    monkeypatch.setattr(choose, "fault", "it was not built")
    choose._warn_once.cache_clear()
    forget_plans()
    with tritonclip.use_backend("auto"), pytest.warns(UserWarning, match="slower") as caught:
        call(parameters([torch.ones(4)]))
    choose._warn_once.cache_clear()
    forget_plans()
    assert [warning.filename for warning in caught] == [__file__]


MODEL = torch.nn.Linear(2, 2)
OF_ZERO: dict[str, Callable[[], Any]] = {
    "clip_": lambda: tritonclip.clip_(MODEL, 0.0),
    "clip_, int": lambda: tritonclip.clip_(MODEL, 0),
    "ClipByNorm": lambda: tritonclip.clip_(MODEL, tritonclip.ClipByNorm(0.0)),
    "ClipByRMS": lambda: tritonclip.clip_(MODEL, tritonclip.ClipByRMS(0.0)),
    "ClipByUnitNorm": lambda: tritonclip.clip_(MODEL, tritonclip.ClipByUnitNorm(0.0)),
    "ClipByValue": lambda: tritonclip.clip_(MODEL, tritonclip.ClipByValue(0.0)),
    "ClipByZScore": lambda: tritonclip.ClipByZScore(max_norm=0.0),
    "clip_grad_norm_": lambda: tritonclip.clip_grad_norm_(MODEL, 0.0),
    "clip_grad_value_": lambda: tritonclip.clip_grad_value_(MODEL, 0.0),
    "wrapper": lambda: tritonclip.ClippedOptimizer(torch.optim.SGD(MODEL.parameters()), 0),
    "hook": lambda: tritonclip.clip_on_backward_(MODEL, tritonclip.ClipByNorm(0)).remove(),
}


@pytest.mark.parametrize("call", OF_ZERO.values(), ids=OF_ZERO)
def test_a_limit_of_0_is_said_once_at_each_line(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
        call()
    (warning,) = caught
    assert "is 0, which makes every gradient 0" in str(warning.message)
    assert warning.filename == __file__


def test_a_limit_of_0_is_named_as_in_the_call():
    with pytest.warns(tritonclip.ClippingWarning, match="^clip_value is 0, which"):
        tritonclip.clip_grad_value_(MODEL, 0)


def test_a_limit_of_0_of_a_group_is_said_once_and_that_of_a_schedule_never():
    # Another zero, as the rules of numbers are known once.
    known_rule.cache_clear()  # type: ignore[attr-defined]  # a cache
    groups: Any = [{"params": MODEL.parameters(), "clip": 0}]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = tritonclip.ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 1.0)
        for _ in range(3):
            optimizer.step()
        optimizer.param_groups[0]["clip"] = tritonclip.ClipByNorm(lambda step: 0 if step < 9 else 1)
        optimizer.step()
    assert len(caught) == 1


LEAF = torch.ones(2, requires_grad=True)
NO_PARAMETERS: dict[str, Callable[[], Any]] = {
    "gradients": lambda: tritonclip.clip_([torch.ones(2)], 1.0),
    "loss": lambda: tritonclip.clip_((LEAF * 2).sum(), 1.0),
    "state_dict": lambda: tritonclip.clip_(MODEL.state_dict().items(), 1.0),
    "clip_grad_norm_": lambda: tritonclip.clip_grad_norm_([torch.ones(2)], 1.0),
    "clip_grad_value_": lambda: tritonclip.clip_grad_value_([torch.ones(2)], 1.0),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("call", NO_PARAMETERS.values(), ids=NO_PARAMETERS)
def test_tensors_in_place_of_parameters_are_said_once(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", tritonclip.ClippingWarning)
        call()
        call()
    (warning,) = caught
    assert "clip_tensors_" in str(warning.message)
    assert warning.filename == __file__


def test_parameters_without_gradients_are_no_mistake():
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    for fine in (MODEL, frozen, [*frozen.parameters()], LEAF, []):
        tritonclip.clip_(fine, 1.0)


@pytest.mark.parametrize("package", [torch, tritonclip])
def test_a_package_of_a_longer_name_is_the_users(package):
    file = f"{Path(package.__file__).parent}vision/train.py"
    call = compile("clip_((p for p in []), 1.0)", file, "exec")
    with pytest.warns(UserWarning, match="empty generator") as caught:
        exec(call, {"clip_": tritonclip.clip_})
    assert [warning.filename for warning in caught] == [file]


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
    (
        lambda: on_one(clip_, [("bias", torch.nn.Parameter(torch.ones(2)))]),
        "parameters come first: clip_(parameters, 1.0)",
    ),
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
