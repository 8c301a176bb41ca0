"""`clip_backward`: an identity whose gradient is clipped on its way back.

The engine clips a copy of the gradient, because autograd passes one tensor to several branches, and
hands on tensors that users gave it or keep. A formula of torch operators, which is slower, serves
where there is no address, as inside torch.func and torch.compile, and where the clipping itself is
differentiated.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from tritonclip.distributed.gradients import collect_tensors
from tritonclip.engine import execute
from tritonclip.engine.arguments import PLAIN
from tritonclip.engine.checks import REMEDY, check_policy
from tritonclip.engine.plan import result_dtype
from tritonclip.engine.plan_cache import PlanCache
from tritonclip.functional.by_value import clamped
from tritonclip.functional.coefficients import filled
from tritonclip.functional.formulas import coefficient_of, norm_of
from tritonclip.modes import is_traced
from tritonclip.rules import ClipByGlobalNorm, ClipByNorm, ClipByValue
from tritonclip.rules.arguments import as_number

# The plans of gradients that are clipped one at a time. More than most models have kinds of
# gradients, which come in turn; the memory of plans is bounded too.
plans = PlanCache(capacity=256)


def clip_backward(
    x: Tensor, rule: ClipByNorm | ClipByValue, *, nonfinite: str = "propagate"
) -> Tensor:
    """Returns `x` unchanged; clips the gradient of this activation on its way through backward.

    For parameters, whose gradients flow no further, :func:`~tritonclip.clip_on_backward_`.

    For recurrent networks, call it on the state at every time step: gradients then cannot grow from
    step to step.

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
        x: any tensor; its gradient is clipped as a whole, all examples of a batch by one norm.
        rule: :class:`ClipByNorm` or :class:`ClipByValue`, with a number as its limit.
        nonfinite: "propagate", "error" or "zero", for a norm (for ClipByValue: an element) that is
            NaN or inf; see :func:`clip_`. "error" raises from within `backward`.

    Returns:
        A view of `x`. In forward-mode differentiation its tangent is not clipped.

    Raises:
        TypeError: an `x` that is no tensor; a rule for several gradients, a number among them;
            ClipByValue for a complex `x`.
        ValueError: an unknown policy; "error" in a compiled graph, which cannot wait.

    Notes:
        The clipped gradient is a new tensor, so that no gradient is overwritten that something else
        holds. Where the clipping itself is differentiated (`create_graph=True`, torch.func), and in
        a graph of torch.compile, it is a formula of torch operators.

    References:
        Graves, `Generating sequences with recurrent neural networks
        <https://arxiv.org/abs/1308.0850>`_, 2013; Paddle, `ErrorClipByValue`.
    """
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
    result: Tensor = _Identity.apply(x, partial(_clip, rule, nonfinite))  # type: ignore[no-untyped-call]
    return result


class ClipBackward(Module):
    """A module that returns its input, and clips the gradient of it; for `torch.nn.Sequential`.

    The function is :func:`clip_backward`, whose arguments, errors and notes hold here too.

    Example:
        >>> import torch, tritonclip
        >>> linear = torch.nn.Linear(2, 1)
        >>> clip = tritonclip.ClipBackward(tritonclip.ClipByNorm(1.0))
        >>> model = torch.nn.Sequential(linear, clip)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for step in range(2):
        ...     optimizer.zero_grad()
        ...     (100 * model(torch.tensor([3.0, 4.0]))).sum().backward()
        ...     optimizer.step()
        >>> linear.weight.grad  # the gradient of the output was 100
        tensor([[3., 4.]])
    """

    def __init__(self, rule: ClipByNorm | ClipByValue, *, nonfinite: str = "propagate") -> None:
        super().__init__()
        self.rule = rule_for_one(rule, "ClipBackward")
        check_policy(nonfinite)
        self.nonfinite = nonfinite

    def forward(self, x: Tensor) -> Tensor:
        """Returns a view of `x`, whose gradient will be clipped."""
        return clip_backward(x, self.rule, nonfinite=self.nonfinite)

    def extra_repr(self) -> str:
        """The rule, and the policy unless it is the default."""
        policy = "" if self.nonfinite == "propagate" else f", nonfinite={self.nonfinite!r}"
        return f"{self.rule}{policy}"


def _clip(rule: ClipByNorm | ClipByValue, nonfinite: str, grad: Tensor) -> Tensor:
    """The gradient after clipping, in new memory."""
    if (torch.is_grad_enabled() and grad.requires_grad) or is_traced() or not _has_memory(grad):
        return clipped(grad, rule, nonfinite)
    copy = grad.clone()
    gradients = collect_tensors([copy], "x in clip_backward".format, cache=plans)
    execute.clip_(gradients, rule, nonfinite)
    return copy


def _has_memory(grad: Tensor) -> bool:
    """Whether a gradient has an address; inside torch.func it has none."""
    if type(grad) not in PLAIN or grad.layout != torch.strided:
        # For the engine to read, or to refuse.
        return True
    try:
        grad.data_ptr()
    except RuntimeError:
        return False
    return True


class _Identity(torch.autograd.Function):
    """Passes its gradient in backward to a function."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A view of `x`; in backward, `function` gets its gradient and returns another one."""
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps the function; a missing gradient is None."""
        ctx.function = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        """The result of the function."""
        return None if grad is None else ctx.function(grad), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, _: None) -> Tensor | None:
        """The tangent of an identity."""
        return None if tangent is None else tangent.view_as(tangent)


class _Compiled(torch.autograd.Function):
    """The formula, as torch.compile can trace it: it knows no `jvp`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rule: ClipByNorm | ClipByValue, nonfinite: str) -> Tensor:
        ctx.rule, ctx.nonfinite = rule, nonfinite
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return clipped(grad, ctx.rule, ctx.nonfinite), None, None


