"""``clip_backward``: a view whose gradient is clipped by the functions of ``functional``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.cases import INTERPRETED, assert_bits, copies, grad_of, normal
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClipByValue, clip_backward, functional

RULES = [
    pytest.param(ClipByNorm(0.5), id="by-norm"),
    pytest.param(ClipByNorm(0.5, norm_type=3.0), id="by-norm-3"),
    pytest.param(ClipByValue(-0.1, 0.2), id="by-value"),
]


def clipped(grad: torch.Tensor, rule: Any) -> torch.Tensor:
    if isinstance(rule, ClipByValue):
        return functional.clip_by_value(grad, *rule.interval())
    return functional.clip_by_norm(grad, rule.max_norm, norm_type=rule.norm_type)


def through(grad: torch.Tensor, rule: Any) -> torch.Tensor:
    """What arrives at x where this gradient arrives at the result."""
    x = torch.zeros_like(grad, requires_grad=True)
    (result,) = torch.autograd.grad(clip_backward(x, rule), x, grad)
    return result


@pytest.mark.parametrize("rule", RULES)
def test_clip_backward_returns_x_unchanged(rule):
    x = normal(7).requires_grad_()
    y = clip_backward(x, rule)
    assert_bits([y], [x])
    assert y.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [0, 7])
def test_clip_backward_clips_the_gradient(device, dtype, size, rule):
    grad = normal(size, dtype, device)
    result = through(grad, rule)
    assert_bits([result], [clipped(grad, rule)])
    assert size == 0 or not torch.equal(result, grad)


def test_clip_backward_clips_complex_gradients_by_modulus():
    grad = normal(7, torch.complex64)
    assert float(through(grad, ClipByNorm(0.5)).norm()) == pytest.approx(0.5, rel=1e-6)


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


def test_clip_backward_keeps_x_without_gradient():
    x = torch.arange(3)
    assert_bits([clip_backward(x, ClipByNorm(1.0))], [x])


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


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("rule", RULES)
def test_clip_backward_inside_activation_checkpoint(rule, reentrant):
    x, twin = (normal((4, 3)).requires_grad_() for _ in range(2))

    def segment(x):
        return clip_backward(x.exp(), rule).tanh()

    torch.utils.checkpoint.checkpoint(segment, x, use_reentrant=reentrant).sum().backward()
    segment(twin).sum().backward()
    assert_bits([grad_of(x)], [grad_of(twin)])


def test_clip_backward_serves_every_backward_of_a_retained_graph():
    x, rule = normal(5).requires_grad_(), ClipByNorm(0.5)
    loss = clip_backward(x * 2, rule).square().sum()
    loss.backward(retain_graph=True)
    first = grad_of(x).clone()
    loss.backward()
    torch.testing.assert_close(grad_of(x), 2 * first)
    assert float(first.norm()) == pytest.approx(1.0, rel=1e-6)


def loss_of(x, rule):
    return clip_backward(x * 3, rule).sin().sum()


def gradient_of(x, rule):
    x = x.detach().clone().requires_grad_()
    loss_of(x, rule).backward()
    return x.grad


@pytest.mark.parametrize("rule", RULES)
def test_torch_func_clips_the_gradient_of_each_example(rule):
    batch = normal((4, 5))
    expected = torch.stack([gradient_of(x, rule) for x in batch])
    found = torch.func.vmap(lambda x: torch.func.grad(loss_of)(x, rule))(batch)
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
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


@pytest.mark.plain_empty
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
# The compiler reads it where it goes on after the break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("rule", RULES)
def test_torch_compile_breaks_the_graph_and_clips(rule):
    x = normal(5).requires_grad_()
    torch.compile(loss_of, backend="aot_eager")(x, rule).backward()
    torch.testing.assert_close(x.grad, gradient_of(x, rule))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (1.0, "a norm of all gradients"),
        (ClipByGlobalNorm(1.0), "before the next one is known"),
        (ClipByNorm, r"write ClipByNorm\(\.\.\.\)"),
        (None, "got None of type NoneType"),
    ],
    ids=["number", "global", "class", "none"],
)
def test_rules_for_several_gradients_are_refused(rule, message):
    with pytest.raises(TypeError, match=rf"clip_backward expects .*{message}"):
        clip_backward(torch.zeros(2), rule)


def test_a_limit_that_is_a_function_of_the_step_is_refused():
    with pytest.raises(ValueError, match="sees no steps"):
        clip_backward(torch.zeros(2, requires_grad=True), ClipByNorm(lambda step: 1.0))


REFUSED: dict[str, Any] = {
    "tuple": ((torch.zeros(2),), "got tuple; call clip_backward on each tensor in it"),
    "sparse": (
        torch.ones(2).to_sparse().requires_grad_(),
        r"x has layout torch.sparse_coo; .*to_dense\(\)",
    ),
    "complex": (
        torch.zeros(2, dtype=torch.complex64).requires_grad_(),
        "x has dtype .*which has no order",
    ),
}


@pytest.mark.parametrize(("x", "message"), REFUSED.values(), ids=REFUSED)
def test_clip_backward_refuses_other_arguments(x, message):
    with pytest.raises(TypeError, match=message):
        clip_backward(x, ClipByValue(1.0))


@pytest.mark.skipif(INTERPRETED, reason="the message is torch's")
def test_writing_over_the_result_is_refused():
    x = normal(3).requires_grad_()
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        clip_backward(x * 2, ClipByNorm(1.0)).relu_()


def test_a_subclass_is_refused_where_its_limit_would_not_be_asked():
    class Half(ClipByNorm):
        pass

    with pytest.raises(TypeError, match=r"expects ClipByNorm.* of type Half"):
        clip_backward(torch.ones(2), Half(1.0))
