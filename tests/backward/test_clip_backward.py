"""``clip_backward``: an identity whose gradient is clipped, as ``helpers.reference`` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tritonclip
from helpers import reference
from helpers.cases import (
    CHUNK,
    FLOATS,
    INTERPRETED,
    NORM_TYPES,
    assert_bits,
    copies,
    grad_of,
    named,
    normal,
)
from tritonclip import ClipBackward, ClipByGlobalNorm, ClipByNorm, ClipByValue, clip_backward

RULES = [
    pytest.param(ClipByNorm(0.5), id="by-norm"),
    pytest.param(ClipByValue(-0.1, 0.2), id="by-value"),
]
SIZES = (0, 1, 7, CHUNK + 1)


def clipped(grad: torch.Tensor, rule: Any) -> torch.Tensor:
    """A gradient by the formula of a rule, from its norm in float64."""
    measured = None
    if isinstance(rule, ClipByNorm):
        wide = grad.dtype in (torch.float64, torch.complex128)
        dtype = torch.float64 if wide else torch.float32
        measured = torch.tensor([reference.norm(grad, rule.norm_type)], dtype=dtype)
    return reference.clipped([grad], rule, measured)[0]


def through(grad: torch.Tensor, rule: Any, **options: Any) -> torch.Tensor:
    """What arrives at x where this gradient arrives at the result."""
    x = torch.zeros_like(grad, requires_grad=True)
    (result,) = torch.autograd.grad(clip_backward(x, rule, **options), x, grad)
    return result


def assert_clipped(actual: torch.Tensor, grad: torch.Tensor, rule: Any) -> None:
    # A norm in the last digit of float32, and one rounding of the product, in the dtype.
    eps = max(2.0**-22, torch.finfo(grad.dtype).eps)
    rtol = 2.0**-50 if grad.dtype in (torch.float64, torch.complex128) else eps
    expected = clipped(grad, rule)
    torch.testing.assert_close(actual.cpu(), expected, rtol=rtol, atol=0, equal_nan=True)


def check(grad: torch.Tensor, rule: Any) -> None:
    assert_clipped(through(grad, rule), grad.cpu(), rule)


@pytest.mark.parametrize("rule", RULES)
def test_clip_backward_returns_x_unchanged(rule):
    x = normal(7).requires_grad_()
    y = clip_backward(x, rule)
    assert_bits([y], [x])
    assert y.data_ptr() == x.data_ptr()


@pytest.mark.covering(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_clip_backward_clips_the_gradient(backend, dtype, size, rule):
    check(normal(size, dtype, backend.device), rule)


@pytest.mark.parametrize("p", NORM_TYPES)
def test_clip_backward_measures_any_norm(backend, p):
    check(normal((9, 7), device=backend.device), ClipByNorm(0.01, norm_type=p))


@pytest.mark.parametrize("dtype", named([torch.complex64, torch.complex128]))
def test_clip_backward_clips_complex_gradients_by_modulus(dtype):
    check(normal(7, dtype), ClipByNorm(0.5))


class Copying(torch.autograd.Function):
    """`clip_backward`, with a copy of the gradient that arrives."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            return through(grad.clone(), ClipByNorm(0.01))


