"""`find_max_norm` tries limits on the user's training, says which is best, and leaves no trace."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections import Counter
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import tritonclip
from tritonclip import ClipByGlobalNorm, ClipByQuantile, ClipByValue, finder
from tritonclip.finder import Candidate, choose
from tritonclip.trials import Trial


@pytest.fixture(autouse=True)
def quiet(capsys):
    """The budget is written to stderr."""
    yield
    capsys.readouterr()


def draw(n: int = 40, corrupt: float = 1000.0) -> list[torch.Tensor]:
    """Batches, of which every tenth is far too large."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(8, 4, generator=generator) for _ in range(n)]
    for i in range(5, n, 10):
        batches[i] *= corrupt
    return batches


def loss(model: nn.Module, x: torch.Tensor) -> Any:
    return (model(x) - x[:, :1]).square().mean()


def make(lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr)


def find(make: Any = make, batches: Any = None, **options: Any) -> finder.Found:
    options = {"steps": 40, "loss": loss, **options}
    return tritonclip.find_max_norm(make, draw() if batches is None else batches, **options)


def trained(clip: Any, steps: int = 40) -> float:
    """The loss on clean batches after training with a limit."""
    torch.manual_seed(7)
    model, optimizer = make()
    for batch in draw(steps):
        optimizer.zero_grad()
        loss(model, batch).backward()
        tritonclip.clip_(model, clip)
        optimizer.step()
    return float(loss(model, torch.eye(4)).detach())


# What is found.


def test_a_limit_is_found_with_which_training_goes_well():
    found = find()
    assert found.max_norm is not None
    assert found.clip == found.max_norm
    assert trained(found.max_norm) < 0.1 < trained(math.inf)
    assert found.reason.startswith(f"Clip by {found.max_norm:g}")


def test_no_limit_helps_where_all_norms_are_small():
    found = find(lambda: make(0.01), draw(corrupt=1.0))
    assert found.max_norm is None
    assert found.clip == math.inf
    assert found.reason.startswith("No limit helps")


def test_the_same_seeds_give_the_same_answer():
    assert find().candidates == find().candidates


def test_global_random_states_do_not_matter():
    first = find()
    torch.manual_seed(99)
    random.seed(99)
    assert str(find()) == str(first)


def test_printing_shows_the_verdict_and_a_row_for_each_candidate():
    found = find()
    verdict, blank, heads, *rows = str(found).splitlines()
    assert verdict == found.reason
    assert not blank
    assert heads.split()[:2] == ["limit", "loss"]
    assert len(rows) == len(found.candidates)
    assert [row.startswith(f"{found.max_norm:g} ") for row in rows if "recommended" in row] == [
        True
    ]


def test_given_limits_are_tried_and_none_beside_them():
    found = find(limits=[3.0, 0.5, 30.0])
    assert [c.clip for c in found.candidates] == [0.5, 3.0, 30.0, math.inf]


def test_a_limit_below_nearly_all_norms_is_called_a_smaller_step():
    batches = draw(corrupt=1.0)
    found = find(lambda: make(3.0), batches, limits=[0.01, 0.02])
    assert "acts as a smaller step" in found.reason
    scale = {c.clip: c.scale for c in found.candidates}[found.clip]
    assert f"{scale:.2g} times the learning rate, here {3.0 * scale:.2g}," in found.reason


def test_lower_limits_follow_while_the_lowest_is_best():
    def build():
        model = nn.Linear(4, 1)
        return model, torch.optim.SGD(model.parameters(), 1e4)

    batches = draw(corrupt=1.0)
    found = find(build, batches)
    norm = tritonclip.clip_(_with_gradients(batches[0]), math.inf)
    # Without a limit, norms explode from the second step on.
    assert min(limits_of(found)) < 3 * norm / 10**3.4
    assert found.max_norm is not None
    assert found.max_norm < norm / 100


def limits_of(found: finder.Found) -> list[float]:
    return [c.clip for c in found.candidates if isinstance(c.clip, float)]


