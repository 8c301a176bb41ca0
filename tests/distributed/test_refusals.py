"""Calls that all processes refuse, or one of them: every process raises, and nobody waits."""

import math
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
from helpers.refusing import (
    as_on_accelerator,
    check_raises,
    in_first,
    is_first,
    named_parameters,
    overlap,
)
from helpers.spread import (
    assert_same_everywhere,
    collectives_of,
    grads_of,
    local,
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
    ClipByUnitNorm,
    ClipByValue,
    ClippedOptimizer,
    ClipState,
    Rule,
)
from tritonclip.rules import Measured

Named = dict[str, Any]
Call = Callable[[Named], object]


def clip(named: Named, max_norm: Any = 0.5, **options: Any) -> Any:
    return tritonclip.clip_(named.items(), max_norm, **options)


def alone(named: Named, **options: Any) -> Any:
    """Clips the plain parameter with all processes."""
    group = dist.group.WORLD
    return tritonclip.clip_([("plain", named["plain"])], 0.5, process_group=group, **options)


def other_group(named: Named) -> Any:
    groups = [dist.new_group([0]), dist.new_group([1])]
    return clip(named, process_group=groups[1 - dist.get_rank()])


def with_partial_copy(named: Named, kind: str = "sum") -> Named:
    with_partial(named["copied"], [Partial(kind)])
    return named


def value_of_parts(named: Named, **options: Any) -> object:
    return clip(with_partial_copy(named), ClipByValue(0.1), **options)


def step(named: Named, **options: Any) -> ClippedOptimizer:
    groups: Any = [
        {"params": [named["sharded"], named["copied"]]},
        {"params": [named["plain"]], **options},
    ]
    optimizer = ClippedOptimizer(torch.optim.SGD(groups, lr=0.1), 0.5, nonfinite="skip")
    optimizer.step()
    return optimizer


def verified(named: Named) -> None:
    with tritonclip.verify():
        clip(named)


# What is refused in every process alike.
EVERYWHERE: dict[str, tuple[Call, type[Exception], str]] = {
    "copies": (lambda n: alone(n, copies=3), TypeError, "copies must map parameters"),
    "few": (lambda n: alone(n, copies={n["plain"]: -1}), ValueError, "must be from 0 to 2"),
    "many": (lambda n: alone(n, copies={n["plain"]: 3}), ValueError, "0 to 2.*got 3 for plain"),
    "half": (lambda n: alone(n, copies={n["plain"]: 1.5}), TypeError, "processes, got 1.5"),
    "bool": (lambda n: alone(n, copies=lambda p: True), TypeError, "processes, got True"),
    "group": (other_group, ValueError, "this process belongs to"),
    "maxima": (
        lambda n: clip(with_partial_copy(n, "max")),
        TypeError,
        r"gradient of copied is a DTensor .*redistribute",
    ),
    **{
        f"value-of-parts-{policy}": (
            partial(value_of_parts, nonfinite=policy),
            TypeError,
            r"parts of a sum.*copied.*redistribute",
        )
        for policy in ("propagate", "zero", "error")
    },
    "norm-of-each": (
        lambda n: clip(n, ClipByNorm(1.0), process_group=dist.group.WORLD),
        ValueError,
        "ClipByNorm measures each gradient",
    ),
}


@pytest.mark.parametrize("what", EVERYWHERE)
@in_processes(2)
def test_call_is_refused_in_every_process(what: str) -> None:
    named = named_parameters()
    call, error, message = EVERYWHERE[what]
    grads = [named["sharded"].grad, named["plain"].grad]
    with unchanged(grads), pytest.raises(error, match=message):
        call(named)
    assert_same_everywhere(clip(named_parameters()))


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


def _fail(step: int) -> float:
    if is_first():
        raise KeyError("no limit")
    return 0.5


class Own(Rule):
    def __init__(self, number: Any = 0.5, **wrong: Any) -> None:
        self._number = number
        if is_first():
            vars(self).update(wrong)

    def limit(self, measured: Measured) -> Any:
        return self._number() if callable(self._number) else self._number


class FailingAdaptive(AdaptiveRule):
    def start(self) -> tuple[float]:
        return (0.0,)

    def advance(self, state: Any, norm: Any) -> Any:
        return norm * _fail(0), state


