"""What to clip to: small frozen values that check their arguments when they are made."""

import math
from dataclasses import dataclass
from numbers import Real

import torch


def as_number(name: str, value: object) -> float:
    """The argument as a float; TypeError for what is no number, booleans and text among them."""
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    return float(value)


def as_limit(name: str, value: object) -> float:
    """The argument as a float that may be 0 or inf, but neither negative nor NaN."""
    number = as_number(name, value)
    if not number >= 0:
        raise ValueError(f"{name} must be 0 or more, got {number}")
    return number


def as_norm_type(value: object) -> float:
    """The order of a norm as a float: positive, 0, inf or -inf; the text 'inf' counts."""
    number = float(value) if value in ("inf", "-inf") else as_number("norm_type", value)
    if not (number >= 0 or number == -math.inf):
        raise ValueError(f"norm_type must be positive, 0, inf or -inf, got {number}")
    return number


def check_one_float(name: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor that is not one floating-point number."""
    expected = f"{name} must be a one-element floating-point tensor or a number"
    if not tensor.is_floating_point():
        raise TypeError(f"{expected}, got {tensor.dtype}")
    if tensor.numel() != 1:
        raise ValueError(f"{expected}, got shape {tuple(tensor.shape)}")


def as_grad_scale(grad_scale: object) -> float | torch.Tensor:
    """The loss scale as a number, or as a one-element tensor on a device that is not waited for."""
    if grad_scale is None:
        return 1.0
    if isinstance(grad_scale, torch.Tensor):
        check_one_float("grad_scale", grad_scale)
        if grad_scale.device.type != "cpu" or torch.compiler.is_compiling():
            return grad_scale.detach()
    number = as_number("grad_scale", grad_scale)
    info = torch.finfo(torch.float32)
    if not info.tiny <= number <= info.max:
        raise ValueError(f"grad_scale must be positive and fit float32, got {number}")
    return number


@dataclass(frozen=True, slots=True)
class _ClipNorm:
    max_norm: float
    norm_type: float = 2.0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_norm", as_limit("max_norm", self.max_norm))
        object.__setattr__(self, "norm_type", as_norm_type(self.norm_type))
        object.__setattr__(self, "eps", as_limit("eps", self.eps))
        if math.isinf(self.eps):
            raise ValueError("eps must be finite, got inf")


@dataclass(frozen=True, slots=True)
class ClipByGlobalNorm(_ClipNorm):
    r"""Scales all gradients by one coefficient if their norm before clipping exceeds `max_norm`.

    .. math::
        g \leftarrow g \cdot \min(1, \text{max\_norm} / (\|(g_1, \dots, g_n)\|_p + \text{eps}))

    Args:
        max_norm: largest norm of all gradients together; 0 or more, inf clips nothing.
        norm_type: p of the p-norm: positive, inf, -inf, or 0 for the number of nonzero elements.
        eps: added to the norm. 1e-6 is what `torch.nn.utils.clip_grad_norm_` adds; with 0, the
            exact form of Paddle and TensorFlow, a norm equal to `max_norm` changes nothing.

    Raises:
        ValueError: a limit that is negative or NaN, a `norm_type` that names no norm.
        TypeError: an argument that is no number.

    Example:
        >>> ClipByGlobalNorm(1.0)
        ClipByGlobalNorm(max_norm=1.0, norm_type=2.0, eps=1e-06)

    References:
        Pascanu, Mikolov, Bengio, `On the difficulty of training recurrent neural networks
        <https://arxiv.org/abs/1211.5063>`_, 2013
    """


@dataclass(frozen=True, slots=True)
class ClipByNorm(_ClipNorm):
    r"""Scales each gradient whose norm before clipping exceeds `max_norm`, by its own coefficient.

    .. math:: g_i \leftarrow g_i \cdot \min(1, \text{max\_norm} / (\|g_i\|_p + \text{eps}))

    Args:
        max_norm: largest norm of a gradient; 0 or more, inf clips nothing.
        norm_type: p of the p-norm: positive, inf, -inf, or 0 for the number of nonzero elements.
        eps: added to the norm; see :class:`ClipByGlobalNorm`.

    Raises:
        ValueError: a limit that is negative or NaN, a `norm_type` that names no norm.
        TypeError: an argument that is no number.

    Example:
        >>> ClipByNorm(1.0, eps=0.0)
        ClipByNorm(max_norm=1.0, norm_type=2.0, eps=0.0)

    References:
        Paddle, `ClipGradByNorm`; TensorFlow, `clip_by_norm`.
    """


@dataclass(frozen=True, slots=True, init=False)
class ClipByValue:
    r"""Clamps every element to `[min, max]`; NaN stays NaN.

    .. math:: g \leftarrow \min(\max(g, \text{min}), \text{max})

    Args:
        min: least value; or, where it is the only argument, the bound of both sides, 0 or more.
        max: largest value.

    The bounds are rounded to the gradient's dtype first, and a finite bound stays finite there.

    Raises:
        ValueError: `min > max`, a NaN, or a single bound that is negative.
        TypeError: an argument that is no number.

    Example:
        >>> ClipByValue(0.5)
        ClipByValue(min=-0.5, max=0.5)
        >>> ClipByValue(-1.0, 0.25)
        ClipByValue(min=-1.0, max=0.25)

    References:
        Paddle, `ClipGradByValue`; TensorFlow, `clip_by_value`.
    """

    min: float
    max: float

    def __init__(self, min: float, max: float | None = None) -> None:
        if max is None:
            high = as_limit("min, the bound of both sides where max is not given,", min)
            low = -high
        else:
            low, high = as_number("min", min), as_number("max", max)
            if not low <= high:
                raise ValueError(f"min must not exceed max, got min={low} and max={high}")
        object.__setattr__(self, "min", low)
        object.__setattr__(self, "max", high)


Rule = ClipByGlobalNorm | ClipByNorm | ClipByValue
# A tuple: torch.compile traces isinstance with a union from torch 2.9 on only.
_RULES = (ClipByGlobalNorm, ClipByNorm, ClipByValue)


def as_rule(clip: object) -> Rule:
    """The rule itself, or `ClipByGlobalNorm` of a number."""
    if isinstance(clip, _RULES):
        return clip
    if isinstance(clip, type) and issubclass(clip, _RULES):
        raise TypeError(f"clip must be a rule, got the class; write {clip.__name__}(...)")
    try:
        return ClipByGlobalNorm(clip)  # type: ignore[arg-type]  # the rule checks
    except TypeError:
        raise TypeError(
            "clip must be a number (the largest global norm) or one of ClipByGlobalNorm, "
            f"ClipByNorm and ClipByValue, got {clip!r} of type {type(clip).__name__}"
        ) from None
