"""Trials of `find_max_norm` begin anew from their seed, end in time, and name what they refuse."""

import itertools
import math
import random
import sys
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import tritonclip
from advice.searches import draw, find, loss, make, training
from tritonclip.advice import trials


def run(train: Any, **options: Any) -> Any:
    """One short trial for each limit."""
    return find(train, **{"steps": 8, "seeds": 1, "limits": [0.1, 1.0], **options})


# Trainings of many kinds.


def scaled(clip):
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for batch in draw():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model, batch)
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        clip(model.named_parameters())
        scaler.step(optimizer)
        scaler.update()
        yield value


def accumulated(clip):
    model, optimizer = make()
    for i, batch in enumerate(draw(), 1):
        value = loss(model, batch)
        (value / 2).backward()
        if i % 2 == 0:
            clip(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        yield value.item()


def in_a_closure(clip):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=2)

    def closure(batch):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        clip(model.parameters())
        return value

    for batch in draw():
        yield optimizer.step(partial(closure, batch))


@pytest.mark.parametrize("train", [scaled, accumulated, in_a_closure])
def test_trainings_clip_in_their_own_code(train):
    found = find(train)
    assert found.max_norm is not None
    assert str(found) == str(find(train))


def test_clip_takes_and_returns_what_clip_does():
    norms = []

    def train(clip):
        weight, bias = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        for i in range(6):
            parameters = (weight, [("w", weight), ("b", bias)], iter([weight, bias]))[i % 3]
            weight.grad, bias.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
            norms.append((float(clip(parameters)), weight.grad.norm()))
            torch.optim.SGD([weight, bias], 0.1).step()
            yield weight.sum().detach()

    run(train, steps=6, limits=[0.5, 0.6])
    before, after = zip(*norms, strict=True)
    assert before[:18] == (3.0, 5.0, 5.0) * 6
    expected = [3.0] * 6 + [0.6, 0.36, 0.36] * 2 + [0.5, 0.3, 0.3] * 2
    torch.testing.assert_close(torch.stack(after[:18]), torch.tensor(expected))


def test_each_trial_begins_with_the_random_numbers_of_its_seed():
    drawn: list[Any] = []

    def train(clip):
        drawn.append((torch.rand(()).item(), random.random(), numpy.random.rand()))
        yield from training()(clip)

    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    find(train, seeds=[1, 7], limits=[0.1, 1.0])
    assert drawn == [drawn[0]] * 3 + [drawn[3]] * 3
    assert all(a != b for a, b in zip(drawn[0], drawn[3], strict=True))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert str(numpy.random.get_state()) == before[2]


def test_cuda_begins_with_the_seed_of_before(monkeypatch):
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    torch.manual_seed(3)
    run(training())
    assert seeds[-1] == 3


# How a trial ends.


@pytest.mark.parametrize("kind", ["endless", "nan", "interrupt", "error"])
def test_a_training_is_closed_after_its_steps(kind):
    ends: list[str] = []
    steps: list[int] = []
    kept: list[Any] = []
    n = 0

    def train(clip):
        # Kept, so that nothing but the search closes it.
        kept.append(count(clip))
        return kept[-1]

    def count(clip):
        steps.append(0)
        try:
            for value in training(loss=of)(clip):
                steps[-1] += 1
                yield value
        except BaseException as error:
            ends.append(type(error).__name__)
            raise

    def of(model, batch):
        nonlocal n
        n += 1
        if n == 21 and kind in ("interrupt", "error"):
            raise KeyboardInterrupt if kind == "interrupt" else LookupError
        return loss(model, batch) * (math.nan if kind == "nan" and n == 21 else 1.0)

    if kind == "error":
        with pytest.raises(LookupError) as caught:
            run(train)
        if sys.version_info >= (3, 11):
            assert "limit 0.1 and seed 0" in caught.value.__notes__[0]
    else:
        assert run(train).is_interrupted == (kind == "interrupt")
    assert steps[:2] == [8, 8]
    last = {"interrupt": "KeyboardInterrupt", "error": "LookupError"}.get(kind, "GeneratorExit")
    assert ends == ["GeneratorExit"] * 2 + [last]
    assert steps[2] == (8 if kind == "endless" else 3 if kind == "nan" else 2)


def returning(value: Any) -> Any:
    """A training of eight steps that returns a value."""

    def train(clip):
        yield from itertools.islice(training()(clip), 8)
        return value

    return train


@pytest.mark.parametrize("loss", [2.0, torch.tensor([2.0], requires_grad=True), math.nan])
def test_a_loss_that_is_returned_decides(loss):
    found = run(returning(loss))
    assert found.is_held_out
    assert {one.losses for one in found.candidates} == {(2.0 if loss == 2.0 else math.inf,)}


def test_a_loss_that_was_nan_decides_although_it_arrived_late(monkeypatch):
    """As on an accelerator, where later losses may be finite again, and one is returned."""
    monkeypatch.setattr(trials, "sent", lambda number: lambda: 1)

    def train(clip):
        running = training()(clip)
        for i in range(8):
            yield next(running) * (math.nan if i == 4 else 1.0)
        return 2.0

    found = run(train)
    assert {one.losses for one in found.candidates} == {(math.inf,)}


# What is refused.


shared = nn.Linear(4, 1)


def make_both():
    return make()