def rule_for_one(rule: object, name: str) -> ClipByNorm | ClipByValue:
    """The rule of a user of the function `name`; raises for one of several gradients or steps."""
    # Not a subclass, whose limit would not be asked for.
    if type(rule) is ClipByNorm or type(rule) is ClipByValue:
        if not rule.fixed:
            raise ValueError(
                f"{name} sees no steps, but the limit of {rule} is a function of the step; "
                "expected a number"
            )
        return rule
    expected = f"{name} expects ClipByNorm(...) or ClipByValue(...)"
    if isinstance(rule, ClipByGlobalNorm) or (
        isinstance(rule, int | float) and not isinstance(rule, bool)
    ):
        raise TypeError(
            f"{expected}, got {rule!r}, a norm of all gradients. Backward yields one gradient "
            "at a time, before the next one is known; clip by one norm after backward, with clip_ "
            "or a ClippedOptimizer"
        )
    if isinstance(rule, type):
        raise TypeError(f"{expected}, got the class {rule.__name__}; write {rule.__name__}(...)")
    raise TypeError(f"{expected}, got {rule!r:.80} of type {type(rule).__name__}")


def clipped(grad: Tensor, rule: ClipByNorm | ClipByValue, nonfinite: str) -> Tensor:
    """A gradient after clipping, as a new tensor; with nonfinite="error" the host waits."""
    if not grad.numel():
        return grad
    if isinstance(rule, ClipByValue):
        norm, result = grad, clamped(grad, *rule.interval())
    else:
        norm = norm_of(grad, rule.norm_type).to(result_dtype([grad]))
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        result = (wide * _coefficient(norm, rule)).to(grad.dtype)
    if nonfinite == "propagate":
        return result
    finite = torch.isfinite(norm).all()
    if nonfinite == "error":
        if not bool(finite):
            raise RuntimeError(
                f"a gradient in backward is non-finite, so {rule} cannot clip it. {REMEDY}"
            )
        return result
    return torch.where(finite, result, torch.zeros_like(result))


def _coefficient(norm: Tensor, rule: ClipByNorm) -> Tensor:
    """min(1, max_norm / (norm + eps)), and 1 for 0/0; NaN stays NaN."""
    bound, max_norm = norm + rule.eps, as_number("max_norm", rule.max_norm)
    coefficient = coefficient_of(bound, filled(max_norm, norm.dtype, norm.device))
    return torch.where(bound == 0, 1.0, coefficient)
