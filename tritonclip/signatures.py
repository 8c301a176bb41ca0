"""Errors for calls that do not fit a signature: each shows the call to write.

Remedies are found by the names that arguments have in other libraries, or in other functions of
this one. A wrapper around a function would slow down every call. Instead a function takes the
arguments that do not fit as `*_excess` and `**_unknown`, which its signature does not show, and
raises their `misfit`; a right call costs one empty dict. Constructors of dataclasses are wrapped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

_NORMS = (
    *("max_norm", "clip_norm", "clipnorm", "global_clipnorm", "max_grad_norm", "grad_clip"),
    *("gradient_clip_val", "gradient_clipping", "threshold", "value"),
)
_VALUES = ("clip_value", "clipvalue", "max_value", "max_delta")
_BOUNDS = ("min", "max", "clip_value_min", "clip_value_max", "a_min", "a_max")
_RATIOS = ("clip_factor", "clipping")
_MODES = ("mode", "clip_mode", "gradient_clip_algorithm", "algorithm")
_SETTINGS = ("lr", "params", "weight_decay", "momentum", "betas")


def _for_clip(call: str) -> dict[Sequence[str], str]:
    """The remedies of a call that takes a rule as its second argument."""
    return {
        (): f"{call}, 1.0)",
        ("rule",): f"{call}, {{value}})",
        _NORMS: f"{call}, {{value}})",
        _VALUES: f"{call}, ClipByValue({{value}}))",
        _BOUNDS: f"{call}, ClipByValue(-0.5, 0.5))",
        _RATIOS: f"{call}, ClipByUnitNorm({{value}}))",
        _MODES: f"{call}, ClipByNorm(1.0)), or another rule",
        ("norm_type", "eps"): f"{call}, ClipByGlobalNorm(1.0, {{name}}={{value}}))",
        ("error_if_nonfinite",): f'{call}, 1.0, nonfinite="error")',
        ("foreach",): f"{call}, 1.0), which chooses by itself",
        ("*",): (
            f"{call}, ClipByGlobalNorm(1.0, norm_type=2.0)) for a norm type, {call}, "
            'ClipByValue(-0.5, 0.5)) for two bounds, and options by name: nonfinite="error"'
        ),
    }


def _in_backward(call: str) -> dict[Sequence[str], str]:
    """The remedies of a call that takes a rule for one gradient at a time."""
    return {
        (): f"{call}ClipByNorm(1.0))",
        _NORMS: f"{call}ClipByNorm({{value}}))",
        _VALUES: f"{call}ClipByValue({{value}}))",
        _BOUNDS: f"{call}ClipByValue(-0.5, 0.5))",
        ("norm_type", "eps"): f"{call}ClipByNorm(1.0, {{name}}={{value}}))",
        ("error_if_nonfinite",): f'{call}ClipByNorm(1.0), nonfinite="error")',
    }


def _for_norm(rule: str) -> dict[Sequence[str], str]:
    return {
        (): f"{rule}(1.0)",
        (*_NORMS, *_VALUES): f"{rule}({{value}})",
        ("p", "ord", "norm"): f"{rule}(1.0, norm_type={{value}})",
        ("error_if_nonfinite", "nonfinite"): f'clip_(parameters, {rule}(1.0), nonfinite="error")',
        ("group_name", "auto_skip_clip", "foreach"): f"{rule}(1.0), which needs none",
    }


# The call to write, by the name of the function and by the names of arguments. `()` is the usual
# call, `*` the remedy for too many arguments by position.
_REMEDIES: dict[str, dict[Sequence[str], str]] = {
    "clip_": {
        **_for_clip("clip_(parameters"),
        ("scaler", "loss_scale"): "clip_(parameters, 1.0, grad_scale=scaler.get_scale())",
        ("total_norm", "use_norm"): "clip_grads_with_norm_(parameters, 1.0, {value})",
    },
    "clip_tensors_": _for_clip("clip_tensors_(tensors"),
    "accumulate_": {
        (): "accumulate_(parameters, 1.0)",
        _NORMS: "accumulate_(parameters, {value})",
        ("norm_type", "eps"): "accumulate_(parameters, ClipByGlobalNorm(1.0, {name}={value}))",
        ("scaler", "loss_scale"): "accumulate_(parameters, 1.0, grad_scale=scaler.get_scale())",
    },
    "ClippedOptimizer": {
        **_for_clip("ClippedOptimizer(optimizer"),
        _SETTINGS: "ClippedOptimizer(torch.optim.SGD(parameters, lr=0.1), 1.0)",
        ("scaler",): "tritonclip.GradScaler(), whose step(optimizer) unscales",
        ("grad_scale", "loss_scale"): "optimizer.step(grad_scale={value})",
    },
    "GradScaler": {
        (): 'GradScaler("cuda")',
        (*_NORMS, *_VALUES, "clip"): "ClippedOptimizer(optimizer, {value}), which the scaler steps",
    },
    "Clipping": {(): "Clipping(1.0)", _NORMS: "Clipping({value})"},
    "ClippingMixin": {(): "ClippingTrainer(model, arguments, ..., clip=1.0)"},
    "FlatGradients": {
        (): "FlatGradients(model)",
        (*_NORMS, *_VALUES, "clip"): "clip_(FlatGradients(model), {value})",
        ("*",): "clip_(FlatGradients(model), 1.0) to clip",
    },
    "clip_backward": _in_backward("clip_backward(x, "),
    "ClipBackward": _in_backward("ClipBackward("),
    "clip_on_backward_": _in_backward("clip_on_backward_(parameters, "),
    "ClipByGlobalNorm": _for_norm("ClipByGlobalNorm"),
    "ClipByNorm": _for_norm("ClipByNorm"),
    "ClipByValue": {
        (): "ClipByValue(0.5) for both sides, or ClipByValue(-0.5, 0.5)",
        (*_VALUES, *_NORMS): "ClipByValue({value})",
        ("clip_value_min", "min_value", "a_min"): "ClipByValue(min={value}, max=0.5)",
        ("clip_value_max", "a_max"): "ClipByValue(min=-0.5, max={value})",
    },
    "ClipByUnitNorm": {
        (): "ClipByUnitNorm(0.01)",
        (*_RATIOS, *_NORMS): "ClipByUnitNorm({value})",
        ("norm_type",): "ClipByUnitNorm(0.01), whose norms are of order 2",
    },
    "ClipBySpectralNorm": {
        (): "ClipBySpectralNorm(1.0)",
        (*_NORMS, *_VALUES, "c", "beta"): "ClipBySpectralNorm({value})",
        ("norm_type",): "ClipBySpectralNorm(1.0), whose norms are largest singular values",
    },
    "ClipByQuantile": {
        (): "ClipByQuantile(0.9)",
        ("percentile", "clip_percentile"): "ClipByQuantile(0.1) for the 10th percentile",
        ("q",): "ClipByQuantile({value})",
        ("history", "history_size", "window_size"): "ClipByQuantile(0.9, window={value})",
        ("max_grad_norm", "clip_norm"): "ClipByQuantile(0.9, max_norm={value})",
    },
    "ClipByOwnQuantile": {
        (): "ClipByOwnQuantile(0.9)",
        ("percentile", "percentile_clipping"): "ClipByOwnQuantile(0.05) for the 5th percentile",
        ("q",): "ClipByOwnQuantile({value})",
        ("history", "history_size", "window_size"): "ClipByOwnQuantile(0.9, window={value})",
        ("max_grad_norm", "clip_norm"): "ClipByOwnQuantile(0.9, max_norm={value})",
    },
    "ClipByZScore": {
        (): "ClipByZScore(2.5)",
        ("z_thresh", "z_threshold"): "ClipByZScore(threshold={value})",
        ("alpha", "beta"): "ClipByZScore(decay={value})",
        ("warmup_steps",): "ClipByZScore(warmup={value})",
        ("max_grad_norm", "clip_norm"): "ClipByZScore(max_norm={value})",
        (*_MODES, "clip_option", "clip_factor"): "ClipByZScore(2.5), which has one form",
    },
    "ClipByOwnHistory": {
        (): "ClipByOwnHistory(1.05)",
        ("lambda_rel", "factor"): "ClipByOwnHistory(ratio={value})",
        ("lambda_abs", "max_grad_norm", "clip_norm"): "ClipByOwnHistory(max_norm={value})",
        ("beta", "alpha"): "ClipByOwnHistory(decay={value})",
        ("warmup_steps",): "ClipByOwnHistory(warmup={value})",
    },
    "ClipByRMS": {(): "ClipByRMS(1.0)", (*_NORMS, *_VALUES): "ClipByRMS({value})"},
    "Outlier": {
        (): "Outlier(6.0)",
        ("sigma", "sigma_factor", "threshold", "z_thresh"): "Outlier(sigmas={value})",
        ("rolling_interval_length", "window_size", "history"): "Outlier(window={value})",
    },
    "clip_by_norm": {
        (): "clip_by_norm(x, 1.0)",
        _NORMS: "clip_by_norm(x, {value})",
        ("axes", "axis"): "clip_by_norm(x, 1.0, dim={value})",
        ("p", "ord"): "clip_by_norm(x, 1.0, norm_type={value})",
    },
    "clip_by_global_norm": {
        (): "clip_by_global_norm(tensors, 1.0)",
        _NORMS: "clip_by_global_norm(tensors, {value})",
        ("total_norm",): "clip_by_global_norm(tensors, 1.0, use_norm={value})",
    },
    "clip_by_average_norm": {
        (): "clip_by_average_norm(x, 1.0)",
        _NORMS: "clip_by_average_norm(x, {value})",
    },
    "clip_by_spectral_norm": {
        (): "clip_by_spectral_norm(x, 1.0)",
        (*_NORMS, "beta", "limit"): "clip_by_spectral_norm(x, {value})",
    },
    "clip_by_rms": {(): "clip_by_rms(x, 1.0)", _NORMS: "clip_by_rms(x, {value})"},
    "clip_per_example": {
        (): "clip_per_example(gradients, 1.0)",
        (*_NORMS, "l2_norm_clip"): "clip_per_example(gradients, {value})",
        ("global_l2_norm_clip",): "clip_per_example(gradients, 1.0, per_layer=True)",
        ("loss_reduction", "reduction"): "clip_per_example(gradients, 1.0, reduce={value})",
        ("into", "out"): "clip_per_example(gradients, 1.0, add_to=sums)",
        ("error_if_nonfinite",): 'clip_per_example(gradients, 1.0, nonfinite="error")',
    },
    "clip_by_value": {
        (): "clip_by_value(x, -0.5, 0.5)",
        _VALUES: "clip_by_value(x, -{value}, {value})",
        ("clip_value_min", "a_min", "min_value"): "clip_by_value(x, {value}, 0.5), or min={value}",
        ("clip_value_max", "a_max"): "clip_by_value(x, -0.5, {value}), or max={value}",
    },
}


# The value of an argument that was not passed.
ABSENT: Any = object()


def reaches_misfit(function: F) -> F:
    """Lets a function receive calls that do not fit its signature, to raise their `misfit`.

    Required arguments after the first get the default `ABSENT`. `inspect` shows neither this
    default nor `*_excess` and `**_unknown`.
    """
    signature = inspect.signature(function)
    shown = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.name not in ("_excess", "_unknown")
    ]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    absent = [ABSENT] * (sum(map(_is_required, shown)) - 1)
    function.__defaults__ = (*absent, *(function.__defaults__ or ()))
    return function


def explains_misfits(kind: C) -> C:
    """Makes a class raise the `misfit` of calls that do not fit its signature."""
    construct = kind.__init__  # type: ignore[misc]  # of the class
    name = kind.__name__

    @wraps(construct)
    def __init__(self: object, *args: Any, **kwargs: Any) -> None:
        try:
            construct(self, *args, **kwargs)
        except TypeError as error:
            # Raised by the call itself, before the constructor began.
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise _of_constructor(name, construct, args, kwargs) or error from None
            raise

    kind.__init__ = __init__  # type: ignore[misc]
    return kind


def misfit(
    function: Callable[..., Any], excess: Sequence[object], unknown: Mapping[str, object]
) -> TypeError:
    """The error for a call of a function that `reaches_misfit`."""
    parameters = inspect.signature(function).parameters
    required = [key for key, one in parameters.items() if _is_required(one)]
    return _misfit(function.__name__, parameters, excess, unknown, required[-1])


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind in _POSITIONAL


def _of_constructor(
    name: str, construct: Callable[..., None], args: Sequence[object], kwargs: Mapping[str, object]
) -> TypeError | None:
    """The error for a call; None for a repeated argument, which Python's own error names."""
    parameters = dict(list(inspect.signature(construct).parameters.items())[1:])
    positional = [key for key, one in parameters.items() if one.kind in _POSITIONAL]
    named = [key for key, one in parameters.items() if one.kind is one.KEYWORD_ONLY]
    missing = [
        key
        for key in (*positional[len(args) :], *named)
        if key not in kwargs and parameters[key].default is inspect.Parameter.empty
    ]
    takes_any = len(positional) + len(named) < len(parameters)
    unknown = {} if takes_any else {k: v for k, v in kwargs.items() if k not in parameters}
    excess = () if takes_any else args[len(positional) :]
    if not (unknown or excess or missing):
        return None
    return _misfit(name, parameters, excess, unknown, missing[0] if missing else "")


