"""ClippedOptimizer as an optimizer: with every one of torch.optim, as clip_ and the bare one."""

from __future__ import annotations

import gc
import io
import pickle
from copy import copy, deepcopy
from typing import Any

import pytest
import torch
from cases import assert_bits, copies, grad_of, normal
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import tritonclip
from tritonclip import ClipByGlobalNorm, ClipByNorm, ClippedOptimizer

LIMIT = 1.0
# The gradients of `loss_of` have norms of 30 or so: all but the first step are clipped.
FACTORS = (1e-3, 5.0, 1.0)

CLASSES: dict[str, Any] = {
    name: one
    for name, one in vars(torch.optim).items()
    if isinstance(one, type) and issubclass(one, Optimizer) and one is not Optimizer
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "foreach": True}, {"fused": True}],
    "Adam": [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}],
    "AdamW": [{}, {"fused": True}],
    "Adagrad": [{}, {"fused": True}],
    "LBFGS": [{"max_iter": 4}, {"max_iter": 4, "line_search_fn": "strong_wolfe"}],
}


def _id(name, options):
    return "-".join([name, *(f"{key}={value}" for key, value in options.items())])


# Some options of those that have several implementations, and each of torch.optim at least once.
EVERY = pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, id=_id(name, options))
        for name in CLASSES
        for options in OPTIONS.get(name, [{}])
    ],
)
ONE_OF_EACH = pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(name, OPTIONS.get(name, [{}])[0], id=name) for name in CLASSES],
)
# A copy of torch's LBFGS cannot step: it lacks the attribute _params, wrapped or not.
COPYABLE = pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, OPTIONS.get(name, [{}])[0], id=name)
        for name in CLASSES
        if name != "LBFGS"
    ],
)


def made(name):
    """Parameters that an optimizer takes: Muon wants matrices."""
    shapes = ((4, 3), (2, 4)) if name in ("Muon", "SparseAdam") else ((4, 3), (2, 4), (3,), ())
    return [torch.nn.Parameter(normal(shape, seed=i)) for i, shape in enumerate(shapes)]


def build(name, params, options):
    return CLASSES[name](params, lr=0.05, **options)


def loss_of(name, params):
    if name == "SparseAdam":
        rows = torch.tensor([1, 0, 1])
        params = [torch.nn.functional.embedding(rows, p, sparse=True) for p in params]
    return sum(((p**4).sum() + (p**2).sum() for p in params), torch.zeros(()))


def train(name, optimizer, params, factors=FACTORS, *, with_closure=False):
    """Trains; by hand, with clip_ after each backward, where the optimizer does not clip."""
    by_hand = not isinstance(optimizer, ClippedOptimizer)
    losses = []
    for factor in factors:

        def closure(factor=factor):
            optimizer.zero_grad()
            loss = factor * loss_of(name, params)
            loss.backward()
            if by_hand:
                tritonclip.clip_(params, LIMIT)
            losses.append(loss.detach())
            return loss

        if with_closure or name == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return losses


def assert_same_state(ours, theirs):
    """Same checkpoints, statistics apart."""
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=0)
    assert ours["param_groups"] == theirs["param_groups"]


def assert_same(ours, our_params, theirs, their_params):
    """Same parameters and same optimizer state."""
    assert_bits(our_params, their_params)
    assert_same_state(ours.state_dict(), theirs.state_dict())


def one_weight(values=(3.0, 4.0), lr=1.0, **options):
    """A weight, its gradient and a wrapped SGD; by default a norm of 5, a limit of 2.5."""
    weight = torch.nn.Parameter(torch.zeros(len(values)))
    weight.grad = torch.tensor(values)
    rule = ClipByGlobalNorm(2.5, eps=0.0)
    return weight, ClippedOptimizer(SGD([weight], lr=lr, **options), rule)


@ONE_OF_EACH
def test_wrapper_is_an_optimizer(name, options):
    wrapper = ClippedOptimizer(build(name, made(name), options), LIMIT)
    assert isinstance(wrapper, Optimizer)


def assert_shared(wrapper):
    assert wrapper.param_groups is wrapper.optimizer.param_groups
    assert wrapper.state is wrapper.optimizer.state
    assert wrapper.defaults is wrapper.optimizer.defaults


