"""`clip_backward`: a view of an activation whose gradient is clipped on its way back."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tritonclip.functional.by_norm import clip_by_norm
from tritonclip.functional.by_value import clip_by_value
from tritonclip.functional.trees import Tree
from tritonclip.rules import ClipByNorm, ClipByValue, rule_for_one


def clip_backward(x: Tensor, rule: ClipByNorm | ClipByValue) -> Tensor:
    """Returns `x` unchanged; clips the gradient of this activation on its way through backward.

    In a recurrent network, call it on the state at every time step, so that gradients cannot grow
    from step to step. For parameters, whose gradients flow no further, use
    :func:`~tritonclip.clip_on_backward_`.

    Example:
        >>> import torch, tritonclip
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> rule = tritonclip.ClipByValue(0.5)
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> for step in range(2):
        ...     optimizer.zero_grad()
        ...     hidden = tritonclip.clip_backward(2 * weight, rule)
        ...     (hidden * hidden).sum().backward()
        ...     optimizer.step()
        >>> weight.grad  # 2 * 0.5
        tensor([1., 1.])

    Args:
        x: a plain strided tensor. Its gradient is clipped as a whole, so that all examples of a
            batch share one norm.
        rule: :class:`ClipByNorm` or :class:`ClipByValue`, with a number as its limit. The gradient
            is clipped by :func:`functional.clip_by_norm` or :func:`functional.clip_by_value`, which
            have no `eps`, so the rule's `eps` counts as 0.

    Returns:
        A view of `x`. In forward-mode differentiation its tangent is not clipped.

    Raises:
        TypeError: an `x` that is no plain tensor; a rule for several gradients, or a number, which
            would be one; ClipByValue for a complex `x`.
        ValueError: a rule whose limit is a function of the step.

    Notes:
        NaN and inf spread as with nonfinite="propagate". The clipped gradient is a new tensor, so
        no gradient that other code holds is overwritten. With `create_graph=True` the clipping
        itself is differentiated. torch.compile breaks the graph.

    References:
        Graves, `Generating sequences with recurrent neural networks
        <https://arxiv.org/abs/1308.0850>`_, 2013; Paddle, `ErrorClipByValue`.
    """
    if not isinstance(x, Tensor):
        raise TypeError(
            f"x must be a tensor, got {type(x).__name__}; call clip_backward on each tensor in it"
        )
    if torch.compiler.is_compiling():
        from tritonclip.engine import graph_break

        return graph_break.call(clip_backward, x, rule)  # type: ignore[no-any-return]
    rule = rule_for_one("clip_backward", rule)
    if x.requires_grad:
        Tree(x, "x", ordered=rule.clamps).check()
    numbers: Any = rule
    if rule.clamps:
        clip = partial(clip_by_value, min=numbers.min, max=numbers.max)
    else:
        clip = partial(clip_by_norm, max_norm=numbers.max_norm, norm_type=numbers.norm_type)
    result: Tensor = _Clipping.apply(x, clip)  # type: ignore[no-untyped-call]
    return result


# A hook on the view would not do, because an in-place operator on the view drops it silently.
class _Clipping(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, clip: Callable[[Tensor], Tensor]) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.clip = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.clip(grad), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.view_as(tangent)
