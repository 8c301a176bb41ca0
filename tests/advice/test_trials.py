"""Trials of `find_max_norm` train in every form, leave no trace, and name what they cannot use."""

from __future__ import annotations

import copy
import itertools
import math
import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import tritonclip
from helpers.searches import draw, find, loss, make

# Kinds of trainings.


def step_by(clip_all: Any, build: Any = make, then: Any = lambda: None) -> Any:
    """A step function of a new model, which is clipped by `clip_all(model, clip)`."""
    model, optimizer = build()

    def step(batch, clip):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        clip_all(model, clip)
        optimizer.step()
        then()
        return value

    return step


def clip_model(model: nn.Module, clip: Any) -> None:
    clip(model)


def steps_of(kind: str) -> Any:
    """A `make` that gives a step function."""

    def make_step():
        model, optimizer = make()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20)
        by_schedule = step_by(clip_model, lambda: (model, optimizer), schedule.step)
        n = 0

        def step(batch, clip):
            nonlocal n
            n += 1
            if kind == "amp":
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    value = loss(model, batch)
                scaler.scale(value).backward()
                scaler.unscale_(optimizer)
                clip(model.parameters())
                scaler.step(optimizer)
                scaler.update()
            elif kind == "accumulation":
                value = loss(model, batch)
                (value / 2).backward()
                if n % 2 == 0:
                    clip(model.named_parameters())
                    optimizer.step()
                    optimizer.zero_grad()
            else:
                value = by_schedule(batch, clip)
            return float(value.detach()) if kind == "number" else value

        return step

    return make_step


@pytest.mark.parametrize("kind", ["schedule", "amp", "accumulation", "number"])
def test_step_functions_train_by_their_own_code(kind):
    found = find(steps_of(kind), loss=None)
    assert found.max_norm is not None
    assert str(found) == str(find(steps_of(kind), loss=None))


def test_optimizers_that_need_a_closure_clip_in_it():
    def lbfgs():
        model = nn.Linear(4, 1)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=2)

    found = find(lbfgs, steps=16, limits=[0.1, 1.0, 10.0])
    # Two gradients a step are clipped.
    assert found.max_norm is not None
    assert str(found) == str(find(lbfgs, steps=16, limits=[0.1, 1.0, 10.0]))


def test_a_step_function_has_its_loss_on_held_out_batches():
    def with_evaluate():
        return steps_of("schedule")(), lambda batch: batch

    found = find(with_evaluate, loss=None, held_out=[torch.tensor(2.0)])
    assert {loss for c in found.candidates for loss in c.losses if loss != math.inf} == {2.0}


@pytest.mark.parametrize("form", ["mapping", "tuple", "tensor"])
def test_a_model_may_have_its_loss(form):
    class Model(nn.Linear):
        def forward(self, x):
            value = (super().forward(x) - x[:, :1]).square().mean()
            return {"loss": value} if form == "mapping" else value

    def build():
        model = Model(4, 1)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    wrapped = {"mapping": lambda x: {"x": x}, "tuple": lambda x: (x,), "tensor": lambda x: x}[form]
    assert find(build, [*map(wrapped, draw())], loss=None).max_norm == find().max_norm


def rows(batches: list[torch.Tensor]) -> Any:
    """A data set."""
    return torch.cat(batches)


@pytest.mark.parametrize("form", ["iterator", "function", "loader", "short"])
def test_batches_come_from_lists_loaders_iterators_and_functions(form):
    data = draw()
    batches: Any = {
        "iterator": iter(data),
        "function": lambda: iter(data),
        "loader": DataLoader(rows(data), batch_size=8, shuffle=True),
        "short": data[:20],
    }[form]
    assert find(batches=batches).max_norm is not None


def test_a_loader_with_a_generator_shuffles_by_seed_and_keeps_its_state():
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(rows(draw()), batch_size=8, shuffle=True, generator=generator)
    before = generator.get_state()
    found = find(batches=loader)
    assert torch.equal(generator.get_state(), before)
    generator.manual_seed(4)
    assert str(find(batches=loader)) == str(found)