@ONE_OF_EACH
def test_groups_state_and_defaults_are_shared(name, options):
    params = made(name)
    inner = build(name, params, options)
    groups, state, defaults = inner.param_groups, inner.state, inner.defaults
    wrapper = ClippedOptimizer(inner, LIMIT)
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


@ONE_OF_EACH
def test_constructor_leaves_the_wrapped_optimizer_as_it_was(name, options):
    inner = build(name, made(name), options)
    defaults, saved = dict(inner.defaults), deepcopy(inner.state_dict())
    ClippedOptimizer(inner, LIMIT)
    assert inner.defaults == defaults
    assert_same_state(inner.state_dict(), saved)


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


def test_step_agrees_with_torchs_clipping_in_float64():
    ours, theirs = ([torch.nn.Parameter(p.double()) for p in made("SGD")] for _ in range(2))
    wrapper = ClippedOptimizer(SGD(ours, lr=0.05, momentum=0.9), LIMIT)
    train("SGD", wrapper, ours)
    bare = SGD(theirs, lr=0.05, momentum=0.9)
    for factor in FACTORS:
        bare.zero_grad()
        (factor * loss_of("SGD", theirs)).backward()
        torch.nn.utils.clip_grad_norm_(theirs, LIMIT)
        bare.step()
    # Three steps on values of size 1, whose gradients agree to 1e-12 as norms do.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


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
        weight.grad = torch.tensor([3.0, 4.0]) * left[0]
        return torch.tensor(left.pop(0))

    return wrapper, closure


def test_step_clips_after_each_evaluation_of_a_closure():
    wrapper, closure = searched()
    wrapper.step(closure)
    # Coefficients 1/2, 1/4 and 1 are exact.
    expected = [torch.tensor([1.5, 2.0]), torch.tensor([1.5, 2.0]), torch.tensor([0.75, 1.0])]
    assert_bits(wrapper.optimizer.seen, expected)


@pytest.mark.parametrize("nonfinite", ["propagate", "zero", "skip", "error"])
def test_step_returns_what_the_wrapped_optimizer_returns(nonfinite):
    wrapper, closure = searched()
    wrapper.nonfinite = nonfinite
    assert wrapper.step(closure) == 0.25


@pytest.mark.parametrize("nonfinite", ["propagate", "zero", "skip", "error"])
def test_step_counts_as_clipped_if_any_evaluation_was(nonfinite):
    wrapper, closure = searched((0.25, 2.0, 0.25))
    wrapper.nonfinite = nonfinite
    wrapper.step(closure)
    stats = wrapper.stats
    assert (stats.last_norm, stats.last_coefficient) == (1.25, 0.25)
    assert (stats.steps, stats.clipped_steps) == (1, 1)


@pytest.mark.parametrize("n", [1, 3, 100])
def test_limit_of_zero_gives_a_coefficient_of_zero(n):
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(n)]
    optimizer = ClippedOptimizer(SGD(params, lr=1.0), ClipByNorm(0.0))
    for param in params:
        param.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.stats.last_coefficient == 0
    assert all((param == 1).all() for param in params)


@pytest.mark.parametrize("sizes", [(1.0, 4.0), (4.0, 1.0)], ids=["last", "first"])
def test_coefficient_is_the_least_of_all_dtypes(sizes):
    dtypes = (torch.float32, torch.float64)
    params = [torch.nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in dtypes]
    optimizer = ClippedOptimizer(SGD(params, lr=1.0), ClipByNorm(1.0, eps=0.0))
    for param, size in zip(params, sizes, strict=True):
        param.grad = torch.full_like(param, size)
    optimizer.step()
    assert float(optimizer.stats.last_norm) == 4
    assert float(optimizer.stats.last_coefficient) == 0.25


def test_step_takes_a_closure_by_name():
    weight, wrapper = one_weight()
    assert wrapper.step(closure=lambda: 7.0) == 7.0
    assert weight.tolist() == [-1.5, -2.0]


def test_step_without_closure_returns_none():
    _, wrapper = one_weight()
    assert wrapper.step() is None


