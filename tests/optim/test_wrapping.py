"""ClippedOptimizer in front of another optimizer: hooks of both, methods and attributes."""

import contextlib
import gc
from copy import copy
from typing import Any
from weakref import ref

import pytest
import torch
from torch.optim import SGD
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from helpers.cases import parameter
from helpers.optimizers import COPIED, one_weight
from helpers.training import Inner
from tritonclip import ClipByGlobalNorm, ClippedOptimizer

RAW, CLIPPED = [3.0, 4.0], [1.5, 2.0]
OLD, NEW = [0.0, 0.0], [-1.5, -2.0]


@pytest.fixture
def log() -> list[Any]:
    """What hooks note."""
    return []


def noting(log, label):
    """A step hook that notes who ran it, on which optimizer, with which gradient."""

    def hook(optimizer, args, kwargs):
        weight = optimizer.param_groups[0]["params"][0]
        log.append((label, type(optimizer).__name__, weight.grad.tolist(), weight.tolist()))

    return hook


def test_step_hooks_run_once_around_their_own_part(log):
    _, wrapper = one_weight()
    for optimizer in (wrapper, wrapper.optimizer):
        optimizer.register_step_pre_hook(noting(log, "before"))
        optimizer.register_step_post_hook(noting(log, "after"))
    wrapper.step()
    assert log == [
        ("before", "ClippedOptimizer", RAW, OLD),
        ("before", "SGD", CLIPPED, OLD),
        ("after", "SGD", CLIPPED, NEW),
        ("after", "ClippedOptimizer", CLIPPED, NEW),
    ]


def test_global_step_hooks_run_once_for_the_wrapped_optimizer(log):
    _, wrapper = one_weight()
    handles = [
        register_optimizer_step_pre_hook(noting(log, "before")),
        register_optimizer_step_post_hook(noting(log, "after")),
    ]
    try:
        wrapper.step()
    finally:
        for handle in handles:
            handle.remove()
    assert log == [("before", "SGD", CLIPPED, OLD), ("after", "SGD", CLIPPED, NEW)]


def test_step_hooks_registered_before_wrapping_run_once(log):
    inner = SGD([parameter(torch.tensor(RAW))], lr=1.0)
    inner.register_step_pre_hook(noting(log, "before"))
    ClippedOptimizer(inner, ClipByGlobalNorm(2.5, eps=0.0)).step()
    assert log == [("before", "SGD", CLIPPED, OLD)]


def test_step_hooks_get_the_arguments_of_the_step(log):
    _, wrapper = one_weight()
    for register in (wrapper.register_step_pre_hook, wrapper.register_step_post_hook):
        register(lambda optimizer, args, kwargs: log.append((args, kwargs)))
    wrapper.step()
    wrapper.step(closure := lambda: 1.0)
    wrapper.step(grad_scale=2.0)
    given: list[Any] = [
        ((wrapper,), {}),
        ((wrapper, closure), {}),
        ((wrapper,), {"grad_scale": 2.0}),
    ]
    assert log == [arguments for arguments in given for _ in ("before", "after")]


def test_step_pre_hook_may_replace_the_closure():
    _, wrapper = one_weight()
    wrapper.register_step_pre_hook(lambda optimizer, args, kwargs: ((args[0], lambda: 7.0), kwargs))
    assert wrapper.step(lambda: 1.0) == 7.0


@pytest.mark.parametrize("bad", [torch.nan, 3e6], ids=["nan", "large"])
@pytest.mark.parametrize("closure", [False, True], ids=["no closure", "closure"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Inner(SGD, {"lr": 1.0}), id="plain"),
        pytest.param(Inner(SGD, {"lr": 1.0, "fused": True}), id="fused"),
        pytest.param(Inner(SGD, {"lr": 1.0, "fused": True}, on_device=True), id="deferred"),
    ],
)
def test_step_post_hooks_run_for_steps_that_the_host_takes(bad, closure, make, log):
    """Where the device decides, no host can know: hooks run, as under torch's GradScaler."""
    weight = torch.nn.Parameter(torch.zeros(2))
    wrapper = ClippedOptimizer(make([weight]), 1.0, nonfinite="skip", skip_above=100.0)
    wrapper.register_step_post_hook(lambda *_: log.append(int(wrapper.stats.skipped_steps)))
    for first in (3.0, bad, 3.0):

        def evaluate(first: float = first) -> float:
            weight.grad = torch.tensor([first, 4.0])
            return 1.0

        if not closure:
            evaluate()
        wrapper.step(*([evaluate] if closure else []))
    assert int(wrapper.stats.skipped_steps) == 1
    assert log == ([0, 1, 1] if make.on_device else [0, 1])


