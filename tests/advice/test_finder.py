"""`find_max_norm` tries limits on the user's training, and says which is best."""

import itertools
import math
import random
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import tritonclip
from advice.searches import draw, find, loss, make, training
from tritonclip import ClipByQuantile, ClipByValue
from tritonclip.advice import finder
from tritonclip.advice.finder import Candidate, choose
from tritonclip.advice.trials import Trial


@pytest.fixture(autouse=True)
def quiet(capsys):
    """The budget is written to stderr."""
    yield
    capsys.readouterr()


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
    found = find(training(lambda: make(0.01), draw(corrupt=1.0)))
    assert found.max_norm is None
    assert found.clip == math.inf
    assert found.reason.startswith("No limit helps")


def test_global_random_states_do_not_matter():
    first = find()
    torch.manual_seed(99)
    random.seed(99)
    assert str(find()) == str(first)


def test_printing_shows_the_verdict_and_a_row_for_each_candidate():
    found = find()
    verdict, blank, about, blank_again, heads, *rows = str(found).splitlines()
    assert verdict == found.reason
    assert not blank + blank_again
    assert about.startswith("Losses after 40 steps")
    assert heads.split()[:5] == ["limit", "seed", "0", "3", "seeds"]
    assert len(rows) == len(found.candidates)
    (recommended,) = [row for row in rows if "recommended" in row]
    assert recommended.startswith(f"{found.max_norm:g} ")


def test_a_column_of_the_table_has_losses_of_the_same_seeds():
    found = find(limits=[10.0**i for i in range(-5, 3)])
    heads, *rows = str(found).splitlines()[4:]
    start, end = heads.index("3 seeds"), heads.index("quartiles")
    for row, one in zip(rows, found.candidates, strict=True):
        assert f"{one.losses[0]:.4g}" in row[:start]
        whole = f"{one.quartiles[1]:.4g}" if len(one.seeds) == 3 else ""
        assert row[start:end].strip() == whole
    assert {len(one.seeds) for one in found.candidates} == {1, 2, 3}


def test_given_limits_are_tried_and_none_beside_them():
    found = find(limits=[3.0, 0.5, 30.0])
    assert [c.clip for c in found.candidates] == [0.5, 3.0, 30.0, math.inf]


def test_a_limit_below_nearly_all_norms_is_called_a_smaller_step():
    found = find(training(lambda: make(3.0), draw(corrupt=1.0)), limits=[0.01, 0.02])
    assert "acts as a smaller step" in found.reason
    scale = {c.clip: c.scale for c in found.candidates}[found.clip]
    assert f"{scale:.2g} times the learning rate, here {3.0 * scale:.2g}," in found.reason


def test_lower_limits_follow_while_the_lowest_is_best():
    batches = draw(corrupt=1.0)
    found = find(training(lambda: make(1e4), batches))
    torch.manual_seed(0)
    model, _ = make()
    loss(model, batches[0]).backward()
    norm = tritonclip.clip_(model, math.inf)
    # Without a limit, norms explode from the second step on.
    limits = [c.clip for c in found.candidates if isinstance(c.clip, float)]
    assert min(limits) < 3 * norm / 10**3.4
    assert found.max_norm is not None
    assert found.max_norm < norm / 100


def test_rules_compete_with_limits():
    rules = [ClipByQuantile(0.5, window=10), ClipByValue(1e-9)]
    found = find(rules=rules, limits=[1e-8])
    assert found.clip == rules[0]
    assert found.max_norm is None
    assert {c.clip for c in found.candidates} == {1e-8, math.inf, *rules}


def test_trials_that_diverge_end_early():
    ticks = Counter[str]()
    train = training(batches=draw(corrupt=1e30))
    found = find(train, progress=lambda done, most: ticks.update(done=1, most=most))
    losses = {c.clip: c.losses for c in found.candidates}
    assert losses[math.inf] == (math.inf,) * 3
    assert found.spent == ticks["done"] - 1 < ticks["most"] / ticks["done"] - 60


