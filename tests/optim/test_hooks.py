"""Hooks of torch on ClippedOptimizer and on the optimizer that it wraps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from helpers.optimizers import one_weight
from helpers.training import Inner
from tritonclip import ClipByGlobalNorm, ClippedOptimizer


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


def test_step_pre_hook_may_replace_the_closure():
    _, wrapper = one_weight()
    wrapper.register_step_pre_hook(lambda optimizer, args, kwargs: ((args[0], lambda: 7.0), kwargs))
    assert wrapper.step(lambda: 1.0) == 7.0


def _nan(weight: Any) -> None:
    weight.grad[0] = torch.nan


def _large(weight: Any) -> None:
    weight.grad *= 1e6


@pytest.mark.parametrize("spoil", [_nan, _large])
@pytest.mark.parametrize("closure", [False, True], ids=["no closure", "closure"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Inner(SGD, {"lr": 1.0}), id="plain"),
        pytest.param(Inner(SGD, {"lr": 1.0, "fused": True}), id="fused"),
        pytest.param(Inner(SGD, {"lr": 1.0, "fused": True}, on_device=True), id="deferred"),
    ],
)
def test_step_post_hooks_run_for_steps_that_the_host_takes(spoil, closure, make):
    """Where the device decides, no host can know: hooks run, as under torch's GradScaler."""
    weight = torch.nn.Parameter(torch.zeros(2))
    wrapper = ClippedOptimizer(make([weight]), 1.0, nonfinite="skip", skip_above=100.0)
    log: list[Any] = []
    wrapper.register_step_post_hook(lambda *_: log.append(int(wrapper.stats.skipped_steps)))
    for change in (lambda _: None, spoil, lambda _: None):

        def evaluate(change: Any = change) -> float:
            weight.grad = torch.tensor(RAW)
            change(weight)
            return 1.0

        if not closure:
            evaluate()
        wrapper.step(*([evaluate] if closure else []))
    assert int(wrapper.stats.skipped_steps) == 1
    assert log == ([0, 1, 1] if make.on_device else [0, 1])


def test_step_post_hooks_do_not_run_where_a_later_evaluation_undoes_the_step():
    weight = torch.nn.Parameter(torch.zeros(2))
    inner = torch.optim.LBFGS([weight], max_iter=4)
    wrapper = ClippedOptimizer(inner, 1.0, nonfinite="skip")
    log: list[Any] = []
    wrapper.register_step_post_hook(lambda *_: log.append("after"))
    values = iter([1.0, torch.nan])

    def closure() -> Any:
        wrapper.zero_grad()
        loss = ((weight - 1) ** 2).sum() * next(values)
        loss.backward()
        return loss

    wrapper.step(closure)
    assert (int(wrapper.stats.skipped_steps), log) == (1, [])


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


def test_step_pre_hook_with_another_result_is_refused():
    _, wrapper = one_weight()
    wrapper.register_step_pre_hook(lambda *_: 5)
    with pytest.raises(RuntimeError, match=r"None or a tuple of \(new_args, new_kwargs\), got 5"):
        wrapper.step()