class Saved(torch.autograd.Function):
    """Hands on a tensor that its graph keeps."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(kept)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None


Identity = Callable[[torch.Tensor], torch.Tensor]


def expanded(identity: Identity, x: Any) -> list[Any]:
    identity(x).sum().backward()
    return [x.grad]


def from_the_user(identity: Identity, x: Any) -> list[Any]:
    root = torch.ones(4, 3)
    identity(x).backward(root)
    return [x.grad, root]


def view_from_numpy(identity: Identity, x: Any) -> list[Any]:
    array = normal(12).numpy()
    identity(x).view(12).backward(torch.from_numpy(array))
    return [x.grad, torch.from_numpy(array)]


def of_two_branches(identity: Identity, x: Any) -> list[Any]:
    other = normal((4, 3)).requires_grad_()
    # Made first, and so waiting while the gradient of the other branch is clipped.
    waiting = other * 3
    ((identity(x * 2) + waiting) * 2).sum().backward()
    return [x.grad, other.grad]


def saved_by_the_graph(identity: Identity, x: Any) -> list[Any]:
    kept = normal((4, 3))
    Saved.apply(identity(x), kept).sum().backward()
    return [x.grad, kept]


def kept_by_a_hook(identity: Identity, x: Any) -> list[Any]:
    kept: list[Any] = []
    y = identity(x * 2)
    y.register_hook(kept.append)
    (y * 2).sum().backward()
    return [x.grad, *kept]


HOLDERS = [
    *(expanded, from_the_user, view_from_numpy, of_two_branches),
    *(saved_by_the_graph, kept_by_a_hook),
]


@pytest.mark.parametrize("scenario", HOLDERS, ids=lambda scenario: scenario.__name__)
def test_clip_backward_leaves_gradients_alone_that_others_hold(scenario):
    x, twin = (normal((4, 3), seed=1).requires_grad_() for _ in range(2))
    results = copies(scenario(lambda t: clip_backward(t, ClipByNorm(0.01)), x))
    expected = scenario(Copying.apply, twin)
    assert_bits(results, expected)
    assert all(t.abs().max() > 0 for t in expected)


@pytest.mark.parametrize("rule", [ClipByNorm(1e3), ClipByValue(1e3)], ids=["by-norm", "by-value"])
def test_clip_backward_leaves_gradients_within_the_limit(backend, rule):
    grad = normal(CHUNK + 1, torch.float16, backend.device)
    assert_bits([through(grad, rule)], [grad])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("rule", RULES)
def test_clip_backward_propagates_nonfinite(backend, rule, bad):
    grad = torch.tensor([3.0, bad, -1.0], device=backend.device)
    assert_bits([through(grad, rule)], [clipped(grad.cpu(), rule)])


@pytest.mark.parametrize("rule", RULES)
def test_clip_backward_zeroes_nonfinite(backend, rule):
    grad = torch.tensor([3.0, torch.nan, -1.0], device=backend.device)
    assert_bits([through(grad, rule, nonfinite="zero")], [torch.zeros(3)])


@pytest.mark.parametrize("rule", RULES)
def test_clip_backward_raises_on_nonfinite(rule):
    grad = torch.tensor([3.0, torch.nan, -1.0])
    with pytest.raises(RuntimeError, match=r"x in clip_backward.* non-finite"):
        through(grad, rule, nonfinite="error")
    assert grad[0] == 3


def test_clip_backward_keeps_x_without_gradient():
    x = torch.arange(3)
    assert_bits([clip_backward(x, ClipByNorm(1.0))], [x])


def test_clip_backward_accepts_a_result_without_use():
    x, y = normal(3).requires_grad_(), normal(3).requires_grad_()
    clip_backward(x, ClipByNorm(1.0))
    y.sum().backward()
    assert x.grad is None


def test_clip_backward_clips_at_every_time_step():
    """A linear recurrence with a weight over 1, and its backward written down by hand."""
    weight = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    inputs = normal((6, 5), torch.float64)
    rule = ClipByValue(0.75)
    state, states = torch.zeros(5, dtype=torch.float64), []
    for entry in inputs:
        states.append(state)
        state = clip_backward(weight * state + entry, rule)
    state.square().sum().backward()
    delta, expected = 2 * state.detach(), 0.0
    for before in reversed(states):
        delta = delta.clamp(-0.75, 0.75)
        expected += float((delta * before.detach()).sum())
        delta = weight.detach() * delta
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx(expected, rel=1e-12)


def test_module_clips_inside_a_sequential():
    rule = ClipByNorm(0.01)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), ClipBackward(rule), torch.nn.Tanh())
    x = normal((4, 3))
    model(x).sum().backward()
    hidden = model[0](x).detach().requires_grad_()
    hidden.tanh().sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(model[0].bias.grad, clipped(hidden.grad, rule).sum(0))
    assert repr(model[1]) == f"ClipBackward({rule})"
    assert repr(ClipBackward(rule, nonfinite="zero")) == f"ClipBackward({rule}, nonfinite='zero')"


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("rule", RULES)
def test_clip_backward_inside_activation_checkpoint(rule, reentrant):
    x, twin = (normal((4, 3)).requires_grad_() for _ in range(2))

    def segment(x):
        return clip_backward(x.exp(), rule).tanh()

    torch.utils.checkpoint.checkpoint(segment, x, use_reentrant=reentrant).sum().backward()
    segment(twin).sum().backward()
    assert_bits([grad_of(x)], [grad_of(twin)])


def test_clip_backward_under_autocast():
    layer, rule = torch.nn.Linear(3, 2), ClipByNorm(1e-3)
    seen = []
    with torch.autocast("cpu", torch.bfloat16):
        hidden = layer(normal((4, 3)))
        hidden.register_hook(lambda grad: seen.append(grad))
        result = clip_backward(hidden, rule)
        (result.sum() * 1.0).backward()
    assert seen[0].dtype == torch.bfloat16
    assert_clipped(seen[0], torch.ones(4, 2, dtype=torch.bfloat16), rule)


def test_clip_backward_serves_every_backward_of_a_retained_graph():
    x, rule = normal(5).requires_grad_(), ClipByNorm(0.5)
    loss = clip_backward(x * 2, rule).square().sum()
    loss.backward(retain_graph=True)
    first = grad_of(x).clone()
    loss.backward()
    torch.testing.assert_close(grad_of(x), 2 * first)
    assert float(first.norm()) == pytest.approx(1.0, rel=1e-6)


def test_clip_backward_clips_the_dense_sum_of_a_sparse_gradient():
    weight, rule = normal((5, 3)).requires_grad_(), ClipByNorm(0.5)
    rows = torch.tensor([1, 1, 4])
    picked = torch.nn.functional.embedding(rows, clip_backward(weight, rule), sparse=True)
    picked.square().sum().backward()
    dense = weight.detach().clone().requires_grad_()
    torch.nn.functional.embedding(rows, dense).square().sum().backward()
    grad = grad_of(weight)
    assert grad.is_sparse
    torch.testing.assert_close(grad.to_dense(), clipped(grad_of(dense), rule))


CALLS: dict[str, Any] = {
    "clip_backward": lambda rule: clip_backward(torch.zeros(2), rule),
    "ClipBackward": ClipBackward,
    "clip_on_backward_": lambda rule: tritonclip.clip_on_backward_(torch.nn.Linear(1, 1), rule),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (1.0, "a norm of all gradients"),
        (ClipByGlobalNorm(1.0), "before the next one is known"),
        (ClipByNorm, r"write ClipByNorm\(\.\.\.\)"),
        (None, "got None of type NoneType"),
        (True, "got True of type bool"),
    ],
    ids=["number", "global", "class", "none", "bool"],
)
def test_rules_for_several_gradients_are_refused(name, rule, message):
    with pytest.raises(TypeError, match=rf"{name} expects .*{message}"):
        CALLS[name](rule)


@pytest.mark.parametrize("call", [clip_backward, tritonclip.clip_on_backward_])
def test_unknown_policies_are_refused(call):
    with pytest.raises(ValueError, match="got 'skip'; only a ClippedOptimizer can skip"):
        call(torch.zeros(2, requires_grad=True), ClipByNorm(1.0), nonfinite="skip")


def test_clip_backward_refuses_other_arguments_than_tensors():
    with pytest.raises(TypeError, match="got tuple; call clip_backward on each tensor in it"):
        clip_backward((torch.zeros(2), torch.zeros(2)), ClipByNorm(1.0))  # type: ignore[arg-type]


def test_clip_backward_refuses_values_of_complex_tensors():
    with pytest.raises(TypeError, match="cannot order complex gradients"):
        clip_backward(torch.zeros(2, dtype=torch.complex64), ClipByValue(1.0))


@pytest.mark.skipif(INTERPRETED, reason="the message is torch's")
def test_writing_over_the_result_is_refused():
    x = normal(3).requires_grad_()
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        clip_backward(x * 2, ClipByNorm(1.0)).relu_()
