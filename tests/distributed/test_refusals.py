"""Arguments that are refused, in all processes or in one of them: every process raises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import tritonclip
from helpers import reference
from helpers.cases import assert_norm
from helpers.processes import in_processes
from helpers.refusing import check_raises, is_first, named_parameters, overlap
from helpers.spread import (
    assert_same_everywhere,
    collectives_of,
    grads_of,
    mesh_of,
    parameter,
    unchanged,
    values,
    with_partial,
)
from tritonclip import (
    AdaptiveRule,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByOwnHistory,
    ClipByQuantile,
    ClipByValue,
    ClippedOptimizer,
    ClipState,
    Rule,
)
from tritonclip.rules import Measured


def _one() -> Any:
    return parameter((8, 3), mesh_of(-1), [Shard(0)])


def test_groups_that_are_none_are_refused() -> None:
    one: Any = parameter((3,), None)
    with pytest.raises(ValueError, match="no process_group was given; expected both"):
        tritonclip.clip_([one], 1.0, copies={one: 1})
    with pytest.raises(TypeError, match="ProcessGroup or a DeviceMesh, got 3 of type int"):
        tritonclip.clip_([one], 1.0, process_group=3)  # type: ignore[call-overload]


@in_processes(2)
def test_copies_of_another_kind_are_refused() -> None:
    one = parameter((3,), None)
    world = dist.group.WORLD
    cases: list[tuple[Any, type[Exception], str]] = [
        (3, TypeError, "copies must map parameters"),
        ({one: -1}, ValueError, "copies must be from 0 to 2"),
        ({one: 3}, ValueError, "copies must be from 0 to 2.*got 3 for weight"),
        ({one: 1.5}, TypeError, "numbers of processes, got 1.5"),
        (lambda p: True, TypeError, "numbers of processes, got True"),
    ]
    for copies, error, message in cases:
        with pytest.raises(error, match=message):
            tritonclip.clip_([("weight", one)], 1.0, process_group=world, copies=copies)


@in_processes(2)
def test_group_without_this_process_is_refused() -> None:
    one = parameter((3,), None)
    groups = [dist.new_group([0]), dist.new_group([1])]
    other = groups[1 - dist.get_rank()]
    with pytest.raises(ValueError, match="this process belongs to"):
        tritonclip.clip_([one], 1.0, process_group=other)


@in_processes(2)
def test_partial_of_another_kind_is_refused() -> None:
    named = {"weight": with_partial(parameter((4,), mesh_of(-1), [Replicate()]), [Partial("max")])}
    with pytest.raises(TypeError, match=r"gradient of weight is a DTensor .*redistribute"):
        tritonclip.clip_(named.items(), 1.0)


@in_processes(2)
def test_clip_by_value_of_partial_is_refused() -> None:
    one = with_partial(parameter((4,), mesh_of(-1), [Replicate()]), [Partial()])
    for policy in ("propagate", "zero", "error"):
        error = pytest.raises(TypeError, match=r"parts of a sum.*weight.*redistribute")
        with unchanged([one.grad]), error:
            tritonclip.clip_([("weight", one)], ClipByValue(0.1), nonfinite=policy)


@in_processes(2)
def test_clip_by_norm_over_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="ClipByNorm measures each gradient"):
        tritonclip.clip_([_one()], ClipByNorm(1.0), process_group=dist.group.WORLD)


@in_processes(2)
def test_clip_by_norm_needs_no_cover() -> None:
    """The norm of each gradient is that of its mesh, whoever else there is."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    one: Any = parameter((8, 3), mesh["dp"], [Shard(0)])
    assert tritonclip.clip_([one], ClipByNorm(1.0)).shape == (1,)
    tritonclip.clip_([one], ClipByValue(1.0))


