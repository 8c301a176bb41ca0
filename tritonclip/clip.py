"""What a training loop calls: contracts and composition, no device code."""

from collections.abc import Iterable
from typing import Literal, cast, overload

import torch
from torch import Tensor
from torch.nn import Module

from tritonclip import apply, compiled, gradients
from tritonclip.flat import FlatGradients
from tritonclip.gradient_list import GradientList
from tritonclip.rules import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    Rule,
    as_grad_scale,
    as_limit,
    as_norm_type,
    as_rule,
    check_one_float,
)

Parameters = Tensor | Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | FlatGradients
Nonfinite = Literal["propagate", "error", "zero"]
_POLICIES = ("propagate", "error", "zero")
# Where torch has its foreach functions.
_FOREACH_DEVICES = ("cpu", "cuda", "xpu", "mtia", "privateuseone")


@overload
def clip_(
    parameters: Parameters,
    clip: float | ClipByGlobalNorm | ClipByNorm,
    *,
    nonfinite: Nonfinite = ...,
    grad_scale: float | Tensor | None = ...,
) -> Tensor: ...
@overload
def clip_(
    parameters: Parameters,
    clip: ClipByValue,
    *,
    nonfinite: Nonfinite = ...,
    grad_scale: float | Tensor | None = ...,
) -> None: ...
def clip_(
    parameters: Parameters,
    clip: float | Rule,
    *,
    nonfinite: Nonfinite = "propagate",
    grad_scale: float | Tensor | None = None,
) -> Tensor | None:
    r"""Clips the gradients of parameters in place and returns what it measured *before* clipping.

    Gradients within the limit are left bit for bit as they are. On a GPU nothing waits for the
    device unless said so.

    Args:
        parameters: an iterable of tensors, one tensor, a module, or (name, parameter) pairs as
            `named_parameters()` yields them. Names, also a module's, stand in error messages. Read
            once. Parameters without `.grad`, and those with `need_clip = False`, are left out; a
            gradient that is met twice counts once. Any floating-point or complex dtype, any device,
            strided or sparse COO; dtypes and devices may mix. :class:`FlatGradients` spares the
            look at every parameter.
        clip: :class:`ClipByGlobalNorm`, :class:`ClipByNorm` or :class:`ClipByValue`; a number means
            ClipByGlobalNorm(number).
        nonfinite: what happens where a norm is NaN or inf (for ClipByValue: where any element is).
            "propagate": nothing special; as in torch, NaN spreads to all gradients that share the
            norm, inf turns their finite ones into 0; ClipByValue brings inf to its bound and keeps
            NaN.
            "error": RuntimeError that names the gradients, none of which is changed; waits for the
            device.
            "zero": every gradient becomes 0; decided on the device.
        grad_scale: the loss scale that the gradients still carry: a positive number or a
            one-element floating-point tensor. Gradients are divided by it in the same pass; limits
            and norms are of the divided gradients. A tensor on a GPU cannot be checked without a
            sync: if it is not positive, the result is undefined.

    Returns:
        ClipByGlobalNorm: the norm of all gradients, a 0-d tensor. ClipByNorm: the norm of each, a
        1-d tensor in order. ClipByValue: None. float64 where any gradient is, else float32, on the
        first gradient's device.

    Raises:
        TypeError: parameters or clip of another kind; integer, nested and mkldnn gradients; tensor
            subclasses; ClipByValue on complex gradients.
        ValueError: gradients whose elements overlap in memory, or whose memory was freed; sparse
            gradients whose implicit zeros a rule would change or count; an unknown policy; a loss
            scale that is not positive.
        RuntimeError: a norm that is not finite, with nonfinite="error"; gradients made in inference
            mode, outside of it; a backend that was asked for and cannot serve.

    A call that raises has changed nothing.

    Example:
        >>> weight = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> (weight * weight).sum().backward()
        >>> clip_(weight, 1.0)
        tensor(10.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    rule = as_rule(clip)
    if nonfinite not in _POLICIES:
        raise ValueError(
            f"nonfinite must be 'propagate', 'error' or 'zero', got {nonfinite!r}; only a "
            "ClippedOptimizer can skip a step"
        )
    scale = as_grad_scale(grad_scale)
    if torch.compiler.is_compiling():
        return compiled.clip_(parameters, rule, nonfinite, scale)
    each = isinstance(rule, ClipByNorm)
    return apply.clip_(_found(parameters, each=each), rule, nonfinite, scale)


def _found(parameters: object, *, each: bool = False) -> GradientList:
    """The gradients; `each` if they have to be told apart."""
    if isinstance(parameters, FlatGradients):
        return parameters.gradient_list(each=each)
    return gradients.of_parameters(parameters)


def _as_float(number: object) -> object:
    """What torch makes of a number: text and one-element tensors count, errors are Python's.

    Booleans pass: rules refuse them.
    """
    return number if isinstance(number, bool) else float(number)  # type: ignore[arg-type]


def _check_foreach(foreach: bool | None, found: GradientList) -> None:
    """Refuses foreach=True where torch does; otherwise the argument changes nothing."""
    if foreach:
        for group in found.groups:
            if group.device.type not in _FOREACH_DEVICES:
                raise RuntimeError(
                    "foreach=True was passed, but can't use the foreach API on "
                    f"{group.device.type} tensors"
                )


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Limits the global norm of gradients in place; returns the norm *before* clipping.

    A drop-in replacement of `torch.nn.utils.clip_grad_norm_`; the README's table lists every
    difference.

    Args:
        parameters: as for :func:`clip_`.
        max_norm: largest norm, 0 or more.
        norm_type: p of the p-norm: positive, 0, inf or -inf, also as text.
        error_if_nonfinite: raise RuntimeError where the norm is NaN or inf, gradients untouched;
            waits for the device.
        foreach: accepted for compatibility; there is one implementation.

    Returns:
        The norm, a 0-d tensor: float64 where any gradient is, else float32; on the first gradient's
        device.

    Raises:
        As :func:`clip_`.

    Example:
        >>> weight = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> (weight * weight).sum().backward()
        >>> clip_grad_norm_([weight], max_norm=1.0)
        tensor(10.)
    """
    rule = ClipByGlobalNorm(_as_float(max_norm), _as_float(norm_type))  # type: ignore[arg-type]
    policy = "error" if error_if_nonfinite else "propagate"
    if torch.compiler.is_compiling():
        norm = compiled.clip_(parameters, rule, policy, 1.0)
    else:
        found = _found(parameters)
        _check_foreach(foreach, found)
        norm = apply.clip_(found, rule, policy, remedy=apply.TORCH_REMEDY)
    return cast(Tensor, norm)