def _with_gradients(batch: torch.Tensor) -> nn.Module:
    torch.manual_seed(0)
    model, _ = make()
    loss(model, batch).backward()
    return model


def test_rules_compete_with_limits():
    rules = [ClipByQuantile(0.5, window=10), ClipByValue(1e-9)]
    found = find(rules=rules, limits=[1e-8])
    assert found.clip == rules[0]
    assert found.max_norm is None
    assert {c.clip for c in found.candidates} == {1e-8, math.inf, *rules}


def test_trials_that_diverge_end_early():
    ticks = Counter[str]()
    batches = draw(corrupt=1e30)
    found = find(batches=batches, progress=lambda done, most: ticks.update(done=1, most=most))
    losses = {c.clip: c.losses for c in found.candidates}
    assert losses[math.inf] == (math.inf,) * 3
    assert found.spent == ticks["done"] - 1 < ticks["most"] / ticks["done"] - 60


def test_held_out_batches_judge():
    seen = []

    def of(model, batch):
        if not torch.is_grad_enabled():
            seen.append(model.training)
            return model.weight.detach().norm() * 0 + batch.sum()
        return loss(model, batch)

    found = find(loss=of, held_out=[torch.tensor([1.0]), torch.tensor([2.0])])
    assert found.is_held_out
    assert {loss for c in found.candidates for loss in c.losses if loss != math.inf} == {1.5}
    assert seen
    assert not any(seen)


