"""Drop-in replacements for torch.nn.utils, with its signatures, messages and warnings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils import clip_grad

from tritonclip.clipping import Parameters, clip_, clip_gradients_, raise_everywhere
from tritonclip.distributed.domain import Copies, check_processes
from tritonclip.distributed.shards import replicated
from tritonclip.engine import compiled, execute
from tritonclip.engine.arguments import labelled, needs_clip, tensors_in
from tritonclip.engine.gradients import collect, collect_tensors
from tritonclip.modes import is_traced
from tritonclip.rules import ClipByGlobalNorm, ClipByValue, Norm, Rule, rule_of
from tritonclip.rules.arguments import (
    as_limit,
    as_limit_or_schedule,
    as_norm_type,
    check_one_float,
    local_number,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

NAMES = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")


def _is_of_torch(function: object) -> bool:
    """Whether this is a function that torch defines, rather than a replacement of one."""
    if not isinstance(function, FunctionType):
        return False
    return str(function.__globals__.get("__name__")).startswith("torch.")


def _copy_of(function: FunctionType, scope: dict[str, Any]) -> FunctionType:
    """Copies a function of torch, and the functions it wraps; those of `clip_grad` use `scope`."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    closure = [CellType(_copy_of(c, scope) if _is_of_torch(c) else c) for c in cells]
    own = function.__globals__
    copy = FunctionType(
        function.__code__,
        scope if own is vars(clip_grad) else own,
        function.__name__,
        function.__defaults__,
        tuple(closure),
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# torch's function objects, which all modules share; those that something replaced before are left
# out. Two of them have private names in clip_grad, by which torch's functions call each other.
torchs: dict[str, FunctionType] = {}
# Copies of torch's functions that call one another, so that `patch_torch` does not change them.
originals: dict[str, Callable[..., Tensor]] = {}
# Without __name__, because torch.compile would look the functions up in the module of that name.
_scope = {key: value for key, value in vars(clip_grad).items() if key != "__name__"}
for _name in NAMES:
    _found: Any = getattr(clip_grad, _name, None) or getattr(clip_grad, f"_{_name}", None)
    originals[_name] = getattr(torch.nn.utils, _name)
    if _is_of_torch(_found):
        torchs[_name], originals[_name] = _found, _copy_of(_found, _scope)
        _scope[_name] = _scope[f"_{_name}"] = originals[_name]


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    process_group: ProcessGroup | DeviceMesh | None = None,
    copies: Copies | None = None,
) -> Tensor:
    """Limits the global norm of gradients in place; returns the norm *before* clipping.

    A drop-in replacement of `torch.nn.utils.clip_grad_norm_`. docs/differences.md has every
    difference.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> for step in range(2):
        ...     optimizer.zero_grad()
        ...     (weight * weight).sum().backward()
        ...     print(tritonclip.clip_grad_norm_([weight], max_norm=1.0))
        ...     optimizer.step()
        tensor(10.)
        tensor(8.)

    Args:
        parameters: tensors, a module, or (name, parameter) pairs, as for :func:`clip_`.
        max_norm: the largest norm of all gradients together, 0 or more.
        norm_type: the order of the norm, a number or text: 2 is the Euclidean norm, inf the largest
            magnitude. For orders below 1 torch's own function clips parameters that need it.
        error_if_nonfinite: raises RuntimeError if the norm is NaN or inf, and changes nothing. The
            host waits for the device.
        foreach: accepted for compatibility; there is one implementation.
        process_group: the processes that share one norm, as for :func:`clip_`.
        copies: as for :func:`clip_`.

    Returns:
        The norm, 0-d; float64 if any gradient is float64, else float32; on the first gradient's
        device. If there are DTensors among the gradients, the norm is a DTensor, replicated on the
        mesh of the first one, as torch returns it; see docs/distributed.md.

    Raises:
        TypeError, ValueError: an argument, or gradients, that :func:`clip_` refuses too.
        RuntimeError: a norm that is not finite, with `error_if_nonfinite`.
    """
    if isinstance(max_norm, Tensor) and torch.compiler.is_compiling():
        return compiled.break_graph(
            *(clip_grad_norm_, parameters, max_norm, norm_type, error_if_nonfinite),
            process_group=process_group,
            copies=copies,
        )
    try:
        limit = max_norm if type(max_norm) is float else _as_float("max_norm", max_norm)
        order = norm_type if type(norm_type) is float else _as_float("norm_type", norm_type)
        is_torchs = order < 1 and _is_torchs(order, process_group, copies)
        rule = None if is_torchs else rule_of(ClipByGlobalNorm, limit, order)
    except (TypeError, ValueError) as error:
        raise_everywhere(error, parameters, process_group, copies)
        raise
    if rule is None:
        wanted = [p for p in labelled(parameters)[0] if needs_clip(p)]
        max_norm = as_limit("max_norm", limit)
        return originals["clip_grad_norm_"](wanted, max_norm, order, error_if_nonfinite, foreach)
    return clip_gradients_(  # type: ignore[return-value]
        *(_clip_grad_norm_, parameters, rule, "error" if error_if_nonfinite else "propagate"),
        process_group=process_group,
        copies=copies,
        is_torchs=True,
    )