@pytest.mark.parametrize("clips", [True, False], ids=["clip", "none"])
def test_the_verdict_has_the_losses_of_the_table(clips):
    def run(position, clip):
        value = [1.0, 2.0, 30.0][position] * (0.5 if clip == 1.0 and clips else 1.0)
        return Trial(torch.tensor([90.0, value]).double(), torch.ones(1).double() * 9, None)

    search = finder._Search(run, [1.0, 2.0], [], 3)
    search.run()
    last = search.last
    clip, best, _ = choose(last)
    found = {c: finder._candidate(c, 40, [0, 1, 2], last[c]) for c in last}
    reason = finder._reason(found[clip], found[best], found[math.inf], last, None)
    assert f"median loss is {found[clip].quartiles[1]:.4g}" in reason
    assert (clip == 1.0) == clips == ("and 2 without a limit" in reason)


def test_a_limit_that_only_the_mean_prefers_is_explained():
    last: Any = {math.inf: trials(1.0, 2.0, 90.0), 1.0: trials(1.1, 2.1, 3.1)}
    chosen, none = (finder._candidate(c, 40, [0, 1, 2], last[c]) for c in (1.0, math.inf))
    reason = finder._reason(chosen, chosen, none, last, None)
    assert "mean decides: it is 2.1, and 31 without" in reason


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
    steps = "in the first 40 steps"
    assert f"{steps}, the loss changed clearly with {few} of 4 candidates, so that" in said
    assert said.endswith("Ask again with steps=720.")


@pytest.mark.parametrize(("lr", "is_said"), [(0.1, False), (1e-6, True)], ids=["trains", "hardly"])
def test_an_answer_says_whether_its_trials_were_too_short(lr, is_said):
    found = find(training(lambda: make(lr), draw(corrupt=1.0)), limits=[0.3, 1.0, 30.0])
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

    found = find(training(same, draw(1)))
    assert "All seeds gave the same losses" in found.reason


# How candidates are chosen.


def search_of(loss: Any, limits: list[float], n_seeds: int = 3) -> tuple[Any, list[Any]]:
    """A search whose trials end with `loss(position, clip)`, and its trials in order."""
    calls: list[Any] = []

    def run(position, clip):
        calls.append((position, clip))
        losses = torch.tensor([9.0, loss(position, clip)], dtype=torch.float64)
        return Trial(losses, torch.tensor([2.0]).double(), None)

    search = finder._Search(run, limits, [], n_seeds)
    search.run()
    return search, calls


def test_all_limits_are_tried_with_the_first_seed_and_the_better_ones_with_others():
    limits = [1.5, 1.0, 0.5, 0.3, 0.1, 0.05, 0.03]
    search, calls = search_of(lambda i, clip: min(abs(math.log(clip / 0.3)), 9.0), limits, 4)
    assert calls == [
        *((0, clip) for clip in (math.inf, 0.3, 0.5, 0.1, 1.0, 0.05, 1.5, 0.03)),
        *((1, clip) for clip in (math.inf, 0.3, 0.5, 0.1, 1.0, 1.5)),
        *((2, clip) for clip in (math.inf, 0.3, 0.5, 0.1, 1.0)),
        *((3, clip) for clip in (math.inf, 0.3, 0.5, 0.1, 1.0)),
    ]
    assert len(calls) == search.most
    assert {*search.last} == {math.inf, 0.3, 0.5, 0.1, 1.0}
    assert choose(search.last)[0] == 0.3


def test_limits_are_tried_from_the_middle_outwards_and_then_beside_the_best():
    search, calls = search_of(lambda i, clip: min(abs(math.log(clip / 0.25)), 9.0), [], 1)
    none, *limits = (clip for _, clip in calls)
    assert none == math.inf
    # 6.0 is above the norm, and not run.
    assert limits == [0.19, 0.6, 0.06, 1.9, 0.019, 0.006, 0.34, 0.11]
    assert choose(search.last)[0] == 0.19


