"""The arguments of torch.nn.utils: numbers as torch converts them, and their rules."""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import Module

from tritonclip.engine.gradients import Gradients
from tritonclip.engine.plan import refuse_
from tritonclip.modes import is_traced
from tritonclip.rules import ClipByGlobalNorm, ClipByValue, Rule
from tritonclip.rules.arguments import as_limit

# Where torch has its foreach functions.
_FOREACH_DEVICES = ("cpu", "cuda", "xpu", "mtia", "privateuseone")
_cached_by_norm = lru_cache(maxsize=64)(ClipByGlobalNorm)
_cached_by_value = lru_cache(maxsize=64)(lambda bound: ClipByValue(as_limit("clip_value", bound)))


def as_float(name: str, number: object) -> float:
    """Converts a number as torch does: text and one-element tensors count.

    Python's booleans pass: rules refuse them. An argument that belongs elsewhere raises a TypeError
    that says where; errors of conversion are of Python's kinds.
    """
    if type(number) is float or isinstance(number, bool):
        return number
    if isinstance(number, Rule):
        raise TypeError(
            f"{name} must be a number, got the rule {type(number).__name__}; pass rules to clip_: "
            "clip_(parameters, rule)"
        )
    if isinstance(number, (list, tuple, Iterator, Module)):
        remedy = "parameters come first, and then numbers, such as a limit of 1.0"
        if isinstance(number, tuple):
            remedy += "; of two bounds make a rule: clip_(parameters, ClipByValue(-0.5, 0.5))"
        raise TypeError(f"{name} must be a number, got {type(number).__name__}; {remedy}")
    # NumPy's booleans by their name: tracing reads no dtype of theirs.
    is_boolean = type(number).__name__ in ("bool", "bool_")
    if is_boolean or (isinstance(number, Tensor) and number.dtype == torch.bool):
        raise TypeError(f"{name} must be a number, got a boolean {type(number).__name__}")
    if isinstance(number, Tensor) and number.numel() == 1 and is_traced():
        # Read when the graph runs.
        return number.to("cpu")  # type: ignore[return-value]
    if number is None:
        remedy = "leave it out for 2.0" if name == "norm_type" else "float('inf') clips nothing"
        raise TypeError(f"{name} must be a number, got None; {remedy}")
    try:
        return float(number)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{name} must be a number, such as 1.0, got {number!r:.80} of type "
            f"{type(number).__name__}"
        ) from None


def by_norm(max_norm: float, norm_type: float) -> ClipByGlobalNorm:
    """The rule, made once for floats: a cache would find 1 for True, and cannot be traced."""
    floats = type(max_norm) is float and type(norm_type) is float
    if floats and not torch.compiler.is_compiling():
        return _cached_by_norm(max_norm, norm_type)
    return ClipByGlobalNorm(max_norm, norm_type)


def by_value(bound: float) -> ClipByValue:
    """As `by_norm`."""
    if type(bound) is float and not torch.compiler.is_compiling():
        return _cached_by_value(bound)
    return ClipByValue(as_limit("clip_value", bound))


def check_foreach(gradients: Gradients) -> None:
    """Refuses foreach=True where torch does; otherwise the argument changes nothing."""
    for tensor in gradients.tensors:
        if tensor.device.type not in _FOREACH_DEVICES:
            error = RuntimeError(
                "foreach=True was passed, but can't use the foreach API on "
                f"{tensor.device.type} tensors"
            )
            if not refuse_(gradients, error):
                raise error
            break
