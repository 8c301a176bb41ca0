"""Errors for names and calls of other libraries: Python's own, with what to write here.

`explained` wraps a function or a class to catch the error of a call that does not fit. A function
that runs in every step `receives_misfits` instead: it takes what does not fit as `*_excess` and
`**_unknown`, and a right call passes through no wrapper.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T", bound=Callable[..., Any])

# Our name for each name in torch, Paddle, TensorFlow, optax, timm and papers; rules add theirs.
NAMES = {
    "ClipGradForMOEByGlobalNorm": "ClipByGlobalNorm",
    "Clipping": "integrations.lightning.Clipping",
    "ClippingTrainer": "integrations.transformers.ClippingTrainer",
    "ErrorClipByValue": "clip_backward",
    "LossScaleOptimizer": "GradScaler",
    "apply_if_finite": 'ClippedOptimizer(..., nonfinite="skip")',
    "clip": "clip_ (in place) or functional.clip_by_value (out of place)",
    "clip_by_average_norm": "functional.clip_by_average_norm",
    "clip_by_block_rms": "ClipByRMS (in place) or functional.clip_by_rms (out of place)",
    "clip_by_global_norm": "functional.clip_by_global_norm (out of place) or clip_ (in place)",
    "clip_by_norm": "functional.clip_by_norm (out of place) or clip_ with ClipByNorm (in place)",
    "clip_by_rms": "functional.clip_by_rms (out of place) or clip_ with ClipByRMS (in place)",
    "clip_by_value": "functional.clip_by_value (out of place) or clip_ with ClipByValue (in place)",
    "clip_grad": "clip_",
    "clip_grad_norm": "clip_grad_norm_",
    "clip_grad_value": "clip_grad_value_",
    "clip_gradients": "clip_",
    "clip_grads_with_norm": "clip_grads_with_norm_",
    "dispatch_clip_grad": "clip_",
    "differentially_private_aggregate": "functional.clip_per_example, without its noise",
    "per_example_global_norm_clip": "functional.clip_per_example",
    "per_example_layer_norm_clip": "functional.clip_per_example, with per_layer=True",
    "global_norm": "get_total_norm, or functional.global_norm (differentiable)",
}

# What to write for an argument of other libraries, or of other functions here: the first argument
# that the called function has, or a whole call. A name alone takes the value that came; "*" is an
# argument too many by position.
_ARGUMENTS = {
    "max_norm clip_norm clipnorm global_clipnorm max_grad_norm grad_clip gradient_clip_val "
    "gradient_clipping threshold value limit l2_norm_clip": (
        "clip | rule=ClipByNorm({value}) | max_norm | max_rms | ratio | c"
    ),
    "clip_value clipvalue max_value max_delta": (
        "clip=ClipByValue({value}) | rule=ClipByValue({value}) | ClipByValue({value})"
    ),
    "min clip_value_min min_value a_min": (
        "min | clip=ClipByValue(-0.5, 0.5) | rule=ClipByValue(-0.5, 0.5)"
    ),
    "max clip_value_max a_max": "max | clip=ClipByValue(-0.5, 0.5) | rule=ClipByValue(-0.5, 0.5)",
    "clip_factor clipping": "clip=ClipByUnitNorm({value}) | ratio",
    "mode clip_mode gradient_clip_algorithm algorithm": (
        "a rule for it: a number for the norm, ClipByValue(0.5), or ClipByUnitNorm(0.01) for agc"
    ),
    "norm_type eps": (
        "clip=ClipByGlobalNorm(1.0, {name}={value}) | rule=ClipByNorm(1.0, {name}={value})"
    ),
    "p ord norm": "norm_type | clip=ClipByGlobalNorm(1.0, norm_type={value})",
    "rule": "clip",
    "error_if_nonfinite": 'nonfinite="error"',
    "scaler loss_scale": "grad_scale=scaler.get_scale()",
    "total_norm use_norm": "use_norm | clip_grads_with_norm_(parameters, 1.0, {value})",
    "foreach group_name auto_skip_clip": "{usual} without it",
    "axes axis": "dim",
    "loss_reduction reduction": "reduce",
    "history history_size window_size rolling_interval_length": "window",
    "*": 'clip=ClipByGlobalNorm(1.0, norm_type=2.0), nonfinite="error"',
}
# By each word: the first word of its line, and what to write.
_WORDS = {
    word: (words.split()[0], text) for words, text in _ARGUMENTS.items() for word in words.split()
}

# The value of an argument that was not passed.
ABSENT: Any = object()


class _Call(NamedTuple):
    """A function, or a class by its constructor; its usual call; what to write for arguments."""

    name: str
    function: Callable[..., Any]
    usual: str
    arguments: Mapping[str, str]


def explained(usual: str, arguments: Mapping[str, str] | None = None) -> Callable[[T], T]:
    """Makes wrong calls of a function or class raise an error that shows its usual call.

    `arguments` says what to write for arguments, before the table of all functions: a parameter, a
    parameter with a value, or a call. Several names are divided by spaces; the first word of a line
    of the table stands for the line.
    """

    def explain(target: T) -> T:
        untyped: Any = target
        is_class = isinstance(target, type)
        function = untyped.__init__ if is_class else target
        words = {word: text for key, text in (arguments or {}).items() for word in key.split()}
        call = _Call(target.__name__, function, usual, words)

        @wraps(function)
        def explaining(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError:
                if (error := _misfit(call, args, kwargs)) is not None:
                    raise error from None
                raise

        if not is_class:
            return explaining  # type: ignore[return-value]  # of the same signature
        untyped.__init__ = explaining
        return target

    return explain


def receives_misfits(function: T) -> T:
    """As `explained`, for a function that takes `*_excess` and `**_unknown` to raise `misfit`.

    Its second argument gets the default `ABSENT`. `inspect` shows the function without all three.
    """
    untyped: Any = function
    signature = inspect.signature(function)
    parameters = [p for name, p in signature.parameters.items() if not name.startswith("_")]
    untyped.__signature__ = signature.replace(parameters=parameters)
    untyped.__defaults__ = (ABSENT,)
    return function


def misfit(function: Callable[..., Any], /, *args: object, **unknown: object) -> TypeError:
    """The error for a call of a function that `receives_misfits`, usually with a limit of 1.0."""
    name, (first, *_) = function.__name__, inspect.signature(function).parameters
    given = [value for value in args if value is not ABSENT]
    error = _misfit(_Call(name, function, f"{name}({first}, 1.0)", {}), given, unknown)
    assert error is not None
    return error


def missing(module: ModuleType, name: str) -> AttributeError:
    """The error of a module's `__getattr__`, with our name for a name of another library."""
    text = f"module {module.__name__!r} has no attribute {name!r}"
    if name in NAMES:
        text += f"; here it is tritonclip.{NAMES[name]}"
    return AttributeError(text, name=name, obj=module)


