"""ClippedOptimizer as an optimizer: with every one of torch.optim, as clip_ and the bare one."""

from copy import deepcopy

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer

from helpers.cases import assert_bits, parameters
from helpers.optimizers import (
    EVERY,
    FACTORS,
    LIMIT,
    ONE_OF_EACH,
    assert_same,
    assert_same_state,
    assert_shared,
    build,
    made,
    one_weight,
    train,
)
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClippedOptimizer


@ONE_OF_EACH
def test_groups_state_and_defaults_are_shared(name, options):
    params = made(name)
    inner = build(name, params, options)
    groups, state, defaults = inner.param_groups, inner.state, inner.defaults
    before, saved = dict(defaults), deepcopy(inner.state_dict())
    wrapper = ClippedOptimizer(inner, LIMIT)
    assert defaults == before
    assert_same_state(inner.state_dict(), saved)
    train(name, wrapper, params)
    assert_shared(wrapper)
    assert wrapper.param_groups is groups
    assert wrapper.state is state
    assert wrapper.defaults is defaults


@pytest.mark.parametrize("loader", ["wrapper", "inner"])
def test_load_state_dict_keeps_groups_and_state_shared(loader):
    params = made("Adam")
    wrapper = ClippedOptimizer(Adam(params), LIMIT)
    train("Adam", wrapper, params)
    saved = deepcopy(wrapper.state_dict())
    groups = wrapper.param_groups
    (wrapper if loader == "wrapper" else wrapper.optimizer).load_state_dict(saved)
    assert wrapper.param_groups is not groups
    assert_shared(wrapper)


@pytest.mark.parametrize("attribute", ["param_groups", "state", "defaults"])
def test_assignment_reaches_the_wrapped_optimizer(attribute):
    _, wrapper = one_weight()
    replacement = deepcopy(getattr(wrapper, attribute))
    setattr(wrapper, attribute, replacement)
    assert getattr(wrapper.optimizer, attribute) is replacement


@pytest.mark.parametrize("with_closure", [False, True], ids=["plain", "closure"])
@EVERY
def test_step_is_clip_then_the_bare_step(name, options, with_closure):
    ours, theirs = made(name), made(name)
    wrapper = ClippedOptimizer(build(name, ours, options), LIMIT)
    bare = build(name, theirs, options)
    our_losses = train(name, wrapper, ours, with_closure=with_closure)
    their_losses = train(name, bare, theirs, with_closure=with_closure)
    assert_same(wrapper, ours, bare, theirs)
    # Every evaluation, so that a line search took the same way.
    assert_bits(our_losses, their_losses)
    assert int(wrapper.stats.steps) == len(FACTORS)
    assert int(wrapper.stats.clipped_steps) == len(FACTORS) - 1


class Searching(Optimizer):
    """Evaluates its closure three times, and notes the gradient that it is given each time."""

    def __init__(self, params):
        super().__init__(params, {})
        self.seen = []

    def step(self, closure):  # type: ignore[override]
        losses = []
        for _ in range(3):
            losses.append(closure())
            self.seen.append(self.param_groups[0]["params"][0].grad.clone())
        return losses[-1]


def searched(factors=(1.0, 2.0, 0.25)):
    """A wrapper around Searching, and a closure whose gradients have norms of 5 times factors."""
    weight = torch.nn.Parameter(torch.zeros(2))
    wrapper = ClippedOptimizer(Searching([weight]), ClipByGlobalNorm(2.5, eps=0.0))
    left = list(factors)

    def closure():
        assert torch.is_grad_enabled()
        weight.grad = torch.tensor([3.0, 4.0]) * left[0]
        return torch.tensor(left.pop(0))

    return wrapper, closure


@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_step_counts_as_clipped_if_any_evaluation_was(nonfinite):
    """Gradients are enabled for each; what the wrapped optimizer returns is returned."""
    wrapper, closure = searched((0.25, 2.0, 0.5))
    wrapper.nonfinite = nonfinite
    with torch.no_grad():
        assert wrapper.step(closure) == 0.5
    stats = wrapper.stats
    assert (stats.last_norm, stats.last_coefficient) == (1.25, 0.25)
    assert (stats.steps, stats.clipped_steps) == (1, 1)