def test_held_out_batches_come_from_a_function_with_random_numbers_of_its_own():
    drawn = []

    def batches():
        for _ in range(3):
            drawn.append(torch.randn(8, 4))
            yield drawn[-1]

    before = torch.get_rng_state()
    found = find(held_out=batches, batches=batches, steps=4, seeds=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.is_held_out
    assert not any(torch.equal(held, other) for held in drawn[:3] for other in drawn[3:])


@pytest.mark.parametrize("clips", [True, False], ids=["clip", "none"])
def test_the_verdict_has_the_losses_of_the_table(clips):
    def run(position, clip, steps):
        value = [1.0, 2.0, 30.0][position] * (0.5 if clip == 1.0 and clips else 1.0)
        return Trial(torch.tensor([90.0, value]).double(), torch.ones(1).double() * 9, None)

    search = finder._Search(run, [1.0, 2.0], [], 40, 3)
    search.run()
    one, last = search.last
    clip, best, _ = choose(last)
    found = {c: finder._candidate(c, one.steps, [0, 1, 2], last[c]) for c in last}
    reason = finder._reason(found[clip], found[best], found[math.inf], last, None)
    assert f"median loss is {found[clip].quartiles[1]:.4g}" in reason
    assert (clip == 1.0) == clips == ("and 2 without a limit" in reason)


def test_a_limit_that_only_the_mean_prefers_is_explained():
    last: Any = {math.inf: trials(1.0, 2.0, 90.0), 1.0: trials(1.1, 2.1, 3.1)}
    chosen, none = (finder._candidate(c, 40, [0, 1, 2], last[c]) for c in (1.0, math.inf))
    assert "mean decides: it is 2.1, and 31 without" in finder._reason(
        chosen, chosen, none, last, None
    )


FALLS, RISES = torch.linspace(9.0, 1.0, 40).double(), torch.linspace(1.0, 9.0, 40).double()
STAYS = torch.tensor([2.0, 1.0]).double().repeat(20)


@pytest.mark.parametrize(
    ("losses", "n_telling"),
    [
        ([FALLS, FALLS, STAYS, STAYS], None),
        ([FALLS, STAYS, STAYS, STAYS], 1),
        ([RISES, torch.tensor([1.0, math.nan]), STAYS, STAYS], None),
        ([STAYS, STAYS, STAYS, STAYS], 0),
    ],
    ids=["half", "few", "rises or diverges", "none"],
)
def test_trials_that_are_too_short_to_tell_are_said_to_be(losses, n_telling):
    said = finder._on_length([Trial(one, torch.zeros(0), None) for one in losses], 240)
    if n_telling is None:
        assert not said
        return
    few = "only 1" if n_telling else "none"
    assert f"of 40 steps, the loss changed clearly with {few} of 4 candidates, so that" in said
    assert said.endswith("Ask again with steps=720.")


@pytest.mark.parametrize(("lr", "is_said"), [(0.1, False), (1e-6, True)], ids=["trains", "hardly"])
def test_an_answer_says_whether_its_trials_were_too_short(lr, is_said):
    found = find(lambda: make(lr), draw(corrupt=1.0), limits=[0.3, 1.0, 30.0])
    assert ("too short to tell" in found.reason) == is_said


@pytest.mark.parametrize("seeds", [1, [5], 2, [3, 1, 4]], ids=str)
def test_seeds_are_a_number_or_a_list(seeds):
    found = find(seeds=seeds)
    assert found.best.seeds == tuple(range(seeds) if isinstance(seeds, int) else seeds)
    assert ("One seed cannot say" in found.reason) == (len(found.best.seeds) == 1)


def test_seeds_that_change_nothing_are_named():
    def same():
        model = nn.Linear(4, 1)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    found = find(same, lambda: iter(draw()))
    assert "All seeds gave the same losses" in found.reason


# How candidates are chosen.


def test_limits_beside_the_best_are_tried_where_short_trials_misled():
    calls = Counter[tuple[float, int]]()

    def run(position, clip, steps):
        calls[clip, steps] += 1
        value = abs(math.log(clip / 0.3)) if steps == 40 else clip
        losses = torch.tensor([9.0, min(value, 9.0)], dtype=torch.float64)
        return Trial(losses, torch.tensor([2.0]).double(), None)

    search = finder._Search(run, [1.0, 0.5, 0.3, 0.1, 0.05], [], 40, 2)
    search.run()
    assert choose(search.last[1])[0] == 0.3
    # The next one is worse with the first seed.
    assert (calls[0.3, 40], calls[0.5, 40], calls[1.0, 40]) == (2, 1, 0)


def trials(*losses: float) -> dict[int, Trial]:
    nothing = torch.zeros(0, dtype=torch.float64)
    return {
        i: Trial(torch.full((8,), loss).double(), nothing, None) for i, loss in enumerate(losses)
    }


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [
        ({math.inf: (1.0, 2.0, 3.0), 1.0: (0.5, 1.0, 1.5), 2.0: (0.51, 0.99, 1.5)}, 2.0),
        ({math.inf: (1.0, 2.0, 3.0), 1.0: (0.5, 1.0, 1.5), 2.0: (0.9, 1.6, 2.5)}, 1.0),
        ({math.inf: (1.0, 2.0, 3.0), 1.0: (1.1, 1.9, 3.1)}, math.inf),
        ({math.inf: (1.0, 2.0, 3.0), 1.0: (0.9999, 1.9998, 2.9997)}, math.inf),
        ({math.inf: (math.inf,) * 3, 1.0: (0.5, 1.0, 1.5), 2.0: (0.4, 0.9, math.inf)}, 1.0),
        ({math.inf: (math.inf,) * 3, 1.0: (math.inf,) * 3}, math.inf),
        ({math.inf: (1e9, 1e27, 1e3), 1.0: (0.5, 1.0, 1.5)}, 1.0),
        ({math.inf: (-10.0, -12.0, -9.0), 1.0: (-50.0, -60.0, -55.0)}, 1.0),
        ({math.inf: (0.0, 0.0), 1.0: (0.0, 0.0)}, math.inf),
    ],
    ids=["mild", "clear", "noise", "tiny", "diverged", "all", "explodes", "negative", "zero"],
)
def test_the_mildest_of_the_best_is_chosen(losses, chosen):
    assert choose({clip: trials(*values) for clip, values in losses.items()})[0] == chosen


@pytest.mark.parametrize(
    ("losses", "quartiles"),
    [
        ((1.0,), (1.0, 1.0, 1.0)),
        ((1.0, 3.0), (1.5, 2.0, 2.5)),
        ((1.0, math.inf), (1.0, 1.0, math.inf)),
    ],
    ids=["one", "two", "inf"],
)
def test_quartiles_lie_between_losses(losses, quartiles):
    seeds = tuple(range(len(losses)))
    assert Candidate(1.0, 10, seeds, losses, 0.0, 1.0).quartiles == quartiles


