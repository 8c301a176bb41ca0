"""Checkpoints by `torch.distributed.checkpoint`: a resumed run goes on as if it had not stopped.

One process, in a group of processes where a test says so; the truth is the run that was not
interrupted.
"""

import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from operator import is_
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from helpers.cases import assert_bits, grad_of, normal
from helpers.optimizers import torch_saved
from helpers.training import state_of, unchanged
from tritonclip import (
    AdaptiveRule,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByOwnHistory,
    ClipByOwnQuantile,
    ClipByQuantile,
    ClipByValue,
    ClippedOptimizer,
    ClipState,
    Outlier,
    clip_,
    record,
)
from tritonclip.optim.checkpoint import may_make_state

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
]

OPTIMIZERS = {
    "AdamW": lambda groups: AdamW(groups, lr=0.05),
    "fused": lambda groups: AdamW(groups, lr=0.05, fused=True),
    "tensor-lr": lambda groups: AdamW(groups, lr=torch.tensor(0.05), foreach=False),
    "momentum": lambda groups: SGD(groups, lr=0.05, momentum=0.9),
    "stateless": lambda groups: SGD(groups, lr=0.05),
}
EVERY = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
FLATTEN = pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
LIMIT = 0.05

Make = Callable[[Any], Optimizer]


def layers(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))


def groups_of(model: torch.nn.Sequential, *, rule: bool) -> list[dict[str, Any]]:
    own = {"clip": ClipByNorm(0.02)} if rule else {}
    return [{"params": [*model[0].parameters()], **own}, {"params": [*model[2].parameters()]}]


def program(
    make: Make, seed: int = 0, clip: Any = LIMIT, *, rule: bool = True, **options: Any
) -> tuple[torch.nn.Sequential, ClippedOptimizer]:
    """A model and its optimizer, as a program makes them at its start."""
    model = layers(seed)
    return model, ClippedOptimizer(make(groups_of(model, rule=rule)), clip, **options)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(normal((5, 4), seed=step)).square().sum()
    return loss


