"""`clip_backward`: an identity whose gradient is clipped on its way back."""

from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Module

from tritonclip.backward import formula
from tritonclip.backward.arguments import check_policy, rule_for_one
from tritonclip.backward.ownership import Identity, References, is_free
from tritonclip.backward.plans import plans
from tritonclip.distributed import execute
from tritonclip.distributed.gradients import collect_tensors
from tritonclip.engine.arguments import PLAIN
from tritonclip.rules import ClipByNorm, ClipByValue
from tritonclip.signatures import ABSENT, explains_misfits, misfit, reaches_misfit
from tritonclip.tracing import is_traced


@reaches_misfit
def clip_backward(
    x: Tensor,
    rule: ClipByNorm | ClipByValue,
    *_excess: NoReturn,
    nonfinite: str = "propagate",
    **_unknown: NoReturn,
) -> Tensor:
    r"""Returns `x` unchanged; in backward, clips its gradient before it goes on.

    For recurrent networks, call it on the state at every time step: gradients then cannot grow from
    step to step.

    The gradient is overwritten where autograd has just made it and nobody else holds it, else
    copied. Where the clipping itself is differentiated (`create_graph=True`, torch.func) and in a
    graph of torch.compile it is a formula of torch operators.

    Args:
        x: any tensor; its gradient is clipped as one, also the batch in it.
        rule: :class:`ClipByNorm` or :class:`ClipByValue`.
        nonfinite: the policy for a norm (for ClipByValue: an element) that is NaN or inf; see
            :func:`clip_`. "error" raises from within `backward`.

    Returns:
        A view of `x`. In forward-mode differentiation its tangent is not clipped.

    Raises:
        TypeError: an `x` that is no tensor; a rule for several gradients, a number among them;
            ClipByValue for a complex `x`.
        ValueError: an unknown policy; "error" in a compiled graph, which cannot wait.

    Example:
        >>> x = torch.tensor([1.0, -2.0], requires_grad=True)
        >>> y = clip_backward(x, ClipByValue(0.5))
        >>> (3 * y).sum().backward()
        >>> x.grad
        tensor([0.5000, 0.5000])

    References:
        Graves, `Generating sequences with recurrent neural networks
        <https://arxiv.org/abs/1308.0850>`_, 2013; Paddle, `ErrorClipByValue`.
    """
    if _excess or _unknown or rule is ABSENT:
        raise misfit(clip_backward, _excess, _unknown)
    if not isinstance(x, Tensor):
        raise TypeError(
            f"x must be a tensor, got {type(x).__name__}; call clip_backward on each tensor in it"
        )
    rule = rule_for_one(rule, "clip_backward")
    check_policy(nonfinite)
    if rule.clamps and x.is_complex():
        raise TypeError(
            "ClipByValue cannot order complex gradients, got a complex x; expected a real one: "
            "clip by norm instead"
        )
    if torch.compiler.is_compiling():
        if nonfinite == "error":
            raise ValueError(
                "nonfinite='error' reads gradients in backward, which a compiled graph cannot; "
                "expected 'propagate' or 'zero', or clip_backward outside of the compiled region"
            )
        compiled: Tensor = _Compiled.apply(x, rule, nonfinite)  # type: ignore[no-untyped-call]
        return compiled
    result: Tensor = Identity.apply(x, partial(_clip, rule, nonfinite))  # type: ignore[no-untyped-call]
    return result


@explains_misfits
class ClipBackward(Module):
    """:func:`clip_backward` as a module, for `torch.nn.Sequential`.

    Args:
        rule: :class:`ClipByNorm` or :class:`ClipByValue`.
        nonfinite: see :func:`clip_backward`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), ClipBackward(ClipByNorm(1.0)))
        >>> model[1]
        ClipBackward(ClipByNorm(max_norm=1.0, norm_type=2.0, eps=1e-06))
    """

    def __init__(self, rule: ClipByNorm | ClipByValue, *, nonfinite: str = "propagate") -> None:
        super().__init__()
        self.rule = rule_for_one(rule, "ClipBackward")
        check_policy(nonfinite)
        self.nonfinite = nonfinite

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x`; see :func:`clip_backward`."""
        return clip_backward(x, self.rule, nonfinite=self.nonfinite)

    def extra_repr(self) -> str:
        """The rule, and the policy where it is another one than usual."""
        policy = "" if self.nonfinite == "propagate" else f", nonfinite={self.nonfinite!r}"
        return f"{self.rule}{policy}"


def _clip(
    rule: ClipByNorm | ClipByValue, nonfinite: str, grad: Tensor, references: References
) -> Tensor:
    """The gradient after clipping: in its own memory, in a copy, or as a formula."""
    if (torch.is_grad_enabled() and grad.requires_grad) or is_traced() or not _has_memory(grad):
        return formula.clipped(grad, rule, nonfinite)
    if not is_free(grad, references):
        grad = grad.clone()
    gradients = collect_tensors([grad], "x in clip_backward".format, cache=plans)
    execute.clip_(gradients, rule, nonfinite)
    return grad


def _has_memory(grad: Tensor) -> bool:
    """Whether a gradient has an address; inside torch.func it has none."""
    if type(grad) not in PLAIN or grad.layout != torch.strided:
        # For the engine to take apart, or to refuse.
        return True
    try:
        grad.data_ptr()
    except RuntimeError:
        return False
    return True


class _Compiled(torch.autograd.Function):
    """The formula, as torch.compile can trace it: it knows no `jvp`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rule: ClipByNorm | ClipByValue, nonfinite: str) -> Tensor:
        ctx.rule, ctx.nonfinite = rule, nonfinite
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return formula.clipped(grad, ctx.rule, ctx.nonfinite), None, None