def test_step_enables_gradients_for_its_closure():
    wrapper, closure = searched()
    enabled = []

    def noting():
        enabled.append(torch.is_grad_enabled())
        return closure()

    with torch.no_grad():
        wrapper.step(noting)
    assert enabled == [True, True, True]


def test_add_param_group_reaches_the_wrapped_optimizer():
    first, wrapper = one_weight((3.0, 0.0))
    second = torch.nn.Parameter(torch.zeros(2))
    second.grad = torch.tensor([0.0, 4.0])
    wrapper.add_param_group({"params": [second], "lr": 2.0})
    wrapper.step()
    # Under one norm, 5: the coefficient is 1/2.
    assert len(wrapper.optimizer.param_groups) == 2
    assert first.tolist() == [-1.5, 0.0]
    assert second.tolist() == [0.0, -4.0]


@ONE_OF_EACH
def test_add_param_group_is_the_bare_one(name, options):
    if name == "LBFGS":
        pytest.skip("LBFGS knows one parameter group only")
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
    if to_none:
        assert weight.grad is None
    else:
        assert grad_of(weight).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "way", ["wrapper-wrapper", "bare-wrapper", "wrapper-bare", "wrapper-inner"]
)
@EVERY
def test_state_dict_goes_on_identically(name, options, way):
    source_kind, target_kind = way.split("-")
    ours = made(name)
    source = build(name, ours, options)
    if source_kind == "wrapper":
        source = ClippedOptimizer(source, LIMIT)
    train(name, source, ours)

    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    target = build(name, theirs, options)
    if target_kind != "bare":
        target = ClippedOptimizer(target, LIMIT)
    (target.optimizer if target_kind == "inner" else target).load_state_dict(
        deepcopy(source.state_dict())
    )
    for optimizer, params in ((source, ours), (target, theirs)):
        train(name, optimizer, params)
    assert_same(target, theirs, source, ours)


@ONE_OF_EACH
def test_state_dict_is_the_bare_one_and_statistics(name, options):
    params = made(name)
    wrapper = ClippedOptimizer(build(name, params, options), LIMIT)
    train(name, wrapper, params)
    ours, theirs = wrapper.state_dict(), wrapper.optimizer.state_dict()
    assert set(ours) - set(theirs) == {"tritonclip"}
    assert_same_state(ours, theirs)


@pytest.mark.parametrize("clip", [0.5, ClipByNorm(0.5), None], ids=["number", "rule", "None"])
def test_state_dict_leaves_the_rules_of_groups_out(clip):
    weight = torch.nn.Parameter(torch.zeros(2))
    wrapper = ClippedOptimizer(SGD([{"params": [weight], "clip": clip}]), LIMIT)
    assert "clip" not in wrapper.state_dict()["param_groups"][0]
    assert "clip" not in wrapper.optimizer.state_dict()["param_groups"][0]
    assert wrapper.param_groups[0]["clip"] is clip


@pytest.mark.parametrize("loader", ["wrapper", "inner"])
def test_load_state_dict_keeps_the_present_rules_of_groups(loader):
    one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    saved = SGD([{"params": [one], "clip": 9.0}, {"params": [other], "clip": 9.0}]).state_dict()
    groups: list[Any] = [{"params": [one], "clip": 0.5}, {"params": [other]}]
    wrapper = ClippedOptimizer(SGD(groups), LIMIT)
    (wrapper if loader == "wrapper" else wrapper.optimizer).load_state_dict(saved)
    assert wrapper.param_groups[0]["clip"] == 0.5
    assert "clip" not in wrapper.param_groups[1]


def test_load_state_dict_brings_statistics_back():
    _, source = one_weight()
    source.step()
    _, target = one_weight()
    target.load_state_dict(source.state_dict())
    assert target.stats.summary() == source.stats.summary()
    assert target.stats.summary()["norm"] == 5.0


def test_load_state_dict_copies_statistics():
    _, source = one_weight()
    source.step()
    saved = source.state_dict()
    _, target = one_weight()
    target.load_state_dict(saved)
    source.step()
    target.step()
    assert int(saved["tritonclip"]["steps"]) == 1
    assert int(target.stats.steps) == 2