def test_state_dict_hooks_run_around_the_whole_checkpoint(log):
    _, wrapper = one_weight()

    def after(optimizer, state_dict):
        log.append((optimizer, set(state_dict)))
        return {**state_dict, "mine": 1}

    wrapper.register_state_dict_pre_hook(lambda optimizer: log.append((optimizer, None)))
    wrapper.register_state_dict_post_hook(after)
    saved = wrapper.state_dict()
    assert log == [(wrapper, None), (wrapper, {"state", "param_groups", "tritonclip"})]
    assert saved["mine"] == 1


def test_load_state_dict_hooks_run_around_the_whole_load(log):
    _, wrapper = one_weight()
    _, source = one_weight()
    source.step()

    def before(optimizer, state_dict):
        log.append((optimizer, set(state_dict), int(optimizer.stats.steps)))
        statistics = {**state_dict["tritonclip"], "steps": torch.tensor(41)}
        return {**state_dict, "tritonclip": statistics}

    wrapper.register_load_state_dict_pre_hook(before)
    wrapper.register_load_state_dict_post_hook(
        lambda optimizer: log.append((optimizer, None, int(optimizer.stats.steps)))
    )
    wrapper.load_state_dict(source.state_dict())
    assert log == [(wrapper, {"state", "param_groups", "tritonclip"}, 0), (wrapper, None, 41)]


def test_state_dict_hooks_of_the_wrapped_optimizer_run_once(log):
    _, wrapper = one_weight()
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


def test_step_pre_hook_with_another_result_is_refused():
    _, wrapper = one_weight()
    wrapper.register_step_pre_hook(lambda *_: 5)
    with pytest.raises(RuntimeError, match=r"None or a tuple of \(new_args, new_kwargs\), got 5"):
        wrapper.step()


RULE = ClipByGlobalNorm(1.0, eps=0.0)


class ScheduleFree(SGD):
    """Switched before every evaluation, as schedule-free optimizers are."""

    n_switches = 0
    training = False

    def train(self, mode=True):
        self.training = mode
        self.n_switches += 1

    def eval(self):
        self.train(False)

    def step(self, closure=None):
        assert self.training
        return super().step(closure)

    @property
    def lacking(self):
        raise AttributeError("of the property")


class SAM(SGD):
    """Sharpness-aware minimization: the gradient at the top of a hill moves the weights below."""

    def __init__(self, params, base=SGD, **options):
        super().__init__(params, **options)
        self.base = base(self.param_groups, **options)

    @torch.no_grad()
    def first_step(self):
        self.hills = [
            (p, p.grad / p.grad.norm()) for group in self.param_groups for p in group["params"]
        ]
        for p, hill in self.hills:
            p += hill

    @torch.no_grad()
    def second_step(self):
        for p, hill in self.hills:
            p -= hill
        self.base.step()


def wrapped(kind=ScheduleFree, **options) -> tuple[torch.nn.Parameter, Any]:
    weight: Any = parameter(torch.tensor([3.0, 4.0]))
    return weight, ClippedOptimizer(kind([weight], lr=1.0, **options), RULE)


def test_methods_of_the_wrapped_optimizer_are_called():
    weight, optimizer = wrapped()
    optimizer.train()
    optimizer.step()
    optimizer.eval()
    torch.testing.assert_close(weight.data, torch.tensor([-0.6, -0.8]))
    assert optimizer.n_switches == 2


def test_attributes_of_the_wrapper_come_first():
    _, optimizer = wrapped()
    # An interrupted step may leave the latter two.
    vars(optimizer.optimizer).update(max_norm=7.0, grad_scale=5.0, found_inf=torch.ones(()))
    assert optimizer.step.__self__ is optimizer
    with pytest.raises(AttributeError, match="max_norm"):
        _ = optimizer.max_norm
    with pytest.raises(AttributeError, match="no loss scale is set"):
        _ = optimizer.grad_scale
    assert optimizer.found_inf is None


def test_attribute_that_is_set_stays_on_the_wrapper():
    _, optimizer = wrapped()
    optimizer.training = 3
    assert (optimizer.training, optimizer.optimizer.training) == (3, False)


@pytest.mark.parametrize("name", ["trian", "_private", "lacking"])
def test_other_names_raise(name):
    _, optimizer = wrapped()
    with pytest.raises(AttributeError, match=f"'ClippedOptimizer' object has no attribute '{name}"):
        getattr(optimizer, name)
    assert not hasattr(optimizer, name)


def test_property_of_a_subclass_says_why_it_raises():
    class Subclass(ClippedOptimizer):
        @property
        def n_switches(self):
            raise AttributeError("counts nothing")

    weight, _ = wrapped()
    with pytest.raises(AttributeError, match="counts nothing"):
        _ = Subclass(ScheduleFree([weight]), 1.0).n_switches