def test_candidates_are_compared_on_the_same_batches():
    """Losses of batches differ by more than limits change them."""
    ends = {0.3: [0.5, 1.5, 4.0, 3.5, 4.5], 1.0: [1.0, 2.0, 3.0, 4.0, 5.0]}

    def run(position, clip):
        losses = torch.tensor([9.0] * 15 + ends.get(clip, [9.0] * 5)).double()
        return Trial(losses, torch.tensor([2.0]).double(), None)

    search = finder._Search(run, [0.1, 0.3, 1.0], [], 1)
    search.run()
    # Four batches of five have a lower loss, and the median of all is higher.
    assert search._best(2) == [0.3, 1.0]
    assert choose(search.last)[1] == 0.3


def test_a_limit_above_every_norm_is_not_run_and_comes_last():
    search, calls = search_of(lambda i, clip: 5.0 if clip > 1 else 6.0, [30.0, 10.0, 1.0, 0.5])
    assert {clip for _, clip in calls} == {math.inf, 1.0, 0.5}
    assert len(calls) == 3 * 3
    assert choose(search.last)[0] == math.inf
    assert search.trials[30.0][0] is search.trials[math.inf][0]


def trials(*losses: float) -> dict[int, Trial]:
    ends = [torch.full((8,), loss).double() for loss in losses]
    return {i: Trial(end, torch.zeros(0).double(), None) for i, end in enumerate(ends)}


RISING = (1.0, 2.0, 3.0)
# Losses without a limit, losses by limit, and the limit that is chosen.
CHOICES: dict[str, tuple[tuple[float, ...], dict[float, tuple[float, ...]], float]] = {
    "mild": (RISING, {1.0: (0.5, 1.0, 1.5), 2.0: (0.51, 0.99, 1.5)}, 2.0),
    "clear": (RISING, {1.0: (0.5, 1.0, 1.5), 2.0: (0.9, 1.6, 2.5)}, 1.0),
    "noise": (RISING, {1.0: (1.1, 1.9, 3.1)}, math.inf),
    "tiny": (RISING, {1.0: (0.9999, 1.9998, 2.9997)}, math.inf),
    "diverged": ((math.inf,) * 3, {1.0: (0.5, 1.0, 1.5), 2.0: (0.4, 0.9, math.inf)}, 1.0),
    "all": ((math.inf,) * 3, {1.0: (math.inf,) * 3}, math.inf),
    "explodes": ((1e9, 1e27, 1e3), {1.0: (0.5, 1.0, 1.5)}, 1.0),
    "negative": ((-10.0, -12.0, -9.0), {1.0: (-50.0, -60.0, -55.0)}, 1.0),
    "zero": ((0.0, 0.0), {1.0: (0.0, 0.0)}, math.inf),
    "one seed is worse": (RISING, {1.0: (0.4, 0.9, 3.1)}, math.inf),
    "one seed is equal": (RISING, {1.0: (0.4, 0.9, 3.001)}, 1.0),
    "one seed diverges": ((1.0, 2.0, math.inf), {1.0: (1.1, 2.1, 3.0)}, 1.0),
    "one seed of eight is worse": ((1.0,) * 8, {1.0: (*(0.5,) * 7, 1.1)}, 1.0),
}


@pytest.mark.parametrize(("without", "losses", "chosen"), CHOICES.values(), ids=CHOICES)
def test_the_mildest_of_the_best_is_chosen(without, losses, chosen):
    every = {math.inf: without, **losses}
    assert choose({clip: trials(*values) for clip, values in every.items()})[0] == chosen


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


# Interrupts.


