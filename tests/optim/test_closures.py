"""Closures: without a loss, and of optimizers that do something before they evaluate one."""

from copy import deepcopy
from weakref import ref

import pytest
import torch
from torch.optim import SGD, Optimizer

import tritonclip
from helpers.cases import assert_bits, copies, grad_of
from helpers.optimizers import (
    LIMIT,
    ONE_OF_EACH,
    assert_same_state,
    build,
    loss_of,
    made,
    one_weight,
    train,
)
from tritonclip import ClippedOptimizer


class _ZeroFirst(Optimizer):
    """Sets gradients to zero before it evaluates."""

    def __init__(self, params):
        super().__init__(params, {})
        self.base = SGD(params, lr=0.1)

    def step(self, closure):  # type: ignore[override]
        self.base.zero_grad()
        loss = closure()
        self.base.step()
        return loss


class _AscendFirst(Optimizer):
    """Sharpness-aware minimization (Foret et al., 2021): climbs, evaluates there, steps from here.

    Gradients of the point it starts from are there already.
    """

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure):  # type: ignore[override]
        (weight,) = self.param_groups[0]["params"]
        start = weight.clone()
        weight.add_(weight.grad, alpha=0.5)
        weight.grad.zero_()
        with torch.enable_grad():
            loss = closure()
        weight.copy_(start).add_(weight.grad, alpha=-0.1)
        return loss


class _Deaf(SGD):
    """Never evaluates its closure."""

    def step(self, closure=None):
        return super().step()


def quadratic(*, clips=False):
    """A weight with the gradient of half its square, and a closure, which may clip by itself."""
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))

    def closure(clips=clips):
        weight.grad = None
        loss = 0.5 * weight.square().sum()
        loss.backward()
        if clips:
            tritonclip.clip_(weight, 2.5)
        return loss

    closure(clips=False)
    return weight, closure


@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
@pytest.mark.parametrize("kind", [_ZeroFirst, _AscendFirst, SGD], ids=["zero", "ascend", "sgd"])
def test_step_equals_that_of_a_bare_optimizer_whose_closure_clips(kind, nonfinite):
    weight, closure = quadratic()
    twin, twin_closure = quadratic(clips=True)
    wrapper = ClippedOptimizer(kind([weight]), 2.5, nonfinite=nonfinite)
    bare = kind([twin])
    for _ in range(3):
        wrapper.step(closure)
        bare.step(twin_closure)
    assert_bits([weight], [twin])
    assert wrapper.stats.summary()["clipped_steps"] == 3


@pytest.mark.parametrize("kind", [_ZeroFirst, torch.optim.LBFGS], ids=["own", "LBFGS"])
@pytest.mark.parametrize(
    "options", [{"nonfinite": "skip"}, {"nonfinite": "error"}, {"skip_above": 5.0}], ids=str
)
def test_judging_is_refused_to_an_optimizer_that_needs_a_closure(kind, options):
    weight, closure = quadratic()
    message = f"{kind.__name__} evaluates its closure within the step, .*; expected nonfinite="
    with pytest.raises(ValueError, match=message):
        ClippedOptimizer(kind([weight]), 2.5, **options)
    wrapper = ClippedOptimizer(kind([weight]), 2.5)
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=message):
        setattr(wrapper, name, value)
    assert (wrapper.nonfinite, wrapper.skip_above) == ("propagate", None)
    wrapper.step(closure)


@pytest.mark.parametrize(
    "options", [{"nonfinite": "skip"}, {"nonfinite": "error"}, {"skip_above": 50.0}], ids=str
)
def test_judged_closure_is_evaluated_once_and_its_loss_returned(options):
    """The wrapped optimizer steps without it."""
    weight, closure = quadratic()
    twin, twin_closure = quadratic(clips=True)
    losses: list[torch.Tensor] = []

    def noted() -> torch.Tensor:
        losses.append(closure())
        return losses[-1]

    class Bare(SGD):
        def step(self, closure=None):
            assert closure is None
            return super().step()

    wrapper, bare = ClippedOptimizer(Bare([weight], lr=0.1), 2.5, **options), SGD([twin], lr=0.1)
    for _ in range(2):
        assert wrapper.step(noted) is losses[-1]
        bare.step(twin_closure)
    assert len(losses) == 2
    assert_bits([weight], [twin])


def test_optimizer_that_ignores_its_closure_is_found_out():
    weight, closure = quadratic()
    wrapper = ClippedOptimizer(_Deaf([weight], lr=0.1), 2.5)
    with pytest.raises(RuntimeError, match="_Deaf updated without evaluating the closure"):
        wrapper.step(closure)