def clip_grad_value_(
    parameters: Parameters, clip_value: float, foreach: bool | None = None
) -> None:
    """Clamps gradients in place to `[-clip_value, clip_value]`; NaN stays NaN.

    A drop-in replacement of `torch.nn.utils.clip_grad_value_`.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 0.1]))
        >>> (weight * weight).sum().backward()
        >>> tritonclip.clip_grad_value_([weight], clip_value=0.5)
        >>> weight.grad
        tensor([0.5000, 0.2000])

    Args:
        parameters: as for :func:`clip_grad_norm_`.
        clip_value: the largest magnitude of an element, 0 or more.
        foreach: accepted for compatibility.

    Raises:
        TypeError, ValueError: an argument, or gradients, that :func:`clip_` refuses too; complex
            gradients, which have no order.
    """
    bound = clip_value if type(clip_value) is float else _as_float("clip_value", clip_value)
    bound = as_limit("clip_value", bound)
    if not bound:
        # This warns of a bound of 0, and calls it clip_value.
        as_limit_or_schedule("clip_value", bound)
    clip_gradients_(clip_, parameters, rule_of(ClipByValue, -bound, bound), "propagate")


def get_total_norm(
    tensors: Tensor | Iterable[Tensor | None],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    process_group: ProcessGroup | DeviceMesh | None = None,
    copies: Copies | None = None,
) -> Tensor:
    """Measures the norm of all elements of all tensors; writes nothing.

    A drop-in replacement of `torch.nn.utils.get_total_norm`.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> (weight * weight).sum().backward()
        >>> tritonclip.get_total_norm([weight.grad])
        tensor(10.)

    Args:
        tensors: the gradients themselves (parameters would give the norm of the weights),
            floating-point or complex. None is left out.
        norm_type: the order of the norm, as for :func:`clip_grad_norm_`.
        error_if_nonfinite: raises RuntimeError if the norm is NaN or inf.
        foreach: accepted for compatibility.
        process_group: the processes that share one norm, as for :func:`clip_tensors_`.
        copies: as for :func:`clip_tensors_`.

    Returns:
        The norm, 0-d; float64 if any tensor is float64, else float32; on the first tensor's device.
        If there are DTensors among the tensors, the norm is a DTensor, replicated on the mesh of
        the first one; a pipeline stage gets the norm over its mesh, as in torch.

    Raises:
        TypeError, ValueError: tensors that have no norm, such as integer, nested and overlapping
            ones.
        RuntimeError: a norm that is not finite, with `error_if_nonfinite`.
    """
    if is_traced():
        return compiled.break_graph(  # type: ignore[no-any-return]
            *(get_total_norm, tensors, norm_type, error_if_nonfinite),
            process_group=process_group,
            copies=copies,
        )
    try:
        order = _as_float("norm_type", norm_type)
        is_torchs = _is_torchs(order, process_group, copies)
        order = order if is_torchs else as_norm_type("norm_type", order)
    except (TypeError, ValueError) as error:
        raise_everywhere(error, tensors, process_group, copies, are_gradients=True)
        raise
    if is_torchs:
        items, _ = tensors_in(tensors)
        return originals["get_total_norm"](items, order, error_if_nonfinite, foreach)
    processes = check_processes(process_group, copies)
    gradients = collect_tensors(tensors, processes=processes)
    norm = execute.measured_norm(gradients, Norm(order), error_if_nonfinite=error_if_nonfinite)
    return replicated(norm, gradients.wrappers) if gradients.wrappers else norm