@COPIED
def test_a_copy_reaches_its_own_optimizer(copied):
    _, optimizer = wrapped()
    twin = copied(optimizer)
    twin.train()
    assert (twin.training, optimizer.training) == (True, False)


def test_sharpness_aware_steps_by_hand_are_clipped_inside_it():
    weight = torch.nn.Parameter(torch.zeros(2))
    sam = SAM([weight], lambda groups, **options: ClippedOptimizer(SGD(groups, **options), RULE))
    sam.param_groups[0]["lr"] = 1.0
    weight.grad = torch.tensor([3.0, 4.0])
    sam.first_step()
    weight.grad = torch.tensor([30.0, 40.0])
    sam.second_step()
    assert float(weight.detach().norm()) == pytest.approx(1.0)


def test_other_attributes_are_set():
    """Schedulers and trainers keep theirs on an optimizer."""

    class Warming(ClippedOptimizer):
        def __init__(self, *args):
            super().__init__(*args)
            self.warmup, self.eps, self.window = 5, 1e-3, 10

    weight, _ = wrapped()
    optimizer = Warming(SGD([weight]), 1.0)
    # Puts a function in the place of `step`.
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    assert (optimizer.warmup, optimizer.eps, optimizer.window) == (5, 1e-3, 10)
    assert int(optimizer.stats.steps) == 1


def traces(optimizer: SGD) -> tuple[Any, ...]:
    """All that a wrapper could leave on an optimizer."""
    kept = {name: value for name, value in vars(optimizer).items() if name != "state"}
    hooks = [[*value.values()] for name, value in kept.items() if name.endswith("hooks")]
    groups = [sorted(group) for group in optimizer.param_groups]
    return sorted(kept), hooks, groups, [*optimizer.state]


def test_unwrap_leaves_the_optimizer_as_it_was():
    weight, other = parameter(torch.ones(2)), parameter(torch.ones(2))
    groups: list[dict[str, Any]] = [{"params": [weight], "clip": 0.5}, {"params": [other]}]
    inner = SGD(groups, lr=0.1)
    inner.register_state_dict_post_hook(lambda *_: None)
    before = traces(inner)
    wrapper = ClippedOptimizer(inner, 1.0)
    wrapper.step()
    wrapper.load_state_dict(wrapper.state_dict())
    assert wrapper.unwrap() is inner
    assert traces(inner) == before
    assert ClippedOptimizer(inner, 1.0).unwrap().param_groups[0]["clip"] == 0.5


@pytest.mark.parametrize("again", [copy, lambda one: ClippedOptimizer(one.optimizer, 2.0)])
def test_last_of_several_wrappers_takes_the_traces_away(again):
    inner = SGD([parameter(torch.ones(2))], lr=0.1)
    before = traces(inner)
    first = ClippedOptimizer(inner, 1.0)
    second, dropped = again(first), again(first)
    wrapped = traces(inner)
    first.unwrap()
    del dropped
    assert traces(inner) == wrapped
    second.unwrap()
    assert traces(inner) == before


def test_wrapper_that_is_dropped_takes_its_traces_away():
    """Also a copy, and one whose constructor raised after ours."""

    class Failing(ClippedOptimizer):
        def __init__(self, *args):
            super().__init__(*args)
            raise KeyError

    inner = SGD([parameter(torch.ones(2))], lr=0.1)
    handle = inner.register_step_pre_hook(lambda *_: None)
    before = traces(inner)
    wrapper = ClippedOptimizer(inner, 1.0)
    wrapped = traces(inner)
    with contextlib.suppress(KeyError):
        Failing(inner, 1.0)
    gc.collect()
    twin = copy(wrapper)
    del wrapper
    assert traces(inner) == wrapped
    twin.step()
    del twin
    assert traces(inner) == before
    handle.remove()
    assert not inner._optimizer_step_pre_hooks


def test_wrapper_keeps_no_optimizer_alive():
    """Also where the optimizer knows its wrapper."""
    inner: Any = SGD([parameter(torch.ones(2))], lr=0.1)
    inner.wrapper = ClippedOptimizer(inner, 1.0)
    inner.wrapper.step()
    left = ref(inner)
    del inner
    gc.collect()
    assert left() is None


@pytest.mark.parametrize(
    ("max_norm", "options"),
    [("1", {}), (1.0, {"nonfinite": "?"}), (1.0, {"skip_above": "?"}), (1.0, {"recorder": 1})],
    ids=str,
)
def test_wrapper_that_is_refused_leaves_no_trace(max_norm, options):
    inner = SGD([parameter(torch.ones(2))], lr=0.1)
    before = traces(inner)
    with pytest.raises((TypeError, ValueError)):
        ClippedOptimizer(inner, max_norm, **options)
    assert traces(inner) == before