# What is left as it was.


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    grads = [p.grad for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    return copy.deepcopy((model.state_dict(), grads, modes, optimizer.state_dict()))


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.mark.parametrize("again", ["both", "model"])
@pytest.mark.parametrize("end", ["returns", "raises", "is interrupted"])
def test_a_model_that_is_given_again_is_put_back(again, end):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    loss(model, draw()[0]).backward()
    optimizer.step()
    model[1].eval()
    grads, states = [p.grad for p in model.parameters()], [*optimizer.state.values()]
    before = state_of(model, optimizer)
    n = 0

    def of(model, batch):
        nonlocal n
        n += 1
        if n == 200 and end != "returns":
            raise LookupError if end == "raises" else KeyboardInterrupt
        return loss(model, batch)

    def build():
        new = torch.optim.AdamW(model.parameters(), 0.1)
        return model, optimizer if again == "both" else new

    if end == "raises":
        with pytest.raises(LookupError):
            find(build, loss=of)
    else:
        found = find(build, loss=of)
        assert found.is_interrupted == (end == "is interrupted")
    assert equal(state_of(model, optimizer), before)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert all(a is b for a, b in zip(optimizer.state.values(), states, strict=True))


def test_a_model_that_is_given_again_trains_as_a_new_one():
    model, _ = make()
    weights = copy.deepcopy(model.state_dict())

    def build(again):
        if again:
            return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
        new = nn.Linear(4, 1)
        new.load_state_dict(weights)
        return new, torch.optim.SGD(new.parameters(), 0.1, momentum=0.5)

    assert str(find(lambda: build(True))) == str(find(lambda: build(False)))


def test_random_states_are_as_before(monkeypatch):
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    find()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert str(numpy.random.get_state()) == before[2]
    # CUDA, which was not begun yet, begins with this one.
    assert seeds[-1] == 3


# Bad input.


def still():
    model, _ = make()

    def step(batch, clip):
        value = loss(model, batch)
        value.backward()
        clip(model)
        return value

    return step


def forgetful():
    model, _ = make()
    return lambda batch, clip: loss(model, batch)


def lossless():
    step = step_by(clip_model)

    def without_loss(batch, clip):
        step(batch, clip)

    return without_loss


shared = nn.Linear(4, 1)


def again():
    return step_by(clip_model, lambda: (shared, torch.optim.SGD(shared.parameters(), 0.1)))


def wrapped():
    model, optimizer = make()
    return model, tritonclip.ClippedOptimizer(optimizer, 1.0)


def frozen():
    model = nn.Linear(4, 1).requires_grad_(False)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def twice(how: str) -> dict[str, Any]:
    """Options of steps that clip once more, to 0.5, before or after the trial's clip."""

    def clip_all(model, clip):
        if how == "before":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        clip(model)
        if how == "after":
            tritonclip.clip_(model, 0.5)

    def build():
        model, optimizer = make()
        return model, tritonclip.ClippedOptimizer(optimizer, 0.5) if how == "wrapper" else optimizer

    return {"loss": None, "make": lambda: step_by(clip_all, build)}


def test_norms_of_one_batch_that_stay_in_a_warm_up_are_no_second_clip():
    def build():
        model, optimizer = make()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 if n > 4 else 1e-9)
        return step_by(clip_model, lambda: (model, optimizer), schedule.step)

    assert find(build, draw(1), loss=None, limits=[0.1, 1.0]).reason


def test_absolute_errors_whose_gradient_stays_are_no_second_clip():
    def build():
        model = nn.Linear(4, 1)
        return model, torch.optim.SGD(model.parameters(), 0.5)

    def errors(model, batch):
        return (model(batch) - 2).abs().mean()

    assert find(build, draw(1), loss=errors, limits=[0.1, 1.0]).reason