def train(model: torch.nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def checkpoint_of(model: Any, optimizers: Any, flatten: bool) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    weights, states = get_state_dict(model, optimizers, options=options)
    return {"model": weights, "optimizer": states}


def _is_alone() -> bool:
    return not torch.distributed.is_initialized()


def save_to(folder: Path, model: Any, optimizers: Any, flatten: bool) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save(checkpoint_of(model, optimizers, flatten), checkpoint_id=folder, no_dist=_is_alone())


def load_from(folder: Path, model: Any, optimizers: Any, flatten: bool, **options: Any) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as read

    saved = checkpoint_of(model, optimizers, flatten)
    read(saved, checkpoint_id=folder, no_dist=_is_alone(), **options)
    set_state_dict(
        model,
        optimizers,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=StateDictOptions(flatten_optimizer_state_dict=flatten),
    )


def load_what_is_there(folder: Path, *program: Any, missing: str) -> None:
    """torch refuses a checkpoint that lacks an entry, unless it is told otherwise."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    with pytest.raises(CheckpointException, match=f"Missing key .*{missing}"):
        load_from(folder, *program)
    load_from(folder, *program, planner=DefaultLoadPlanner(allow_partial_load=True))


def assert_same_run(ours: Any, theirs: Any) -> None:
    """Parameters, state, options and statistics to the last bit."""
    (model, optimizer), (twin, other) = ours, theirs
    params, twins = [*model.parameters()], [*twin.parameters()]
    assert_bits(params, twins)
    assert_bits(state_of(optimizer, params), state_of(other, twins))
    for one, two in zip(optimizer.param_groups, other.param_groups, strict=True):
        assert {**one, "params": None} == {**two, "params": None}
    if isinstance(optimizer, ClippedOptimizer):
        assert repr(optimizer.stats.summary()) == repr(other.stats.summary())
        ours, theirs = (run.state_dict()["tritonclip"].get("memory") for run in (optimizer, other))
        # As text, in which NaN equals NaN.
        assert repr(ours) == repr(theirs)


def assert_resumes(folder: Path, make: Make, flatten: bool, **options: Any) -> None:
    """A run that stops after five steps and goes on in a new program is one of nine."""
    whole, first, second = (program(make, seed, **options) for seed in (0, 0, 9))
    train(*whole, range(9))
    train(*first, range(5))
    save_to(folder, *first, flatten)
    # torch makes no state where there are gradients.
    load_from(folder, *second, flatten)
    train(*second, range(5, 9))
    assert_same_run(second, whole)


@pytest.mark.covering(2)
@EVERY
@FLATTEN
@pytest.mark.parametrize("rule", [False, True], ids=["one-rule", "group-rule"])
def test_resumed_run_equals_one_without_interruption(tmp_path, make, flatten, rule):
    assert_resumes(tmp_path, make, flatten, rule=rule)


@pytest.fixture
def lone_group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("lone_group")
@FLATTEN
def test_run_resumed_in_a_process_group_equals_one_without_interruption(tmp_path, flatten):
    make = partial(AdamW, lr=0.05)
    assert_resumes(tmp_path / "saved", make, flatten, rule=True)


@FLATTEN
@pytest.mark.parametrize("rule", [ClipByQuantile(0.5, 5), ClipByOwnHistory(warmup=2)], ids=repr)
def test_norms_that_a_rule_remembers_come_back(tmp_path, flatten, rule):
    options = {"clip": rule, "skip_above": Outlier(2.0, 4)}
    assert_resumes(tmp_path, partial(AdamW, lr=0.05), flatten, rule=False, **options)


@pytest.mark.parametrize("make", [*OPTIMIZERS.values()][:-1], ids=[*OPTIMIZERS][:-1])
@FLATTEN
def test_saving_changes_nothing(tmp_path, make, flatten):
    """Also where gradients were dropped."""
    whole, saved = program(make), program(make)
    for run in (whole, saved):
        train(*run, range(3))
        run[1].zero_grad()
    save_to(tmp_path, *saved, flatten)
    assert_same_run(saved, whole)
    for run in (whole, saved):
        train(*run, range(3, 5))
    assert_same_run(saved, whole)


def test_saving_an_optimizer_without_state_counts_no_step(tmp_path):
    """By a step that changes nothing, torch makes the state of an optimizer that has none."""
    model, optimizer = program(OPTIMIZERS["stateless"])
    train(model, optimizer, range(3))
    optimizer.zero_grad()
    with unchanged([*model.parameters()]):
        save_to(tmp_path, model, optimizer, flatten=False)
    assert optimizer.stats.summary()["steps"] == 3
    assert float(optimizer.stats.last_norm) > 0


@pytest.mark.parametrize(
    "make", [OPTIMIZERS["AdamW"], OPTIMIZERS["tensor-lr"]], ids=["lr", "tensor"]
)
def test_step_by_which_torch_makes_state_is_seen_by_no_rule(make):
    schedule = ClipByGlobalNorm(lambda step: 1.0 + step)
    model, optimizer = program(make, 0, schedule, skip_above=Outlier(2.0, 4))
    checkpoint_of(model, optimizer, flatten=False)
    assert optimizer.state
    part = optimizer.state_dict()["tritonclip"]
    assert (int(part["calls"]), int(part["steps"])) == (0, 0)
    assert part["memory"]["outliers"]["steps"] == part["memory"]["rule"]["steps"] == 0
    assert math.isnan(optimizer.stats.last_norm)


@pytest.mark.parametrize(
    ("lr", "grad", "with_graph"),
    [(0.0, 0.0, True), (0.1, 0.0, False), (0.0, 1.0, False), (0.0, None, False)],
)
@pytest.mark.parametrize("rule", [1.0, ClipByValue(1.0)], ids=["norm", "value"])
def test_steps_of_a_training_count(lr, grad, with_graph, rule):
    """A warm-up begins with a rate of 0, and some loops step without recording a graph."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = ClippedOptimizer(SGD([weight], lr=lr), rule)
    for _ in range(2):
        weight.grad = None if grad is None else torch.full((2,), grad)
        with torch.set_grad_enabled(with_graph):
            optimizer.step()
    assert int(optimizer.stats.steps) == 2


def test_rate_on_a_device_is_not_waited_for():
    """A step without a graph may be captured; torch's rates of 0 are on the default device."""
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = torch.zeros(2)
    for device, expected in (("meta", False), ("cpu", True)):
        group = {"params": [weight], "lr": torch.zeros((), device=device)}
        assert may_make_state([group], has_shards=False) is expected


@pytest.mark.parametrize("each", [False, True], ids=["all", "each"])
def test_recorder_goes_on_after_loading(tmp_path, each):
    """The step by which torch makes state is no row."""
    path = tmp_path / "run.csv"
    first = program(AdamW, rule=False)
    with record(path, each=each) as recorder:
        first[1].recorder = recorder
        train(*first, range(3))
        save_to(tmp_path / "saved", *first, flatten=False)
    second = program(AdamW, seed=9, rule=False)
    with record(path, each=each) as recorder:
        second[1].recorder = recorder
        load_from(tmp_path / "saved", *second, flatten=False)
        train(*second, range(3, 5))
    assert [line.split(",")[0] for line in path.read_text().split()] == ["step", *"12345"]


@EVERY
def test_template_of_a_new_program_leaves_model_gradients_and_statistics(make):
    model, optimizer = program(make)
    model(torch.ones(1, 4)).sum().backward()
    rates = [group["lr"] for group in optimizer.param_groups]
    with unchanged([*model.parameters()], grads=True):
        checkpoint_of(model, optimizer, flatten=False)
    assert all(map(is_, rates, (group["lr"] for group in optimizer.param_groups)))
    assert optimizer.stats.summary()["steps"] == 0


@FLATTEN
def test_rules_are_those_of_the_program_that_loads(tmp_path, flatten):
    first = program(AdamW, rule=True)
    train(*first, range(2))
    save_to(tmp_path, *first, flatten)
    model, optimizer = program(AdamW, rule=False)
    optimizer.param_groups[1]["clip"] = ClipByValue(0.1)
    load_from(tmp_path, model, optimizer, flatten)
    assert [group.get("clip") for group in optimizer.param_groups] == [None, ClipByValue(0.1)]
    assert "clip" not in optimizer.param_groups[0]
    assert [group["tritonclip"] for group in optimizer.param_groups] == [None, None]


@FLATTEN
def test_bare_optimizer_that_loaded_a_checkpoint_with_rules_can_be_wrapped(tmp_path, flatten):
    """It may keep what stands for them, which is no rule, and what they remembered."""
    first = program(AdamW, 0, ClipByOwnQuantile())
    train(*first, range(2))
    save_to(tmp_path, *first, flatten)
    model = layers(9)
    bare = AdamW(groups_of(model, rule=False))
    load_from(tmp_path, model, bare, flatten)
    if not flatten:
        # Of a file of torch.save; the other loader asks for no name that it does not know.
        bare.load_state_dict(torch_saved(first[1].state_dict(), weights_only=True))
    train(model, bare, range(1))
    wrapper = ClippedOptimizer(bare, LIMIT)
    assert not any("tritonclip" in name for entry in bare.state.values() for name in entry)
    assert ["clip" in group for group in wrapper.param_groups] == [False, False]
    train(model, wrapper, range(2, 3))


class _Around(Optimizer):
    """An optimizer around another one, such as those of Accelerate."""

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.state_dict = optimizer.state_dict  # type: ignore[method-assign]
        self.load_state_dict = optimizer.load_state_dict  # type: ignore[method-assign]
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad  # type: ignore[method-assign]


@pytest.mark.covering(2)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("around", [lambda optimizer: optimizer, _Around], ids=["alone", "around"])
@pytest.mark.parametrize("name", ["AdamW", "stateless"])
@pytest.mark.parametrize("clip", [None, 0.02, ClipByNorm(0.02), ClipByOwnQuantile()], ids=repr)
def test_flattened_groups_with_a_rule_load_by_set_state_dict_alone(name, clip, around, frozen):
    """From a file of torch.save, too, where no template has been made before."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    first, second = program(OPTIMIZERS[name]), program(OPTIMIZERS[name], seed=9)
    for model, optimizer in (first, second):
        optimizer.param_groups[0]["clip"] = clip
        model[0].weight.requires_grad_(not frozen)
    train(*first, range(2))
    saved = torch_saved(checkpoint_of(*first, flatten=True)["optimizer"], weights_only=True)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(second[0], around(second[1]), saved, options=options)
    assert second[1].param_groups[0]["clip"] == clip
    assert int(second[1].stats.steps) == 2
    assert repr(second[1].state_dict()["tritonclip"]) == repr(first[1].state_dict()["tritonclip"])


def sizes_of(n: int, wrap: Callable[[Optimizer], Optimizer]) -> list[int]:
    """The bytes of a checkpoint in each form, after some steps with n small parameters."""
    from torch.distributed.checkpoint.state_dict_saver import save

    model = torch.nn.ParameterList([torch.ones(16, 16) for _ in range(n)])
    optimizer = wrap(AdamW(model.parameters()))
    for step in range(3):
        for parameter in model:
            parameter.grad = torch.full((16, 16), 1.0 + step)
        optimizer.step()
    forms = [checkpoint_of(model, optimizer, flatten)["optimizer"] for flatten in (False, True)]
    sizes = []
    for form in (optimizer.state_dict(), *forms):
        torch.save(form, file := BytesIO())
        sizes.append(len(file.getvalue()))
    for form in forms:
        with tempfile.TemporaryDirectory() as folder:
            save({"optimizer": form}, checkpoint_id=folder, no_dist=_is_alone())
            sizes.append(sum(path.stat().st_size for path in Path(folder).iterdir()))
    return sizes


@pytest.mark.parametrize(
    ("rule", "above", "numbers_of"),
    [
        (1.0, None, lambda n: 0),
        (ClipByQuantile(0.9), Outlier(), lambda n: 1000 + 2 * 128),
        (ClipByOwnHistory(), None, lambda n: 2 * n),
        (ClipByOwnQuantile(0.9), None, lambda n: 100 * n),
    ],
    ids=["fixed", "windows", "own-history", "own-windows"],
)
def test_checkpoints_have_the_state_of_rules_once(rule, above, numbers_of):
    """However torch lays them out, which copies the keys of a group for each parameter."""
    for n in (50, 150):
        bare = sizes_of(n, lambda optimizer: optimizer)
        ours = sizes_of(n, lambda optimizer: ClippedOptimizer(optimizer, rule, skip_above=above))
        for own, plain in zip(ours, bare, strict=True):
            # Numbers take 8 bytes, and up to 2 KB of names and archives are in every checkpoint.
            assert own <= 1.2 * (plain + 8 * numbers_of(n) + 2048)


@FLATTEN
@pytest.mark.parametrize(
    ("name", "rule", "missed"),
    [
        ("stateless", ClipByOwnQuantile(), "norms that ClipByOwnQuantile"),
        ("AdamW", LIMIT, "state of the optimizer"),
    ],
    ids=["norms", "state"],
)
def test_what_torch_could_not_load_is_missed(tmp_path, flatten, name, rule, missed):
    """Torch makes no state for an optimizer whose parameters have gradients."""
    first, second = (program(OPTIMIZERS[name], seed, rule, rule=False) for seed in (0, 9))
    train(*first, range(2))
    save_to(tmp_path, *first, flatten)
    loss_of(second[0], 0).backward()
    with pytest.raises(ValueError, match=f"{missed}.* and it is missing"):
        load_from(tmp_path, *second, flatten)
    assert second[1].stats.summary()["steps"] == 0


@FLATTEN
def test_rule_that_remembers_may_be_replaced_by_one_that_does_not(tmp_path, flatten):
    first = program(AdamW, 0, ClipByOwnQuantile(), rule=False)
    second = program(AdamW, 9, rule=False)
    train(*first, range(2))
    save_to(tmp_path, *first, flatten)
    load_from(tmp_path, *second, flatten)
    assert int(second[1].stats.steps) == 2
    train(*second, range(2, 3))


@FLATTEN
def test_rule_that_the_checkpoint_does_not_know_begins_anew_where_it_may_be_missing(
    tmp_path, flatten
):
    first = program(AdamW, rule=False)
    second = program(AdamW, 9, ClipByQuantile(), rule=False)
    train(*first, range(2))
    save_to(tmp_path, *first, flatten)
    load_what_is_there(tmp_path, *second, flatten, missing="tritonclip_rule")
    assert int(second[1].stats.steps) == 2
    train(*second, range(2, 3))
    assert second[1].state_dict()["tritonclip"]["memory"]["rule"]["steps"] == 1


def test_checkpoint_before_the_first_step_leaves_a_bare_optimizer_without_state():
    """One entry would make it believe that it has met the parameter."""
    optimizer = program(AdamW, 0, ClipByOwnQuantile())[1]
    model = layers(9)
    bare = AdamW(groups_of(model, rule=False))
    bare.load_state_dict(torch_saved(optimizer.state_dict(), weights_only=True))
    assert not bare.state
    train(model, bare, range(2))


def test_rule_without_a_start_is_no_reason_not_to_save():
    class Unfinished(AdaptiveRule):
        pass

    memory = program(AdamW, 0, Unfinished())[1].state_dict()["tritonclip"]["memory"]
    assert memory["rule"]["values"] is None


@FLATTEN
def test_two_wrappers_of_one_optimizer_have_each_its_own_numbers(tmp_path, flatten):
    def two(seed: int) -> tuple[torch.nn.Sequential, list[ClippedOptimizer]]:
        model, one = program(AdamW, seed, ClipByOwnQuantile(), rule=False)
        return model, [one, ClippedOptimizer(one.optimizer, ClipByQuantile(0.5))]

    (model, ours), (twin, others) = two(0), two(9)
    train(model, ours[0], range(2))
    train(model, ours[1], range(2, 5))
    for number, (one, other) in enumerate(zip(ours, others, strict=True)):
        save_to(tmp_path / str(number), model, one, flatten)
        load_from(tmp_path / str(number), twin, other, flatten)
        assert repr(other.state_dict()["tritonclip"]) == repr(one.state_dict()["tritonclip"])


@FLATTEN
def test_two_wrappers_keep_their_statistics_apart(tmp_path, flatten):
    def two(seed: int) -> tuple[torch.nn.Sequential, list[ClippedOptimizer]]:
        model = layers(seed)
        parts = [model[0].parameters(), model[2].parameters()]
        return model, [ClippedOptimizer(AdamW(p), LIMIT) for p in parts]

    model, optimizers = two(0)
    for steps in (1, 2):
        model(torch.ones(1, 4)).sum().backward()
        for optimizer in optimizers[:steps]:
            optimizer.step()
    save_to(tmp_path, model, optimizers, flatten)
    again, loaded = two(1)
    load_from(tmp_path, again, loaded, flatten)
    assert [o.stats.summary() for o in loaded] == [o.stats.summary() for o in optimizers]
    assert [o.stats.summary()["steps"] for o in loaded] == [2, 1]


@FLATTEN
@pytest.mark.parametrize("norm", [0.1, 1.0], ids=["long", "short"])
def test_norms_of_float64_keep_their_digits(tmp_path, flatten, norm):
    def one() -> tuple[torch.nn.Module, ClippedOptimizer]:
        layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        return layer, ClippedOptimizer(AdamW(layer.parameters()), 1.0)

    layer, optimizer = one()
    layer.weight.grad = torch.full((1, 1), norm, dtype=torch.float64)
    optimizer.step()
    save_to(tmp_path, layer, optimizer, flatten)
    again, loaded = one()
    load_from(tmp_path, again, loaded, flatten)
    assert float(loaded.stats.last_norm) == float(optimizer.stats.last_norm) == norm


@EVERY
@FLATTEN
def test_checkpoint_of_the_wrapper_loads_into_the_bare_optimizer(tmp_path, make, flatten):
    first, wrapper = program(make)
    train(first, wrapper, range(3))
    save_to(tmp_path, first, wrapper, flatten)
    model = layers(1)
    bare = make(groups_of(model, rule=False))
    load_from(tmp_path, model, bare, flatten)
    assert_bits(model.parameters(), first.parameters())
    assert_bits(state_of(bare, model.parameters()), state_of(wrapper, first.parameters()))


@EVERY
@FLATTEN
def test_checkpoint_of_the_bare_optimizer_loads_where_statistics_may_be_missing(
    tmp_path, make, flatten
):
    model = layers(0)
    bare = make(groups_of(model, rule=False))
    train(model, bare, range(3))
    save_to(tmp_path, model, bare, flatten)
    twin, wrapper = program(make, seed=1, rule=False)
    load_what_is_there(tmp_path, twin, wrapper, flatten, missing="tritonclip")
    assert_bits(twin.parameters(), model.parameters())
    assert_bits(state_of(wrapper, twin.parameters()), state_of(bare, model.parameters()))
    assert wrapper.stats.summary()["steps"] == 0


class _EmptyStates(Optimizer):
    """Asks for the state of each parameter, and keeps nothing in it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                assert not self.state[parameter]


def test_states_without_entries_come_back():
    weight, twin = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer, other = (ClippedOptimizer(_EmptyStates([p]), 1.0) for p in (weight, twin))
    weight.grad = torch.ones(2)
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["state"] == {0: {}}
    other.load_state_dict(saved)
    assert int(other.stats.steps) == 1


MEMORIES = [ClipByQuantile(0.5, 5), ClipByOwnHistory(warmup=2)]


def saved_and_read(folder: Path, saved: Any, template: Any) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load as read
    from torch.distributed.checkpoint.state_dict_saver import save

    save(saved, checkpoint_id=folder, no_dist=_is_alone())
    read(template, checkpoint_id=folder, no_dist=_is_alone())


@pytest.mark.parametrize("is_begun", [False, True], ids=["new", "begun"])
@pytest.mark.parametrize("rule", MEMORIES, ids=repr)
def test_state_of_clip_comes_back(tmp_path, rule, is_begun):
    """Into a new state, which knows no shape of its values, and into one of another length."""
    weights, state, loaded = [*layers(0).parameters()], ClipState(), ClipState()

    def clip(state: ClipState, sizes: range) -> list[torch.Tensor]:
        for size in sizes:
            for weight in weights:
                weight.grad = torch.full_like(weight, 1.0 + size % 3)
            clip_(weights, rule, state=state)
        return [grad_of(weight).clone() for weight in weights]

    clip(state, range(4))
    if is_begun:
        clip_(weights[:2], rule, state=loaded)
    saved_and_read(tmp_path, {"clip": state}, {"clip": loaded})
    assert loaded.steps == 4
    assert_bits(clip(loaded, range(4, 8)), clip(state, range(4, 8)))


@pytest.mark.parametrize("how", ["itself", "its-state-dict"])
@pytest.mark.parametrize("rule", MEMORIES, ids=repr)
def test_wrapper_that_is_saved_without_helpers_comes_back(tmp_path, rule, how):
    """A new one has the same keys."""

    (model, optimizer), (twin, other) = (
        program(partial(SGD, lr=0.05), seed, rule, rule=False, skip_above=Outlier(2.0, 4))
        for seed in (0, 9)
    )
    train(model, optimizer, range(5))
    if how == "itself":
        saved_and_read(tmp_path, {"optimizer": optimizer}, {"optimizer": other})
    else:
        template = {"optimizer": other.state_dict()}
        saved_and_read(tmp_path, {"optimizer": optimizer.state_dict()}, template)
        other.load_state_dict(template["optimizer"])
    twin.load_state_dict(model.state_dict())
    for pair in ((model, optimizer), (twin, other)):
        train(*pair, range(5, 9))
    assert_same_run((model, optimizer), (twin, other))
