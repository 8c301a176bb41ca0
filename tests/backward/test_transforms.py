"""``clip_backward`` under torch.func, torch.compile, and differentiated once more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from helpers.cases import grad_of, normal, parameter
from helpers.graphs import NEEDS_DYNAMO
from tritonclip import ClipByNorm, ClipByValue, clip_, clip_backward, clip_on_backward_

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.plain_empty,
]

RULES: list[Any] = [
    pytest.param(ClipByNorm(0.5), id="by-norm"),
    pytest.param(ClipByNorm(0.5, norm_type=3.0), id="by-norm-3"),
    pytest.param(ClipByNorm(0.5, norm_type=torch.inf, eps=0.0), id="by-norm-inf"),
    pytest.param(ClipByValue(-0.1, 0.2), id="by-value"),
]
POLICIES = ["propagate", "zero"]


def loss_of(x, rule, nonfinite="propagate"):
    return clip_backward(x * 3, rule, nonfinite=nonfinite).sin().sum()


def gradient_of(x, rule, nonfinite="propagate"):
    """In eager mode, by the engine."""
    x = x.detach().clone().requires_grad_()
    loss_of(x, rule, nonfinite).backward()
    return x.grad


@pytest.mark.parametrize("rule", RULES)
def test_grad_equals_backward(rule):
    x = normal(5)
    torch.testing.assert_close(torch.func.grad(loss_of)(x, rule), gradient_of(x, rule))


@pytest.mark.parametrize("rule", RULES)
def test_vmap_clips_the_gradient_of_each_example(rule):
    batch = normal((4, 5))
    expected = torch.stack([gradient_of(x, rule) for x in batch])
    outside = torch.func.vmap(lambda x: torch.func.grad(loss_of)(x, rule))(batch)
    inside = torch.func.grad(lambda b: torch.func.vmap(lambda x: loss_of(x, rule))(b).sum())(batch)
    torch.testing.assert_close(outside, expected)
    torch.testing.assert_close(inside, expected)


@pytest.mark.parametrize("rule", RULES)
def test_batched_gradients_are_clipped_each(rule):
    x, roots = normal(5).requires_grad_(), normal((3, 5), seed=1)
    y = clip_backward(x * 3, rule)
    (batched,) = torch.autograd.grad(y, x, roots, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, x, root, retain_graph=True)[0] for root in roots]
    torch.testing.assert_close(batched, torch.stack(each))


def test_forward_mode_tangents_are_not_clipped():
    x, tangent = normal(5), normal(5, seed=1)
    value, derivative = torch.func.jvp(  # type: ignore[misc]
        lambda x: clip_backward(x, ClipByNorm(0.1)), (x,), (tangent,)
    )
    torch.testing.assert_close((value, derivative), (x, tangent))


@pytest.mark.parametrize("rule", RULES)
def test_clipping_is_differentiated_twice(rule):
    x = normal(5, torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: clip_backward(x**3, rule), (x,))
    torch.autograd.functional.hessian(lambda x: clip_backward(x**3, rule).sum(), x.detach())


@pytest.mark.parametrize("rule", RULES)
def test_created_graph_has_the_same_gradient(rule):
    x = normal(5).requires_grad_()
    (first,) = torch.autograd.grad(loss_of(x, rule), x, create_graph=True)
    assert first.requires_grad
    torch.testing.assert_close(first.detach(), gradient_of(x, rule))


@pytest.mark.parametrize("rule", RULES)
def test_derivative_of_clipping_zeros_is_finite(rule):
    x = torch.zeros(3, requires_grad=True)
    root = torch.zeros(3, requires_grad=True)
    (grad,) = torch.autograd.grad(clip_backward(x, rule), x, root, create_graph=True)
    (derivative,) = torch.autograd.grad(grad.sum(), root)
    assert derivative.isfinite().all()


@pytest.mark.parametrize("scale", [1e30, 1e-30], ids=["large", "small"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_formula_measures_any_magnitude(dtype, scale):
    root = normal(5, torch.float64) * scale**6 if dtype == torch.float64 else normal(5) * scale
    root.requires_grad_()
    x = torch.zeros(5, dtype=dtype, requires_grad=True)
    limit = float(root.detach().abs().max()) / 4
    rule = ClipByNorm(limit, eps=0.0)
    (grad,) = torch.autograd.grad(clip_backward(x, rule), x, root, create_graph=True)
    # Relative to the limit, for numbers whose squares float64 does not hold.
    assert float((grad.detach() / limit).norm()) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("nonfinite", POLICIES)
def test_formula_keeps_the_policy(nonfinite, bad, rule):
    root = torch.tensor([3.0, bad, -1.0])
    x = torch.zeros(3, requires_grad=True)
    y = clip_backward(x, rule, nonfinite=nonfinite)
    (formula,) = torch.autograd.grad(y, x, root.clone().requires_grad_(), create_graph=True)
    (engine,) = torch.autograd.grad(y, x, root)
    torch.testing.assert_close(formula.detach(), engine, equal_nan=True)


@pytest.mark.parametrize("rule", RULES)
def test_formula_raises_on_nonfinite(rule):
    root = torch.tensor([3.0, torch.nan, -1.0], requires_grad=True)
    x = torch.zeros(3, requires_grad=True)
    y = clip_backward(x, rule, nonfinite="error")
    with pytest.raises(RuntimeError, match="a gradient in backward is non-finite"):
        torch.autograd.grad(y, x, root, create_graph=True)


@pytest.mark.covering(1)
@NEEDS_DYNAMO
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("nonfinite", POLICIES)
@pytest.mark.parametrize("rule", RULES)
def test_compiled_graph_clips_in_backward(rule, nonfinite, dtype):
    x, twin = normal(5, dtype).requires_grad_(), normal(5, dtype)
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    compiled(x, rule, nonfinite).backward()
    torch.testing.assert_close(x.grad, gradient_of(twin, rule, nonfinite))


@NEEDS_DYNAMO
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_graph_stays_as_its_rule_meets_other_dtypes():
    rule, counter = ClipByValue(-0.1, 0.2), CompileCounter()
    compiled = torch.compile(loss_of, fullgraph=True, backend=counter)
    for dtype in (torch.float16, torch.float64, torch.float32):
        compiled(normal(5).requires_grad_(), rule).backward()
        clip_(parameter(normal(3, dtype)), rule)
    assert counter.frame_count == 1


@NEEDS_DYNAMO
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_graph_refuses_to_wait():
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="which a compiled graph cannot"):
        compiled(normal(5).requires_grad_(), ClipByNorm(1.0), "error")


@pytest.mark.covering(1)
@NEEDS_DYNAMO
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("traced", [False, True], ids=["eager-backward", "compiled-autograd"])
@pytest.mark.parametrize("rule", RULES)
def test_clip_on_backward_under_compile(rule, traced):
    model, x = torch.nn.Linear(5, 3), normal((4, 5))
    model(x).square().sum().backward()
    unclipped = [grad_of(p) for p in model.parameters()]
    model.zero_grad()
    clip_on_backward_(model, rule)
    with torch._dynamo.config.patch(compiled_autograd=traced):
        torch.compile(lambda x: model(x).square().sum().backward(), backend="aot_eager")(x)
    ones = [torch.zeros_like(g, requires_grad=True) for g in unclipped]
    expected = [
        torch.autograd.grad(clip_backward(one, rule), one, g)[0]
        for one, g in zip(ones, unclipped, strict=True)
    ]
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


def test_a_limit_that_is_a_function_of_the_step_is_refused():
    with pytest.raises(ValueError, match="sees no steps"):
        clip_backward(torch.zeros(2, requires_grad=True), ClipByNorm(lambda step: 1.0))
