"""Calls with arguments of other libraries, or of torch, get an error with the call to write."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from cases import grad_of, parameter

import tritonclip
from tritonclip import (
    ClipBackward,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByOwnHistory,
    ClipByOwnQuantile,
    ClipByQuantile,
    ClipByRMS,
    ClipBySpectralNorm,
    ClipByUnitNorm,
    ClipByValue,
    ClipByZScore,
    ClippedOptimizer,
    FlatGradients,
    GradScaler,
    Outlier,
    clip_,
    functional,
)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


def on_one(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(parameter(torch.ones(2)), *args, **kwargs)


def around(*args: Any, **kwargs: Any) -> ClippedOptimizer:
    return ClippedOptimizer(optimizer(), *args, **kwargs)


# The call, what came, and what to write.
CALLS: list[tuple[Callable[[], object], str, str]] = [
    (lambda: on_one(clip_, max_norm=1.5), "'max_norm', got 1.5", "clip_(parameters, 1.5)"),
    (lambda: on_one(clip_, clip_norm=1.5), "'clip_norm', got 1.5", "clip_(parameters, 1.5)"),
    (lambda: on_one(clip_, gradient_clip_val=1), "'gradient_clip_val'", "clip_(parameters, 1)"),
    (lambda: on_one(clip_, clip_value=0.5), "'clip_value'", "clip_(parameters, ClipByValue(0.5))"),
    (lambda: on_one(clip_, clip_factor=0.01), "'clip_factor'", "ClipByUnitNorm(0.01)"),
    (
        lambda: on_one(clip_, 1.0, 2.0),
        "parameters, clip by position, got 2.0 after them",
        "clip_(parameters, ClipByGlobalNorm(1.0, norm_type=2.0))",
    ),
    (
        lambda: on_one(clip_, 1.0, norm_type=1.0),
        "'norm_type', got 1.0",
        "clip_(parameters, ClipByGlobalNorm(1.0, norm_type=1.0))",
    ),
    (
        lambda: on_one(clip_, 1.0, error_if_nonfinite=True),
        "'error_if_nonfinite', got True",
        'clip_(parameters, 1.0, nonfinite="error")',
    ),
    (lambda: on_one(clip_, 1.0, nonfinit="zero"), "'nonfinit'", "did you mean nonfinite?"),
    (lambda: on_one(clip_, 1.0, strict=True), "'strict'", "expected parameters, clip, nonfinite,"),
    (lambda: on_one(clip_), "needs its argument 'clip', got none", "clip_(parameters, 1.0)"),
    (lambda: around(max_norm=1.5), "'max_norm'", "ClippedOptimizer(optimizer, 1.5)"),
    (lambda: around(clipnorm=1.5), "'clipnorm'", "ClippedOptimizer(optimizer, 1.5)"),
    (lambda: around(), "needs its argument 'clip'", "ClippedOptimizer(optimizer, 1.0)"),
    (lambda: around(1.0, "skip"), "got 'skip' after them", 'options by name: nonfinite="error"'),
    (
        lambda: ClippedOptimizer(torch.optim.SGD, lr=0.1),  # type: ignore[call-arg, arg-type]
        "'lr'",
        "ClippedOptimizer(torch.optim.SGD(parameters, lr=0.1), 1.0)",
    ),
    (
        lambda: GradScaler(max_norm=1.0),  # type: ignore[call-arg]
        "'max_norm'",
        "ClippedOptimizer(optimizer, 1.0)",
    ),
    (lambda: on_one(FlatGradients, 1.0), "got 1.0 after", "clip_(FlatGradients(model), 1.0)"),
]
RULES: list[tuple[Any, dict[str, Any], str]] = [
    (ClipByValue, {"clip_value": 0.5}, "ClipByValue(0.5)"),
    (ClipByValue, {"clip_value_min": -1.0, "clip_value_max": 1.0}, "ClipByValue(min=-1.0, max="),
    (ClipByValue, {"max": 1.0}, "ClipByValue(0.5) for both sides"),
    (ClipByNorm, {"clip_norm": 0.5}, "ClipByNorm(0.5)"),
    (ClipByNorm, {}, "ClipByNorm(1.0)"),
    (ClipByGlobalNorm, {"clip_norm": 0.5}, "ClipByGlobalNorm(0.5)"),
    (ClipByGlobalNorm, {"max_norm": 1.0, "p": 1}, "ClipByGlobalNorm(1.0, norm_type=1)"),
    (ClipByUnitNorm, {"clip_factor": 0.02}, "ClipByUnitNorm(0.02)"),
    (ClipByUnitNorm, {"clipping": 0.02}, "ClipByUnitNorm(0.02)"),
    (ClipBySpectralNorm, {"clip_norm": 2.0}, "ClipBySpectralNorm(2.0)"),
    (ClipByQuantile, {"clip_percentile": 10}, "ClipByQuantile(0.1)"),
    (ClipByZScore, {"z_thresh": 3.0}, "ClipByZScore(threshold=3.0)"),
    (ClipByOwnHistory, {"lambda_rel": 1.1}, "ClipByOwnHistory(ratio=1.1)"),
    (ClipByOwnQuantile, {"percentile_clipping": 5}, "ClipByOwnQuantile(0.05)"),
    (ClipByRMS, {"threshold": 2.0}, "ClipByRMS(2.0)"),
    (Outlier, {"sigma_factor": 5}, "Outlier(sigmas=5)"),
    (ClipBackward, {"max_norm": 1.0}, "ClipBackward(ClipByNorm(1.0))"),
]
FUNCTIONS: list[tuple[Any, dict[str, Any], str]] = [
    (functional.clip_by_norm, {"clip_norm": 0.5}, "clip_by_norm(x, 0.5)"),
    (functional.clip_by_norm, {"max_norm": 1.0, "axes": [0]}, "clip_by_norm(x, 1.0, dim=[0])"),
    (functional.clip_by_norm, {}, "clip_by_norm(x, 1.0)"),
    (functional.clip_by_global_norm, {"clip_norm": 2.0}, "clip_by_global_norm(tensors, 2.0)"),
    (functional.clip_by_average_norm, {"clip_norm": 2.0}, "clip_by_average_norm(x, 2.0)"),
    (functional.clip_by_rms, {"threshold": 2.0}, "clip_by_rms(x, 2.0)"),
    (functional.clip_by_spectral_norm, {"beta": 2.0}, "clip_by_spectral_norm(x, 2.0)"),
    (functional.clip_by_value, {"clip_value_min": -1.0}, "clip_by_value(x, -1.0, 0.5), or min="),
    (functional.clip_per_example, {"l2_norm_clip": 2.0}, "clip_per_example(gradients, 2.0)"),
    (functional.clip_per_example, {"max_norm": 1.0, "reduction": "mean"}, "reduce='mean')"),
    (functional.clip_by_value, {"clip_value": 1.0}, "clip_by_value(x, -1.0, 1.0)"),
    (tritonclip.clip_tensors_, {"max_norm": 0.5}, "clip_tensors_(tensors, 0.5)"),
    (tritonclip.accumulate_, {"max_norm": 0.5}, "accumulate_(parameters, 0.5)"),
    (tritonclip.clip_backward, {"clip_value": 0.5}, "clip_backward(x, ClipByValue(0.5))"),
    (tritonclip.clip_on_backward_, {"max_norm": 0.5}, "(parameters, ClipByNorm(0.5))"),
]


@pytest.mark.parametrize(("call", "came", "write"), CALLS)
def test_misfit_says_what_came_and_what_to_write(call, came, write):
    with pytest.raises(TypeError, match=f"{re.escape(came)}.*; .*{re.escape(write)}"):
        call()


@pytest.mark.parametrize(("rule", "arguments", "write"), RULES)
def test_misfit_of_a_class_says_what_to_write(rule, arguments, write):
    with pytest.raises(TypeError, match=f"{rule.__name__}\\(\\) .*; write {re.escape(write)}"):
        rule(**arguments)


@pytest.mark.parametrize(("function", "arguments", "write"), FUNCTIONS)
def test_misfit_of_a_function_says_what_to_write(function, arguments, write):
    with pytest.raises(TypeError, match=f"{function.__name__}\\(\\) .*; .*{re.escape(write)}"):
        function(torch.nn.Parameter(torch.ones(2)), **arguments)


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
    (lambda: ClipByUnitNorm(exclude="head"), "of type str; write exclude=model.head"),  # type: ignore[arg-type]
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
    assert "signatures.py" not in files