def _misfit(call: _Call, args: Sequence[object], kwargs: Mapping[str, object]) -> TypeError | None:
    """Python's error for a call, with what to write; None for a call that fits."""
    signature = inspect.signature(call.function)
    names = [name for name in signature.parameters if name != "self"]
    try:
        signature.bind_partial(*args, **kwargs)
    except TypeError as error:
        word = next((key for key in kwargs if key not in names), "*")
        remedy = _remedy(call, names, word, kwargs.get(word))
        return TypeError(f"{call.name}(): {error}; {remedy}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return TypeError(f"{call.name}(): {error}; write {call.usual}")
    return None


def _remedy(call: _Call, names: Sequence[str], word: str, value: object) -> str:
    """What to write for an argument that the call does not have; "*" for one by position."""
    line, common = _WORDS.get(word, (word, ""))
    remedies = call.arguments.get(word) or call.arguments.get(line) or common
    for remedy in filter(None, remedies.split(" | ")):
        template = f"{remedy}={{value}}" if remedy.isidentifier() else remedy
        text = template.format(name=word, value=f"{value!r:.40}", usual=call.usual)
        name = text.partition("=")[0]
        if not name.isidentifier():
            return f"write {text}"
        if name in names:
            return f"write {_with_argument(call.usual, names.index(name), text)}"
    return f"expected {', '.join(names) or 'no argument'}, as in {call.usual}"


def _with_argument(usual: str, position: int, argument: str) -> str:
    """The usual call with an argument, which takes the place of one by position."""
    head, _, inside = usual[:-1].partition("(")
    args = inside.split(", ")
    if position < len(args):
        argument = argument.partition("=")[2]
    args[position : position + 1] = [argument]
    return f"{head}({', '.join(args)})"