def test_load_state_dict_of_a_bare_optimizer_starts_statistics_anew():
    _, wrapper = one_weight()
    wrapper.step()
    wrapper.load_state_dict(SGD([torch.nn.Parameter(torch.zeros(2))]).state_dict())
    assert int(wrapper.stats.steps) == int(wrapper.stats.clipped_steps) == 0
    assert wrapper.stats.last_norm.isnan()


def test_load_state_dict_changes_nothing_where_it_raises():
    _, wrapper = one_weight(momentum=0.5)
    wrapper.step()
    before, statistics = deepcopy(wrapper.state_dict()), wrapper.stats.summary()
    groups: list[dict[str, Any]] = [{"params": [p]} for p in made("SGD")]
    other = SGD(groups).state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        wrapper.load_state_dict(other)
    assert_same_state(wrapper.state_dict(), before)
    assert wrapper.stats.summary() == statistics


@EVERY
def test_state_dict_loads_with_weights_only(name, options):
    params = made(name)
    wrapper = ClippedOptimizer(build(name, params, options), LIMIT)
    wrapper.param_groups[0]["clip"] = ClipByNorm(0.5)
    train(name, wrapper, params)
    file = io.BytesIO()
    torch.save(wrapper.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    expected = wrapper.state_dict()
    assert loaded.pop("param_groups") == expected.pop("param_groups")
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0, equal_nan=True)


def deep_copied(pair):
    return deepcopy(pair)


def pickled(pair):
    return pickle.loads(pickle.dumps(pair))


def torch_saved(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIED = pytest.mark.parametrize("copied", [deep_copied, pickled, torch_saved])


@COPIED
@COPYABLE
def test_copy_goes_on_identically_and_apart(name, options, copied):
    ours = made(name)
    source = ClippedOptimizer(build(name, ours, options), LIMIT)
    train(name, source, ours)
    theirs, target = copied((ours, source))
    left_alone = copies(ours)
    train(name, target, theirs)
    assert_bits(ours, left_alone)
    train(name, source, ours)
    assert_same(target, theirs, source, ours)
    assert target.stats.summary() == source.stats.summary()


@COPIED
def test_copy_keeps_rules_and_policy(copied):
    weight = torch.nn.Parameter(torch.zeros(2))
    inner = SGD([{"params": [weight], "clip": ClipByNorm(0.5)}])
    target = copied(ClippedOptimizer(inner, ClipByGlobalNorm(2.0, 1.0), nonfinite="skip"))
    assert target.clip == ClipByGlobalNorm(2.0, 1.0)
    assert target.nonfinite == "skip"
    assert target.param_groups[0]["clip"] == ClipByNorm(0.5)
    assert "clip" not in target.state_dict()["param_groups"][0]
    assert_shared(target)


@COPIED
def test_copy_counts_as_a_wrapper(copied):
    _, wrapper = one_weight()
    target = copied(wrapper)
    with pytest.raises(ValueError, match="wrapped already"):
        ClippedOptimizer(target.optimizer, LIMIT)


def recorder(log, label):
    """A step hook that notes who ran it, on which optimizer, with which gradient."""

    def hook(optimizer, args, kwargs):
        weight = optimizer.param_groups[0]["params"][0]
        log.append((label, type(optimizer).__name__, weight.grad.tolist(), weight.tolist()))

    return hook


RAW, CLIPPED = [3.0, 4.0], [1.5, 2.0]
OLD, NEW = [0.0, 0.0], [-1.5, -2.0]


def test_step_hooks_run_once_around_their_own_part():
    _, wrapper = one_weight()
    log: list[Any] = []
    wrapper.register_step_pre_hook(recorder(log, "before"))
    wrapper.register_step_post_hook(recorder(log, "after"))
    wrapper.optimizer.register_step_pre_hook(recorder(log, "before"))
    wrapper.optimizer.register_step_post_hook(recorder(log, "after"))
    wrapper.step()
    assert log == [
        ("before", "ClippedOptimizer", RAW, OLD),
        ("before", "SGD", CLIPPED, OLD),
        ("after", "SGD", CLIPPED, NEW),
        ("after", "ClippedOptimizer", CLIPPED, NEW),
    ]


def test_global_step_hooks_run_once_for_the_wrapped_optimizer():
    _, wrapper = one_weight()
    log: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(recorder(log, "before")),
        register_optimizer_step_post_hook(recorder(log, "after")),
    ]
    try:
        wrapper.step()
    finally:
        for handle in handles:
            handle.remove()
    assert log == [("before", "SGD", CLIPPED, OLD), ("after", "SGD", CLIPPED, NEW)]


