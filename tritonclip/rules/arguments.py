"""Checks of arguments: numbers, limits, norm types and loss scales."""

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import TypeGuard

import torch

from tritonclip.messages import warn_user

# A number that depends on the step, which is the number of earlier calls or steps.
Schedule = Callable[[int], float]
# A limit of 0 that a schedule gives for one step, which is no mistake and raises no warning.
OF_SCHEDULE = -0.0
# The least normal number of float32.
_LEAST_SCALE = 2.0**-126


def as_number(name: str, value: object) -> float:
    """Returns the argument as a float."""
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        if type(value) is not torch.Tensor:
            value = local_number(name, value)
        if value.device.type != "cpu":
            raise TypeError(
                f"{name} must be a number or a one-element tensor on the CPU, got one on "
                f"{value.device}, which would make the call wait for it; pass its item()"
            )
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name} must be a number, got {value!r:.80} of type {type(value).__name__}"
        )
    try:
        return float(value)
    except OverflowError:
        got = f"a larger number of type {type(value).__name__}"
        raise ValueError(f"{name} must fit a float, got {got}") from None


def local_number(name: str, number: torch.Tensor) -> torch.Tensor:
    """Returns a tensor itself, or the local tensor of a DTensor that is the same everywhere."""
    placements = getattr(number, "placements", None)
    if placements is None:
        return number
    if not all(placement.is_replicate() for placement in placements):
        raise ValueError(
            f"{name} must be one number on all processes, got a DTensor with the placements "
            f"{placements}, of which each process has a part; pass its full_tensor(), which all "
            "processes call"
        )
    local: torch.Tensor = number.to_local()  # type: ignore[attr-defined]
    return local


def as_limit(name: str, value: object) -> float:
    """Returns the argument as a float of 0 or more, or inf."""
    number = value if type(value) is float else as_number(name, value)
    if not number >= 0:
        raise ValueError(f"{name} must be 0 or more, got {number}")
    # -0.0 becomes 0.0: as a limit it would flip the sign of every gradient.
    return number + 0.0


def as_eps(name: str, value: object) -> float:
    """Returns the argument as a finite float of 0 or more."""
    number = as_limit(name, value)
    if number == math.inf:
        raise ValueError(f"{name} must be finite, got inf")
    return number


def as_limit_or_schedule(name: str, value: object) -> float | Schedule:
    """Returns a limit or a function of the step; warns of 0, which trainers take for no limit."""
    if is_function(value):
        return value
    number = as_limit(name, value)
    if number == 0 and value is not OF_SCHEDULE and not torch.compiler.is_compiling():
        warn_user(
            f"{name} is 0, which makes every gradient 0, so that nothing is learned; to turn "
            "clipping off, pass float('inf') or leave the clip out",
            once=True,
        )
    return number


def as_number_or_schedule(name: str, value: object) -> float | Schedule:
    """Returns the argument as a float, or a function of the step as it is."""
    return value if is_function(value) else as_number(name, value)


def is_function(value: object) -> TypeGuard[Schedule]:
    """Whether an argument is meant as a function of the step."""
    return callable(value) and not isinstance(value, type | torch.nn.Module)


def as_fraction(name: str, value: object) -> float:
    """Returns the argument as a float above 0 and below 1."""
    number = as_number(name, value)
    if not 0 < number < 1:
        remedy = f"; write {number / 100:g} for {number:g}%" if 1 < number < 100 else ""
        raise ValueError(f"{name} must lie between 0 and 1, got {number}{remedy}")
    return number


def as_positive(name: str, value: object) -> float:
    """Returns the argument as a float that is positive and finite."""
    number = as_number(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {number}")
    return number


def as_count(name: str, value: object, least: int) -> int:
    """Returns the argument as an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}")
    return int(value)


def saved_count(name: str, value: object) -> int:
    """Reads a count of a saved state, an int or a 0-d integer tensor; on meta it counts as 0."""
    number = value
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.dtype.is_floating_point:
        number = 0 if value.is_meta else value.item()
    # The bound lies well below the largest int64.
    if type(number) is int and 0 <= number < 2**62:
        return number
    raise ValueError(
        f"{name} of a saved state must be a count, an int or a 0-d integer tensor from 0 to 2**62, "
        f"got {value!r:.80}; expected the result of state_dict(). Nothing was loaded"
    )


def as_flag(name: str, value: object) -> bool:
    """Returns the argument as a bool; accepts 0 and 1 too."""
    try:
        if value in (False, True):
            return bool(value)
    except (RuntimeError, ValueError):
        # An array of several elements has no truth value.
        pass
    raise TypeError(
        f"{name} must be True or False, got {value!r:.80} of type {type(value).__name__}"
    )


def as_norm_type(name: str, value: object) -> float:
    """Returns the order of a norm as a float from 1 to inf; accepts 'inf' too."""
    is_text = isinstance(value, str) and value == "inf"
    number = math.inf if is_text else as_number(name, value)
    if not number >= 1:
        raise ValueError(f"{name} must be from 1 to inf, got {number}")
    return number


def check_one_float(name: str, tensor: torch.Tensor) -> None:
    """Raises for a tensor that is not one floating-point number."""
    expected = f"{name} must be a one-element floating-point tensor or a number"
    if not tensor.is_floating_point():
        raise TypeError(f"{expected}, got {tensor.dtype}")
    if tensor.numel() != 1:
        raise ValueError(f"{expected}, got shape {tuple(tensor.shape)}")


def as_grad_scale(grad_scale: object) -> float | torch.Tensor:
    """Returns the loss scale as a number; a one-element tensor on a device stays one, unread."""
    if grad_scale is None:
        return 1.0
    if isinstance(grad_scale, torch.Tensor):
        if type(grad_scale) is not torch.Tensor:
            grad_scale = local_number("grad_scale", grad_scale)
        check_one_float("grad_scale", grad_scale)
        if grad_scale.device.type != "cpu":
            return grad_scale.detach()
    # Numbers are excluded first: torch.compile cannot look up attributes of one that changes.
    if not isinstance(grad_scale, Real) and hasattr(grad_scale, "get_scale"):
        raise TypeError(
            f"grad_scale must be a number or a tensor, got a {type(grad_scale).__name__}; pass its "
            "get_scale()"
        )
    number = as_number("grad_scale", grad_scale)
    if not _LEAST_SCALE <= number <= 1 / _LEAST_SCALE:
        raise ValueError(
            "grad_scale must be positive, and from 2^-126 to 2^126, so that it and its reciprocal "
            f"fit float32; got {number}"
        )
    return number
