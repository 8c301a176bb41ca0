"""ClippedOptimizer in the training stack of torch: every LR scheduler, SWA and EMA."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.optim import SGD, lr_scheduler, swa_utils

import tritonclip
from helpers.cases import assert_bits, normal
from tritonclip import ClippedOptimizer

LIMIT = 0.5
STEPS = 12

SCHEDULERS: dict[str, Any] = {
    name: one
    for name, one in vars(lr_scheduler).items()
    if isinstance(one, type)
    and issubclass(one, lr_scheduler.LRScheduler)
    and name not in ("LRScheduler", "_LRScheduler")
} | {"SWALR": swa_utils.SWALR}


def _parts(optimizer, first) -> list[Any]:
    return [first(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)]


# Those that need more than an optimizer.
FACTORIES: dict[str, Any] = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        _parts(o, lr_scheduler.ConstantLR), o
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 7]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.95),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, cooldown=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, _parts(o, lr_scheduler.LinearLR), milestones=[4]
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.02, anneal_epochs=5),
}
EVERY = pytest.mark.parametrize("name", SCHEDULERS)


def schedule(name, optimizer):
    return FACTORIES.get(name, SCHEDULERS[name])(optimizer)


def made(seed=0):
    """A small model and an optimizer with two groups, whose learning rates differ."""
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    )
    for i, parameter in enumerate(model.parameters()):
        parameter.data = normal(parameter.shape, seed=seed + i)
    groups: list[dict[str, Any]] = [
        {"params": list(model[0].parameters()), "lr": 0.1},
        {"params": [*model[1].parameters(), *model[2].parameters()], "lr": 0.05},
    ]
    return model, SGD(groups, lr=0.1, momentum=0.9)


def batch(step):
    return 3 * normal((8, 3), seed=100 + step)


def train(model, optimizer, scheduler=None, steps=range(STEPS), after_step=None):
    """Trains, by hand with clip_ where the optimizer does not clip; the rates used at each step."""
    used = []
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        if not isinstance(optimizer, ClippedOptimizer):
            tritonclip.clip_(model.parameters(), LIMIT)
        used.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        elif scheduler is not None:
            scheduler.step()
        if after_step is not None:
            after_step()
    return used


def assert_same_models(ours, theirs):
    assert_bits(ours.state_dict().values(), theirs.state_dict().values())


@pytest.mark.parametrize("made_on", ["wrapper", "inner-before-wrapping", "inner-after-wrapping"])
@EVERY
def test_scheduler_gives_the_bare_rates_and_updates(name, made_on):
    model, inner = made()
    if made_on == "inner-before-wrapping":
        scheduler = schedule(name, inner)
        wrapper = ClippedOptimizer(inner, LIMIT)
    else:
        wrapper = ClippedOptimizer(inner, LIMIT)
        scheduler = schedule(name, wrapper if made_on == "wrapper" else inner)
    bare_model, bare = made()
    used = train(model, wrapper, scheduler)
    assert used == train(bare_model, bare, schedule(name, bare))
    # Each of them moves what it schedules, so equal sequences say something.
    assert any(rates != used[0] for rates in used)
    assert_same_models(model, bare_model)
    assert int(wrapper.stats.clipped_steps) > 0


@EVERY
def test_scheduler_goes_on_from_a_checkpoint(name):
    model, inner = made()
    wrapper = ClippedOptimizer(inner, LIMIT)
    scheduler = schedule(name, wrapper)
    train(model, wrapper, scheduler, range(5))
    saved = deepcopy((model.state_dict(), wrapper.state_dict(), scheduler.state_dict()))

    other_model, other_inner = made(seed=50)
    other = ClippedOptimizer(other_inner, LIMIT)
    other_scheduler = schedule(name, other)
    for target, state in zip((other_model, other, other_scheduler), saved, strict=True):
        target.load_state_dict(state)
    rest = range(5, STEPS)
    used = train(other_model, other, other_scheduler, rest)
    assert used == train(model, wrapper, scheduler, rest)
    assert_same_models(other_model, model)


@pytest.mark.parametrize("made_on", ["wrapper", "inner"])
def test_scheduler_warns_when_it_steps_before_the_optimizer(made_on):
    _, inner = made()
    wrapper = ClippedOptimizer(inner, LIMIT)
    scheduler = schedule("StepLR", wrapper if made_on == "wrapper" else inner)
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        scheduler.step()
