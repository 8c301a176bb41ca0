"""`clip_`, the call in a training loop, and `clip_tensors_`: their contract and arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor
from torch.nn import Module

from tritonclip.distributed import execute as sharded
from tritonclip.distributed.gradients import ERRORS, collect, collect_tensors
from tritonclip.distributed.process_groups import Copies, check_processes
from tritonclip.engine import execute, misuse, traced
from tritonclip.engine.arguments import as_list
from tritonclip.engine.checks import POLICIES, refuse_other_model, unknown_policy
from tritonclip.engine.gradients import Gradients
from tritonclip.flat.flat_gradients import FlatGradients
from tritonclip.modes import is_traced, n_dispatch_modes
from tritonclip.rules import (
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
    ClipState,
    Rule,
    as_rule,
    by_number,
    follow,
)
from tritonclip.rules.arguments import as_grad_scale
from tritonclip.signatures import ABSENT, misfit, reaches_misfit

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Parameters = Tensor | Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | FlatGradients
# Rules that measure a norm, or one for each gradient.
NormRule = (
    ClipByGlobalNorm
    | ClipByNorm
    | ClipByOwnHistory
    | ClipByOwnQuantile
    | ClipByQuantile
    | ClipByRMS
    | ClipBySpectralNorm
    | ClipByUnitNorm
    | ClipByZScore
)
Nonfinite = Literal["propagate", "error", "zero"]
Tensors = Tensor | Iterable[Tensor | None] | Iterable[tuple[str, Tensor | None]]


@overload
def clip_(
    parameters: Parameters,
    clip: float | NormRule,
    *,
    nonfinite: Nonfinite = ...,
    grad_scale: float | Tensor | None = ...,
    state: ClipState | None = ...,
    process_group: ProcessGroup | DeviceMesh | None = ...,
    copies: Copies | None = ...,
) -> Tensor: ...
@overload
def clip_(
    parameters: Parameters,
    clip: ClipByValue,
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
    clip: float | Rule,
    *,
    nonfinite: Nonfinite = ...,
    grad_scale: float | Tensor | None = ...,
    state: ClipState | None = ...,
    process_group: ProcessGroup | DeviceMesh | None = ...,
    copies: Copies | None = ...,
) -> Tensor | None: ...
@reaches_misfit
def clip_(
    parameters: Parameters,
    clip: float | Rule,
    *_excess: object,
    nonfinite: Nonfinite = "propagate",
    grad_scale: float | Tensor | None = None,
    state: ClipState | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
    copies: Copies | None = None,
    **_unknown: object,
) -> Tensor | None:
    """Clips the gradients of parameters in place and returns their norm *before* clipping.

    Gradients within the limit are left bit for bit as they are. The host does not wait for a GPU,
    except with nonfinite="error" and for :class:`ClipBySpectralNorm`.

    Args:
        parameters: an iterable of tensors, one tensor, a module, or (name, parameter) pairs as
            `named_parameters()` yields them, read once. Error messages show the names, also those
            of a module. Parameters without `.grad`, and those with `need_clip = False`, are left
            out; a gradient that occurs several times counts once. Any floating-point or complex
            dtype, any device, strided or sparse COO; dtypes and devices may mix. With
            :class:`FlatGradients` a call does not read each parameter. DTensors are clipped by the
            norm of all their shards, by one all-reduce: every process must make the call.
        clip: a rule, such as :class:`ClipByGlobalNorm`, :class:`ClipByNorm` or
            :class:`ClipByValue`; a number means ClipByGlobalNorm(number).
        nonfinite: the policy where a norm is NaN or inf (for ClipByValue: where any element is,
            before the loss scale is divided out). A norm of order 0 hides NaN and inf. A norm of
            order -inf hides inf.
            "propagate": as in torch, a NaN norm makes its gradients NaN, and an inf norm makes
            their finite elements 0; ClipByValue brings inf to its bound and keeps NaN.
            "error": RuntimeError that names the gradients. No gradient is changed. The host waits
            for the device.
            "zero": every gradient becomes 0; decided on the device.
        grad_scale: the loss scale of the gradients: a number from 2^-126 to 2^126 or a one-element
            floating-point tensor. Gradients are divided by it in the same pass;
            limits and norms are of the divided gradients. A tensor on a GPU cannot be checked
            without a sync: if it is not positive, the result is undefined.
        state: the memory of a rule whose limit changes from call to call: a :class:`ClipState`, the
            same at every call. A call that raises leaves it as it was.
        process_group: the processes whose gradients have one norm, where DTensors do not say so: a
            ProcessGroup or a DeviceMesh. Plain tensors then differ between processes, as those of
            pipeline stages do. Along the mesh of DTensors in the same call they count as replicas.
            DTensors of different meshes are different tensors. For ClipByGlobalNorm, and for the
            policies of ClipByValue.
        copies: how many processes of `process_group` hold the same shard, for each parameter: a
            mapping or a function. None: as the group and the placements say. 0: the parameter is
            scaled here, and another process counts it in the norm.

    Returns:
        ClipByGlobalNorm: the norm of all gradients, a 0-d tensor. ClipByNorm, ClipByUnitNorm: the
        norm of each, a 1-d tensor in order. ClipBySpectralNorm: the largest singular value of each.
        ClipByValue: None. float64 where any gradient is, else
        float32, on the first gradient's device.

    Raises:
        TypeError: parameters or clip of another kind; integer, nested and mkldnn gradients; tensor
            subclasses other than DTensor; norms of shards of FullyShardedDataParallel without
            `process_group`; ClipByValue on complex and on Partial gradients; Partial gradients that
            are no sum or mean; ClipByUnitNorm on sparse gradients, and on DTensors that split rows;
            ClipBySpectralNorm on complex and sparse gradients, and on DTensors.
        ValueError: a rule that needs a `state`, or a state of another rule or list; gradients whose
            elements overlap in memory, that overlap with each other, or whose
            memory was freed; sparse gradients whose implicit zeros a rule would change or count; an
            unknown policy; a loss scale that is not positive; DTensors on a part of a mesh, whose
            other processes may hold other gradients, without `process_group`; a group that cuts
            through a mesh, `copies` without a group, ClipByNorm and ClipByUnitNorm with one.
        RuntimeError: a norm that is not finite, with nonfinite="error"; gradients made in inference
            mode, outside of it; a backend that was asked for and cannot serve; under make_fx and
            FakeTensorMode a `state`, a limit that changes, and gradients of several processes.

    A call that raises has changed nothing. If Ctrl-C interrupts a call while it writes, some
    gradients are clipped and others are not, and the `state` may or may not count the call. The
    next call works as usual. If one of several processes rejects its gradients, all that share the
    norm raise; on an accelerator the others get a norm of NaN instead.

    Example:
        >>> weight = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> (weight * weight).sum().backward()
        >>> clip_(weight, 1.0)
        tensor(10.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    if _excess or _unknown or clip is ABSENT:
        raise misfit(clip_, _excess, _unknown)
    is_compiling = torch.compiler.is_compiling()
    if type(clip) is float and not is_compiling:
        # As `as_rule`, in one call less.
        rule: Rule = by_number(clip)
    else:
        rule = clip if isinstance(clip, Rule) else as_rule(clip)
    if nonfinite not in POLICIES:
        raise unknown_policy(nonfinite)
    if is_compiling or (n_dispatch_modes() and is_traced()):
        return traced.clip_(
            clip_, parameters, rule, nonfinite, grad_scale, state, process_group, copies
        )
    processes = None
    if process_group is not None or copies is not None:
        processes = check_processes(process_group, copies)
    if isinstance(parameters, FlatGradients):
        gradients = parameters.gradients(
            per_gradient=rule.per_gradient,
            processes=processes,
            weights=rule.per_unit or rule.excludes > 0,
        )
    else:
        gradients = collect(parameters, processes=processes)
    return _clip_collected_(gradients, parameters, rule, nonfinite, grad_scale, state)


@overload
def clip_tensors_(
    tensors: Tensors,
    clip: float | NormRule,
    *,
    nonfinite: Nonfinite = ...,
    grad_scale: float | Tensor | None = ...,
    state: ClipState | None = ...,
    process_group: ProcessGroup | DeviceMesh | None = ...,
    copies: Copies | None = ...,
) -> Tensor: ...
@overload
def clip_tensors_(
    tensors: Tensors,
    clip: ClipByValue,
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
    clip: float | Rule,
    *,
    nonfinite: Nonfinite = ...,
    grad_scale: float | Tensor | None = ...,
    state: ClipState | None = ...,
    process_group: ProcessGroup | DeviceMesh | None = ...,
    copies: Copies | None = ...,
) -> Tensor | None: ...
@reaches_misfit
def clip_tensors_(
    tensors: Tensors,
    clip: float | Rule,
    *_excess: object,
    nonfinite: Nonfinite = "propagate",
    grad_scale: float | Tensor | None = None,
    state: ClipState | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
    copies: Copies | None = None,
    **_unknown: object,
) -> Tensor | None:
    """Clips tensors themselves in place, not their `.grad`; returns their norm *before* clipping.

    For gradients that lie elsewhere, such as Megatron's `main_grad` and Transformer Engine's
    `decoupled_grad`, for the pseudo-gradients of outer steps, and for updates. Rules, policies,
    results and cost are those of :func:`clip_`.

    Args:
        tensors: an iterable of tensors, where None is left out, one tensor, or (name, tensor)
            pairs, read once. Messages name a tensor by its name, or by its position. A tensor that
            occurs several times counts once. Dtypes, devices and layouts as for :func:`clip_`.
        clip: a rule other than :class:`ClipByUnitNorm`, which needs weights; a number means
            ClipByGlobalNorm(number).
        nonfinite: as for :func:`clip_`.
        grad_scale: as for :func:`clip_`.
        state: as for :func:`clip_`, by position in the list: with a rule that remembers the norm of
            each, every position has a tensor of its own.
        process_group: as for :func:`clip_`. Every process of the tensors' meshes has to have a
            tensor of each mesh: no parameters say which there are.
        copies: as for :func:`clip_`, of tensors.

    Returns:
        As :func:`clip_`.

    Raises:
        TypeError: parameters, modules, and other tensors that require grad: this would clip the
            weights, or write what autograd does not see; ClipByUnitNorm, and a rule with `exclude`;
            else as :func:`clip_`.
        ValueError, RuntimeError: as :func:`clip_`.

    A call that raises has changed nothing.

    Example:
        >>> update = torch.tensor([3.0, 4.0])
        >>> clip_tensors_([update], 1.0)
        tensor(5.)
        >>> update
        tensor([0.6000, 0.8000])
    """
    if _excess or _unknown or clip is ABSENT:
        raise misfit(clip_tensors_, _excess, _unknown)
    is_compiling = torch.compiler.is_compiling()
    if type(clip) is float and not is_compiling:
        rule: Rule = by_number(clip)
    else:
        rule = clip if isinstance(clip, Rule) else as_rule(clip)
    if nonfinite not in POLICIES:
        raise unknown_policy(nonfinite)
    if rule.per_unit:
        raise TypeError(
            f"{rule.name} compares gradients with the weights of their parameters, and tensors "
            "have none; expected another rule, or clip_(parameters, rule) with gradients in .grad"
        )
    if rule.excludes:
        raise TypeError(
            f"{rule.name} excludes parameters, and tensors that are no gradients of them cannot be "
            "among these; expected a rule without exclude, and a list without those tensors"
        )
    if is_compiling or (n_dispatch_modes() and is_traced()):
        return traced.clip_tensors_(
            clip_tensors_, tensors, rule, nonfinite, grad_scale, state, process_group, copies
        )
    processes = None
    if process_group is not None or copies is not None:
        processes = check_processes(process_group, copies)
    if state is not None and rule.per_gradient:
        tensors = as_list(tensors)
    gradients = collect_tensors(tensors, processes=processes, writes=True)
    if state is not None and rule.per_gradient:
        n, n_distinct = len(as_list(tensors)), len(gradients.tensors)
        if n_distinct != n:
            raise ValueError(
                f"a state of {rule.name} remembers a norm for each position, got {n_distinct} "
                f"tensors at {n} positions; expected one at each, and none twice"
            )
    return _clip_collected_(gradients, tensors, rule, nonfinite, grad_scale, state)


def _clip_collected_(
    gradients: Gradients,
    argument: object,
    rule: Rule,
    nonfinite: Nonfinite,
    grad_scale: float | Tensor | None,
    state: ClipState | None,
) -> Tensor | None:
    """Clips a gradient list; `argument` is the user's."""
    scale: float | Tensor = 1.0
    following = None
    try:
        if grad_scale is not None:
            scale = as_grad_scale(grad_scale)
        if state is not None:
            rule = following = follow(rule, state)
        if rule.excludes:
            refuse_other_model(rule, _all_of(argument, gradients))
        if following is not None:
            following.meet(_members_of(argument, gradients))
    except ERRORS as error:
        gradients.reject_(error)
    clip_list_ = execute.clip_ if gradients.sharding is None else sharded.clip_
    norm = clip_list_(gradients, rule, nonfinite, scale)
    if following is not None:
        following.commit()
    if misuse.calls:
        misuse.look(gradients, rule)
    return norm


def _members_of(parameters: object, gradients: Gradients) -> Sequence[Tensor]:
    """The parameters of a list, with and without a gradient; of FlatGradients those they hold."""
    if isinstance(parameters, FlatGradients):
        return parameters.parameters
    return gradients.sources or ()


def _all_of(parameters: object, gradients: Gradients) -> Sequence[Tensor]:
    """All parameters of a list, those without a gradient too."""
    if isinstance(parameters, FlatGradients):
        return [*parameters.parameters, *parameters.left_out]
    return gradients.sources or ()