LIMITS: dict[str, tuple[Callable[[], Rule], type[Exception], str]] = {
    "schedule": (lambda: ClipByGlobalNorm(_fail), KeyError, "no limit"),
    "own": (lambda: Own(lambda: _fail(0)), KeyError, "no limit"),
    "negative": (lambda: Own(in_first(-1.0, 0.5)), ValueError, "must be 0 or more"),
    "adaptive": (FailingAdaptive, KeyError, "no limit"),
}


def stated(named: Named, make: Callable[[], Rule]) -> Callable[[], object]:
    rule = make()
    follows = not isinstance(rule, Own)
    return partial(clip, named, rule, state=ClipState() if follows else None)


def in_steps(named: Named, make: Callable[[], Rule]) -> Any:
    return ClippedOptimizer(torch.optim.SGD([*named.items()], lr=0.1), make()).step


def tensors_with_state(named: Named, bad: Any = None) -> Callable[[], object]:
    """A gradient at every position; none for the second one in the process that refuses."""
    one, other = named["sharded"].grad, named_parameters()["sharded"].grad
    tensors = [one, in_first(one if bad is None else bad, other)]
    return partial(tritonclip.clip_tensors_, tensors, ClipByOwnHistory(), state=ClipState())


def expanded() -> Any:
    return DTensor.from_local(torch.ones(1, 1).expand(4, 3), mesh_of(-1), [Shard(0)])


def by_name(named: Named) -> object:
    return tritonclip.norms_by_name(named.items(), group_of=in_first(lambda _: 3, str))


def with_copies(named: Named, n: Any) -> Callable[[], object]:
    return partial(alone, named, copies=lambda _: in_first(n, 2))


# Calls, made of parameters, that the first process refuses alone.
FIRST: dict[str, tuple[Callable[[Named], Callable[[], object]], type[Exception], str]] = {
    "scale": (
        lambda n: partial(clip, n, grad_scale=in_first(torch.tensor(0.0))),
        ValueError,
        "grad_scale",
    ),
    "scale-kind": (lambda n: partial(clip, n, grad_scale=in_first("1")), TypeError, "grad_scale"),
    "state": (
        lambda n: partial(clip, n, ClipByQuantile(0.5, 4), state=in_first(3, ClipState())),
        TypeError,
        "ClipState",
    ),
    "eps": (lambda n: partial(clip, n, Own(eps=-1.0)), ValueError, "Own: eps"),
    "order": (lambda n: partial(clip, n, Own(norm_type="2")), TypeError, "Own: norm_type"),
    "copies-few": (lambda n: with_copies(n, -1), ValueError, "copies must"),
    "copies-half": (lambda n: with_copies(n, 1.5), TypeError, "copies must"),
    "copies-bool": (lambda n: with_copies(n, True), TypeError, "copies must"),
    "names": (lambda n: partial(by_name, n), TypeError, "must return text"),
    "missing": (tensors_with_state, ValueError, "got 1 tensors at 2 positions"),
    "expanded": (lambda n: tensors_with_state(n, expanded()), ValueError, "share memory"),
    **{
        f"{name}-{how.__name__}": (partial(how, make=rule), error, message)
        for name, (rule, error, message) in LIMITS.items()
        for how in (stated, in_steps)
    },
}


@pytest.mark.parametrize("what", FIRST)
@in_processes(2)
def test_call_that_one_process_refuses_raises_everywhere(what: str) -> None:
    named = named_parameters()
    make, error, message = FIRST[what]
    call, tensors = make(named), [*named.values(), *grads_of(named.values())]
    for _ in range(2):
        check_raises(call, error, message, tensors)
    optimizer = getattr(call, "__self__", None) or step(named)
    optimizer.clip = 0.5
    optimizer.step()
    assert_same_everywhere(optimizer.stats.last_norm)


@pytest.mark.parametrize("how", [stated, in_steps])
@in_processes(2)
def test_limit_that_differs_between_processes_raises_everywhere(how: Any) -> None:
    named = named_parameters()
    how(named, lambda: Own(in_first(1e300, math.inf)))()
    call = how(named, lambda: Own(in_first(0.25, torch.tensor(0.5))))
    error = pytest.raises(ValueError, match=r"limit of Own must be the same.*got 0.25 to 0.5;")
    with unchanged([*named.values(), *grads_of(named.values())]), error:
        call()