# Kinds of trainings.


def steps_of(kind: str) -> Any:
    """A `make` that gives a step function."""

    def make_step():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20)
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
                optimizer.zero_grad()
                value = loss(model, batch)
                value.backward()
                clip(model)
                optimizer.step()
                schedule.step()
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
    return copy.deepcopy(
        (
            model.state_dict(),
            [p.grad for p in model.parameters()],
            [module.training for module in model.modules()],
            optimizer.state_dict(),
        )
    )


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


# Interrupts.


@pytest.mark.parametrize(
    ("step", "steps", "n_seeds"), [(95, 10, 1), (190, 13, 1), (350, 40, 1), (500, 40, 2)]
)
def test_an_interrupt_gives_the_answer_so_far(step, steps, n_seeds):
    def stop(done, most):
        if done == step:
            raise KeyboardInterrupt

    found = find(progress=stop)
    assert found.is_interrupted
    assert found.spent == step
    assert found.max_norm is not None
    assert (found.best.steps, len(found.best.seeds)) == (steps, n_seeds)
    assert f"trials of {steps} of 40 steps, over {n_seeds} of 3 seeds" in found.reason


def test_an_interrupt_of_an_added_trial_keeps_the_round():
    def run(position, clip, steps):
        if clip == 1.0 and steps == 40:
            raise KeyboardInterrupt
        value = 1.0 if clip == math.inf or clip == 1.0 else 2.0 + clip
        value += (clip == 1.0) * 9
        return Trial(torch.tensor([9.0, value]).double(), torch.ones(1).double() * 2, None)

    search = finder._Search(run, [1.0, 0.5, 0.3, 0.1, 0.05], [], 40, 2)
    search.run()
    assert search.is_interrupted
    assert {*search.last[1]} == {math.inf, 0.05, 0.1}
    assert search.last[0].steps == 40


def test_an_interrupt_before_anything_is_known_goes_on():
    def stop(done, most):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find(progress=stop)


def test_the_budget_is_stated_before_any_step(capsys):
    called = []
    find(progress=lambda done, most: called.append((done, most)))
    budget = called[0][1]
    assert called[0] == (0, budget)
    assert called[-1][0] <= budget
    assert not capsys.readouterr().err

    def fails(model, batch):
        raise LookupError

    with pytest.raises(LookupError):
        find(loss=fails)
    assert f"at most {budget:,} training steps" in capsys.readouterr().err


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
    model, optimizer = make()

    def step(batch, clip):
        loss(model, batch).backward()
        clip(model)
        optimizer.step()

    return step


shared = nn.Linear(4, 1)


def again():
    optimizer = torch.optim.SGD(shared.parameters(), 0.1)

    def step(batch, clip):
        optimizer.zero_grad()
        value = loss(shared, batch)
        value.backward()
        clip(shared)
        optimizer.step()
        return value

    return step


def lazy():
    model = nn.LazyLinear(1)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def wrapped():
    model, optimizer = make()
    return model, tritonclip.ClippedOptimizer(optimizer, 1.0)


def frozen():
    model = nn.Linear(4, 1).requires_grad_(False)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def clipped_twice(how):
    """A `make` of steps that clip once more, to 0.5, before or after the trial's clip."""

    def build():
        model, optimizer = make()
        if how == "wrapper":
            optimizer = tritonclip.ClippedOptimizer(optimizer, 0.5)

        def step(batch, clip):
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            if how == "before":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            clip(model)
            if how == "after":
                tritonclip.clip_(model, 0.5)
            optimizer.step()
            return value

        return step

    return build