def clip_grads_with_norm_(
    parameters: Parameters,
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
    *,
    eps: float = 1e-6,
    process_group: ProcessGroup | DeviceMesh | None = None,
    copies: Copies | None = None,
) -> None:
    """Scales gradients in place by `min(1, max_norm / (total_norm + eps))`.

    Use it when the norm *before* clipping is already known. A drop-in replacement of
    `torch.nn.utils.clip_grads_with_norm_`.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> (weight * weight).sum().backward()
        >>> norm = tritonclip.get_total_norm([weight.grad])
        >>> tritonclip.clip_grads_with_norm_([weight], 1.0, norm)
        >>> weight.grad
        tensor([0.6000, 0.8000])

    Args:
        parameters: as for :func:`clip_grad_norm_`.
        max_norm: the largest norm of all gradients together, 0 or more.
        total_norm: the norm of the gradients: a number, or a one-element floating-point tensor on
            any device, also a DTensor as torch returns. A negative norm raises ValueError, except
            off the CPU, where reading it would wait: there its magnitude counts.
        foreach: accepted for compatibility.
        eps: added to the norm; with 0, as in Paddle and TensorFlow, gradients whose norm equals
            `max_norm` do not change.
        process_group: as for :func:`clip_`, but nothing is sent.
        copies: as for :func:`clip_`.

    Raises:
        TypeError, ValueError: an argument, or gradients, that :func:`clip_` refuses too.
    """
    if is_traced():
        compiled.break_graph(
            *(clip_grads_with_norm_, parameters, max_norm, total_norm),
            eps=eps,
            process_group=process_group,
            copies=copies,
        )
        return
    rule = ClipByGlobalNorm(_as_float("max_norm", max_norm), math.inf, eps)
    if isinstance(total_norm, Tensor):
        if hasattr(total_norm, "full_tensor"):
            total_norm = cast(Tensor, total_norm.full_tensor())
        check_one_float("total_norm", total_norm)
        # Elsewhere the host would have to wait for the sign.
        if total_norm.device.type == "cpu" and (number := float(total_norm.detach())) < 0:
            raise ValueError(f"total_norm must be 0 or more, got {number}")
    else:
        number = as_limit("total_norm", total_norm)
        total_norm = torch.tensor(number, dtype=torch.float64, device="cpu")
    processes = check_processes(process_group, copies)
    gradients = collect(parameters, processes=processes)
    execute.scale_(gradients, rule, total_norm)


def _clip_grad_norm_(
    parameters: Parameters, rule: ClipByGlobalNorm, *, nonfinite: str, **options: Any
) -> Tensor:
    """`clip_grad_norm_` with the arguments of `clip_`, called where a graph breaks."""
    given = {name: value for name, value in options.items() if value is not None}
    max_norm: Any = rule.max_norm
    return clip_grad_norm_(parameters, max_norm, rule.norm_type, nonfinite == "error", **given)


def _is_torchs(order: float, process_group: object, copies: object) -> bool:
    """Whether torch's own function serves this order; ValueError if processes share the norm."""
    if not (type(order) is float and order < 1):
        return False
    if process_group is None and copies is None:
        return True
    raise ValueError(f"norm_type must be from 1 to inf with process_group or copies, got {order}")


def _as_float(name: str, number: object) -> float:
    """Converts a number as torch does, which accepts text and one-element tensors.

    Python's booleans pass through, because rules refuse them. An argument in the wrong place raises
    a TypeError that says where it belongs; failed conversions raise Python's kinds of errors.
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
    is_boolean = type(number).__name__ in ("bool", "bool_")
    if is_boolean or (isinstance(number, Tensor) and number.dtype == torch.bool):
        raise TypeError(f"{name} must be a number, got a boolean {type(number).__name__}")
    if number is None:
        remedy = "leave it out for 2.0" if name == "norm_type" else "float('inf') clips nothing"
        raise TypeError(f"{name} must be a number, got None; {remedy}")
    if isinstance(number, Tensor):
        # torch warns of a tensor with a graph that becomes a number.
        number = local_number(name, number).detach()
    try:
        return float(number)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise type(error)(
            f"{name} must be a number, such as 1.0, got {number!r:.80} of type "
            f"{type(number).__name__}"
        ) from None