def test_inference_tensors_go_with_a_closure():
    with torch.inference_mode():
        weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]), requires_grad=False)
        wrapper = ClippedOptimizer(SGD([weight], lr=1.0), 2.5, nonfinite="skip")
        weight.grad = torch.tensor([3.0, 4.0])
        assert wrapper.step(lambda: 7.0) == 7.0
    torch.testing.assert_close(weight.clone(), torch.tensor([1.5, 2.0]))


def test_statistics_made_in_inference_mode_count_outside():
    weight, _ = quadratic()
    inner = SGD([weight], lr=1.0)
    with torch.inference_mode():
        wrapper = ClippedOptimizer(inner, 2.5)
    wrapper.step()
    assert wrapper.stats.summary()["clipped_steps"] == 1


NO_LOSS = "returned None; expected the loss: end it with `return loss`"


@ONE_OF_EACH
def test_closure_without_a_loss_changes_nothing(name, options):
    params = made(name)
    wrapper = ClippedOptimizer(build(name, params, options), LIMIT)
    train(name, wrapper, params)
    weights, saved = copies(params), deepcopy(wrapper.state_dict())
    raw = torch.autograd.grad(loss_of(name, params), params)

    def closure():
        wrapper.zero_grad()
        loss_of(name, params).backward()

    with pytest.raises(TypeError, match=NO_LOSS):
        wrapper.step(closure)
    assert_bits((grad_of(p).to_dense() for p in params), [grad.to_dense() for grad in raw])
    assert_bits(params, weights)
    assert_same_state(wrapper.state_dict(), saved)
    torch.testing.assert_close(
        wrapper.state_dict()["tritonclip"], saved["tritonclip"], rtol=0, atol=0
    )


def test_closure_without_a_loss_is_refused_for_a_gradient_in_place_of_the_old_one():
    weight, wrapper = one_weight()
    others = []

    def closure():
        address, weight.grad = id(weight.grad), None
        for _ in range(1000):
            others.append(torch.tensor([6.0, 8.0]))
            if id(others[-1]) == address:
                break
        weight.grad = others[-1]

    with pytest.raises(TypeError, match=NO_LOSS):
        wrapper.step(closure)
    assert weight.tolist() == [0.0, 0.0]


def test_closure_without_a_loss_is_refused_for_a_gradient_that_was_added_to():
    weight, wrapper = one_weight()
    with pytest.raises(TypeError, match=NO_LOSS):
        wrapper.step(lambda: (weight - 1).square().sum().backward())
    # 3 - 2 and 4 - 2.
    assert grad_of(weight).tolist() == [1.0, 2.0]
    assert weight.tolist() == [0.0, 0.0]


def test_closure_that_leaves_gradients_alone_needs_no_loss():
    """As trainers pass it, which have called backward before."""
    weight, wrapper = one_weight()
    calls = []
    assert wrapper.step(lambda: calls.append(1)) is None
    assert calls == [1]
    assert weight.tolist() == [-1.5, -2.0]
    assert int(wrapper.stats.steps) == 1


@pytest.mark.parametrize("args", [(), (lambda: None,)], ids=["no-closure", "no-gradients"])
def test_step_of_lbfgs_refuses_to_go_without_a_loss(args):
    weight, _ = one_weight()
    wrapper = ClippedOptimizer(torch.optim.LBFGS([weight]), LIMIT)
    with pytest.raises(TypeError, match=r"LBFGS needs a closure .* expected step\(closure\)"):
        wrapper.step(*args)
    assert weight.tolist() == [0.0, 0.0]
    assert grad_of(weight).tolist() == [3.0, 4.0]


@pytest.mark.parametrize("policy", ["propagate", "zero"])
def test_gradients_of_earlier_evaluations_are_freed(policy):
    """But for those of the first, whose step is logged."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(20))
    matrix, target = torch.randn(10, 20), torch.randn(10)
    inner = torch.optim.LBFGS([weight], max_iter=10, line_search_fn="strong_wolfe")
    optimizer = ClippedOptimizer(inner, 10.0, nonfinite=policy)
    grads: list[ref[torch.Tensor]] = []
    alive: list[int] = []

    def closure():
        optimizer.zero_grad(set_to_none=True)
        alive.append(sum(grad() is not None for grad in grads))
        loss = (matrix @ weight - target).square().mean() + weight.pow(4).mean()
        loss.backward()
        grads.append(ref(grad_of(weight)))
        return loss

    optimizer.step(closure)
    assert len(alive) > 5
    assert max(alive) <= 1