def test_norms_of_one_batch_that_stay_in_a_warm_up_are_no_second_clip():
    def build():
        model, optimizer = make()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 if n > 4 else 1e-9)

        def step(batch, clip):
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            clip(model)
            optimizer.step()
            schedule.step()
            return value

        return step

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
        ({"make": lambda: limited(0.5)}, TypeError, "parameters alone"),
        ({"make": lambda: limited(max_norm=0.5)}, TypeError, "got also max_norm=0.5"),
        (
            {"make": lambda: lambda batch: batch},
            TypeError,
            "step(batch, clip), got one with (batch)",
        ),
        ({"make": frozen}, ValueError, "unfreeze"),
        ({"loss": lambda model, x: loss(model, x).item()}, ValueError, "without .item()"),
        ({"loss": nn.MSELoss()}, TypeError, "loss(model, batch), got MSELoss of torch"),
        ({"loss": nn.functional.mse_loss}, TypeError, "got mse_loss of torch"),
        ({"loss": None, "batches": [(torch.ones(8, 4),) * 2]}, TypeError, "--loss mymodule:loss"),
        ({"loss": None, "batches": [{"y": torch.ones(8, 4)}]}, TypeError, "loss=lambda model"),
        ({"held_out": itertools.repeat(torch.ones(8, 4))}, ValueError, "islice(batches(), 20)"),
        ({"held_out": itertools.count}, ValueError, "got more than 1,000"),
        ({"held_out": 3}, TypeError, "held_out must be an iterable of batches"),
        ({"held_out": lambda: 3}, TypeError, "got function, which gave int"),
        ({"limits": (x for x in [1.0, math.inf])}, ValueError, "got limits=[1.0, inf]; the run"),
        ({"limits": [1.0, 1.0]}, ValueError, "--limits 0.1 0.3"),
        ({"make": still}, ValueError, "changed no parameter"),
        ({"make": lambda: make(0.0)}, ValueError, "learning rate above 0"),
        ({"make": forgetful}, ValueError, "clip was not called"),
        ({"make": lossless}, TypeError, "step function that returns it"),
        ({"make": again}, ValueError, "copy.deepcopy"),
        ({"make": lazy}, ValueError, "forward pass before"),
        ({"make": clipped_twice("before")}, ValueError, "of the same norm, 0.5, and none had"),
        ({"make": clipped_twice("after")}, ValueError, "expected a step that calls clip("),
        ({"make": clipped_twice("wrapper")}, ValueError, "without clip_grad_norm_, a ClippedOpt"),
        ({"make": wrapped}, TypeError, "it wraps"),
        ({"make": nn.Linear(4, 1)}, TypeError, "got Linear"),
        ({"make": lambda: nn.Linear(4, 1)}, TypeError, "got Linear"),
        ({"make": lambda: (1, 2, 3)}, TypeError, "got int, int, int"),
        ({"make": steps_of("schedule"), "held_out": draw()}, TypeError, "(step, evaluate)"),
        ({"batches": [torch.full((8, 4), math.nan)]}, ValueError, "first loss is nan"),
        ({"batches": []}, ValueError, "ran out after 0 of"),
        ({"batches": iter(draw()[:7])}, ValueError, "steps=7"),
        ({"batches": 3}, TypeError, "such as a DataLoader"),
        ({"batches": lambda: 3}, TypeError, "batches() must give an iterable, got int"),
        ({"held_out": []}, ValueError, "no batches"),
        ({"limits": [1.0]}, ValueError, "two or more limits"),
        ({"limits": [1.0, math.inf]}, ValueError, "two or more limits"),
        ({"limits": 1.0}, TypeError, "must be numbers"),
        ({"limits": [1.0, -1.0]}, ValueError, "above 0"),
        ({"limits": [1.0, math.nan]}, ValueError, "limits"),
        ({"limits": [1.0, "2"]}, TypeError, "limits[1]"),
        ({"rules": ClipByGlobalNorm(1.0)}, TypeError, "[ClipByQuantile(0.9)]"),
        ({"steps": 0}, ValueError, "steps must be"),
        ({"seeds": 0}, ValueError, "seeds must be"),
        ({"seeds": [1, 1]}, ValueError, "different numbers"),
        ({"loss": 3}, TypeError, "loss(model, batch)"),
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