def test_step_hooks_registered_before_wrapping_run_once():
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor(RAW)
    inner = SGD([weight], lr=1.0)
    log: list[Any] = []
    inner.register_step_pre_hook(recorder(log, "before"))
    ClippedOptimizer(inner, ClipByGlobalNorm(2.5, eps=0.0)).step()
    assert log == [("before", "SGD", CLIPPED, OLD)]


def test_step_hooks_stop_when_removed():
    _, wrapper = one_weight()
    log: list[Any] = []
    handles = [
        wrapper.register_step_pre_hook(recorder(log, "before")),
        wrapper.register_step_post_hook(recorder(log, "after")),
    ]
    for handle in handles:
        handle.remove()
    wrapper.step()
    assert log == []


def test_step_pre_hook_may_replace_the_closure():
    _, wrapper = one_weight()
    wrapper.register_step_pre_hook(lambda optimizer, args, kwargs: ((args[0], lambda: 7.0), kwargs))
    assert wrapper.step(lambda: 1.0) == 7.0


def test_state_dict_hooks_run_around_the_whole_checkpoint():
    _, wrapper = one_weight()
    log: list[Any] = []

    def after(optimizer, state_dict):
        log.append((optimizer, set(state_dict)))
        return {**state_dict, "mine": 1}

    wrapper.register_state_dict_pre_hook(lambda optimizer: log.append((optimizer, None)))
    wrapper.register_state_dict_post_hook(after)
    saved = wrapper.state_dict()
    assert log == [(wrapper, None), (wrapper, {"state", "param_groups", "tritonclip"})]
    assert saved["mine"] == 1


def test_load_state_dict_hooks_run_around_the_whole_load():
    _, wrapper = one_weight()
    _, source = one_weight()
    source.step()
    log: list[Any] = []

    def before(optimizer, state_dict):
        log.append((optimizer, set(state_dict), int(optimizer.stats.steps)))
        statistics = {**state_dict["tritonclip"], "steps": torch.tensor(41)}
        return {**state_dict, "tritonclip": statistics}

    wrapper.register_load_state_dict_pre_hook(before)
    wrapper.register_load_state_dict_post_hook(
        lambda optimizer: log.append((optimizer, None, int(optimizer.stats.steps)))
    )
    wrapper.load_state_dict(source.state_dict())
    assert log == [
        (wrapper, {"state", "param_groups", "tritonclip"}, 0),
        (wrapper, None, 41),
    ]


def test_state_dict_hooks_of_the_wrapped_optimizer_run_once():
    _, wrapper = one_weight()
    log: list[Any] = []
    wrapper.optimizer.register_state_dict_pre_hook(lambda _: log.append("before saving"))
    wrapper.optimizer.register_state_dict_post_hook(lambda *_: log.append("after saving"))
    wrapper.optimizer.register_load_state_dict_pre_hook(lambda *_: log.append("before loading"))
    wrapper.optimizer.register_load_state_dict_post_hook(lambda _: log.append("after loading"))
    wrapper.load_state_dict(wrapper.state_dict())
    assert log == ["before saving", "after saving", "before loading", "after loading"]


@pytest.mark.parametrize("direction", ["save", "load"])
def test_checkpoint_is_not_changed_by_a_hook_that_returns_it(direction):
    _, wrapper = one_weight()
    wrapper.step()
    saved = wrapper.state_dict()
    keys = set(saved)
    if direction == "save":
        wrapper.register_state_dict_post_hook(lambda *_: saved)
        assert wrapper.state_dict() is saved
    else:
        wrapper.register_load_state_dict_pre_hook(lambda *_: saved)
        wrapper.load_state_dict({"state": {}, "param_groups": []})
    assert set(saved) == keys


@pytest.mark.parametrize("optimizer", [None, 1.0, torch.nn.Linear(1, 1), [1]], ids=repr)
def test_constructor_refuses_what_is_no_optimizer(optimizer):
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, got \w+"):
        ClippedOptimizer(optimizer, 1.0)


