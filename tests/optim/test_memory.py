"""The memory of rules under a wrapper: it follows parameters, not their positions."""

import copy
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from helpers.cases import grad_of
from tritonclip import ClipByOwnHistory, ClipByQuantile, ClippedOptimizer, Outlier

# Clips to 1.05 times its norm a gradient that grows.
OWN = ClipByOwnHistory(warmup=1, max_norm=math.inf)
MEDIAN = ClipByQuantile(0.5, 9)


def weights(n: int) -> list[Tensor]:
    return [torch.nn.Parameter(torch.zeros(2)) for _ in range(n)]


def own_history(*groups: list[Tensor], rule: Any = OWN) -> ClippedOptimizer:
    return ClippedOptimizer(SGD([{"params": own} for own in groups], lr=0.0), rule)


def norms_after(optimizer: ClippedOptimizer, sizes: dict[Tensor, float]) -> list[float]:
    """The norms after a step with gradients of these norms, in their order."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            size = sizes.get(param)
            param.grad = None if size is None else torch.tensor([0.0, size])
    optimizer.step()
    return [float(grad_of(param).norm()) for param in sizes]


def remember(optimizer: ClippedOptimizer, sizes: dict[Tensor, float]) -> None:
    for _ in range(3):
        assert norms_after(optimizer, sizes) == list(sizes.values())


def remembering(sizes: dict[Tensor, float]) -> ClippedOptimizer:
    """An optimizer of one group, whose parameters remember these norms."""
    optimizer = own_history([*sizes])
    remember(optimizer, sizes)
    return optimizer


def assert_follows(optimizer: ClippedOptimizer, sizes: dict[Tensor, float]) -> None:
    """Each parameter has the limit that its own norms gave it."""
    assert norms_after(optimizer, sizes) == list(sizes.values())
    found = norms_after(optimizer, {param: 1e6 * size for param, size in sizes.items()})
    assert found == pytest.approx([1.05 * size for size in sizes.values()], rel=1e-6)


def _reverse(optimizer: ClippedOptimizer) -> None:
    for group in optimizer.param_groups:
        group["params"].reverse()


def _exchange(optimizer: ClippedOptimizer) -> None:
    ours, theirs = (group["params"] for group in optimizer.param_groups)
    ours[0], theirs[0] = theirs[0], ours[0]


def _move(optimizer: ClippedOptimizer) -> None:
    ours, theirs = (group["params"] for group in optimizer.param_groups)
    theirs.insert(0, ours.pop())


def _join(optimizer: ClippedOptimizer) -> None:
    optimizer.param_groups[1]["params"] += optimizer.param_groups[0]["params"]
    del optimizer.param_groups[0]


def _remake(optimizer: ClippedOptimizer) -> None:
    optimizer.param_groups = [
        {**group, "params": list(group["params"])} for group in reversed(optimizer.param_groups)
    ]


CHANGES: dict[str, Any] = {
    "append": lambda optimizer: optimizer.param_groups[0]["params"].extend(weights(1)),
    "insert": lambda optimizer: optimizer.param_groups[0]["params"].insert(0, *weights(1)),
    "reverse": _reverse,
    "reverse-groups": lambda optimizer: optimizer.param_groups.reverse(),
    "exchange": _exchange,
    "move": _move,
    "join": _join,
    "remake": _remake,
}


def four() -> tuple[list[Tensor], dict[Tensor, float], ClippedOptimizer]:
    """Parameters in two groups, the norms that they remember, and their optimizer."""
    params = weights(4)
    sizes = dict(zip(params, [1.0, 100.0, 1e4, 1e6], strict=True))
    optimizer = own_history(params[:2], params[2:])
    remember(optimizer, sizes)
    return params, sizes, optimizer


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_history_follows_its_parameter(change):
    _, sizes, optimizer = four()
    change(optimizer)
    assert_follows(optimizer, sizes)


@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_copy_has_histories_in_the_order_of_its_parameters(change, how):
    """Made after parameters moved, and changed again before its first step."""
    _, sizes, optimizer = four()
    change(optimizer)
    if how == "state_dict":
        groups = [weights(len(group["params"])) for group in optimizer.param_groups]
        other = own_history(*groups)
        other.load_state_dict(optimizer.state_dict())
    elif how == "deepcopy":
        other = copy.deepcopy(optimizer)
    else:
        other = pickle.loads(pickle.dumps(optimizer))
    ours, theirs = (
        [p for group in one.param_groups for p in group["params"]] for one in (optimizer, other)
    )
    twins = dict(zip(ours, theirs, strict=True))
    _reverse(other)
    assert_follows(other, {twins[param]: size for param, size in sizes.items()})
    assert_follows(optimizer, sizes)


@pytest.mark.parametrize("to", ["group", "groups"])
def test_a_new_parameter_begins_its_history(to):
    a, b, c = weights(3)
    optimizer = own_history([a], [b])
    remember(optimizer, {a: 1.0, b: 100.0})
    if to == "group":
        optimizer.param_groups[0]["params"].append(c)
    else:
        optimizer.add_param_group({"params": [c]})
    assert norms_after(optimizer, {a: 1.0, c: 7.0, b: 1e4}) == pytest.approx([1.0, 7.0, 105.0])
    assert norms_after(optimizer, {c: 1e4}) == pytest.approx([1.05 * 7.0])


def test_a_group_may_lose_parameters_and_get_them_back():
    """As freezing and unfreezing do."""
    _, sizes, optimizer = four()
    frozen = optimizer.param_groups[0]["params"].pop(0)
    remember(optimizer, {param: size for param, size in sizes.items() if param is not frozen})
    optimizer.add_param_group({"params": [frozen]})
    assert_follows(optimizer, sizes)


def test_a_group_that_is_left_alone_for_a_while_keeps_its_histories():
    _, sizes, optimizer = four()
    optimizer.param_groups[0]["clip"] = None
    norms_after(optimizer, sizes)
    del optimizer.param_groups[0]["clip"]
    assert_follows(optimizer, sizes)


def test_a_parameter_that_takes_the_place_of_another_begins_its_history():
    a, b, c = weights(3)
    optimizer = remembering({a: 1.0, b: 100.0})
    optimizer.param_groups[0]["params"][1] = c
    assert norms_after(optimizer, {a: 1e4, c: 7.0}) == pytest.approx([1.05, 7.0])
    optimizer.param_groups[0]["params"] = [a, b]
    assert norms_after(optimizer, {b: 1e4}) == pytest.approx([105.0])


def limits_of_groups(optimizer: ClippedOptimizer) -> list[float]:
    """What each group, of one parameter, clips a large gradient to; nothing remembers it."""
    twin = copy.deepcopy(optimizer)
    params = [param for group in twin.param_groups for param in group["params"]]
    return norms_after(twin, dict.fromkeys(params, 1e6))


def with_rules(rule: Any, *sizes: float) -> ClippedOptimizer:
    """Groups of one parameter, with a rule of their own, after gradients of these norms."""
    params = weights(len(sizes))
    groups: list[dict[str, Any]] = [{"params": [param], "clip": rule} for param in params]
    optimizer = ClippedOptimizer(SGD(groups, lr=0.0), 1.0)
    remember(optimizer, dict(zip(params, sizes, strict=True)))
    assert limits_of_groups(optimizer) == pytest.approx(list(sizes), rel=0.06)
    return optimizer


RULES = pytest.mark.parametrize("rule", [MEDIAN, OWN], ids=["median", "own-history"])


@RULES
def test_the_memory_of_a_group_stays_where_the_wrapped_optimizer_is_loaded(rule):
    """It then has other dicts of the same parameters."""
    optimizer = with_rules(rule, 1.0, 100.0)
    optimizer.optimizer.load_state_dict(optimizer.optimizer.state_dict())
    assert limits_of_groups(optimizer) == pytest.approx([1.0, 100.0], rel=0.06)


def test_a_checkpoint_from_before_a_parameter_was_met_is_loaded():
    """Its histories are fewer than the parameters."""
    a, b, c = weights(3)
    optimizer = remembering({a: 1.0, b: 100.0})
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["params"] = [0, 1, 2]
    other = own_history([a, b, c])
    other.load_state_dict(saved)
    other.param_groups[0]["params"].reverse()
    assert_follows(other, {a: 1.0, b: 100.0})


@pytest.mark.parametrize("rule", [1.0, MEDIAN], ids=["fixed", "median"])
def test_a_rule_without_norms_of_each_keeps_no_replaced_parameter_alive(rule):
    a, b, c = weights(3)
    optimizer = ClippedOptimizer(SGD([a, b], lr=0.0), rule, skip_above=Outlier())
    norms_after(optimizer, {a: 1.0, b: 1.0})
    optimizer.param_groups[0]["params"][1] = c
    gone = weakref.ref(b)
    del b
    norms_after(optimizer, {a: 1.0, c: 1.0})
    assert gone() is None


@pytest.mark.parametrize("rule", [1.0, MEDIAN, OWN], ids=["fixed", "median", "own-history"])
def test_a_step_leaves_gradients_to_nothing_but_the_parameters(rule):
    (a,) = weights(1)
    optimizer = own_history([a], rule=rule)
    norms_after(optimizer, {a: 1.0})
    grad = weakref.ref(grad_of(a))
    optimizer.zero_grad()
    assert grad() is None


@pytest.mark.parametrize("loaded", [True, False])
def test_a_history_that_has_not_begun_is_saved(loaded):
    """Of a new parameter before the others, with no step since."""
    a, b, c = weights(3)
    optimizer = remembering({a: 1.0, b: 100.0})
    if loaded:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["params"].insert(0, c)
    other = own_history([c, a, b])
    other.load_state_dict(optimizer.state_dict())
    assert norms_after(other, {c: 500.0, a: 1e4, b: 1e4}) == pytest.approx([500.0, 1.05, 105.0])


def test_histories_of_a_rule_that_the_program_has_no_more_are_saved_or_begin():
    a, b, c = weights(3)
    optimizer = remembering({a: 1.0, b: 100.0})
    other = own_history([a, b], rule=1.0)
    other.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(other.state_dict())
    assert norms_after(optimizer, {a: 1e4, b: 1e4}) == pytest.approx([1.05, 105.0])
    other.param_groups[0]["params"].insert(0, c)
    third = own_history([c, a, b])
    third.load_state_dict(other.state_dict())
    remember(third, {c: 7.0, a: 7.0, b: 7.0})