def _misfit(
    name: str,
    parameters: Mapping[str, inspect.Parameter],
    excess: Sequence[object],
    unknown: Mapping[str, object],
    missing: str,
) -> TypeError:
    remedies = _REMEDIES.get(name, {(): f"{name}({', '.join(parameters)})"})
    for key, value in unknown.items():
        remedy = _remedy(remedies, key, value)
        if remedy is None:
            close = get_close_matches(key, parameters, n=1)
            meant = f"; did you mean {close[0]}?" if close else f", as in {remedies[()]}"
            remedy = f"expected {', '.join(parameters)}{meant}"
        return TypeError(f"{name}() has no argument {key!r}, got {value!r:.40}; {remedy}")
    if excess:
        positional = [key for key, one in parameters.items() if one.kind in _POSITIONAL]
        remedy = _remedy(remedies, "*", None) or f"write {remedies[()]}"
        return TypeError(
            f"{name}() takes {', '.join(positional)} by position, got {excess[0]!r:.40} after "
            f"them; {remedy}"
        )
    return TypeError(f"{name}() needs its argument {missing!r}, got none; write {remedies[()]}")


def _remedy(remedies: Mapping[Sequence[str], str], key: str, value: object) -> str | None:
    for keys, remedy in remedies.items():
        if key in keys:
            return "write " + remedy.format(name=key, value=f"{value!r:.40}")
    return None