@pytest.mark.parametrize(
    ("step", "n_seeds", "n_limits"), [(300, 1, 6), (330, 1, 7), (805, 2, 13), (900, 2, 13)]
)
def test_an_interrupt_gives_the_answer_so_far(step, n_seeds, n_limits):
    def stop(done, most):
        if done == step:
            raise KeyboardInterrupt

    found = find(progress=stop)
    assert found.is_interrupted
    assert found.spent == step
    assert found.max_norm is not None
    assert len(found.best.seeds) == n_seeds
    said = f"known from {n_seeds} of 3 seeds, and {n_limits} limits and rules."
    assert found.reason.endswith(said)


def test_an_interrupt_before_anything_is_known_goes_on():
    def stop(done, most):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find(progress=stop)


def test_an_early_interrupt_answers_by_the_limits_in_the_middle():
    def stop(done, most):
        if done == 130:
            raise KeyboardInterrupt

    found = find(limits=[10.0**i for i in range(-4, 3)], progress=stop)
    assert [one.clip for one in found.candidates] == [0.1, 1.0, math.inf]
    assert found.max_norm in (0.1, 1.0)


@pytest.fixture
def creeping(monkeypatch):
    """A training whose first ten losses say nothing, and trials that are short at first."""
    monkeypatch.setattr(finder, "_FIRST_STEPS", 60)

    def train(clip):
        for step, value in enumerate(training()(clip)):
            yield 1.0 + step % 2 if step < 10 else value.clamp(max=0.9)

    return train


def test_trials_become_longer_while_they_are_too_short_and_time_is_left(creeping):
    short = find(creeping, steps=None, seconds=0.0, seeds=1)
    longer = find(creeping, steps=None, seeds=1)
    assert short.is_too_short
    assert short.best.steps == 60
    assert not longer.is_too_short
    assert longer.best.steps == 180
    assert longer.spent > short.spent + longer.best.steps


@pytest.mark.parametrize("end", ["interrupt", "no more batches"])
def test_longer_trials_that_end_early_give_the_answer_of_shorter_ones(creeping, end):
    begun = []

    def stop(done, most):
        begun.extend([most] * (not done))
        if len(begun) == 2 and done == 5 and end == "interrupt":
            raise KeyboardInterrupt

    def train(clip):
        yield from itertools.islice(creeping(clip), 100 if end != "interrupt" else None)

    found = find(train, steps=None, seeds=1, progress=stop)
    assert found.best.steps == 60
    assert found.is_too_short


def test_the_budget_is_stated_before_any_step(capsys):
    called = []
    find(progress=lambda done, most: called.append((done, most)))
    budget = called[0][1]
    assert called[0] == (0, budget)
    assert called[-1][0] <= budget
    assert not capsys.readouterr().err

    def fails(clip):
        raise LookupError
        yield

    with pytest.raises(LookupError):
        find(fails)
    assert f"at most {budget:,} training steps" in capsys.readouterr().err


def test_a_line_every_ten_seconds_says_how_many_steps_and_how_much_time_are_left(
    capsys, monkeypatch
):
    seconds = itertools.count()
    monkeypatch.setattr(finder, "monotonic", lambda: 0.9 * next(seconds))
    find(steps=20, seeds=1)
    first, *lines = capsys.readouterr().err.splitlines()
    ((most,),) = numbers(r"at most (\d+) training steps", first)
    assert len(lines) > 5
    for i, line in enumerate(lines, 1):
        said = r"(\d+) of at most (\d+) steps, at most (\d+) (?:s|min) left; Ctrl-C"
        ((done, of, left),) = numbers(said, line)
        # A step takes 0.9 s.
        assert (done, of) == (12 * i, most)
        unit = 60 if " min left" in line else 1
        assert left == pytest.approx(0.9 * (most - done) / unit, abs=1)


def numbers(pattern: str, text: str) -> list[tuple[int, ...]]:
    """The groups of each match of a pattern, as numbers."""
    return [tuple(map(int, match.groups())) for match in re.finditer(pattern, text)]