@in_processes(2)
def test_norms_by_name_of_a_bad_gradient_raises_everywhere() -> None:
    named = named_parameters()
    measure = partial(tritonclip.norms_by_name, named.items())
    if is_first():
        overlap(named["plain"])
    check_raises(measure, ValueError, "share memory", grads_of(named.values())[:2])
    named["plain"].grad = None
    _, n = collectives_of(measure)
    assert n == 1


class _Subclass(torch.Tensor):
    pass


def _foreign(one: Any) -> None:
    one.grad = torch.ones(5).as_subclass(_Subclass)


def _inference(one: Any) -> None:
    with torch.inference_mode():
        grad = torch.ones(5)
    one.grad = grad


BAD: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "overlapping": (overlap, ValueError, "share memory"),
    "freed": (lambda one: one.grad.untyped_storage().resize_(0), ValueError, "freed"),
    "kind": (_foreign, TypeError, "_Subclass"),
    "inference": (_inference, RuntimeError, "inference"),
}
RULES = {
    "2": ClipByGlobalNorm(0.5),
    "20": ClipByGlobalNorm(0.5, 20.0),
    "100": ClipByGlobalNorm(0.5, 100.0),
    "inf": ClipByGlobalNorm(0.5, math.inf),
    "each": ClipByNorm(0.5),
    "each-inf": ClipByNorm(0.5, math.inf),
    "unit": ClipByUnitNorm(0.01),
}
CALLS: dict[str, Call] = {
    **{name: partial(clip, max_norm=rule) for name, rule in RULES.items()},
    "value-zero": lambda n: clip(n, ClipByValue(1.0), nonfinite="zero"),
    "value-error": lambda n: clip(n, ClipByValue(1.0), nonfinite="error"),
    "clip_grad_norm_": lambda n: tritonclip.clip_grad_norm_(list(n.values()), 1.0),
    "get_total_norm": lambda n: tritonclip.get_total_norm(grads_of(n.values())),
    "get_total_norm-inf": lambda n: tritonclip.get_total_norm(grads_of(n.values()), math.inf),
    "group": alone,
    "step": step,
    "step-by-rules": lambda n: step(n, clip=ClipByNorm(0.5)),
    "verify": verified,
}
# What a measurement takes.
MEASURES = ("get_total_norm", "get_total_norm-inf")


@pytest.mark.covering(2)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("call", CALLS)
@in_processes(2, 4)
def test_bad_gradient_of_one_process_raises_everywhere(call: str, bad: str) -> None:
    if call in MEASURES and bad == "inference":
        return
    named = named_parameters()
    make, error, message = BAD[bad]
    if is_first():
        make(named["plain"])
    tensors = [named["sharded"].grad, named["copied"].grad, named["sharded"]]
    check_raises(lambda: CALLS[call](named), error, message, tensors)
    named["plain"].grad = None
    assert_same_everywhere(clip(named, 0.1))


@pytest.mark.parametrize("call", [*RULES, "step", "step-by-rules"])
@in_processes(2)
def test_bad_gradient_beside_one_that_is_not_finite_raises_everywhere(call: str) -> None:
    for value in (math.inf, -math.inf, math.nan):
        named = named_parameters()
        if is_first():
            overlap(named["plain"])
        else:
            local(named["sharded"].grad).fill_(value)
        with pytest.raises(ValueError, match="share memory"):
            CALLS[call](named)


@pytest.mark.parametrize("policy", ["propagate", "error"])
@pytest.mark.parametrize("rule", RULES)
@in_processes(2)
def test_refusal_makes_the_norm_nan_where_reading_it_would_wait(rule: str, policy: Any) -> None:
    """As on an accelerator, where the others go by their policy."""
    named = named_parameters()
    with as_on_accelerator():
        if is_first():
            overlap(named["plain"])
            with pytest.raises(ValueError, match="share memory"):
                clip(named, RULES[rule], nonfinite=policy)
        elif policy == "error":
            with pytest.raises(RuntimeError, match="non-finite"):
                clip(named, RULES[rule], nonfinite=policy)
        else:
            assert clip(named, RULES[rule]).isnan().all()


# Nothing is sent, so nobody waits.
ALONE: dict[str, Call] = {
    "value": lambda n: clip(n, ClipByValue(0.1)),
    "given": lambda n: tritonclip.clip_grads_with_norm_(n.values(), 1.0, torch.ones(())),
}