@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_step_divides_the_gradients_of_each_evaluation_by_the_loss_scale(nonfinite):
    wrapper, closure = searched((4.0, 8.0, 1.0))
    wrapper.nonfinite = nonfinite
    wrapper.step(closure, grad_scale=4.0)
    # As without a scale and with factors of 1, 2 and 0.25.
    expected = [torch.tensor([1.5, 2.0]), torch.tensor([1.5, 2.0]), torch.tensor([0.75, 1.0])]
    assert_bits(wrapper.optimizer.seen, expected)
    assert wrapper.stats.last_norm == 5.0


@pytest.mark.parametrize("with_closure", [False, True], ids=["plain", "closure"])
@pytest.mark.parametrize("mode", [{}, {"fused": True}], ids=["for-loop", "fused"])
@pytest.mark.parametrize("scale", [1024.0, torch.tensor(1024.0)], ids=["number", "tensor"])
def test_loss_scale_holds_for_one_step(scale, mode, with_closure):
    weight = torch.nn.Parameter(torch.zeros(2))
    wrapper = ClippedOptimizer(SGD([weight], lr=1.0, **mode), ClipByGlobalNorm(10.0, eps=0.0))
    for options, factor in (({"grad_scale": scale}, 1024.0), ({}, 1.0)):
        weight.grad = torch.tensor([3.0, 4.0]) * factor
        wrapper.step((lambda: torch.tensor(1.0)) if with_closure else None, **options)
        assert wrapper.stats.last_norm == 5.0
    assert weight.tolist() == [-6.0, -8.0]


@pytest.mark.parametrize("n", [1, 3, 100])
def test_limit_of_zero_gives_a_coefficient_of_zero(n):
    params = parameters(torch.ones(2) for _ in range(n))
    optimizer = ClippedOptimizer(SGD(params, lr=1.0), ClipByNorm(0.0))
    optimizer.step()
    assert optimizer.stats.last_coefficient == 0
    assert not any(param.any() for param in params)


@pytest.mark.parametrize("sizes", [(1.0, 4.0), (4.0, 1.0)], ids=["last", "first"])
def test_coefficient_is_the_least_of_all_dtypes(sizes):
    dtypes = (torch.float32, torch.float64)
    grads = [torch.tensor([n], dtype=dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    optimizer = ClippedOptimizer(SGD(parameters(grads), lr=1.0), ClipByNorm(1.0, eps=0.0))
    optimizer.step()
    assert float(optimizer.stats.last_norm) == 4
    assert float(optimizer.stats.last_coefficient) == 0.25


@ONE_OF_EACH
def test_add_param_group_is_the_bare_one(name, options):
    if name == "LBFGS":
        pytest.skip("LBFGS knows one parameter group only")
    if name == "Adagrad" and torch.__version__.startswith("2.8"):
        pytest.skip("Adagrad of torch 2.8 cannot step a group that was added")
    ours, theirs = made(name), made(name)
    wrapper = ClippedOptimizer(build(name, ours[:1], options), LIMIT)
    bare = build(name, theirs[:1], options)
    for optimizer, params in ((wrapper, ours), (bare, theirs)):
        train(name, optimizer, params[:1])
        optimizer.add_param_group({"params": params[1:], "lr": 0.01})
        train(name, optimizer, params)
    assert_same(wrapper, ours, bare, theirs)


@pytest.mark.parametrize("which", ["wrapper", "inner"])
@pytest.mark.parametrize("to_none", [True, False], ids="set_to_none={}".format)
def test_zero_grad_resets_gradients(which, to_none):
    weight, wrapper = one_weight()
    (wrapper if which == "wrapper" else wrapper.optimizer).zero_grad(set_to_none=to_none)
    found = None if weight.grad is None else weight.grad.tolist()
    assert found == (None if to_none else [0.0, 0.0])


def test_a_loss_in_place_of_a_closure_raises():
    weight, optimizer = one_weight()
    with pytest.raises(TypeError, match=r"got a tensor; expected step\(\), after optimizer.loss"):
        optimizer.step(weight.sum())
