"""`clip_` and `clip_tensors_`, the calls of a training loop: their contract and arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from tritonclip import settings
from tritonclip.distributed.agreement import verify_replicas
from tritonclip.distributed.domain import Copies, check_processes
from tritonclip.distributed.shards import replicated
from tritonclip.engine import compiled, execute, verify
from tritonclip.engine.arguments import GradientSource, as_list
from tritonclip.engine.checks import (
    POLICIES,
    REMEDY,
    TORCH_REMEDY,
    Nonfinite,
    unknown_policy,
)
from tritonclip.engine.gradients import collect, collect_tensors
from tritonclip.modes import is_traced, n_dispatch_modes
from tritonclip.rules import (
    ClipByGlobalNorm,
    ClipByValue,
    ClipState,
    Rule,
    as_rule,
    follow,
    known_rule,
)
from tritonclip.rules.arguments import as_grad_scale

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Parameters = Tensor | Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
Tensors = Tensor | Iterable[Tensor | None] | Iterable[tuple[str, Tensor | None]]


@overload
def clip_(  # type: ignore[overload-overlap]  # a Rule that is no ClipByValue measures a norm
    parameters: Parameters,
    max_norm: ClipByValue,
    *,
    nonfinite: Nonfinite = ...,
    grad_scale: float | Tensor | None = ...,
    state: ClipState | None = ...,
    process_group: ProcessGroup | DeviceMesh | None = ...,
    copies: Copies | None = ...,
) -> None: ...
@overload
def clip_(
    parameters: Parameters,
    max_norm: float | Rule,
    *,
    nonfinite: Nonfinite = ...,
    grad_scale: float | Tensor | None = ...,
    state: ClipState | None = ...,
    process_group: ProcessGroup | DeviceMesh | None = ...,
    copies: Copies | None = ...,
) -> Tensor: ...
def clip_(
    parameters: Parameters,
    max_norm: float | Rule,
    *,
    nonfinite: Nonfinite = "propagate",
    grad_scale: float | Tensor | None = None,
    state: ClipState | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
    copies: Copies | None = None,
) -> Tensor | None:
    """Clips the gradients of parameters in place and returns their norm *before* clipping.

    Call it after `backward` and before `optimizer.step()`. Gradients within the limit stay bit for
    bit as they are; a norm within the rule's `eps` of the limit counts as over it. The host does
    not wait for a GPU, except with nonfinite="error".

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> for step in range(2):
        ...     optimizer.zero_grad()
        ...     (weight * weight).sum().backward()
        ...     print(tritonclip.clip_([weight], 1.0))
        ...     optimizer.step()
        tensor(10.)
        tensor(8.)
        >>> weight.grad
        tensor([0.6000, 0.8000])

    Args:
        parameters: tensors, a module, (name, parameter) pairs, or :class:`FlatGradients`. Messages
            show the names. Parameters without a gradient or with `need_clip = False` are left out.
            Gradients are floating-point or complex, dense or sparse COO, on any devices. DTensors
            have one norm over all shards.
        max_norm: the largest norm of all gradients together; or a rule, such as
            :class:`ClipByNorm` or :class:`ClipByValue`.
        nonfinite: if a norm (for ClipByValue an element) is NaN or inf, "propagate" behaves like
            torch, "error" raises and changes nothing, "zero" sets every gradient to 0.
        grad_scale: the loss scale, a number or a one-element tensor. Gradients are divided by it in
            the same pass; norm and limit are of the divided gradients.
        state: a :class:`ClipState`, the same at every call, for a rule whose limit changes.
        process_group: a ProcessGroup or a DeviceMesh whose processes share one norm. Needed where
            DTensors do not say so: for pipeline stages and plain shards.
        copies: a mapping or a function from each parameter to the number of processes in
            `process_group` that hold the same shard, so that it counts once. 0 leaves the shard
            out of the norm on this process, because another process counts it.

    Returns:
        The norm, 0-d; or the norm of each gradient, 1-d, for rules with one norm per gradient; or
        None for ClipByValue. The dtype is float64 if any gradient is float64, else float32; the
        device is the first gradient's.

    Raises:
        TypeError: parameters, gradients or a rule of a kind that cannot be clipped.
        ValueError: a policy, loss scale, `state` or `process_group` that does not fit the call, or
            gradients that overlap in memory.
        RuntimeError: a norm that is not finite, with nonfinite="error".

    Notes:
        A call that raises has changed nothing. docs/clipping.md has the whole contract;
        docs/distributed.md has the contract for several processes.
    """
    return clip_gradients_(
        clip_, parameters, max_norm, nonfinite, grad_scale, state, process_group, copies
    )


@overload
def clip_tensors_(  # type: ignore[overload-overlap]  # a Rule that is no ClipByValue measures a norm
    tensors: Tensors,
    max_norm: ClipByValue,
    *,
    nonfinite: Nonfinite = ...,
    grad_scale: float | Tensor | None = ...,
    state: ClipState | None = ...,
    process_group: ProcessGroup | DeviceMesh | None = ...,
    copies: Copies | None = ...,
) -> None: ...
@overload
def clip_tensors_(
    tensors: Tensors,
    max_norm: float | Rule,
    *,
    nonfinite: Nonfinite = ...,
    grad_scale: float | Tensor | None = ...,
    state: ClipState | None = ...,
    process_group: ProcessGroup | DeviceMesh | None = ...,
    copies: Copies | None = ...,
) -> Tensor: ...
def clip_tensors_(
    tensors: Tensors,
    max_norm: float | Rule,
    *,
    nonfinite: Nonfinite = "propagate",
    grad_scale: float | Tensor | None = None,
    state: ClipState | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
    copies: Copies | None = None,
) -> Tensor | None:
    """Clips tensors themselves in place, not their `.grad`; returns their norm *before* clipping.

    For gradients that lie elsewhere, such as Megatron's `main_grad` and Transformer Engine's
    `decoupled_grad`, for the pseudo-gradients of outer steps, and for updates.

    Example:
        >>> import torch, tritonclip
        >>> update = torch.tensor([6.0, 8.0])
        >>> tritonclip.clip_tensors_([update], 1.0)
        tensor(10.)
        >>> update
        tensor([0.6000, 0.8000])

    Args:
        tensors: tensors or (name, tensor) pairs; None is left out. Messages show the name or the
            position. A tensor that occurs several times counts once. Dtypes, layouts and devices
            are those of :func:`clip_`.
        max_norm: the largest norm of all tensors together; or any rule except
            :class:`ClipByUnitNorm`, which compares gradients with weights.
        nonfinite: "propagate", "error" or "zero", as for :func:`clip_`.
        grad_scale: the loss scale that the tensors carry, as for :func:`clip_`.
        state: a :class:`ClipState`, for a rule whose limit changes. It knows tensors by position,
            so a rule that remembers each tensor's norm needs a tensor at every position.
        process_group: the processes that share one norm, as for :func:`clip_`. Each process must
            have a tensor of each mesh, because there are no parameters that name the meshes.
        copies: how many processes hold the same shard of a tensor, as for :func:`clip_`.

    Returns:
        The norm, 0-d or 1-d, or None, as :func:`clip_` returns it.

    Raises:
        TypeError: parameters, modules and other tensors that require grad, because this would clip
            the weights; tensors that :func:`clip_` cannot clip.
        ValueError, RuntimeError: for the reasons of :func:`clip_`.
    """
    return clip_gradients_(
        *(clip_tensors_, tensors, max_norm, nonfinite, grad_scale, state, process_group, copies),
        are_gradients=True,
    )


def clip_gradients_(
    call: Callable[..., Any],
    argument: Any,
    max_norm: float | Rule,
    nonfinite: Nonfinite,
    grad_scale: float | Tensor | None = None,
    state: ClipState | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
    copies: Copies | None = None,
    *,
    are_gradients: bool = False,
    is_torchs: bool = False,
) -> Tensor | None:
    """The common body of the functions that clip in place, with the arguments of `clip_`.

    Where torch.compile breaks the graph, `call` is called again outside of it. `argument` holds
    parameters or, if `are_gradients`, the gradients themselves. If `is_torchs`, messages and norms
    of DTensors follow torch.
    """
    is_compiling = torch.compiler.is_compiling()
    # A tensor as limit breaks the graph, which is not possible inside a `try` block.
    rule: Any = max_norm
    if not (is_compiling and isinstance(max_norm, Tensor)):
        try:
            if type(max_norm) is float and max_norm and not is_compiling:
                # This saves a call against `as_rule`.
                rule = known_rule(ClipByGlobalNorm, max_norm)
            else:
                rule = max_norm if isinstance(max_norm, Rule) else as_rule("max_norm", max_norm)
            if nonfinite not in POLICIES:
                raise unknown_policy(nonfinite)
            if are_gradients and rule.per_unit:
                raise TypeError(
                    f"{rule.name} compares gradients with the weights of their parameters, and "
                    "tensors have none; expected another rule, or clip_(parameters, rule) with "
                    "gradients in .grad"
                )
        except (TypeError, ValueError) as error:
            raise_everywhere(error, argument, process_group, copies, are_gradients=are_gradients)
            raise
    if is_compiling or (n_dispatch_modes() and is_traced()):
        options: Any = {"grad_scale": grad_scale, "state": state}
        options |= {"process_group": process_group, "copies": copies}
        breaks = are_gradients or not isinstance(rule, Rule)
        traced = compiled.break_graph if breaks else compiled.clip_
        return traced(call, argument, rule, nonfinite=nonfinite, **options)
    if isinstance(argument, DistributedDataParallel):
        verify_replicas(argument, rule, grad_scale, nonfinite, state)
    processes = None
    if process_group is not None or copies is not None:
        processes = check_processes(process_group, copies)
    if are_gradients:
        # An iterator can be read only once, and the number of tensors is needed below.
        argument = argument if state is None else as_list(argument)
        gradients = collect_tensors(argument, processes=processes, writes=True)
    elif isinstance(argument, GradientSource):
        gradients = argument.gradients(rule, state, processes)
    else:
        gradients = collect(argument, processes=processes)
    scale: float | Tensor = 1.0
    following = None
    try:
        if grad_scale is not None:
            scale = as_grad_scale(grad_scale)
        if state is not None:
            rule = following = follow(rule, state, gradients.sources or ())
            n, n_distinct = len(argument) if are_gradients else 0, len(gradients.tensors)
            if are_gradients and rule.per_gradient and n_distinct != n:
                raise ValueError(
                    f"a state of {rule.name} remembers a norm for each position, got {n_distinct} "
                    f"tensors at {n} positions; expected one at each, and none twice"
                )
    except Exception as error:
        # A limit that is a function of the step runs the user's code, which may raise anything.
        gradients.reject_(error)
    norm = execute.clip_(
        gradients, rule, nonfinite, scale, remedy=TORCH_REMEDY if is_torchs else REMEDY
    )
    if following is not None:
        following.commit()
    if is_torchs and gradients.wrappers and norm is not None:
        norm = replicated(norm, gradients.wrappers)
    return norm


def raise_everywhere(
    error: Exception,
    argument: Any,
    process_group: ProcessGroup | DeviceMesh | None = None,
    copies: Copies | None = None,
    *,
    are_gradients: bool = False,
) -> None:
    """Under `verify()`, raises the error of an argument on all processes that share the list."""
    if torch.compiler.is_compiling() or not settings.current().verifying:
        return
    if isinstance(argument, GradientSource):
        return
    try:
        processes = check_processes(process_group, copies)
        take = partial(collect_tensors, writes=True) if are_gradients else collect
        gradients = take(argument, processes=processes)
    except (TypeError, ValueError):
        # The list is wrong as well, so we cannot know which processes wait.
        return
    gradients.reject_(error)
    verify.agree_on(gradients, "clip", ClipByGlobalNorm(1.0))
