"""Names and arguments of other libraries, or of torch, get an error with what to write."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import pickle
import re
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import tritonclip
from helpers.cases import grad_of, parameter
from tritonclip import (
    ClipBackward,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByOwnHistory,
    ClipByOwnQuantile,
    ClipByQuantile,
    ClipByRMS,
    ClipByUnitNorm,
    ClipByValue,
    ClipByZScore,
    ClippedOptimizer,
    FlatGradients,
    GradScaler,
    Outlier,
    clip_,
    functional,
    hints,
)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


def on_one(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(parameter(torch.ones(2)), *args, **kwargs)


# The function, the arguments after the first, what came, and what to write.
CALLS: list[tuple[Any, list[Any], dict[str, Any], str, str]] = [
    (clip_, [], {"max_norm": 1.5}, "argument 'max_norm'", "write clip_(parameters, 1.5)"),
    (clip_, [], {"gradient_clip_val": 1}, "'gradient_clip_val'", "write clip_(parameters, 1)"),
    (clip_, [], {"clip_value": 0.5}, "", "write clip_(parameters, ClipByValue(0.5))"),
    (clip_, [], {"a_min": -1.0, "a_max": 1}, "", "write clip_(parameters, ClipByValue(-0.5, 0.5))"),
    (clip_, [], {"clip_factor": 0.01}, "", "write clip_(parameters, ClipByUnitNorm(0.01))"),
    (
        *(clip_, [1.0, 2.0], {}, "too many positional arguments"),
        'write clip_(parameters, ClipByGlobalNorm(1.0, norm_type=2.0), nonfinite="error")',
    ),
    (
        *(clip_, [1.0], {"norm_type": 1.0}, "'norm_type'"),
        "write clip_(parameters, ClipByGlobalNorm(1.0, norm_type=1.0))",
    ),
    (
        *(clip_, [1.0], {"error_if_nonfinite": True}, "'error_if_nonfinite'"),
        'write clip_(parameters, 1.0, nonfinite="error")',
    ),
    (clip_, [1.0], {"foreach": True}, "", "write clip_(parameters, 1.0) without it"),
    (clip_, [], {"total_norm": 3.0}, "", "write clip_grads_with_norm_(parameters, 1.0, 3.0)"),
    (
        *(clip_, [1.0], {"nonfinit": "zero"}, "'nonfinit'"),
        "expected parameters, clip, nonfinite, grad_scale, state, process_group, copies, as in "
        "clip_(parameters, 1.0)",
    ),
    (clip_, [], {}, "missing a required argument: 'clip'", "write clip_(parameters, 1.0)"),
    (tritonclip.clip_tensors_, [], {"max_norm": 0.5}, "", "write clip_tensors_(tensors, 0.5)"),
    (tritonclip.accumulate_, [], {"max_norm": 0.5}, "", "write accumulate_(parameters, 0.5)"),
    (
        *(tritonclip.accumulate_, [], {"clip_value": 0.5}, ""),
        "write accumulate_(parameters, 1.0), which clips by one norm alone",
    ),
    (
        *(tritonclip.clip_backward, [], {"clip_value": 0.5}, ""),
        "write clip_backward(x, ClipByValue(0.5))",
    ),
    (
        *(tritonclip.clip_on_backward_, [], {"max_norm": 0.5}, ""),
        "write clip_on_backward_(parameters, ClipByNorm(0.5))",
    ),
    (FlatGradients, [1.0], {}, "too many", "write clip_(FlatGradients(model), 1.0) to clip"),
    (FlatGradients, [], {"clip_norm": 1}, "", "write clip_(FlatGradients(model), 1)"),
    (functional.clip_by_norm, [], {"clip_norm": 0.5}, "", "write clip_by_norm(x, 0.5)"),
    (functional.clip_by_norm, [1.0], {"axes": [0]}, "", "write clip_by_norm(x, 1.0, dim=[0])"),
    (functional.clip_by_norm, [], {}, "'max_norm'", "write clip_by_norm(x, 1.0)"),
    (functional.clip_by_rms, [], {"threshold": 2.0}, "", "write clip_by_rms(x, 2.0)"),
    (
        *(functional.clip_by_value, [], {"clip_value_min": -1.0}, ""),
        "write clip_by_value(x, -1.0, 0.5), or min=-1.0",
    ),
    (functional.clip_by_value, [], {"clip_value": 1.0}, "", "write clip_by_value(x, -1.0, 1.0)"),
    (
        *(functional.clip_per_example, [1.0], {"reduction": "mean"}, ""),
        "write clip_per_example(gradients, 1.0, reduce='mean')",
    ),
]
CLASSES: list[tuple[Any, dict[str, Any], str]] = [
    (ClipByValue, {"clip_value": 0.5}, "ClipByValue(0.5)"),
    (ClipByValue, {"clip_value_min": -1.0, "clip_value_max": 1.0}, "ClipByValue(-1.0, 0.5)"),
    (ClipByValue, {"max": 1.0}, "ClipByValue(-0.5, 0.5)"),
    (ClipByNorm, {}, "ClipByNorm(1.0)"),
    (ClipByGlobalNorm, {"clip_norm": 0.5}, "ClipByGlobalNorm(0.5)"),
    (ClipByGlobalNorm, {"max_norm": 1.0, "p": 1}, "ClipByGlobalNorm(1.0, norm_type=1)"),
    (ClipByUnitNorm, {"clip_factor": 0.02}, "ClipByUnitNorm(0.02)"),
    (ClipByQuantile, {"clip_percentile": 10}, "ClipByQuantile(0.1)"),
    (ClipByQuantile, {"history": 50}, "ClipByQuantile(0.9, window=50)"),
    (ClipByZScore, {"z_thresh": 3.0}, "ClipByZScore(3.0)"),
    (ClipByOwnHistory, {"lambda_abs": 1.1}, "ClipByOwnHistory(1.05, max_norm=1.1)"),
    (ClipByOwnQuantile, {"percentile_clipping": 5}, "ClipByOwnQuantile(0.05)"),
    (ClipByRMS, {"threshold": 2.0}, "ClipByRMS(2.0)"),
    (Outlier, {"sigma_factor": 5}, "Outlier(5)"),
    (ClipBackward, {"max_norm": 1.0}, "ClipBackward(ClipByNorm(1.0))"),
    (ClippedOptimizer, {"clipnorm": 1.5}, "ClippedOptimizer(optimizer, 1.5)"),
    (ClippedOptimizer, {"lr": 0.1}, "ClippedOptimizer(torch.optim.SGD(parameters, lr=0.1), 1.0)"),
    (GradScaler, {"max_norm": 1}, "ClippedOptimizer(optimizer, 1), which the scaler steps"),
]


@pytest.mark.parametrize(("function", "args", "kwargs", "came", "write"), CALLS)
def test_misfit_says_what_came_and_what_to_write(function, args, kwargs, came, write):
    expected = f"^{function.__name__}\\(\\): .*{re.escape(came)}.*; .*{re.escape(write)}$"
    with pytest.raises(TypeError, match=expected):
        on_one(function, *args, **kwargs)


@pytest.mark.parametrize(("kind", "kwargs", "write"), CLASSES)
def test_misfit_of_a_class_says_what_to_write(kind, kwargs, write):
    with pytest.raises(TypeError, match=f"^{kind.__name__}\\(\\): .*; write {re.escape(write)}$"):
        kind(**kwargs)


GROUPS = optimizer().param_groups
# The call, and the remedy at the end of its error.
VALUES: list[tuple[Callable[[], object], str]] = [
    (lambda: on_one(clip_, None), "float('inf') measures and clips nothing"),
    (lambda: on_one(clip_, "1.0"), "of type str; convert text by float()"),
    (lambda: on_one(clip_, (-0.5, 0.5)), "write ClipByValue(-0.5, 0.5) for two bounds"),
    (lambda: on_one(clip_, optimizer()), "it clips in its step: ClippedOptimizer(optimizer, 1.0)"),
    (lambda: on_one(clip_, 1.0, nonfinite="skip"), "only a ClippedOptimizer can skip a step"),
    (lambda: on_one(clip_, 1.0, nonfinite="async_error"), "can raise at a later step"),
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
    (
        lambda: ClipByUnitNorm(exclude="head"),  # type: ignore[arg-type]
        "got 'head' of type str at position 0; write exclude=model.head, or "
        "exclude=model.head.parameters()",
    ),
]


@pytest.mark.parametrize(("call", "remedy"), VALUES)
def test_wrong_value_gets_a_remedy(call, remedy):
    with pytest.raises((TypeError, ValueError), match=re.escape(remedy) + "$"):
        call()


def test_misfit_changes_nothing():
    one = parameter(torch.full((2,), 3.0))
    with pytest.raises(TypeError):
        clip_(one, 1.0, norm_type=1.0)  # type: ignore[call-overload]
    assert grad_of(one).tolist() == [3.0, 3.0]


def test_errors_of_a_constructor_stay():
    with pytest.raises(TypeError, match=r"^max_norm must be a number, got 'a' of type str$"):
        ClipByNorm("a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="multiple values for argument 'max_norm'"):
        ClipByNorm(1.0, max_norm=1.0)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (clip_, "parameters, clip, nonfinite, grad_scale, state, process_group, copies"),
        (functional.clip_by_norm, "x, max_norm, dim, norm_type"),
        (functional.clip_by_value, "x, bounds, min, max"),
        (tritonclip.clip_backward, "x, rule, nonfinite"),
        (ClipByNorm, "max_norm, norm_type, eps"),
        (ClipByValue, "min, max"),
    ],
)
def test_signature_shows_the_arguments_alone(function, shown):
    parameters = inspect.signature(function).parameters
    assert ", ".join(parameters) == shown
    assert next(iter(parameters.values())).default is inspect.Parameter.empty


def _public() -> list[Any]:
    """Every public object, under its name."""
    modules = [tritonclip, functional]
    for name in ("lightning", "transformers"):
        # The packages that they serve are optional.
        with contextlib.suppress(ImportError):
            modules.append(importlib.import_module(f"tritonclip.integrations.{name}"))
    return [
        pytest.param(getattr(module, name), id=name)
        for module in modules
        for name in module.__all__
    ]


@pytest.mark.parametrize("value", _public())
def test_every_public_name_has_an_example(value):
    examples = doctest.DocTestParser().get_examples(value.__doc__ or "")
    assert any(one.want for one in examples)


def test_function_can_be_pickled():
    assert pickle.loads(pickle.dumps(clip_)) is clip_


def test_right_call_enters_no_function_for_misfits():
    one, files = parameter(torch.ones(2)), set()

    def note(frame: FrameType, event: str, _: object) -> None:
        files.add(Path(frame.f_code.co_filename).name)

    clip_(one, 1.0)
    sys.setprofile(note)
    try:
        clip_(one, 1.0)
    finally:
        sys.setprofile(None)
    assert "clipping.py" in files
    assert "hints.py" not in files


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


@pytest.mark.parametrize("name", ["clip", "adaptive_clip_grad"])
def test_functional_knows_names_from_elsewhere(name):
    with pytest.raises(AttributeError, match=rf"\.functional' .*'{name}'; here it is"):
        getattr(functional, name)


@pytest.mark.parametrize("module", [tritonclip, functional], ids=lambda module: module.__name__)
def test_other_names_get_pythons_errors(module):
    with pytest.raises(AttributeError, match=f"^module '{module.__name__}' has no attribute 'it'$"):
        _ = module.it
    with pytest.raises(ImportError, match="cannot import name 'it'"):
        exec(f"from {module.__name__} import it")


def test_every_match_is_there():
    for name, text in hints.NAMES.items():
        path = re.split(r"[ ,(]", text)[0]
        assert name not in tritonclip.__all__
        # Their packages are optional.
        assert path.startswith("integrations.") or attrgetter(path)(tritonclip)