def clip_grad_value_(
    parameters: Parameters, clip_value: float, foreach: bool | None = None
) -> None:
    """Clamps gradients in place to `[-clip_value, clip_value]`; NaN stays NaN.

    A drop-in replacement of `torch.nn.utils.clip_grad_value_`.

    Args:
        parameters: as for :func:`clip_`.
        clip_value: largest magnitude, 0 or more.
        foreach: accepted for compatibility; there is one implementation.

    Raises:
        As :func:`clip_`.
    """
    bound = as_limit("clip_value", _as_float(clip_value))
    rule = ClipByValue(bound)
    if torch.compiler.is_compiling():
        compiled.clip_(parameters, rule, "propagate", 1.0)
    else:
        found = _found(parameters)
        _check_foreach(foreach, found)
        apply.clip_(found, rule)


def get_total_norm(
    tensors: Tensor | Iterable[Tensor] | FlatGradients,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of all tensors together; writes nothing.

    A drop-in replacement of `torch.nn.utils.get_total_norm`.

    Args:
        tensors: floating-point or complex: gradients themselves, not what has a `.grad`; or
            :class:`FlatGradients`.
        norm_type: p of the p-norm: positive, 0, inf or -inf, also as text.
        error_if_nonfinite: raise RuntimeError where the norm is NaN or inf; waits for the device.
        foreach: accepted for compatibility; there is one implementation.

    Returns:
        The norm, a 0-d tensor: float64 where any tensor is, else float32; on the first tensor's
        device.

    Raises:
        TypeError, ValueError: tensors that have no norm; see :func:`clip_`.
        RuntimeError: a norm that is not finite, with `error_if_nonfinite`.

    Example:
        >>> get_total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        tensor(5.)
    """
    order = as_norm_type(_as_float(norm_type))
    if torch.compiler.is_compiling():
        if isinstance(tensors, FlatGradients):
            tensors = [p.grad for p in tensors.parameters if p.grad is not None]
        return compiled.total_norm(tensors, order, error_if_nonfinite)
    if isinstance(tensors, FlatGradients):
        found = tensors.gradient_list(each=False)
    else:
        found = gradients.of_tensors(tensors)
    _check_foreach(foreach, found)
    return apply.total_norm(found, order, error_if_nonfinite)


def clip_grads_with_norm_(
    parameters: Parameters,
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """Scales gradients in place by `min(1, max_norm / (total_norm + 1e-6))`.

    For a norm *before* clipping that is known: reduce norms over processes between
    :func:`get_total_norm` and this. A drop-in replacement of
    `torch.nn.utils.clip_grads_with_norm_`.

    Args:
        parameters: as for :func:`clip_`.
        max_norm: largest norm, 0 or more.
        total_norm: the norm that the gradients count as having: a one-element floating-point
            tensor on any device, or a number.
        foreach: accepted for compatibility; there is one implementation.

    Raises:
        As :func:`clip_`.
    """
    limit_to = as_limit("max_norm", _as_float(max_norm))
    if isinstance(total_norm, Tensor):
        check_one_float("total_norm", total_norm)
    else:
        total_norm = torch.tensor(
            as_limit("total_norm", total_norm), dtype=torch.float64, device="cpu"
        )
    if torch.compiler.is_compiling():
        compiled.scale_to_norm_(parameters, limit_to, total_norm)
    else:
        found = _found(parameters)
        _check_foreach(foreach, found)
        apply.scale_(found, limit_to, total_norm)
