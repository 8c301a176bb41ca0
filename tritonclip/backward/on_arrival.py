"""`clip_on_backward_`: clips each gradient when backward has accumulated it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from tritonclip.clipping import clip_
from tritonclip.engine import compiled, execute
from tritonclip.engine.arguments import FSDP_MARK, with_labels
from tritonclip.engine.checks import check_policy
from tritonclip.engine.gradients import collect
from tritonclip.engine.plan_cache import PlanCache
from tritonclip.messages import join_names, warn_user
from tritonclip.modes import is_traced, n_dispatch_modes
from tritonclip.rules import ClipByNorm, ClipByValue, rule_for_one

# The plans of gradients that are clipped one at a time. Most models have fewer kinds of gradients,
# which come in turn; the memory of plans is bounded too.
plans = PlanCache(capacity=256)


class ClippingHandle:
    """The hooks of one call of :func:`clip_on_backward_`; also a context that removes them."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Ends the clipping; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> ClippingHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def clip_on_backward_(
    parameters: Tensor | Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
    rule: ClipByNorm | ClipByValue,
    *,
    nonfinite: str = "propagate",
) -> ClippingHandle:
    """Clips the gradient of each parameter in place, by a hook, once backward has accumulated it.

    This is for optimizers that step inside backward, and free each gradient before the next one is
    there. Call it before their hooks are registered, so that these get clipped gradients. For
    activations, whose gradients flow on, there is :func:`~tritonclip.clip_backward`.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> with tritonclip.clip_on_backward_(weight, tritonclip.ClipByNorm(1.0)):
        ...     for step in range(2):
        ...         optimizer.zero_grad()
        ...         (weight * weight).sum().backward()
        ...         optimizer.step()
        >>> weight.grad
        tensor([0.6000, 0.8000])

    Args:
        parameters: tensors, a module, or (name, parameter) pairs; read once. Frozen parameters are
            clipped as soon as they are trained. A parameter is left alone if it has
            `need_clip = False` when its gradient arrives.
        rule: :class:`ClipByNorm`, with the norm of each gradient, or :class:`ClipByValue`.
        nonfinite: "propagate", "error" or "zero", for NaN and inf; see :func:`clip_`. "error"
            raises from within `backward`, when earlier gradients are clipped already.

    Returns:
        A handle. Its `remove()` ends the clipping, and so does the end of a `with` block over it.

    Raises:
        TypeError: parameters of another kind, or of FullyShardedDataParallel; a rule for several
            gradients, such as a number.
        ValueError: no parameters; an unknown policy; parameters that are not leaves of the graph;
            parameters that have hooks already, which would get gradients before clipping.

    Warns:
        UserWarning: the module is a DistributedDataParallel, which averages gradients afterwards.

    Notes:
        A gradient is clipped each time that backward adds to it: with accumulation over
        micro-batches, the sum so far.
    """
    rule = rule_for_one("clip_on_backward_", rule)
    check_policy(nonfinite)
    if isinstance(parameters, Module) and any(
        isinstance(module, DistributedDataParallel) for module in parameters.modules()
    ):
        warn_user(
            "DistributedDataParallel averages gradients after they have arrived, so each process "
            "clips the gradient of its own part of the batch. To clip the average, use clip_ or a "
            "ClippedOptimizer after backward; if this is meant, pass model.parameters()"
        )
    members, label_of = with_labels(parameters)
    # Parameters of other dtypes never have a gradient, such as those of quantized layers.
    trainable = [(i, p) for i, p in enumerate(members) if p.is_floating_point() or p.is_complex()]
    named = {id(p): (label_of(i), p) for i, p in trainable}
    _refuse(named.values())
    if not named:
        raise ValueError(
            "expected floating-point parameters, got none; a generator can be read only once"
        )
    handles = [
        _register(parameter, _Clip(label, rule, nonfinite)) for label, parameter in named.values()
    ]
    return ClippingHandle(handles)


class _Clip:
    def __init__(self, label: str, rule: ClipByNorm | ClipByValue, nonfinite: str) -> None:
        self._label, self._rule, self._nonfinite = label, rule, nonfinite

    def __call__(self, parameter: Tensor) -> None:
        if torch.compiler.is_compiling() or (n_dispatch_modes() and is_traced()):
            # Compiled autograd, among others, traces the hook into a graph.
            named = [(self._label, parameter)]
            compiled.clip_(clip_, named, self._rule, nonfinite=self._nonfinite)
            return
        gradients = collect([parameter], lambda _: self._label, cache=plans)
        execute.clip_(gradients, self._rule, self._nonfinite)


def _register(parameter: Tensor, hook: _Clip) -> RemovableHandle:
    """Registers a hook, even for a frozen parameter, for which torch would refuse it."""
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_()
    try:
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    finally:
        if frozen:
            parameter.requires_grad_(False)
    return handle


def _refuse(named: Iterable[tuple[str, Tensor]]) -> None:
    if any(hasattr(parameter, FSDP_MARK) for _, parameter in named):
        raise TypeError(
            "the parameters are those of FullyShardedDataParallel, which accumulates and averages "
            "gradients elsewhere; expected parameters that receive them: use fully_shard, or clip_ "
            "with process_group= after backward"
        )
    inner = [label for label, parameter in named if not parameter.is_leaf]
    if inner:
        raise ValueError(
            f"expected parameters, whose gradients backward accumulates, got results of operators: "
            f"{join_names(inner)}; for these there is clip_backward"
        )
    hooked = [label for label, parameter in named if _has_hooks(parameter)]
    if hooked:
        raise ValueError(
            f"{join_names(hooked)} have hooks of register_post_accumulate_grad_hook already, "
            "which would run before the clipping; expected only those of clip_on_backward_: remove "
            "them, call clip_on_backward_, and register them again"
        )


def _has_hooks(parameter: Tensor) -> bool:
    """Whether other hooks would get the parameter's gradient before it is clipped."""
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(not isinstance(hook, _Clip) for hook in hooks.values())
