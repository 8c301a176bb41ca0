"""Errors for names and calls of other libraries: each shows what to write here.

Python raises for a call that does not fit before the function begins. `explained` wraps a function
or a class to catch that error. `receives_misfits` is for functions that run in every step: these
take what does not fit as `*_excess` and `**_unknown`, and a right call passes through no wrapper.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from dis import opname
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T", bound=Callable[..., Any])
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

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
    "clip_by_spectral_norm": "functional.clip_by_spectral_norm (out of place) or clip_ with "
    "ClipBySpectralNorm (in place)",
    "clip_by_value": "functional.clip_by_value (out of place) or clip_ with ClipByValue (in place)",
    "clip_grad": "clip_",
    "clip_grad_norm": "clip_grad_norm_",
    "clip_grad_value": "clip_grad_value_",
    "clip_gradients": "clip_",
    "clip_grads_with_norm": "clip_grads_with_norm_",
    "dispatch_clip_grad": "clip_",
    "spectral_hardcap": "functional.clip_by_spectral_norm (out of place) or clip_ with "
    "ClipBySpectralNorm (in place)",
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
    word: (words.split()[0], one) for words, one in _ARGUMENTS.items() for word in words.split()
}

# The value of an argument that was not passed.
ABSENT: Any = object()


class _Call(NamedTuple):
    """A function or class, its parameters, its usual call, and what to write for arguments."""

    name: str
    parameters: Mapping[str, inspect.Parameter]
    usual: str
    arguments: Mapping[str, str]


def explained(usual: str, arguments: Mapping[str, str] | None = None) -> Callable[[T], T]:
    """Makes wrong calls of a function or class raise an error that shows what to write.

    Args:
        usual: the usual call, such as ``"clip_by_norm(x, 1.0)"``.
        arguments: what to write for arguments, before the table of all functions: a parameter, a
            parameter with a value, or a call. Several names are divided by spaces; the first word
            of a line of the table stands for the line.
    """

    def explain(target: T) -> T:
        kind: Any = target
        is_class = isinstance(target, type)
        function = kind.__init__ if is_class else target
        parameters = dict(list(inspect.signature(function).parameters.items())[is_class:])
        call = _Call(target.__name__, parameters, usual, _by_word(arguments))

        @wraps(function)
        def explaining(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                # Raised by the call itself, before the function began.
                if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                    raise _misfit(call, args[is_class:], kwargs) or error from None
                raise

        if not is_class:
            return explaining  # type: ignore[return-value]  # of the same signature
        kind.__init__ = explaining
        return target

    return explain


def receives_misfits(usual: str, arguments: Mapping[str, str] | None = None) -> Callable[[T], T]:
    """As `explained`, for a function that takes `*_excess` and `**_unknown` to raise `misfit`.

    Required arguments after the first get the default `ABSENT`. `inspect` shows the function
    without all three.
    """

    def receive(function: T) -> T:
        signature = inspect.signature(function)
        shown = {
            name: one
            for name, one in signature.parameters.items()
            if name not in ("_excess", "_unknown")
        }
        untyped: Any = function
        untyped.__signature__ = signature.replace(parameters=list(shown.values()))
        absent = [ABSENT] * (sum(map(_is_required, shown.values())) - 1)
        untyped.__defaults__ = (*absent, *(untyped.__defaults__ or ()))
        _receiving[function.__name__] = _Call(function.__name__, shown, usual, _by_word(arguments))
        return function

    return receive


# The functions that receive misfits, by name.
_receiving: dict[str, _Call] = {}


def misfit(function: Callable[..., Any], /, *args: object, **unknown: object) -> TypeError:
    """The error for a call of a function that `receives_misfits`."""
    given = [one for one in args if one is not ABSENT]
    error = _misfit(_receiving[function.__name__], given, unknown)
    assert error is not None
    return error


def missing(module: ModuleType, name: str) -> AttributeError | ImportError:
    """The error of a module's `__getattr__`, with our name for a name of another library."""
    match = NAMES.get(name)
    if match is None:
        return AttributeError(
            f"module {module.__name__!r} has no attribute {name!r}", name=name, obj=module
        )
    text = f"module {module.__name__!r} has no attribute {name!r}; here it is tritonclip.{match}"
    # `from module import name` replaces an AttributeError by its own, an ImportError it keeps.
    frame = sys._getframe(2)
    if opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM":
        return ImportError(text, name=module.__name__)
    return AttributeError(text, name=name, obj=module)


def _by_word(arguments: Mapping[str, str] | None) -> dict[str, str]:
    return {word: one for words, one in (arguments or {}).items() for word in words.split()}


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind in _POSITIONAL


def _misfit(call: _Call, args: Sequence[object], kwargs: Mapping[str, object]) -> TypeError | None:
    """The error for a call; None for a repeated argument, which Python's own error names."""
    name, parameters, usual, _ = call
    kinds = {one.kind for one in parameters.values()}
    for key, value in kwargs.items():
        if key not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
            remedy = _remedy(call, key, value)
            if remedy is None:
                close = get_close_matches(key, parameters, n=1)
                meant = f"; did you mean {close[0]}?" if close else f", as in {usual}"
                remedy = f"expected {', '.join(parameters)}{meant}"
            return TypeError(f"{name}() has no argument {key!r}, got {value!r:.40}; {remedy}")
    positional = [key for key, one in parameters.items() if one.kind in _POSITIONAL]
    if len(args) > len(positional) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return TypeError(
            f"{name}() takes {', '.join(positional)} by position, got "
            f"{args[len(positional)]!r:.40} after them; "
            f"{_remedy(call, '*', None) or f'write {usual}'}"
        )
    named = [key for key, one in parameters.items() if one.kind is one.KEYWORD_ONLY]
    for key in (*positional[len(args) :], *named):
        if key not in kwargs and parameters[key].default is inspect.Parameter.empty:
            return TypeError(f"{name}() needs its argument {key!r}, got none; write {usual}")
    return None


def _remedy(call: _Call, word: str, value: object) -> str | None:
    """What to write for an argument; None where no function takes one of this name."""
    first, known = _WORDS.get(word, (word, ""))
    own = call.arguments.get(word) or call.arguments.get(first)
    for one in filter(None, (own or known).split(" | ")):
        template = f"{one}={{value}}" if one.isidentifier() else one
        text = template.format(name=word, value=f"{value!r:.40}", usual=call.usual)
        name = text.partition("=")[0]
        if not name.isidentifier():
            return f"write {text}"
        if name in call.parameters:
            return f"write {_with_argument(call, name, text)}"
    return None


def _with_argument(call: _Call, name: str, argument: str) -> str:
    """The usual call with an argument, which takes the place of one by position."""
    head, _, inside = call.usual[:-1].partition("(")
    args, i = inside.split(", "), list(call.parameters).index(name)
    args[i : i + 1] = [argument.removeprefix(f"{name}=") if i < len(args) else argument]
    return f"{head}({', '.join(args)})"