@in_processes(2, 4)
def test_parameters_on_meshes_of_others_need_a_group() -> None:
    """Every process has all parameters, but of some no piece."""
    world = dist.get_world_size()
    halves = [range(world // 2), range(world // 2, world)]
    meshes = [DeviceMesh("cpu", list(half)) for half in halves]
    parameters = [parameter((8, 3), mesh, [Shard(0)], seed=i) for i, mesh in enumerate(meshes)]
    with pytest.raises(ValueError, match=r"to which this one does not belong.*process_group="):
        tritonclip.clip_(parameters, 1.0)
    expected = reference.total_norm([values((8, 3), i) for i in range(2)])
    norm = tritonclip.clip_(parameters, 1.0, process_group=dist.group.WORLD)
    assert_norm(norm, expected)


@in_processes(2)
def test_norms_by_name_raises_everywhere() -> None:
    named = named_parameters()

    def measure(**options: Any) -> object:
        return tritonclip.norms_by_name(named.items(), **options)

    def group_of(name: str) -> Any:
        return 3 if is_first() else name

    grads = [one.grad for one in named.values()]
    check_raises(lambda: measure(group_of=group_of), TypeError, "must return text", grads)
    if is_first():
        overlap(named["plain"])
    check_raises(measure, ValueError, "share memory", grads[:2])
    named["plain"].grad = None
    _, n = collectives_of(measure)
    assert n == 1


# The rule, the options of the first process and of the others, and the error.
ARGUMENTS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "grad-scale": (0.5, {"grad_scale": torch.tensor(0.0)}, {}, ValueError, "grad_scale"),
    "grad-scale-kind": (0.5, {"grad_scale": "1"}, {}, TypeError, "grad_scale"),
    "state": (
        ClipByQuantile(0.5, 4),
        {"state": 3},
        {"state": ClipState()},
        TypeError,
        "ClipState",
    ),
}


@pytest.mark.parametrize("what", ARGUMENTS)
@in_processes(2)
def test_clip_with_a_bad_argument_in_one_process_raises_everywhere(what: str) -> None:
    named = named_parameters()
    rule, bad, right, error, message = ARGUMENTS[what]
    options = bad if is_first() else right
    grads = [one.grad for one in named.values()]
    check_raises(lambda: tritonclip.clip_(named.items(), rule, **options), error, message, grads)


class Own(Rule):
    def limit(self, measured: Measured) -> float:
        return 0.5


@pytest.mark.parametrize(("name", "value"), [("eps", -1.0), ("norm_type", "2")])
@in_processes(2)
def test_clip_with_a_bad_rule_in_one_process_raises_everywhere(name: str, value: Any) -> None:
    named = named_parameters()
    rule = Own()
    if is_first():
        setattr(rule, name, value)
    grads = [one.grad for one in named.values()]
    error = TypeError if value == "2" else ValueError
    check_raises(lambda: tritonclip.clip_(named.items(), rule), error, f"Own: {name}", grads)


def _fail(step: int) -> float:
    if is_first():
        raise KeyError("no limit")
    return 0.5


class Failing(Rule):
    def limit(self, measured: Measured) -> float:
        return _fail(0)


class Negative(Rule):
    def limit(self, measured: Measured) -> float:
        return -1.0 if is_first() else 0.5


class FailingAdaptive(AdaptiveRule):
    def start(self) -> tuple[float]:
        return (0.0,)

    def advance(self, state: Any, norm: Any) -> Any:
        return norm * _fail(0), state


LIMITS: dict[str, tuple[Rule, type[Exception], type[Exception], str]] = {
    "schedule": (ClipByGlobalNorm(_fail), KeyError, RuntimeError, "no limit"),
    "own": (Failing(), KeyError, RuntimeError, "no limit"),
    "negative": (Negative(), ValueError, ValueError, "must be 0 or more"),
    "adaptive": (FailingAdaptive(), KeyError, RuntimeError, "no limit"),
}


@pytest.mark.parametrize("call", ["clip", "step"])
@pytest.mark.parametrize("what", LIMITS)
@in_processes(2)
def test_limit_that_fails_in_one_process_raises_everywhere(what: str, call: str) -> None:
    named = named_parameters()
    rule, error, others, message = LIMITS[what]
    optimizer = ClippedOptimizer(torch.optim.SGD([*named.items()], lr=0.1), rule)

    def run() -> object:
        if call == "step":
            return optimizer.step()
        state = ClipState() if what in ("schedule", "adaptive") else None
        return tritonclip.clip_(named.items(), rule, state=state)

    tensors = [*named.values(), *grads_of(named.values())]
    for _ in range(2):
        check_raises(run, error if is_first() else others, message, tensors)
    optimizer.clip = 0.5
    optimizer.step()
    assert_same_everywhere(optimizer.stats.last_norm)


@pytest.mark.parametrize("what", ["bad", "missing"])
@in_processes(2)
def test_clip_tensors_with_a_state_raises_everywhere(what: str) -> None:
    mesh, rule = mesh_of(-1), ClipByOwnHistory()
    tensors: list[Any] = [parameter((6, 2), mesh, [Shard(0)], seed=i).grad for i in range(2)]
    grads, message = tensors[:1], "share memory"
    if is_first() and what == "bad":
        tensors[1] = DTensor.from_local(torch.ones(1, 1).expand(3, 2), mesh, [Shard(0)])
    elif what == "missing":
        message = "got 1 tensors at 2 positions"
        if is_first():
            tensors[1] = tensors[0]
    clip_ = partial(tritonclip.clip_tensors_, tensors, rule, state=ClipState())
    check_raises(clip_, ValueError, message, grads)


class OwnLimit(Rule):
    def __init__(self, number: Any) -> None:
        self._number = number

    def limit(self, measured: Measured) -> Any:
        return self._number


NUMBERS: dict[str, Callable[[dict[str, Any], Any], object]] = {
    "grad-scale": lambda named, n: tritonclip.clip_(named.items(), 0.5, grad_scale=n),
    "max-norm": lambda named, n: tritonclip.clip_(named.items(), n),
    "max-norm-of-torch": lambda named, n: tritonclip.clip_grad_norm_(list(named.values()), n),
    "bound": lambda named, n: tritonclip.clip_(named.items(), tritonclip.ClipByValue(n)),
    "bound-of-torch": lambda named, n: tritonclip.clip_grad_value_(list(named.values()), n),
    "own": lambda named, n: tritonclip.clip_(named.items(), OwnLimit(n)),
    "skip-above": lambda named, n: ClippedOptimizer(
        torch.optim.SGD([*named.items()]), 0.5, skip_above=n
    ),
    "scale-of-step": lambda named, n: ClippedOptimizer(torch.optim.SGD([*named.items()]), 0.5).step(
        grad_scale=n
    ),
}


@pytest.mark.parametrize("what", NUMBERS)
@in_processes(2)
def test_number_of_which_a_process_has_a_part_is_refused(what: str) -> None:
    """A term of a sum, or one row of which the other process has none."""
    named, mesh = named_parameters(), mesh_of(-1)
    placements: list[Placement] = [Partial(), Shard(0)]
    for placement in placements:
        own = torch.full((1,), 0.5)
        if placement.is_shard() and not is_first():
            own = own[:0]
        number = DTensor.from_local(
            own, mesh, [placement], run_check=False, shape=torch.Size([1]), stride=(1,)
        )
        message = r"must be one number on all processes.*full_tensor\(\)"
        with pytest.raises(ValueError, match=message):
            NUMBERS[what](named, number)
    NUMBERS[what](named, DTensor.from_local(torch.full((1,), 0.5), mesh, [Replicate()]))


RULES = [ClipByQuantile(0.5, 4), ClipByOwnHistory()]


@pytest.mark.parametrize("other", ["first", "number", "rule"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@in_processes(2)
def test_clip_with_the_state_of_another_list_in_one_process_raises_everywhere(
    rule: Any, other: str
) -> None:
    named, known = named_parameters(), named_parameters()
    states = [ClipState(), ClipState()]
    if other == "number":
        known = {name: named[name] for name in ("sharded", "copied")}
    for one, state in zip((named, known), states, strict=True):
        own = RULES[1 - RULES.index(rule)] if other == "rule" and one is known else rule
        tritonclip.clip_(one.items(), own, state=state)
    state = states[1] if is_first() else states[0]
    message = {"first": "got another one", "number": "2 parameters", "rule": "norms for"}[other]
    clip_ = partial(tritonclip.clip_, named.items(), rule, state=state)
    check_raises(clip_, ValueError, message, grads_of(named.values()))
    tritonclip.clip_(named.items(), rule, state=states[0])


@pytest.mark.parametrize("other", ["list", "rule"])
@in_processes(2)
def test_wrapper_is_refused_the_memory_of_another_list_when_it_is_loaded(other: str) -> None:
    """It keeps its states itself, so that no step meets one; a load sends nothing."""

    def wrapper(names: list[str], rule: Any) -> ClippedOptimizer:
        named = named_parameters()
        made = ClippedOptimizer(torch.optim.SGD([named[name] for name in names], lr=0.1), rule)
        made.step()
        return made

    rule, two = ClipByOwnHistory(), ["sharded", "copied"]
    optimizer = wrapper(two, rule)
    foreign = wrapper([*two, "plain"], rule) if other == "list" else wrapper(two, ClipByQuantile())
    saved = foreign.state_dict()

    message = "norms of 3 parameters" if other == "list" else "memory"

    def load() -> None:
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)

    if is_first():
        _, n = collectives_of(load)
        assert n == 0
    optimizer.step()
    assert int(optimizer.stats.steps) == 2
    assert_same_everywhere(optimizer.stats.last_norm)


@pytest.mark.parametrize("copies", [-1, 1.5, True])
@in_processes(2)
def test_clip_with_a_bad_number_of_copies_in_one_process_raises_everywhere(copies: Any) -> None:
    one = parameter((5,), None, seed=1)
    number = copies if is_first() else 2
    error = ValueError if copies == -1 else TypeError

    def clip() -> Any:
        return tritonclip.clip_([one], 0.5, process_group=dist.group.WORLD, copies=lambda p: number)

    check_raises(clip, error, "copies must", [one.grad])