def test_constructor_refuses_a_class():
    with pytest.raises(TypeError, match=r"got the class; write SGD\(parameters, \.\.\.\)"):
        ClippedOptimizer(SGD, 1.0)  # type: ignore[arg-type]


class _Around(Optimizer):
    """As wrappers write it that do not call Optimizer.__init__."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


def test_constructor_refuses_an_optimizer_without_its_own_init():
    inner = _Around(SGD([one_weight()[0]]))
    message = "that ran Optimizer.__init__, got _Around.*; wrap the optimizer inside it"
    with pytest.raises(TypeError, match=message):
        ClippedOptimizer(inner, 1.0)


def test_step_pre_hook_with_another_result_is_refused():
    _, wrapper = one_weight()
    wrapper.register_step_pre_hook(lambda *_: 5)
    with pytest.raises(RuntimeError, match=r"None or a tuple of \(new_args, new_kwargs\), got 5"):
        wrapper.step()


def test_constructor_refuses_a_wrapper():
    _, wrapper = one_weight()
    with pytest.raises(ValueError, match="would clip twice; to change its rule, set"):
        ClippedOptimizer(wrapper, 1.0)


def test_constructor_refuses_a_second_wrapper():
    weight, wrapper = one_weight()
    with pytest.raises(ValueError, match=r"SGD is wrapped already.*use the first wrapper, or make"):
        ClippedOptimizer(wrapper.optimizer, 1.0)
    wrapper.step()
    assert weight.tolist() == [-1.5, -2.0]


def test_constructor_takes_an_optimizer_whose_wrapper_is_gone():
    weight, wrapper = one_weight()
    inner = wrapper.optimizer
    del wrapper
    gc.collect()
    ClippedOptimizer(inner, ClipByGlobalNorm(1.25, eps=0.0)).step()
    assert weight.tolist() == [-0.75, -1.0]


@pytest.mark.parametrize(
    ("clip", "error", "message"),
    [
        ("1", TypeError, "clip must be"),
        (None, TypeError, "clip must be"),
        (True, TypeError, "clip must be"),
        (-1.0, ValueError, "must be 0 or more, got -1.0"),
        (torch.nan, ValueError, "must be 0 or more, got nan"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("where", ["constructor", "attribute"])
def test_unknown_rule_is_refused(clip, error, message, where):
    weight, wrapper = one_weight()
    if where == "constructor":
        inner = SGD([weight])
        with pytest.raises(error, match=message):
            ClippedOptimizer(inner, clip)
        # What was refused does not count as a wrapper.
        ClippedOptimizer(inner, 1.0)
    else:
        with pytest.raises(error, match=message):
            wrapper.clip = clip
        assert wrapper.clip == ClipByGlobalNorm(2.5, eps=0.0)


def test_no_rule_at_all_is_refused_with_what_to_write():
    with pytest.raises(TypeError, match=r"got None; .* of their own, write float\('inf'\)"):
        ClippedOptimizer(SGD([one_weight()[0]]), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["ignore", None, True], ids=repr)
@pytest.mark.parametrize("where", ["constructor", "attribute"])
def test_unknown_policy_is_refused(policy, where):
    weight, wrapper = one_weight()
    message = "nonfinite must be 'propagate', 'error', 'zero' or 'skip', got "
    if where == "constructor":
        inner = SGD([weight])
        with pytest.raises(ValueError, match=message):
            ClippedOptimizer(inner, 1.0, nonfinite=policy)
        ClippedOptimizer(inner, 1.0)
    else:
        with pytest.raises(ValueError, match=message):
            wrapper.nonfinite = policy
        assert wrapper.nonfinite == "propagate"


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
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    wrapper = ClippedOptimizer(torch.optim.LBFGS([weight]), LIMIT)
    with pytest.raises(TypeError, match=r"LBFGS needs a closure .* expected step\(closure\)"):
        wrapper.step(*args)
    assert weight.tolist() == [0.0, 0.0]
    assert grad_of(weight).tolist() == [3.0, 4.0]


def test_shallow_copy_is_refused_as_a_second_wrapper():
    _, wrapper = one_weight()
    with pytest.raises(ValueError, match="is wrapped already"):
        copy(wrapper)