def limited(*others, **named):
    model, _ = make()
    return lambda batch, clip: clip(model.parameters(), *others, **named)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"loss": None, "make": lambda: limited(0.5)}, TypeError, "takes 2 positional arguments"),
        ({"loss": None, "make": lambda: limited(max_norm=0.5)}, TypeError, "argument 'max_norm'"),
        ({"loss": None, "make": lambda: lambda batch: batch}, TypeError, "takes 1 positional"),
        ({"make": still}, TypeError, "make gave a step function"),
        ({"make": frozen}, RuntimeError, "does not require grad"),
        ({"loss": lambda model, x: loss(model, x).item()}, RuntimeError, "does not require grad"),
        ({"loss": nn.MSELoss()}, TypeError, "loss(model, batch), got MSELoss of torch"),
        ({"loss": nn.functional.mse_loss}, TypeError, "got mse_loss of torch"),
        ({"loss": None, "batches": [(torch.ones(8, 4),) * 2]}, TypeError, "--loss mymodule:loss"),
        ({"loss": None, "batches": [{"y": torch.ones(8, 4)}]}, TypeError, "loss=lambda model"),
        ({"held_out": itertools.repeat(torch.ones(8, 4))}, ValueError, "islice(batches(), 20)"),
        ({"held_out": itertools.count}, ValueError, "got more than 1,000"),
        ({"held_out": 3}, TypeError, "held_out must be an iterable of batches"),
        ({"held_out": lambda: 3}, TypeError, "gives one, got int"),
        ({"limits": (x for x in [1.0, math.inf])}, ValueError, "got limits=[1.0, inf]; the run"),
        ({"limits": [1.0, 1.0]}, ValueError, "--limits 0.1 0.3"),
        ({"loss": None, "make": still}, ValueError, "changed no parameter"),
        ({"make": lambda: make(0.0)}, ValueError, "learning rate above 0"),
        ({"loss": None, "make": forgetful}, ValueError, "clip was not called"),
        ({"loss": None, "make": lossless}, TypeError, "step function that returns it"),
        ({"loss": None, "make": again}, ValueError, "copy.deepcopy"),
        (twice("before"), ValueError, "of the same norm, 0.5, and none had"),
        (twice("after"), ValueError, "expected a step that calls clip("),
        (twice("wrapper"), ValueError, "without clip_grad_norm_, a ClippedOpt"),
        ({"make": wrapped}, TypeError, "it wraps"),
        ({"make": nn.Linear(4, 1)}, TypeError, "got Linear"),
        ({"make": lambda: nn.Linear(4, 1)}, TypeError, "got Linear"),
        ({"make": lambda: (1, 2, 3)}, TypeError, "got int, int, int"),
        ({"make": steps_of("schedule"), "held_out": draw()}, TypeError, "(step, evaluate)"),
        ({"batches": [torch.full((8, 4), math.nan)]}, ValueError, "first loss is nan"),
        ({"batches": []}, ValueError, "ran out after 0 of"),
        ({"batches": iter(draw()[:7])}, ValueError, "steps=7"),
        ({"batches": 3}, TypeError, "such as a DataLoader"),
        ({"batches": lambda: 3}, TypeError, "gives one, got int"),
        ({"held_out": []}, ValueError, "no batches"),
        ({"limits": [1.0]}, ValueError, "two or more limits"),
        ({"limits": [1.0, math.inf]}, ValueError, "two or more limits"),
        ({"limits": 1.0}, TypeError, "not iterable"),
        ({"limits": [1.0, -1.0]}, ValueError, "above 0"),
        ({"limits": [1.0, math.nan]}, ValueError, "limits"),
        ({"limits": [1.0, "2"]}, TypeError, "limits[1]"),
        ({"rules": [1.0]}, TypeError, "[ClipByQuantile(0.9)]"),
        ({"steps": 0}, ValueError, "steps must be"),
        ({"seeds": 0}, ValueError, "seeds must be"),
        ({"seeds": [1, 1]}, ValueError, "different numbers"),
        ({"loss": lambda model, x: model(x)}, TypeError, "of shape (8, 1)"),
        ({"loss": None}, TypeError, "loss=lambda model, batch"),
    ],
)
def test_bad_input_is_named_with_what_to_do(options, error, said):
    weights = shared.weight.clone()
    with pytest.raises(error) as caught:
        find(**options)
    assert said in str(caught.value)
    assert torch.equal(shared.weight, weights)