def twice(how: str) -> Any:
    """A training that clips once more, to 0.5, before or after the trial's clip."""

    def train(clip):
        model, optimizer = make()
        if how == "wrapper":
            optimizer = tritonclip.ClippedOptimizer(optimizer, 0.5)
        for batch in draw():
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            if how == "before":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            clip(model)
            if how == "after":
                tritonclip.clip_(model, 0.5)
            optimizer.step()
            yield value

    return train


def yielding(value: Any) -> Any:
    return lambda clip: (value for _ in training()(clip))


def calling(*others: Any, **named: Any) -> Any:
    def train(clip):
        yield clip(make()[0].parameters(), *others, **named)

    return train


@pytest.mark.parametrize(
    ("train", "error", "said"),
    [
        (nn.Linear(4, 1), TypeError, "expected a generator function train(clip), which makes its"),
        (
            3,
            TypeError,
            "before each optimizer.step() and yields the loss of each step; got int, which",
        ),
        (make_both, TypeError, "got make_both, which does not take clip alone"),
        (lambda clip: 3.0, TypeError, "yield loss; got a function that returns 3.0"),
        (
            lambda clip: [*training()(clip)],
            TypeError,
            "train has no yield; expected yield loss at the end of",
        ),
        (
            lambda clip: training()(list),
            ValueError,
            "clip was not called in 8 steps; expected clip(model.parameters())",
        ),
        (calling(0.5), TypeError, "takes 2 positional arguments"),
        (calling(max_norm=0.5), TypeError, "argument 'max_norm'"),
        (yielding(None), TypeError, "yielded NoneType; expected the loss alone"),
        (yielding((1.0, 2.0)), TypeError, "yielded tuple; expected the loss alone, a number or a"),
        (yielding(torch.ones(8)), TypeError, "yielded Tensor of shape (8,)"),
        (returning("0.1"), TypeError, "returned str; expected the loss alone"),
        (yielding(math.nan), ValueError, "first loss is nan"),
        (lambda clip: (1.0 for _ in ()), ValueError, "train yielded no loss; expected a generator"),
        (lambda clip: (1.0 for _ in range(7)), ValueError, "over its batches again, or steps=7"),
        (training(lambda: make(0.0)), ValueError, "changed no parameter, so that no limit"),
        (
            training(lambda: (shared, torch.optim.SGD(shared.parameters(), 0.1))),
            ValueError,
            "expected a model that train makes, or copy.deepcopy(model)",
        ),
        (twice("before"), ValueError, "of the same norm, 0.5, and none had"),
        (twice("after"), ValueError, "expected a step that calls clip("),
        (twice("wrapper"), ValueError, "without clip_grad_norm_, a ClippedOpt"),
    ],
)
def test_a_training_that_cannot_be_tried_is_refused_with_what_to_write(train, error, said):
    with pytest.raises(error) as caught:
        run(train, limits=[1.0, 10.0])
    assert said in str(caught.value)


@pytest.mark.parametrize("shape", ["warm-up", "absolute errors"])
def test_one_gradient_again_and_again_is_no_second_clip(shape):
    def absolute(model, batch):
        return (model(batch) - 2).abs().mean()

    def warm_up(clip):
        model, optimizer = make()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 if n > 4 else 1e-9)
        for value in training(lambda: (model, optimizer), draw(1))(clip):
            schedule.step()
            yield value

    train = warm_up if shape == "warm-up" else training(lambda: make(0.5), draw(1), absolute)
    assert run(train, steps=40).reason


@pytest.mark.parametrize("shared", ["generator", "data"])
def test_trials_that_begin_differently_are_refused(shared):
    generator, batches = torch.Generator().manual_seed(0), draw(4, corrupt=1.0)

    def of(model, batch):
        if shared == "data":
            batch *= 1.01
        else:
            batch = torch.randn(8, 4, generator=generator)
        return loss(model, batch)

    with pytest.raises(ValueError, match="differ in more than the limit; expected a train that"):
        run(training(batches=batches, loss=of))


def test_frozen_parameters_may_be_shared():
    body = nn.Linear(4, 4).requires_grad_(False)

    def build():
        model = nn.Sequential(body, nn.Linear(4, 1))
        return model, torch.optim.SGD(model.parameters(), 0.1)

    assert run(training(build)).reason


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"limits": (x for x in [1.0, math.inf])}, ValueError, "got limits=[1.0, inf]; the run"),
        ({"limits": [1.0, 1.0]}, ValueError, "--limits 0.1 0.3"),
        ({"limits": 1.0}, TypeError, "as in limits=(0.3, 1.0, 3.0), got 1.0"),
        ({"limits": [1.0, -1.0]}, ValueError, "above 0"),
        ({"limits": [1.0, math.nan]}, ValueError, "limits"),
        ({"limits": [1.0, "2"]}, TypeError, "limits[1]"),
        ({"rules": [1.0]}, TypeError, "[ClipByQuantile(0.9, max_norm=1.0)]"),
        (
            {"rules": tritonclip.ClipByQuantile()},
            TypeError,
            "rules=[ClipByQuantile(0.9, max_norm=1.0)]",
        ),
        ({"steps": 0}, ValueError, "steps must be"),
        ({"seeds": 0}, ValueError, "seeds must be"),
        ({"steps": None, "seconds": math.nan}, ValueError, "seconds must be 0 or more, got nan"),
        ({"seeds": [1, 1]}, ValueError, "different numbers"),
    ],
)
def test_bad_options_are_named_with_what_to_write(options, error, said):
    with pytest.raises(error) as caught:
        find(**options)
    assert said in str(caught.value)