@pytest.mark.parametrize("call", ALONE)
@in_processes(2)
def test_call_raises_where_the_gradient_is(call: str) -> None:
    named = named_parameters()
    if is_first():
        overlap(named["plain"])
        with pytest.raises(ValueError, match="share memory"):
            ALONE[call](named)
    else:
        ALONE[call](named)


@pytest.mark.parametrize("kind", ["max", "sum"])
@in_processes(2)
def test_bad_placement_in_one_process_raises_everywhere(kind: str) -> None:
    named = named_parameters()
    before = named["copied"].grad
    rule = ClipByUnitNorm(0.01) if kind == "sum" else ClipByGlobalNorm(0.5)
    if is_first():
        with_partial_copy(named, kind)
    with pytest.raises(TypeError, match="redistribute" if kind == "max" else "rows that are whole"):
        clip(named, rule)
    named["copied"].grad = before
    assert_same_everywhere(clip(named))


@in_processes(2)
def test_part_beside_a_bad_gradient_raises_everywhere() -> None:
    """One process has a Partial gradient, and the other one that it refuses."""
    named = named_parameters()
    if is_first():
        overlap(named["plain"])
    else:
        with_partial_copy(named)
    for rule in ("2", "100", "each"):
        with pytest.raises(ValueError, match="share memory"):
            CALLS[rule](named)


NUMBERS: dict[str, Callable[[Named, Any], object]] = {
    "grad-scale": lambda named, n: clip(named, grad_scale=n),
    "max-norm": clip,
    "max-norm-of-torch": lambda named, n: tritonclip.clip_grad_norm_(list(named.values()), n),
    "bound": lambda named, n: clip(named, ClipByValue(n)),
    "bound-of-torch": lambda named, n: tritonclip.clip_grad_value_(list(named.values()), n),
    "own": lambda named, n: clip(named, Own(n)),
    "skip-above": lambda named, n: ClippedOptimizer(
        torch.optim.SGD([*named.items()]), 0.5, skip_above=n
    ),
    "scale-of-step": lambda named, n: in_steps(named, lambda: ClipByNorm(0.5))(grad_scale=n),
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


STATEFUL = [ClipByQuantile(0.5, 4), ClipByOwnHistory()]


@pytest.mark.parametrize("other", ["first", "number", "rule"])
@pytest.mark.parametrize("rule", STATEFUL, ids=lambda rule: type(rule).__name__)
@in_processes(2)
def test_clip_with_the_state_of_another_list_in_one_process_raises_everywhere(
    rule: Any, other: str
) -> None:
    named, known = named_parameters(), named_parameters()
    states = [ClipState(), ClipState()]
    if other == "number":
        known = {name: named[name] for name in ("sharded", "copied")}
    clip(named, rule, state=states[0])
    own = STATEFUL[1 - STATEFUL.index(rule)] if other == "rule" else rule
    clip(known, own, state=states[1])
    call = partial(clip, named, rule, state=in_first(states[1], states[0]))
    message = {"first": "got another one", "number": "2 parameters", "rule": "norms for"}[other]
    check_raises(call, ValueError, message, grads_of(named.values()))
    clip(named, rule, state=states[0])


@pytest.mark.parametrize("other", ["list", "rule"])
@in_processes(2)
def test_wrapper_is_refused_the_memory_of_another_list_when_it_is_loaded(other: str) -> None:
    """It keeps its states itself, so that no step meets one; a load sends nothing."""

    def wrapper(n: int, rule: Any) -> ClippedOptimizer:
        params = [*named_parameters().values()][:n]
        made = ClippedOptimizer(torch.optim.SGD(params, lr=0.1), rule)
        made.step()
        return made

    rule = ClipByOwnHistory()
    optimizer = wrapper(2, rule)
    foreign = wrapper(3, rule) if other == "list" else wrapper(2, ClipByQuantile())
    saved = foreign.state_dict()

    def load() -> None:
        message = "norms of 3 parameters" if other == "list" else "memory"
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)

    if is_first():
        _, n = collectives_of(load)
        assert n == 0
    optimizer.step()
    assert int(optimizer.stats.steps) == 2
    assert_same_everywhere(optimizer.stats.last_norm)
